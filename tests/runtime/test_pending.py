"""The question after an overdue call, and the answers that count."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from asyncoll import DeadlineError, deadline
from asyncoll.runtime.pending import PendingCall
from asyncoll.runtime.standstill import Kind
from asyncoll.testing import Network, Pause, run_ranks, simulate
from asyncoll.transport.wire import Here


def test_a_call_that_begins_during_a_question_does_not_drop_the_answers():
    """The deadline of the second call triggers a check while the question about the first call is open."""
    reported = []

    async def meet(comm):
        with deadline(1) if comm.rank == 0 else contextlib.nullcontext():
            await comm.barrier()

    async def begin_another(comm):
        await asyncio.sleep(1.2)
        with deadline(1):
            await comm.recv(np.ones(1), 3, tag=7)

    async def main(comm):
        await comm.barrier()
        await asyncio.sleep(2)
        if comm.rank == 1:  # this rank never answers
            await asyncio.Event().wait()
        try:
            await asyncio.gather(meet(comm), *([begin_another(comm)] if comm.rank == 0 else []))
        except DeadlineError as error:
            if comm.rank == 0:
                reported.append((error.arrived, error.missing))
            raise

    with pytest.raises(DeadlineError):
        simulate(4, main, Network(latency_s=0.05, faults=[Pause(1, 1.5, 1000)]))
    assert reported == [((0, 2, 3), (1,))]


@pytest.mark.parametrize(("world_s", "block_s"), [(1, 100), (100, 1), (1, None)])
def test_the_earlier_of_the_deadlines_of_world_and_block_counts(world_s, block_s):
    async def main(comm):
        with pytest.raises(DeadlineError), deadline(block_s) if block_s else contextlib.nullcontext():
            await (await split_in_a_world_with(world_s, comm)).recv(np.ones(1), 1 - comm.rank)
        return asyncio.get_running_loop().time()

    assert all(1 <= ended_s < 2 for ended_s in simulate(2, main).results)


async def split_in_a_world_with(deadline_s, comm):
    """A communicator of all ranks, as if ASYNCOLL_DEADLINE_S were set."""
    comm._core.member.endpoint.patience_s = deadline_s
    return await comm.split(0)


def test_only_the_addressed_rank_answers():
    async def main(comm):
        await comm.barrier()
        if comm.rank == 0:
            pending = comm._calls._pending
            overdue = PendingCall(pending._last, 3, (0, 1), 0.0, 0.0, Kind.COLLECTIVE)
            asking = asyncio.ensure_future(pending._ask(overdue))
            await asyncio.sleep(0)
            # Answers to earlier questions.
            pending._on_answer(2, Here(comm._core.member.group.communicator, 3, 0, "", "", "", "late"))
            pending._on_answer(1, Here(comm._core.member.group.communicator, 2, 0, "", "", "", "late"))
            assert (await asking)[1].doing != "late"
        await comm.barrier()

    simulate(3, main, Network(latency_s=0.01))


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_the_time_limit_of_the_environment_holds_among_ranks_on_one_loop(transport, monkeypatch):
    monkeypatch.setenv("ASYNCOLL_DEADLINE_S", "0.2")

    async def main(comm):
        await comm.barrier()
        if comm.rank == 0:
            await asyncio.Event().wait()  # the failure of the others cancels this rank
        await comm.barrier()

    with pytest.raises(DeadlineError) as error:
        run_ranks(3, main, transport)
    assert (error.value.arrived, error.value.missing) == ((1, 2), (0,))
