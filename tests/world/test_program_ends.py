"""Every end of a rank's program at every facade: the table in docs/concepts/failures.md, in real processes."""

from __future__ import annotations

import os
import re
import signal

import pytest

from asyncoll import notebook
from asyncoll.errors import AsyncollError
from tests.scripts.world import program_ends
from tests.support.cases import case
from tests.support.places import ROOT, SCRIPTS

PAGE = ROOT / "docs" / "concepts" / "failures.md"
HEADING = "| the program of a rank ends by |"
COLUMNS = {
    "`run`, `connect`": ("run", "connect"),
    "`init`": ("init",),
    "`with init()`": ("with init",),
    "`init_process_group`, hooks of DDP": ("group", "solo", "majority", "quorum"),
    "`notebook.run`": ("notebook",),
    "`ray.run`": ("ray",),
}
IN_TEXT = {"an exception": "boom", "Ctrl-C": "KeyboardInterrupt"}


def table():
    """What the page says: by facade and end, the name of the error."""
    _, rest = PAGE.read_text().split(HEADING)
    heading, _, *rows = [line.strip("| ").split(" | ") for line in (HEADING + rest.split("\n\n")[0]).splitlines()]
    told = {}
    for ends, *errors in rows:
        for column, error in zip(heading[1:], errors, strict=False):
            for facade in COLUMNS[column]:
                told.setdefault(facade, {}).update(dict.fromkeys(ends.split("; "), error))
    return told


TABLE = table()


def told_by_ray(end, outcome):
    """Checks what the driver of `tests/scripts/ray/driver.py` was told of this end."""
    said = "nothing" if "result" in outcome else f"{outcome['type']}: {outcome['text']}"
    with case(end=end):
        check(end, TABLE["ray"][end], said)


def check(end, expected, text):
    """That `text` is the error that the page names, and names rank 1."""
    name, _, told = text.strip().partition(": ")
    assert name == expected, text
    if expected != "nothing":
        assert re.search(r"\brank 1\b", told), text
        assert expected == "PeerLostError" or IN_TEXT.get(end, "") in told, text


@pytest.mark.slow
def test_a_notebook_is_told_of_each_end_of_a_program():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel
    for end, expected in TABLE["notebook"].items():
        said = "nothing"
        try:
            notebook.run(program_ends.main, end, ranks=3)
        except AsyncollError as error:
            said = f"{type(error).__name__}: {error}"
        with case(end=end):
            check(end, expected, said)


def test_the_table_has_each_facade_and_each_end():
    assert set(TABLE) == {*program_ends.FACADES, "notebook", "ray"}
    assert all(list(told) == list(program_ends.ENDS) for facade, told in TABLE.items() if facade != "ray")


@pytest.mark.slow
@pytest.mark.parametrize("facade", [facade for facade in TABLE if facade not in ("notebook", "ray")])
def test_the_others_are_told_of_each_end_of_a_program(forked_world, facade):
    worlds = {}
    for end in TABLE[facade]:
        worlds[end] = forked_world(os.environ, 3, SCRIPTS / "world/program_ends.py", facade, end)
    for end, ranks in worlds.items():
        ends = [rank.end() for rank in ranks]
        for code, out, err in (ends[0], ends[2]):
            with case(end=end, code=code, err=err):
                check(end, TABLE[facade][end], out)
