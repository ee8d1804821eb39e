"""The tables of ways: which takes a call, what comes next where it declines, and a way of a program's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from click.testing import CliRunner

from asyncoll import MAX, SUM, AbortedError, MismatchError, UsageError, _core
from asyncoll.algorithms.choice import tables
from asyncoll.algorithms.dense import compiled, shared_call
from asyncoll.algorithms.seam import ways
from asyncoll.algorithms.seam.ways import Shape, Way, begin, limits
from asyncoll.cli import main as program
from asyncoll.testing import Network, fake_device, run_ranks, simulate
from tests.support.cases import looped
from tests.support.toy_way import TOY

CARRIERS = ["inproc", "zmq", "shm", "shm-mixed", "hosts"]
SIZES = [1, 3, 5]


def run(world, size, main):
    """The results of `main(comm)` at all ranks."""
    if world == "simulated":
        return simulate(size, main, Network()).results
    hosts = [rank % 2 for rank in range(size)] if world == "hosts" else None
    return run_ranks(size, main, "shm" if world == "hosts" else world, hosts=hosts)


def noted(way):
    """`way`, and a list of the shape, the dtype and the reduction of each array that it has taken."""
    begun = []

    def begin(collectives, x, op, dtype):
        work = way.begin(collectives, x, op, dtype)
        if work is not None:
            begun.append((x.dtype.name, x.size, op))
        return work

    return way._replace(begin=begin), begun


@pytest.fixture
def taken():
    """The arrays that the toy way has taken, while it is in the table."""
    way, begun = noted(TOY)
    with ways.added(way):
        yield begun


@looped("world", [*CARRIERS, "simulated"])
@looped("size", SIZES)
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
    run(world, size, main)
    assert sorted(set(taken), key=str) == sorted({("int8", length, SUM) for length in lengths[:-1]}, key=str)
    assert len(taken) == 3 * size * len(lengths[:-1])


@looped("world", CARRIERS)
@looped("size", SIZES)
@looped("learns_first", [True, False])
def test_all_ranks_take_the_way_whatever_the_core_has_learnt_and_however_an_array_lies(world, size, learns_first):
    """One rank has an array with gaps, and calls are awaited after the way is gone."""
    way, begun = noted(TOY)

    def made(comm, strided):
        return np.ones(600, np.int8)[::2] if comm.rank == strided % comm.size else np.ones(300, np.int8)

    async def plain(comm):
        for turn in range(3):
            x = await comm.allreduce(made(comm, turn))
            assert (x == comm.size).all()

    async def main(comm):
        if learns_first:
            await plain(comm)
        for turn in range(9):
            with ways.added(way):
                call = comm.allreduce(made(comm, turn))
                barrier = comm.barrier()
            await asyncio.sleep(0.002 * (comm.rank == turn % comm.size))
            assert ((await call) == comm.size).all()
            await barrier
        assert len(begun) == 9 * size
        await plain(comm)
        assert len(begun) == 9 * size

    run(world, size, main)


@looped("world", [*CARRIERS, "simulated"])
@looped("size", SIZES)
def test_each_rank_of_a_process_adds_its_own_way_at_its_time(world, size):
    """One rank comes to a call before another has added the way, or after that one's block has ended."""
    way, begun = noted(TOY)

    async def calls(comm, times, took):
        for _ in range(times):
            assert (await comm.allreduce(np.ones(300, np.int8)) == comm.size).all()
        return took.append(comm.rank)

    async def main(comm):
        plain, own = [], []
        half = await comm.split(comm.rank % 2)
        for _ in range(3):
            with ways.added(way):
                await calls(comm, 2, own)
                with ways.added(way._replace(name="inner")):
                    await calls(half, 1, own)
                goes_on = asyncio.ensure_future(calls(comm, 2, own))
                await asyncio.sleep(0)
                await goes_on
                has_ended = asyncio.ensure_future(calls(comm, 2, plain))  # its calls begin after the block
            await has_ended
            await calls(half, 1, plain)

    run(world, size, main)
    assert len(begun) == 3 * size * (2 + 1 + 2)
    assert not ways.own()


def test_worlds_in_one_process_have_their_own_ways():
    way, begun = noted(TOY)

    async def main(comm):
        assert (await comm.allreduce(np.ones(300, np.int8)) == comm.size).all()

    async def in_a_notebook():
        with ways.added(way):
            run("shm", 3, main)

    asyncio.run(in_a_notebook())
    assert len(begun) == 3
    with ways.added(way), ThreadPoolExecutor(1) as threads:
        threads.submit(run, "shm", 3, main).result()
    assert len(begun) == 3


