"""Every code block of the README and of the documentation runs.

- A Python block whose first line is `# name.py` is a file of that page; all others share the page's namespace. A file
  is started by a shell block, or imported by another block. Otherwise it calls `asyncoll.run`, and runs here, among
  `RANKS` ranks on one loop.
- A difference of two files of the page, `a.py` and `b.py`, is the file `b.diff`.
- A shell block runs in a folder with the page's files, with real processes (marked slow), a home folder of its own, and
  free ports in place of those of the page. Launchers take seconds to start, above all with torch: the first launch of a
  page is real, with torch only that of the tutorial. In other blocks that launch files, a file that calls
  `asyncoll.run` runs here, among as many ranks on one loop; the ranks of any other file are forks of the template.
- A shell block whose first line is `# On each of N hosts.` runs N times at once, each with a folder for temporary files
  of its own, as a host has. The name of the host `host0` becomes localhost.
- A block that says `# Not run by the tests: reason` is checked for its syntax only.
- A text block with the title "Output" is what the block before it prints, in any order of its lines.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from sybil import Document, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

import asyncoll
import trainers.runs
from asyncoll import extending, notebook, rpc, testing, training
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.torch import hooks
from tests.support.places import ROOT
from tests.support.processes import LIGHT, PATIENCE_S, TRAINING

DOCS = ROOT / "docs"
PACKAGE = ROOT / "asyncoll"
SOURCES = [path for folder in ("asyncoll", "tests", "trainers") for path in (ROOT / folder).rglob("*.py")]
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
DESIGN = [ROOT / "DESIGN.md", *sorted((DOCS / "design").glob("*.md"))]  # they name files and definitions of the code
PROSE = [
    *PAGES,
    *(ROOT / name for name in ("DESIGN.md", "SECURITY.md", "BENCHMARKS.md", "CONTRIBUTING.md")),
    *(ROOT / "benchmarks").rglob("*.md"),
]
STUBS = ROOT / "tests" / "stubs"  # programs that are not on this machine, such as ssh to other hosts
RANKS = 3
SHORT = {"ROUNDS": "4", "COMPUTE_MS": "0"}  # what the scripts of the tutorial read
LANGUAGES = {
    "python",
    "sh",
    "text",
    "diff",
}  # tests/project/test_examples.py compares the differences with their files
NOT_RUN = re.compile(r"^# Not run by the tests: \S", re.MULTILINE)
REFERENCE = re.compile(
    r"`(?P<path>[\w./]+(?:\.py|/))(?:::(?P<name>[\w.]+))?`"
)  # `file.py`, `folder/`, `file.py::Class.name`
MEMBER = re.compile(r"`(?P<name>[A-Z]\w*[a-z]\w*(?:\.\w+)*|_\w+)`")  # `Class`, `Class.name`, `_private`
INFO = re.compile(r"(?P<language>\w*)(?P<attributes>[^\n]*)\n")
NAME = re.compile(r"# (?P<name>\w+\.py)\n")
DIFFERENCE = re.compile(r"--- \w+\.py\n\+\+\+ (?P<name>\w+)\.py\n")  # of two files of the page
ON_HOSTS = re.compile(r"# On each of (?P<count>\d) hosts\.\n")
PORT = re.compile(r"(?<=[:=])29\d{3}\b")
LAUNCH = re.compile(
    r"(?P<setting>(\w+=\w+ )*)asyncoll launch -n (?P<ranks>\d+) (?P<file>\w+\.py)(?P<words>( \w+)*)( +#.*)?"
)


@dataclass(frozen=True)
class Block:
    language: str
    attributes: str
    source: str
    line: int  # of its fence in the page

    @property
    def name(self) -> str:
        if difference := DIFFERENCE.match(self.source):
            return f"{difference['name']}.diff"
        found = NAME.match(self.source)
        return found["name"] if found else ""

    @property
    def runs(self) -> bool:
        return not NOT_RUN.search(self.source)

    @property
    def is_output(self) -> bool:
        return self.language == "text" and 'title="Output"' in self.attributes

    @property
    def is_world(self) -> bool:
        return "asyncoll.run(" in self.source


def _regions(document: Document):
    for region in RawFencedCodeBlockLexer(INFO)(document):
        yield Region(region.start, region.end, parsed=region.lexemes, evaluator=lambda example: None)


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    found = []
    for example in Document.parse(str(page), _regions):
        lexemes = example.parsed
        found.append(Block(lexemes["language"], lexemes["attributes"], str(lexemes["source"]), example.line))
    return tuple(found)


def pages_with(language: str):
    pages = [page for page in PAGES if any(b.language == language and b.runs for b in blocks_of(page))]
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


ALL_BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}:{block.line}") for page in PAGES for block in blocks_of(page)
]


@pytest.fixture
def folder(page, tmp_path, monkeypatch):
    """A folder with the files of the page, as the current one; they can be imported, and are forgotten afterwards."""
    for block in blocks_of(page):
        if block.name:
            (tmp_path / block.name).write_text(block.source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ASYNCOLL_PRELOAD", preloaded(page))
    monkeypatch.setenv("PATH", f"{STUBS}{os.pathsep}{os.environ['PATH']}")
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp") as hosts:  # a short path, for sockets
        monkeypatch.setenv("STUB_HOSTS", hosts)
        yield tmp_path
    forget(tmp_path)


def preloaded(page: Path) -> str:
    """What the programs that the page's shell blocks start will import: the launcher loads it once for all ranks."""
    started = " ".join(block.source for block in blocks_of(page) if block.language == "sh" and block.runs)
    if "-m trainers" in started:
        return trainers.runs.PRELOAD
    programs = " ".join(block.source for block in blocks_of(page) if block.name and block.name in started)
    return (TRAINING if "torch" in programs else LIGHT)["ASYNCOLL_PRELOAD"]


