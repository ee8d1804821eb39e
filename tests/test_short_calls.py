"""The short way of an allreduce or a barrier: what it leaves behind, after a failure and if no task awaits the call."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE_S
from test_meetings import cores, ranks

from asyncoll import AVG, AbortedError, Communicator, _core
from asyncoll.algorithms.dense.meetings import WAITING
from asyncoll.algorithms.dense.staging import Rendezvous
from asyncoll.testing import run_ranks
from asyncoll.transport.control_block import DOORBELLS
from asyncoll.transport.memory.arena import local_world

SCRIPT = Path(__file__).parent / "scripts" / "short_calls.py"
shared = pytest.mark.parametrize("transport", ["inproc", "shm", "shm-mixed"])
LENT = 1 << 14  # elements of float32: a registered array of this length is shown where it is


def withdraw(rendezvous: Rendezvous, nbytes: int) -> None:
    """Withdraw the memory that was shown there; fails if that has to wait."""
    with pytest.raises(StopIteration):
        rendezvous.withdraw(nbytes, lambda rank: False).send(None)


@cores
def test_the_last_rank_does_not_use_memory_that_was_withdrawn(natives):
    with ranks(2, natives) as (first, second):
        x, y = (rank.array(np.full(1 << 10, 1.0), True) for rank in (first, second))
        assert first.arrive(1, x) == WAITING
        withdraw(first.staging.rendezvous(1, 0, 5), x.nbytes)
        assert second.arrive(1, y) == WAITING  # for the failure of the communicator
        assert x.tolist() == y.tolist() == [1.0] * x.size


@cores
def test_a_withdrawal_does_not_wait_for_a_count_of_an_earlier_rendezvous(natives):
    with ranks(2, natives) as (first, second):
        rendezvous = first.staging.rendezvous(1, 0, 5)
        rendezvous._cells[rendezvous._part(second.staging.rank) + 2] = 3
        x = first.array(np.ones(1 << 10), True)
        assert first.arrive(1, x) == WAITING
        withdraw(rendezvous, x.nbytes)


@shared
def test_a_call_that_fails_before_it_sleeps_gives_its_array_back(transport):
    aborted = asyncio.Event()

    async def main(comm: Communicator) -> None:
        await comm.allreduce(np.ones(10, np.float32))
        x = comm.empty(LENT, np.float32)
        x[...] = 1
        if comm.rank == 0:
            call = comm.allreduce(x)
            comm.abort("a test")
            with pytest.raises(AbortedError):
                await call
            x[...] = -7
            aborted.set()
        else:
            await aborted.wait()
            with pytest.raises(AbortedError):
                await comm.allreduce(x)
        await asyncio.sleep(0)
        assert comm.rank or (x == -7).all()

    run_ranks(2, main, transport)


@shared
def test_a_call_that_is_never_awaited_writes_its_result_into_a_tensor_that_is_not_contiguous(transport):
    async def main(comm: Communicator) -> list[float]:
        await comm.allreduce(np.ones(10))
        x = np.ones((4, 8))[:, ::2]
        call = comm.allreduce(x)
        await comm.barrier()
        await comm.barrier()
        result: list[float] = x[0].tolist()
        await call
        return result

    assert run_ranks(3, main, transport) == [[3.0] * 4] * 3


def test_a_call_of_one_rank_leaves_no_reference_to_its_array():
    async def main(comm: Communicator) -> None:
        for _ in range(5):
            x = np.ones(100, np.float32)
            is_alive = weakref.ref(x)
            await comm.allreduce(x)
            del x
            await comm.barrier()
            assert is_alive() is None

    gc.disable()
    try:
        run_ranks(1, main)
    finally:
        gc.enable()


@pytest.mark.slow
def test_calls_beside_a_signal_handler_end_and_leave_no_reference_to_their_arrays():
    """The runtime carries out those that an exception of the handler could leave half done."""
    command = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", "2", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all calls are over") == 2


@pytest.mark.skipif(_core.native is None, reason="needs the compiled core")
def test_a_doorbell_that_is_flagged_again_between_two_wakes_rings_for_each_up_to_the_number_of_doorbells():
    with local_world(1) as (arena,):
        with arena.control_block(1, 4) as block:
            for _ in range(1000):
                block.ring_at_next_wake(0)
                block.wake()
        assert os.eventfd_read(arena._eventfds[0]) == DOORBELLS


@pytest.mark.parametrize("weight", [None, 3.0])
def test_a_result_that_one_rank_did_not_get_is_told_as_it_was(weight):
    async def main(comm: Communicator) -> list[float]:
        x = np.full(3, 10.0)
        await comm.solo_allreduce(np.ones(3), op=AVG, weight=weight)
        dropped = comm.solo_allreduce(x, op=AVG, weight=weight)
        del dropped
        await asyncio.sleep(0)
        x[...] = 999
        into = np.zeros(3)
        await comm.join("solo", into)
        result: list[float] = into.tolist()
        return result

    assert run_ranks(1, main) == [[10.0] * 3]