@looped("world", ["zmq", "shm", "shm-mixed"])
@looped("count", [100, 100_000, 2_000_000])
def test_a_way_of_the_program_gets_tensors_of_devices_once_they_have_arrived(world, count):
    import torch

    way, begun = noted(TOY._replace(dtypes=("float32",), up_to=ways.MANY))

    with fake_device(3) as device, ways.added(way):

        async def main(comm):
            x = device.tensor(torch.full((count,), float(comm.rank + 1)))
            await comm.allreduce(x)
            return (device.values(x) == 6).all()

        assert all(run(world, 3, main))
    assert begun == [("float32", count, SUM)] * 3


@looped("size", SIZES)
def test_a_way_that_cuts_arrays_gets_an_element_for_each_rank(size):
    way, begun = noted(TOY._replace(is_cut=True))

    async def main(comm):
        for count in range(6):
            assert (await comm.allreduce(np.ones(count, np.int8)) == comm.size).all()

    with ways.added(way):
        run("shm", size, main)
    assert sorted({count for _, count, _ in begun}) == list(range(size, 6))


@looped(
    "changed, text",
    [
        ({"call": "allreduced"}, "only allreduce, reduce, broadcast have"),
        ({"call": "barrier"}, "only allreduce, reduce, broadcast have"),
        ({"call": "allgather"}, "only allreduce, reduce, broadcast have"),
        ({"call": "reduce_scatter"}, "only allreduce, reduce, broadcast have"),
        ({"call": "broadcast"}, "leave out `dtypes`"),
        ({"over": 10, "up_to": 5}, "it takes no array; give `over`, 10, fewer bytes than `up_to`, 5"),
        ({"up_to": -1}, "it takes no array"),
        ({"dtypes": ("int9",)}, r"`dtypes` is \('int9',\); give a tuple of names of float64"),
        ({"dtypes": "int8"}, "`dtypes` is 'int8'; give a tuple"),
        ({"begin": None}, "`begin` is None; give a function that returns a coroutine, or None"),
        ({"counts_link": True}, "leave out `counts_link`"),
        ({"compiled": 1}, "leave out `counts_link`, `by_core` and `compiled`"),
    ],
)
def test_a_way_that_cannot_be_tried_is_refused(changed, text):
    with pytest.raises(UsageError, match=text), ways.added(TOY._replace(**changed)):
        pass
    assert not ways.OWN


@looped("world", ["shm", "shm-mixed"])
@looped("size", [2, 3, 5])
def test_a_new_row_of_the_package_takes_its_calls_at_all_ranks(world, size, monkeypatch):
    """The core learns no kind of calls that Python carries out otherwise."""
    way, begun = noted(TOY)
    rows = shared_call.allreduce_ways
    for module in (shared_call, compiled):
        monkeypatch.setattr(module, "allreduce_ways", lambda sizes: (way, *rows(sizes)))

    async def main(comm):
        for turn in range(12):
            whole = np.ones(600, np.int8)
            x = whole[::2] if comm.rank == turn % size else whole[:300]
            assert (await comm.allreduce(x) == size).all()
            assert (await comm.allreduce(np.ones(3)) == size).all()

    run(world, size, main)
    assert len(begun) == 12 * size


@looped("world", ["shm", "shm-mixed"])
def test_the_core_learns_no_barrier_from_one_with_a_way_of_the_program(world):
    async def main(comm):
        with ways.added(TOY):
            await comm.barrier()
        for _ in range(3):
            await comm.barrier()

    run(world, 2, main)


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


@looped("world", [*CARRIERS, "simulated"])
def test_ranks_of_other_ways_fail_instead_of_reducing_what_is_there(world):
    async def main(comm):
        assert (await comm.allreduce(np.ones(300, np.int8)) == comm.size).all()
        with ways.added(TOY) if comm.rank == 1 else contextlib.nullcontext():
            call = comm.allreduce(np.ones(300, np.int8))
        with pytest.raises(MismatchError, match="int8, gathered"):
            await call

    run(world, 3, main)


@looped("world", [*CARRIERS, "simulated"])
@looped("size", [2, 5])
def test_a_way_that_declines_at_some_ranks_is_named_at_all_of_them(world, size):
    def unlike(collectives, *arguments):
        return TOY.begin(collectives, *arguments) if collectives.rank else None

    async def main(comm):
        with pytest.raises((UsageError, AbortedError)) as caught:
            await comm.allreduce(np.ones(300, np.int8))
        return str(caught.value)

    with ways.added(TOY._replace(begin=unlike)):
        told = run(world, size, main)
    for text in told:
        assert "allreduce #1 of 300 int8, SUM, way 'int8, gathered' at test_ways.py" in text
        assert "rank 0 takes a way of the package, rank 1 takes int8, gathered" in text
        assert "let `begin` decline by what all ranks know alike" in text


