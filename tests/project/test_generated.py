"""Pages that are made from the source, or list what it has: errors, commands, environment variables, examples."""

from __future__ import annotations

import ast
import copy
import importlib.util
import re
import traceback

import pytest

import asyncoll
from asyncoll import errors
from asyncoll.cli import main
from asyncoll.errors import AsyncollError, PeerLostError, UsageError
from asyncoll.testing import run_ranks
from asyncoll.transport.memory.fd_passing import ArenaUnavailable
from asyncoll.transport.settings import NAMES, OF_TESTS
from tests.support.places import ROOT

spec = importlib.util.spec_from_file_location("_generated", ROOT / "docs/_generated.py")
generated = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generated)

TROUBLESHOOTING = (ROOT / "docs/howto/troubleshooting.md").read_text()
CLASSES = sorted(generated.ERRORS - {"AsyncollError"})
VARIABLE = re.compile(r"ASYNCOLL_[A-Z_]*[A-Z]")


def made(name: str) -> AsyncollError:
    arguments = {"PeerLostError": (1, "lost"), "AbortedError": (1, "why"), "RemoteError": (1, "ValueError", "bad")}
    return getattr(errors, name)(*arguments.get(name, ((1,),) if name == "NonFiniteError" else ("text",)))


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_has_a_section_that_its_note_names(name):
    heading = f"\n## {name}\n"
    section = TROUBLESHOOTING.partition(heading)[2].partition("\n## ")[0]
    assert f"<!-- generated: error {name} -->" in section
    assert made(name).__notes__ == [f"docs: troubleshooting#{name.lower()}"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_section_has_the_meaning_of_its_error_and_what_the_source_says(name):
    text = generated.error(name)
    assert text.startswith(getattr(errors, name).__doc__.partition("\n")[0])
    assert "Attributes:" not in text
    assert f"`{generated.VALUE}`" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("UsageError", "- `` a loop is running here already: use `async with"),
        ("UsageError", "- `… in the environment is not a variable of asyncoll: …`"),
        ("UsageError", "- `no such script: …`"),
        ("UsageError", "- `ASYNCOLL_CORE=c, and the compiled core cannot be used: …`"),
        ("PeerLostError", "- `rank … is gone: it was killed by …`"),
        ("ServiceLostError", "- `no service at …: …`"),
        ("ServiceLostError", "- `the service at … is gone: its connection closed`"),
        ("ServiceLostError", "- `the service at … is gone: it does not answer as it should: is it stopped, or has"),
        ("ServiceLostError", "- `the service at … is gone: it has shown no sign of life for … s: its process is"),
        ("UsageError", "- `` … streams: use `stream` ``"),
        ("UsageError", "- `` … does not stream: use `call` ``"),
        ("ClosedError", "- `this communicator is closed: it takes no more calls`"),
        ("NonFiniteError", "- `the gradient of rank … for round … holds NaN or infinity"),
    ],
)
def test_the_texts_of_the_source_are_listed(name, said):
    assert said in generated.error(name)


def test_a_text_is_listed_once_in_its_group():
    for name in CLASSES:
        for group in generated.error(name).split("\n\n### "):
            lines = [line for line in group.splitlines() if line.startswith("- ")]
            assert len(lines) == len(set(lines))


def test_a_note_is_no_part_of_the_text_and_stays_one():
    error = PeerLostError(1, "gone", host="h")
    assert str(error) == "rank 1 (host h) is gone: gone"
    assert copy.copy(UsageError("x")).__notes__ == ["docs: troubleshooting#usageerror"]
    for _ in range(2):  # raised again, as at each later call
        with pytest.raises(PeerLostError) as raised:
            raise error
    assert "".join(traceback.format_exception(raised.value)).count("docs: troubleshooting") == 1


def test_a_class_derived_elsewhere_has_the_section_of_its_base_or_none():
    class RefusalError(UsageError):
        pass

    assert RefusalError("x").__notes__ == ["docs: troubleshooting#usageerror"]
    assert not hasattr(ArenaUnavailable("x"), "__notes__")


def test_an_error_that_other_ranks_raise_again_has_one_note_at_each():
    async def main(comm):
        if comm.rank == 0:
            comm.abort("why")
        with pytest.raises(AsyncollError) as raised:
            await comm.barrier()
        return raised.value.__notes__

    assert run_ranks(3, main)[1:] == [["docs: troubleshooting#abortederror"]] * 2


def read_by_the_source() -> set[str]:
    """The names in the strings of the package and of its build that are no text."""
    names = ROOT / "asyncoll/transport/settings.py"
    files = [path for path in (*(ROOT / "asyncoll").rglob("*.py"), ROOT / "hatch_build.py") if path != names]
    strings = [
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {string for string in strings if VARIABLE.fullmatch(string)}


def test_each_variable_that_the_source_reads_is_known_and_on_the_page():
    page = (ROOT / "docs/reference/variables.md").read_text()
    rows = re.findall(r"^\| `(ASYNCOLL_\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(NAMES)
    assert read_by_the_source() == set(NAMES)
    assert OF_TESTS in page


def test_variables_in_texts_exist():
    """In docstrings, errors and pages."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "asyncoll").rglob("*.py")]
    named = {name for page in pages for name in VARIABLE.findall(page.read_text())}
    others = {name for name in named if not name.startswith(OF_TESTS.rstrip("_"))} - {"ASYNCOLL_COMPLETE"}
    assert others <= set(NAMES)


def test_the_page_of_commands_has_each_command_with_an_example():
    page = generated.commands()
    names = [name for name, *_ in generated.all_commands()]
    assert {"launch", "key", "doctor", "laws", "faults", "bench allreduce", "bench tune"} <= set(names)
    for name in names:
        text = page.partition(f"## asyncoll {name}\n")[2].partition("\n## ")[0]
        assert re.search(rf"\n  Examples?:\n    asyncoll {name} ?", text), name
        assert "  -h, --help  " in text, name


def test_the_reference_lists_every_command():
    page = (ROOT / "docs/reference/index.md").read_text()
    assert set(re.findall(r"^\| `asyncoll (\w+)", page, re.MULTILINE)) == set(main.commands)


def test_each_example_is_in_the_gallery_with_a_command():
    table = generated.examples()
    programs = {path.name for path in (ROOT / "examples").glob("*.py")} - {"language.py"}  # a module of others
    assert programs == set(re.findall(r"`(\w+\.py)` \|", table))
    for path in re.findall(r"examples/\w+\.py", table):
        assert (ROOT / path).exists()


def test_every_mark_of_a_page_is_filled():
    for page in (ROOT / "docs").rglob("*.md"):
        assert "<!-- generated" not in generated.filled(page.read_text()), page


def test_what_is_cited_is_this_version():
    cited = (ROOT / "CITATION.cff").read_text(), generated.bibtex()
    assert f"\nversion: {asyncoll.__version__}\n" in cited[0]
    assert f"  version = {{{asyncoll.__version__}}},\n" in cited[1]
    assert all("asyncoll contributors" in text for text in cited)


def test_what_pip_installs_is_one_variable_of_the_site(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    site = importlib.import_module("_site")
    monkeypatch.setattr(site, "PACKAGE", "asyncoll")
    named = "`pip install asyncoll`, `pip install 'asyncoll[ray]'`, `pip install --editable '.[dev]'`"
    written = named.replace("asyncoll[", ".[").replace("asyncoll`", ".`")
    assert site.adapted(written, "howto/install.md") == named
