"""The tables of ways: which takes a call, what comes next where it declines, and a way of a program's own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from asyncoll import MAX, SUM, UsageError
from asyncoll.algorithms.choice import tables
from asyncoll.algorithms.seam import ways
from asyncoll.algorithms.seam.ways import Shape, Way, begin, limits
from asyncoll.cli import main as program
from asyncoll.testing import Network, run_ranks, simulate
from tests.support.cases import looped
from tests.support.toy_way import TOY


@pytest.fixture
def taken():
    """The arrays that the toy way has taken, while it is in the table."""
    begun = []

    def noted(collectives, x, op, dtype):
        work = TOY.begin(collectives, x, op, dtype)
        if work is not None:
            begun.append((x.dtype.name, x.size, op))
        return work

    with ways.added(TOY._replace(begin=noted)):
        yield begun


@looped("world", ["simulated", "shm", "hosts"])
@looped("size", [2, 3, 5, 8])
def test_a_way_of_the_program_takes_what_it_says_and_declines_the_rest(world, size, taken):
    """Its results are those of the ways of the package, also where the core has whole calls."""
    lengths = [0, 1, 1000, 1 << 16, (1 << 16) + 1]
    calls = [(dtype, op, length) for dtype in ("int8", "float32") for op in (SUM, MAX) for length in lengths]
    whole = np.arange(size)[:, None] + np.arange(lengths[-1]) % 5
    expected = {SUM: whole.sum(0), MAX: whole.max(0)}

    async def main(comm):
        for dtype, op, length in calls * 3:  # the core would repeat the second one of a kind
            x = whole[comm.rank, :length].astype(dtype)
            await comm.allreduce(x, op)
            np.testing.assert_array_equal(x, expected[op][:length].astype(dtype))

    taken.clear()
    if world == "simulated":
        simulate(size, main, Network())
    elif world == "hosts":
        run_ranks(size, main, "shm", hosts=[rank % 2 for rank in range(size)])
    else:
        run_ranks(size, main, world)
    assert sorted(set(taken), key=str) == sorted({("int8", length, SUM) for length in lengths[:-1]}, key=str)
    assert len(taken) == 3 * size * len(lengths[:-1])


@looped("dtype, is_taken", [("bfloat16", True), ("uint16", False)])
def test_a_way_is_chosen_by_what_the_bits_mean(dtype, is_taken):
    """bfloat16 lies in arrays of uint16."""
    import torch

    begun = []
    way = TOY._replace(begin=lambda collectives, x, op, dtype: begun.append(dtype), dtypes=("bfloat16",))

    async def main(comm):
        await comm.allreduce(torch.ones(3, dtype=torch.bfloat16) if is_taken else np.ones(3, np.uint16))

    with ways.added(way):
        simulate(2, main, Network())
    assert begun == [dtype] * 2 * is_taken


def test_a_way_of_the_program_is_in_the_printed_table():
    def printed():
        return CliRunner().invoke(program, ["doctor", "--ways", "-n", "4"], catch_exceptions=False).output

    with ways.added(TOY):
        lines = [line.split("  ") for line in printed().splitlines() if "gathered" in line]
    assert [[part.strip() for part in line if part] for line in lines] == [
        ["up to 64 KiB", "int8, gathered", "one step of short messages", "a sum"]
    ]
    assert "gathered" not in printed()


@looped("ranks", [1, 2, 3, 4, 5, 8, 17, 1024])
def test_each_array_has_a_way_in_each_table(ranks):
    for place, table in tables(ranks, {}).items():
        for call in {way.call for way in table}:
            rows = [way._replace(begin=lambda: "begun") for way in table if way.call == call]
            assert rows[-1][4:6] == (-1, ways.MANY)
            edges = [0, *(edge + step for way in rows for edge in (way.over, way.up_to) for step in (0, 1))]
            for nbytes in {min(max(edge, 0), ways.MANY) for edge in edges}:
                for has_parts in (True, False):
                    shape = Shape(nbytes, "float32", has_parts=has_parts)
                    assert begin(rows, shape) == "begun", (place, call, shape)


def test_the_table_is_printed_as_json_with_the_sizes_of_the_environment(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", "short=128")
    done = CliRunner().invoke(program, ["doctor", "--ways", "--json"], env={"WORLD_SIZE": "3"}, catch_exceptions=False)
    row = json.loads(done.output)["allreduce, on one host"][1]
    assert (row["bytes"], row["way"]) == ("up to 128 bytes", "meeting")
    with pytest.raises(UsageError, match="short=5"):
        tables(3, {"ASYNCOLL_SIZES": "short=5"})


@looped(
    "over, up_to, text",
    [
        (-1, ways.MANY, "any"),
        (0, 1 << 20, "up to 1 MiB"),
        (1 << 20, ways.MANY, "over 1 MiB"),
        ((1 << 20) - 1, (1 << 21) - 1, "from 1 MiB under 2 MiB"),
        (1 << 10, 100_000, "over 1 KiB up to 100000 bytes"),
    ],
)
def test_limits_are_told_in_words(over, up_to, text):
    assert limits(Way("allreduce", "", lambda: None, "", over=over, up_to=up_to)) == text
