"""The budget of the package: a commit that raises a number says why in the same line.

tinygrad counts its lines in CI for the same reason (github.com/tinygrad/tinygrad, sz.py): a package that only grows is
soon one that nobody reads whole.
"""

from __future__ import annotations

import ast
import re
import typing

import pytest

from asyncoll.algorithms.seam.backend import Backend
from tests.support.places import ROOT

PACKAGE = ROOT / "asyncoll"
# Lines of code, without empty lines, comments and docstrings, in Python and C.
LINES = {
    "": 1_720,
    "_core": 5_960,
    "algorithms": 1_200,
    "algorithms/dense": 2_650,
    "algorithms/gossip": 330,
    "algorithms/rounds": 3_720,
    "algorithms/seam": 275,
    "algorithms/sparse": 940,
    "bench": 550,
    "launch": 1_680,
    "ray": 390,
    "rpc": 3_110,
    "runtime": 3_740,
    "tensors": 1_270,
    "testing": 5_820,
    "torch": 2_910,
    "training": 2_040,
    "transport": 6_300,
    "world": 1_660,
}
BACKEND_MEMBERS = 8  # beside those of `CommunicatorPart`
WITHOUT_CORE = re.compile(r"\b(native|core) is (not )?None\b")
WITHOUT_CORE_MAX = 9  # places in algorithms/ that ask whether there is a core


def lines_of_python(source: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            prose.update(range(text.lineno, (text.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(1 for number, line in lines if line and not line.startswith("#") and number not in prose)


def lines_of_c(source: str) -> int:
    without_comments = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)
    return sum(1 for line in without_comments.splitlines() if line.strip())


def room(path: object) -> str:
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[:2] if parts[:1] == ("algorithms",) else parts[:1])


def counted() -> dict[str, int]:
    found = dict.fromkeys(LINES, 0)
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".pyi"):
            found[room(path)] += lines_of_python(path.read_text())
        elif path.suffix in (".c", ".h") and path.name != "declared.h":  # which is generated
            found[room(path)] += lines_of_c(path.read_text())
    return found


def test_no_package_has_more_lines_than_its_budget():
    assert {name: count for name, count in counted().items() if count > LINES[name]} == {}


def test_no_budget_has_more_than_a_twentieth_to_spare():
    """Otherwise a package that has shrunk may grow again without a word."""
    assert {name: count for name, count in counted().items() if count < LINES[name] * 0.95 - 10} == {}


def test_the_backend_has_few_members():
    own = {name for name in vars(Backend) if not name.startswith("_")} | set(typing.get_type_hints(Backend))
    assert len(own) <= BACKEND_MEMBERS


def test_few_places_ask_for_the_core():
    places = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted((PACKAGE / "algorithms").rglob("*.py"))
        for line in path.read_text().splitlines()
        if WITHOUT_CORE.search(line)
    ]
    assert len(places) <= WITHOUT_CORE_MAX, places


@pytest.mark.parametrize(
    ("source", "lines"),
    [("", 0), ('"""Text."""\n\nx = 1  # one\n# two\n', 1), ('def f():\n    """A\n\n    B"""\n    return 1\n', 2)],
)
def test_prose_is_not_counted(source, lines):
    assert lines_of_python(source) == lines
    assert lines_of_c("/* a\n b */\nint x; /* c */\n\n") == 1
