"""The budget of the package and its documentation: a commit that raises a number says why in the same line.

tinygrad counts its lines in CI for the same reason (github.com/tinygrad/tinygrad, sz.py): a package that only grows is
soon one that nobody reads whole.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from itertools import chain

import pytest

from asyncoll.algorithms.seam.backend import Backend
from tests.support.places import ROOT

PACKAGE = ROOT / "asyncoll"
# Lines of code, without empty lines, comments and docstrings, in Python and C.
LINES = {
    "": 2_075,  # what commands share, Ctrl-C while they import, kinds of laws, errors, `shrink`, `grow`, bytes of ways
    "_core": 5_580,  # short calls know the last line of the user, which saves a sixth of their time
    # Texts of errors and results that the docstrings of calls share, the parts of a communicator in the next epoch, and
    # one for rounds over deaths.
    "algorithms": 1_250,
    "algorithms/dense": 2_595,  # the patience of waits, a way that needs the core, and plans that say who reduces
    "algorithms/gossip": 320,
    # Operations as arguments describe them, which the communicator had; and the last round of a lost rank.
    "algorithms/rounds": 3_741,  # what survivors of a death read: how many contributions of each rank rounds have
    "algorithms/seam": 333,  # the ways of the program, which are checked; ways that need the core; plans of two kinds
    "algorithms/sparse": 1_024,  # algorithms of the program, whose answers are checked, and words of thresholds
    "bench": 996,  # rows that are shown as they come, JSON of all tables, what Ctrl-C leaves, and ranks that load torch
    "launch": 1_955,  # a job that goes on after deaths: which is the root cause, and a store for ranks of other hosts
    "ray": 390,
    "rpc": 3_080,  # how a stub declares a stream, and functions that go on in the next epoch
    # The agreement on the next epoch, how a rank goes on in it, what needs it, how the news of a loss spreads, events
    # at one place, and how members connect to newcomers.
    "runtime": 4_594,
    "tensors": 1_285,  # results whose elements overlap are refused, in numpy as in torch, for any strides
    "testing": 6_117,  # worlds that go on after deaths, the explorer with attempts given up, no polls on one loop
    "torch": 2_873,  # `discard` of the states of hooks, and their policies; errors that name what was forgotten
    "training": 2_600,  # trainings of five kinds that go on after deaths, and data that is dealt anew
    "transport": 6_427,  # a transport of one epoch, ended processes, silent ranks; worlds on one loop do not poll
    "world": 2_320,  # newcomers, the store that decides on epochs, how a rank enters one, and deaths as it leaves
}
BACKEND_MEMBERS = 8  # beside those of `CommunicatorPart`
# What a way depends on beside the sizes in the tables: a function that asks one of these in a condition chooses a way.
GROUNDS = re.compile(
    "takes|native|core|_?compiled|_?short|repeat|may_block|send_directly|shares_memory|all_have_arenas"
)
ROOMS_OF_WAYS = ("algorithms", "communicator.py", "torch/calls.py")
ROOMS_OF_KERNELS = ("algorithms/sparse", "algorithms/gossip")  # what they ask of the core is one step, and no way
CHOOSERS = {  # what each chooses
    "begin": "the table: the first way that takes a call",
    "choose_backend": "the backend",
    "MemoryBackend.start": "the thread: of the caller, or of the runtime",
    "MemoryBackend.short_calls": "core or not: whole calls",
}
DECLINES = {  # ways of a table that decline what they do not take, and on which grounds
    "Calls.send_directly": "the transport has no room",
    "MemoryBackend.pair_in_blocks": "the two ranks cannot share device memory, as far as is known",
    "PairMemory.offers": "the block of this rank is on another device",
    "GroupMemory.offers": "the block of this rank is on another device",
}
WITHOUT_CORE = re.compile(r"\b(native|core) is (not )?None\b")
WITHOUT_CORE_MAX = 8  # places in algorithms/ that ask whether there is a core
WORDS = {  # as `wc -w` counts them
    "README.md": 700,
    "CHANGELOG.md": 600,
    "docs": 28_000,  # what a user reads from the beginning to the end: without Internals and the reference
}
LOOKED_UP = {"design", "reference"}


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


def words(name: str) -> int:
    path = ROOT / name
    pages = [path] if path.is_file() else path.rglob("*.md")
    return sum(len(page.read_text().split()) for page in pages if not LOOKED_UP & {*page.relative_to(path).parts})


@pytest.mark.parametrize("name", WORDS)
def test_no_text_has_more_words_than_its_budget(name):
    assert words(name) <= WORDS[name]


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


def choosers(tree: ast.AST, outer: str = "") -> Iterator[str]:
    """The functions in `tree`, by their qualified names, with a condition on one of GROUNDS."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        name = f"{outer}.{node.name}".lstrip(".") if is_function or isinstance(node, ast.ClassDef) else outer
        if is_function and any(map(GROUNDS.fullmatch, chain.from_iterable(map(asked, own_parts(node))))):
            yield name
        yield from choosers(node, name)


def own_parts(function: ast.AST) -> Iterator[ast.AST]:
    """The parts of a function, without those of the functions in it."""
    for part in ast.iter_child_nodes(function):
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part
            yield from own_parts(part)


def asked(part: ast.AST) -> set[str]:
    """The names that a condition ends with: `has` of `it.has`, and of `it.has()`."""
    if not isinstance(part, ast.If | ast.IfExp | ast.While | ast.BoolOp):
        return set()
    nodes = list(ast.walk(part if isinstance(part, ast.BoolOp) else part.test))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    ends = [node for node in nodes if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner]
    return {node.attr if isinstance(node, ast.Attribute) else node.id for node in ends}


def test_few_functions_choose_a_way():
    """A choice belongs into a table of ways. One that cannot be made there is listed, with what it chooses.

    A way may ask before it declines.
    """
    found = [
        name
        for path in sorted(PACKAGE.rglob("*.py"))
        if (place := str(path.relative_to(PACKAGE))).startswith(ROOMS_OF_WAYS)
        and not place.startswith(ROOMS_OF_KERNELS)
        for name in choosers(ast.parse(path.read_text()))
    ]
    assert sorted(found) == sorted({**CHOOSERS, **DECLINES})


def test_a_function_that_chooses_a_way_is_found():
    source = """
class A:
    def f(self, x):
        def g():
            return 1 if x.takes() else 2
        return self.core.memory or g

    def h(self, ways):
        while self.member.may_block() and ways:
            pass
"""
    assert list(choosers(ast.parse(source))) == ["A.f.g", "A.h"]


@pytest.mark.parametrize(
    ("source", "lines"),
    [("", 0), ('"""Text."""\n\nx = 1  # one\n# two\n', 1), ('def f():\n    """A\n\n    B"""\n    return 1\n', 2)],
)
def test_prose_is_not_counted(source, lines):
    assert lines_of_python(source) == lines
    assert lines_of_c("/* a\n b */\nint x; /* c */\n\n") == 1