def forget(folder: Path):
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("block", ALL_BLOCKS)
def test_blocks_are_of_a_known_language_and_parse(block):
    assert block.language in LANGUAGES, "name the language of the block"
    if block.language == "python":
        _compile(block, "block")
    elif block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.source, text=True, check=True, timeout=PATIENCE_S)


@pages_with("python")
def test_python_blocks_run(page, folder, monkeypatch):
    namespace = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(page):
        if block.is_output and printed:
            _compare(block, printed)
        printed = ""
        if block.language != "python" or not block.runs or (block.name and _is_used(block, page)):
            continue
        assert block.is_world or not block.name, f"{block.name} of line {block.line} is never run"
        if block.name:
            printed = _run_world(block.source, RANKS, [block.name], {}, monkeypatch)
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            _execute(_compile(block, f"{page}:{block.line}"), namespace)
        printed = out.getvalue()


@pytest.mark.slow
@pages_with("sh")
def test_shell_blocks_run(page, folder, forked_world, monkeypatch):
    printed = ""
    has_launched = preloaded(page) == TRAINING["ASYNCOLL_PRELOAD"] and page.name != "tutorial.md"
    for block in blocks_of(page):
        if block.is_output and printed:
            _compare(block, printed)
        printed = ""
        if block.language != "sh" or not block.runs:
            continue
        before, launches = _launches(block)
        if not (launches and has_launched):
            printed = _run_shell(block, block.source, folder)
            has_launched = has_launched or "asyncoll launch" in block.source
            continue
        _run_shell(block, before, folder)
        for launch in launches:
            forget(folder)
            setting = dict(pair.split("=") for pair in launch["setting"].split()) | SHORT
            source, words = (folder / launch["file"]).read_text(), launch["words"].split()
            if "asyncoll.run(" in source:
                printed += _run_world(source, int(launch["ranks"]), [launch["file"], *words], setting, monkeypatch)
                continue
            environment = os.environ | setting | {"PYTHONPATH": str(ROOT)}
            for rank in forked_world(environment, int(launch["ranks"]), folder / launch["file"], *words):
                code, out, err = rank.end()
                assert code == 0, f"line {block.line}:\n{block.source}\n{out}{err}"
                printed += out


@pytest.mark.parametrize(
    "module", [asyncoll, extending, hooks, notebook, rpc, testing, training], ids=lambda module: module.__name__
)
def test_the_reference_has_every_public_name(module):
    reference = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    constants = {"__version__", *(op.name for op in asyncoll.ReduceOp)}  # these are shown at ReduceOp
    for name in set(module.__all__) - constants:
        assert re.search(rf"^::: {re.escape(module.__name__)}\.{name}$", reference, re.MULTILINE), name


