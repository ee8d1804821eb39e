"""What makes pages that read well in the repository pages of the site.

- Pages and plots outside of this folder are in the site, too, under `repository/`; links to them are redirected.
- Drawings are put into the page instead of being linked, so that they take its colours.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

PAGES = ("BENCHMARKS.md", "DESIGN.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
DRAWING = re.compile(r"^!\[(?P<caption>[^\]]*)\]\((?P<path>[^)]*\.svg)\)$", re.MULTILINE)


def on_files(files: Files, config) -> Files:
    for path in [*(ROOT / name for name in PAGES), *(ROOT / "benchmarks" / "plots").glob("*.png")]:
        files.append(File.generated(config, f"repository/{path.relative_to(ROOT)}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    own = page.file.src_uri
    folder = posixpath.dirname(_in_repository(own))

    def inline(found: re.Match[str]) -> str:
        drawing = (ROOT / folder / found["path"]).read_text()
        return f'<figure class="drawing">\n{drawing}<figcaption>{found["caption"]}</figcaption>\n</figure>'

    def redirect(found: re.Match[str]) -> str:
        target = _in_site(posixpath.normpath(posixpath.join(folder, found["path"])))
        return f"]({posixpath.relpath(target, posixpath.dirname(own) or '.')}{found['anchor'] or ''})"

    return LINK.sub(redirect, DRAWING.sub(inline, markdown))


def _in_repository(uri: str) -> str:
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _in_site(path: str) -> str:
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
