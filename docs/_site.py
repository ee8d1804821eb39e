"""Builds the site of the documentation in build/site: puts its pages together in build/docs, then runs the generator.

- Pages outside of this folder are in the site, too, under `repository/`; links to them are redirected.
- Parts that are made from the source are filled in (`_generated.py`).
- Drawings are put into the page instead of being linked, so that they take its colours.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

from _generated import filled

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import page as benchmarks

REPOSITORY_PAGES = ("DESIGN.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "docs"
LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
UNSEARCHED = re.compile(r"(design|repository)/(?!SECURITY)")  # how it works inside, and what was
# What pip installs: the folder of a checkout. With an index it is "asyncoll", and the page Install says so first.
PACKAGE = "."
INSTALLS = re.compile(r"(?<=pip install )(?P<quote>'?)\.(?=[\[\s`])")
DRAWING = re.compile(r"^!\[(?P<caption>[^\]]*)\]\((?P<path>[^)]*\.svg)\)$", re.MULTILINE)


def assemble() -> None:
    """Write the pages of the site, and what they show."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "assets", PAGES / "assets")
    for source in sorted((ROOT / "docs").rglob("*.md")):
        write(str(source.relative_to(ROOT / "docs")), source)
    page = PAGES / benchmarks.PAGE.relative_to(ROOT / "docs")
    page.write_text(benchmarks.marked(page.read_text()))
    for name in REPOSITORY_PAGES:
        write(f"repository/{name}", ROOT / name)


def write(page: str, source: Path) -> None:
    """Write `page` of the site from `source`."""
    target = PAGES / page
    target.parent.mkdir(parents=True, exist_ok=True)
    unsearched = "---\nsearch:\n  exclude: true\n---\n\n" if UNSEARCHED.match(page) else ""
    target.write_text(unsearched + adapted(filled(source.read_text()), page))


def adapted(markdown: str, page: str) -> str:
    """`markdown` with its drawings, and with links as `page` of the site needs them."""
    folder = posixpath.dirname(_in_repository(page))

    def inline(found: re.Match[str]) -> str:
        drawing = (ROOT / folder / found["path"]).read_text()
        return f'<figure class="drawing">\n{drawing}<figcaption>{found["caption"]}</figcaption>\n</figure>'

    def redirect(found: re.Match[str]) -> str:
        target = _in_site(posixpath.normpath(posixpath.join(folder, found["path"])))
        return f"]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{found['anchor'] or ''})"

    named = INSTALLS.sub(rf"\g<quote>{PACKAGE}", markdown)
    return LINK.sub(redirect, DRAWING.sub(inline, named))


def _in_repository(page: str) -> str:
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def _in_site(path: str) -> str:
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


if __name__ == "__main__":
    assemble()
    # Without --clean pages come from a cache, which does not know that docstrings have changed.
    command = ["zensical", "build", "--clean", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    sys.exit(subprocess.run(command).returncode)