@looped("world", [*CARRIERS, "simulated"])
@looped("size", SIZES)
def test_a_way_cannot_change_the_array_before_its_coroutine(world, size):
    def greedy(collectives, x, op, dtype):
        if collectives.rank == size - 1:
            x += 1

    async def main(comm):
        x = np.ones(300, np.int8)

        async def calls():
            await comm.barrier()  # all have joined
            await comm.allreduce(x)

        with pytest.raises((UsageError, AbortedError)) as caught:
            await calls()
        assert (x == 1).all()
        return str(caught.value)

    with ways.added(TOY._replace(begin=greedy)):
        told = run(world, size, main)
    for text in told:
        assert "the way 'int8, gathered' of allreduce #2 of 300 int8" in text
        assert "raised ValueError: output array is read-only" in text
        assert "nor change the array, which is read-only until then" in text


@looped("world", [*CARRIERS, "simulated"])
def test_a_way_that_begins_no_coroutine_is_named(world):
    async def main(comm):
        async def calls():
            await comm.barrier()  # all have joined
            await comm.allreduce(np.ones(300, np.int8))

        with pytest.raises((UsageError, AbortedError)) as caught:
            await calls()
        return str(caught.value)

    with ways.added(TOY._replace(begin=lambda *_: 5)):
        told = run(world, 3, main)
    for text in told:
        assert "`begin` of the way 'int8, gathered' of allreduce #2 of 300 int8" in text
        assert "returned 5: it is a function that returns a coroutine, or None if it declines" in text


@looped("ranks", [1, 4])
def test_a_way_of_the_program_is_in_the_printed_table(ranks):
    def printed():
        return CliRunner().invoke(program, ["doctor", "--ways", "-n", str(ranks)], catch_exceptions=False).output

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
            takes_all = [(way.over, way.up_to) == (-1, ways.MANY) and not (way.is_cut or way.needs) for way in rows]
            assert takes_all == [False] * (len(rows) - 1) + [True], (place, call)  # a row after it would be for nothing
            edges = [0, *(edge + step for way in rows for edge in (way.over, way.up_to) for step in (0, 1))]
            for nbytes in {min(max(edge, 0), ways.MANY) for edge in edges}:
                for has_parts in (True, False):
                    shape = Shape(nbytes, "float32", has_parts=has_parts)
                    assert begin(rows, shape) == "begun", (place, call, shape)


def test_the_table_is_printed_as_json_with_the_sizes_of_the_environment(monkeypatch):
    monkeypatch.setenv("ASYNCOLL_SIZES", "short=128")
    done = CliRunner().invoke(program, ["doctor", "--ways", "--json"], env={"WORLD_SIZE": "3"}, catch_exceptions=False)
    row = json.loads(done.output)["allreduce, on one host"][0]
    assert (row["bytes"], row["way"]) == ("over 0 bytes up to 128 bytes", "meeting")
    assert row["in C"] == ("whole calls" if _core.native else "")
    with pytest.raises(UsageError, match="short=5"):
        tables(3, {"ASYNCOLL_SIZES": "short=5"})


def test_ways_that_need_the_core_are_shown_where_there_is_one():
    for core in ("python", *(["c"] if _core.native else [])):
        command = [sys.executable, "-m", "asyncoll", "doctor", "--ways", "--json", "-n", "2"]
        done = subprocess.run(command, env={**os.environ, "ASYNCOLL_CORE": core}, stdout=subprocess.PIPE, check=True)
        rows = [row for shown in json.loads(done.stdout).values() for row in shown]
        needing = [row["way"] for row in rows if re.search(r"\bC\b|\bcore\b|whole calls", " ".join(row.values()))]
        assert bool(needing) == ({"memory, in C", "private memory"} <= {row["way"] for row in rows}) == (core == "c")


@looped(
    "over, up_to, text",
    [
        (-1, ways.MANY, "any"),
        (0, 1 << 20, "over 0 bytes up to 1 MiB"),
        (1 << 20, ways.MANY, "over 1 MiB"),
        ((1 << 20) - 1, (1 << 21) - 1, "from 1 MiB under 2 MiB"),
        (1 << 10, 100_000, "over 1 KiB up to 97.7 KiB"),
        (-1, (1 << 20) // 3, "under 341.3 KiB"),
    ],
)
def test_limits_are_told_in_words(over, up_to, text):
    way = Way("allreduce", "", lambda: None, "", over=over, up_to=up_to)
    assert limits(way) == text
    assert limits(way._replace(counts_link=True)) == (text if text == "any" else f"{text} a link")
