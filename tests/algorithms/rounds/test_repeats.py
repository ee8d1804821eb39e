"""Repeated calls of wait-avoiding rounds that are over at once: in one step, and in no other respect special."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncoll import AVG, AbortedError, MismatchError, UsageError
from asyncoll.algorithms.rounds.repeats import Repeat
from asyncoll.testing import run_ranks

# A world of one rank answers in Python, several ranks in memory answer in the compiled core, or never at once.
WORLDS = [("inproc", 1), ("shm", 1), ("shm", 2), ("shm-mixed", 3)]
worlds = pytest.mark.parametrize(("transport", "size"), WORLDS)


async def repeated(comm, x=None, **options):
    """A name of this rank's own, and calls until one was over at once, if this rank has such calls."""
    name = f"of rank {comm.rank}"
    for _ in range(4):
        await comm.solo_allreduce(np.ones(3) if x is None else x, name=name, **options)
    return name


def is_native(comm):
    memory = comm._core.backend.memory
    return comm.size == 1 or (memory is not None and memory.native is not None)


@worlds
def test_a_repeated_call_gives_what_every_call_gives(transport, size):
    async def main(comm):
        name, told = await repeated(comm), []
        is_repeated = isinstance(comm._core.operations.repeats[name], Repeat)
        assert is_repeated or (size > 1 and not is_native(comm))
        for value in range(100):
            x = np.full(3, float(value))
            told.append(await comm.solo_allreduce(x, name=name))
            assert told[-1].result is x
            assert x.tolist() == [value] * 3
        assert [each.round for each in told] == list(range(5, 105))
        assert all((each.included, each.ranks, each.lag, each.skipped) == (True, (comm.rank,), 0, 0) for each in told)
        assert {each.group for each in told} == {tuple(range(size))}
        statistics = comm.statistics().operations[name]
        assert (statistics.rounds, statistics.calls, statistics.lag, statistics.stale) == (104, 104, {0: 104}, 0)
        await comm.barrier()

    run_ranks(size, main, transport=transport)


@worlds
def test_averages_are_divided_and_every_kind_of_array_is_taken(transport, size):
    async def main(comm):
        name = await repeated(comm, np.ones(4, np.float32), op=AVG)
        padded = np.zeros(17, np.uint8)[1:]  # not aligned
        arrays = [np.ones(4, np.float32), np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2]]
        arrays += [np.ones(4, ">f4"), padded.view(np.float32), np.asfortranarray(np.ones((2, 2), np.float32))]
        for x in arrays:
            x[...] = 6
            reduction = await comm.solo_allreduce(x, name=name, op=AVG)
            assert (reduction.result is x, reduction.included) == (True, True)
            assert (x == 6 / size).all(), x
        await comm.barrier()

    run_ranks(size, main, transport=transport)


@worlds
def test_arguments_that_differ_are_checked(transport, size):
    async def main(comm):
        name = await repeated(comm, sync_every=0)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        for wrong in ({"history": 0.5}, {"sync_every": 0.0}, {"op": "sum"}, {"weight": "1"}, {"name": 5}):
            with pytest.raises(UsageError):
                comm.solo_allreduce(np.ones(3), **{"name": name, **wrong})
        with pytest.raises(UsageError):
            comm.solo_allreduce(frozen, name=name)
        assert (await comm.solo_allreduce(np.ones(3), name=name)).round == 5
        await comm.barrier()
        if size == 1:
            with pytest.raises(MismatchError):
                await comm.solo_allreduce(np.ones(4), name=name)

    run_ranks(size, main, transport=transport)


@worlds
def test_a_call_that_was_not_received_is_told_to_the_next(transport, size):
    async def main(comm):
        name = await repeated(comm)

        def call():
            return comm.solo_allreduce(np.ones(3), name=name)

        newest = (await call()).round
        lost = call()  # destroyed before it is awaited
        del lost
        closed = call()
        closed.close()
        thrown = call()
        with pytest.raises(KeyError):
            thrown.throw(KeyError("x"))
        task = asyncio.create_task(call())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reduction = await call()
        assert reduction.round > newest
        assert reduction.skipped == reduction.round - newest - 1
        used = call()
        await used
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await used
        await comm.barrier()

    run_ranks(size, main, transport=transport)


@worlds
def test_the_loop_turns_while_a_program_awaits_calls_that_are_over(transport, size):
    async def main(comm):
        name, turns = await repeated(comm), []
        counter = asyncio.create_task(count(turns))
        for _ in range(400):
            await comm.solo_allreduce(np.ones(3), name=name)
        counter.cancel()
        assert len(turns) >= 3
        await comm.barrier()

    async def count(turns):
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    run_ranks(size, main, transport=transport)


@worlds
def test_several_calls_at_once_take_their_turns(transport, size):
    async def main(comm):
        name = await repeated(comm)
        calls = [comm.solo_allreduce(np.ones(3), name=name) for _ in range(5)]
        told = await asyncio.gather(*calls)
        assert [each.round for each in told] == [5, 6, 7, 8, 9]
        await comm.barrier()

    run_ranks(size, main, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "shm-mixed"])
def test_a_repeated_call_that_waits_gives_what_every_call_gives(transport):
    async def main(comm):
        for number in range(1, 30):
            x = np.full(3, float(comm.rank))
            reduction = await comm.quorum_allreduce(x, name="all", quorum=3)
            assert (reduction.round, reduction.ranks, reduction.result is x) == (number, (0, 1, 2), True)
            assert x.tolist() == [3.0] * 3
        assert comm.statistics().operations["all"].calls == 29

    run_ranks(3, main, transport=transport)


def test_a_repeated_call_that_waits_with_an_array_of_another_size_is_a_mismatch():
    async def main(comm):
        for _ in range(5):
            await comm.quorum_allreduce(np.ones(3), name="all", quorum=2)
        await comm.quorum_allreduce(np.ones(4), name="all", quorum=2)

    with pytest.raises(MismatchError, match="of 4 float64"):
        run_ranks(2, main, transport="shm")


@worlds
def test_cancelled_repeated_calls_that_wait_leave_their_contributions_in(transport, size):
    async def main(comm):
        calls = [comm.quorum_allreduce(np.ones(3), name="all", quorum=size) for _ in range(2)]
        await asyncio.gather(*calls)
        if comm.rank == 0 and size > 1:
            call = asyncio.ensure_future(comm.quorum_allreduce(np.ones(3), name="all", quorum=size))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        await comm.barrier()
        x = np.ones(3)
        await comm.quorum_allreduce(x, name="all", quorum=size)
        assert x.tolist() == [size + (size > 1)] * 3
        await comm.barrier()

    run_ranks(size, main, transport=transport)


@worlds
def test_after_a_join_and_after_an_abort_there_are_no_calls(transport, size):
    async def call_for_ever(part):
        while True:
            await part.solo_allreduce(np.ones(3), name="all")

    async def main(comm):
        part = await comm.split(0, key=comm.rank)
        for _ in range(4):
            await comm.solo_allreduce(np.ones(3), name="all")
            await part.solo_allreduce(np.ones(3), name="all")
        await comm.join("all", np.zeros(3))
        with pytest.raises(UsageError, match="has joined"):
            comm.solo_allreduce(np.ones(3), name="all")
        await comm.barrier()
        part.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await call_for_ever(part)

    run_ranks(size, main, transport=transport)