@pytest.mark.parametrize("page", ["index.md", "communicator.md"])
def test_the_reference_lists_every_reduction(page):
    listed = set(re.findall(r"`(\w+)`", (DOCS / "reference" / page).read_text()))
    assert {op.name for op in asyncoll.ReduceOp} <= listed & set(asyncoll.__all__)


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_navigation_has_every_page():
    """The generator says nothing of a page that is not there, and nothing leads to it but links."""
    listed = re.findall(r"^ +- (?:[^#\n]*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(name for name in listed if not name.startswith("repository/")) == sorted(pages)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_well_formed(path):
    root = ElementTree.fromstring(path.read_text())
    assert root.get("viewBox")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None, "for those who cannot see it"


def test_files_that_papers_to_code_names_exist():
    table = (DOCS / "papers.md").read_text().partition("## Where the code is")[2].partition("\n## ")[0]
    paths = re.findall(r"`([\w./]+(?:\.py|/))`", table)
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_design_names_exists(page):
    """Paths start at the root of the repository, or below asyncoll/."""
    text = page.read_text()
    for found in REFERENCE.finditer(text):
        path = next((base / found["path"] for base in (ROOT, PACKAGE) if (base / found["path"]).exists()), None)
        assert path is not None, found[0]
        assert not found["name"] or found["name"] in definitions(path), found[0]
    everywhere = set().union(*map(definitions, SOURCES)) | {name for name in vars(builtins) if name[0].isupper()}
    everywhere |= {name.rpartition(".")[2] for name in everywhere}
    for found in MEMBER.finditer(text):
        assert found["name"] in everywhere, found[0]


def test_the_design_names_every_package():
    pages = "".join(page.read_text() for page in DESIGN)
    packages = [path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert not [package for package in packages if f"`{package}/`" not in pages]


@cache
def definitions(path: Path) -> set[str]:
    """The qualified names of what a file defines: constants, functions, classes and what these define and assign."""

    def of(body: Iterable[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from of(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (f"{prefix}{name.id}" for name in targets if isinstance(name, ast.Name))

    return set(of(ast.parse(path.read_text()).body, ""))


def _compile(block: Block, where: str):
    """A notebook's cells may await at the top."""
    return compile(block.source, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _execute(code, namespace):
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, namespace)
        return

    async def cell():
        await eval(code, namespace)  # noqa: S307 (a block of our own documentation)

    asyncio.run(cell())


def _run_world(source: str, ranks: int, argv: list[str], setting: dict[str, str], monkeypatch) -> str:
    """What the program prints whose `asyncoll.run` runs so many ranks on one loop."""

    def run(main, *args):
        testing.run_ranks(ranks, lambda comm: main(comm, *args))

    with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(asyncoll, "run", run)
        patch.setattr(sys, "argv", argv)
        for name, value in setting.items():
            patch.setenv(name, value)
        exec(compile(source, argv[0], "exec"), {"__name__": "__main__"})
    return out.getvalue()


def _run_shell(block: Block, source: str, folder: Path) -> str:
    """What the source prints, which is the block or a part of it."""
    found = ON_HOSTS.match(block.source)
    hosts = int(found["count"]) if found else 1
    with _free_ports(source) as source, ThreadPoolExecutor(hosts) as threads:
        commands = [threads.submit(_run_command, source, folder, str(host) if found else "") for host in range(hosts)]
        done = [command.result() for command in commands]
    for command in done:
        assert command.returncode == 0, f"line {block.line}:\n{block.source}\n{command.stdout}{command.stderr}"
    return "".join(command.stdout for command in done)


@contextlib.contextmanager
def _free_ports(source: str) -> Iterator[str]:
    """The source with free ports, which are held meanwhile: two runs of the tests may share a machine."""
    with contextlib.ExitStack() as held:
        ports = {port: held.enter_context(reserve_port()).getsockname()[1] for port in set(PORT.findall(source))}
        yield PORT.sub(lambda found: str(ports[found[0]]), source)


def _run_command(source: str, folder: Path, host: str) -> subprocess.CompletedProcess[str]:
    """A shell that has ended, on one of several hosts if `host` is its name."""
    home = os.environ["STUB_HOSTS"]
    of_host = {}
    if host:
        source = source.replace("host0", "localhost")
        of_host = {"TMPDIR": f"{home}/{host}", "PET_LOCAL_ADDR": "localhost"}  # torchrun's --local-addr
        Path(home, host).mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", source],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HOME": home, **of_host},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def _launches(block: Block) -> tuple[str, list[re.Match[str]]]:
    """The lines of the block that launch files, if these are its last ones, and what is before them."""
    lines = block.source.splitlines(keepends=True)
    found = [LAUNCH.fullmatch(line.rstrip("\n")) for line in lines]
    first = next((number for number, launch in enumerate(found) if launch), len(lines))
    return "".join(lines[:first]), [launch for launch in found[first:] if launch] if all(found[first:]) else []


def _is_used(block: Block, page: Path) -> bool:
    others = [other for other in blocks_of(page) if other is not block and other.runs]
    imports = re.compile(rf"^\s*(from|import) {block.name.removesuffix('.py')}\b", re.MULTILINE)
    return any(
        (other.language == "sh" and block.name in other.source)
        or (other.language == "python" and imports.search(other.source))
        for other in others
    )


def _compare(block: Block, printed: str):
    assert _lines(printed) == _lines(block.source), f"line {block.line}"


def _lines(output: str) -> list[str]:
    """Its lines in an order of their own, without the rank that the launcher puts in front."""
    return sorted(re.sub(r"^\d+: ", "", line.rstrip()) for line in output.splitlines())
