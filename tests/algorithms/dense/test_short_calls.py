"""The short way of an allreduce or a barrier: what it leaves behind, after a failure and if no task awaits the call."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncoll import AVG, MAX, MIN, PROD, SUM, AbortedError, Communicator, UsageError, _core
from asyncoll.testing import run_ranks
from asyncoll.transport.control_block import DOORBELLS
from asyncoll.transport.memory.arena import local_world
from tests.algorithms.dense.test_meetings import WAITING, cores, ranks, withdraw
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

KINDS = ["c", "python", "mixed"] if _core.native else ["python"]
shared = pytest.mark.parametrize("transport", ["inproc", "shm", "shm-mixed"])
LENT = 1 << 14  # elements of float32: a registered array of this length is shown where it is
LONG = 1 << 18  # one of this length is too long to be copied


@cores
@pytest.mark.parametrize("count", [1 << 10, 1 << 12])
def test_the_last_rank_does_not_use_memory_that_was_withdrawn(natives, count):
    if None in natives and count > 1 << 11:
        pytest.skip("only the compiled core meets with such arrays")
    with ranks(2, natives) as (first, second):
        x, y = (rank.array(np.full(count, 1.0), True) for rank in (first, second))
        assert first.arrive(1, x) == WAITING
        withdraw(first.area.rendezvous(1, 0, 5))
        assert second.arrive(1, y) == WAITING  # for the failure of the communicator
        assert x.tolist() == y.tolist() == [1.0] * x.size


@cores
def test_a_withdrawal_does_not_wait_for_a_count_of_an_earlier_rendezvous(natives):
    with ranks(2, natives) as (first, second):
        rendezvous = first.area.rendezvous(1, 0, 5)
        rendezvous._cells[rendezvous._part(second.area.rank) + 2] = 3
        x = first.array(np.ones(1 << 10), True)
        assert first.arrive(1, x) == WAITING
        withdraw(rendezvous)


@shared
@pytest.mark.parametrize("count", [LENT, LONG])
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_registered", [False, True])
def test_a_call_that_fails_before_it_sleeps_gives_its_array_back(transport, is_registered, is_known, count):
    ready, aborted = asyncio.Event(), asyncio.Event()

    async def main(comm: Communicator) -> None:
        await comm.allreduce(np.ones(10, np.float32))
        x = comm.empty(count, np.float32) if is_registered else np.empty(count, np.float32)
        x[...] = 1
        if is_known:
            assert (await comm.allreduce(x) == 2).all()
            assert (await comm.allreduce(x) == 4).all()
        if comm.rank == 0:
            await ready.wait()
            call = comm.allreduce(x)
            comm.abort("a test")
            with pytest.raises(AbortedError):
                await call
            x[...] = -7
            aborted.set()
        else:
            ready.set()
            await aborted.wait()
            with pytest.raises(AbortedError):
                await comm.allreduce(x)
        await asyncio.sleep(0)
        assert comm.rank or (x == -7).all()

    run_ranks(2, main, transport)


@shared
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_may_differ_in_whether_a_long_array_is_registered(transport, size):
    async def main(comm: Communicator) -> list[bool]:
        found = []
        for call in range(8):
            x = comm.empty(LONG, np.float32) if (call >> comm.rank % 3) & 1 else np.empty(LONG, np.float32)
            x[...] = np.arange(LONG) % 1021 + comm.rank
            expected = size * (np.arange(LONG) % 1021) + size * (size - 1) // 2
            await comm.allreduce(x)
            found.append(bool((x == expected).all()))
        return found

    assert run_ranks(size, main, transport) == [[True] * 8] * size


@shared
@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_of_long_arrays_that_are_under_way_at_the_same_time_do_not_share_a_copy(transport, size):
    """A call that finds no block for its copy, or a shorter one, goes the general way."""

    async def main(comm: Communicator) -> bool:
        good = True
        for counts in ([LONG // 2], [LONG, LONG // 2, LONG], [LONG] * 5, [LONG // 2, LONG]) * 3:
            arrays = [np.full(count, 10.0**i + comm.rank, np.float32) for i, count in enumerate(counts)]
            calls = [comm.allreduce(x) for x in arrays]
            for call in reversed(calls):
                await call
            good &= all((x == size * 10.0**i + size * (size - 1) // 2).all() for i, x in enumerate(arrays))
        return good

    assert run_ranks(size, main, transport) == [True] * size


@pytest.mark.skipif(_core.native is None, reason="a whole call is one of the core")
@pytest.mark.parametrize(("size", "count"), [(2, LONG // 2), (2, LONG), (4, LONG // 2), (5, LENT * 2), (5, LONG)])
def test_the_core_carries_out_calls_of_long_arrays_with_a_copy(size, count):
    async def main(comm: Communicator) -> list[str]:
        kinds = []
        for _ in range(6):
            x = np.ones(count, np.float32)
            call = comm.allreduce(x)
            kinds.append(type(call).__name__)
            await call
            assert (x == size).all()
            await comm.barrier()
        return kinds[1:]

    # Among ranks of one loop a whole call is over when it returns only at the last rank to come.
    assert all("ShortCall" in kinds for kinds in zip(*run_ranks(size, main, "shm"), strict=True))


@shared
def test_a_long_call_that_is_never_awaited_ends(transport):
    async def main(comm: Communicator) -> float:
        x = comm.empty(LONG, np.float32)
        x[...] = comm.rank
        call = comm.allreduce(x)
        await comm.barrier()
        while x[-1] != 3.0 or x[0] != 3.0:
            await asyncio.sleep(0)
        await call
        return float(x.sum())

    assert run_ranks(3, main, transport) == [3.0 * LONG] * 3


@shared
def test_a_cancelled_caller_gets_its_long_array_back(transport):
    async def main(comm: Communicator) -> bool:
        await comm.allreduce(np.ones(10, np.float32))
        x = comm.empty(LONG, np.float32)
        x[...] = 1
        if comm.rank == 0:
            task = asyncio.ensure_future(comm.allreduce(x))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            x[...] = -7
            await asyncio.sleep(0)
            return bool((x == -7).all())
        with pytest.raises(AbortedError):
            await comm.recv(x, 0)
        return True

    assert run_ranks(2, main, transport) == [True] * 2


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


@shared
@pytest.mark.parametrize("size", [1, 2, 5])
def test_calls_that_differ_in_one_argument_do_not_mix(transport, size):
    """The second call of each kind is one that its rank knows."""

    async def main(comm: Communicator) -> None:
        rank, size = comm.rank, comm.size
        for _ in range(3):
            for dtype in ("float32", "int32", "uint32", ">i4", "int8", "complex64"):
                x = np.full((2, 4), rank + 1).astype(dtype)
                assert (await comm.allreduce(x) == size * (size + 1) // 2).all()
                assert (await comm.allreduce(np.full(8, rank + 1).astype(dtype), PROD) == math.factorial(size)).all()
            assert (await comm.allreduce(np.full((2, 2), rank), MAX)).tolist() == [[size - 1] * 2] * 2
            assert (await comm.allreduce(np.array(rank), MIN)) == 0
            assert (await comm.allreduce(np.full(4, rank, np.float16), AVG) == (size - 1) / 2).all()
            assert (await comm.allreduce(torch.full((4,), rank + 1.0, dtype=torch.bfloat16), MAX) == size).all()
            assert (await comm.allreduce(np.full(4, rank + 1, np.uint16), MAX) == size).all()
            assert (await comm.allreduce(torch.full((4,), rank + 1.0), MAX) == size).all()
            assert (await comm.allreduce(np.empty(0))).size == 0
            for long in (np.empty(LENT, np.float32), comm.empty((2, LENT // 2), np.float32)):
                long[...] = rank + 1
                assert (await comm.allreduce(long) == size * (size + 1) // 2).all()
            assert await comm.barrier() is None
            await comm.broadcast(x)

    run_ranks(size, main, transport)


@shared
def test_an_unusual_call_is_refused_without_a_number(transport):
    """The number of the next call is that at the other ranks, or it would be a mismatch."""

    async def main(comm: Communicator) -> None:
        fixed = np.ones(4)
        fixed.flags.writeable = False
        unusual: list[tuple[Any, Any]] = [(fixed, SUM), (np.ones(4), []), (np.ones(4), "SUM"), ([1.0] * 4, SUM)]
        unusual += [(np.ma.ones(4), SUM), (np.ones(4, bool), AVG), (torch.ones(4).expand(3, 4), SUM)]
        for number in range(5):
            if number % comm.size == comm.rank:
                for x, op in unusual:
                    with pytest.raises(UsageError):
                        comm.allreduce(x, op)
                with pytest.raises(UsageError, match="running event loop"):
                    await asyncio.to_thread(comm.allreduce, np.ones(4))
                with pytest.raises(UsageError, match="running event loop"):
                    await asyncio.to_thread(comm.barrier)
            assert (await comm.allreduce(np.ones(4)) == comm.size).all()
            assert (await comm.allreduce(np.ones((4, 2))[:, 0]) == comm.size).all()
            await comm.barrier()

    for size in (1, 2, 3):
        run_ranks(size, main, transport)


@shared
def test_any_number_of_kinds_is_served(transport):
    async def main(comm: Communicator) -> int:
        for _ in range(2):
            for length in range(1, 220):
                assert (await comm.allreduce(np.ones(length)) == comm.size).all()
        return comm.statistics().calls["allreduce"].calls

    assert run_ranks(2, main, transport) == [438] * 2


async def endless(start: Callable[[], Awaitable[object]]) -> None:
    while True:
        await start()


@shared
def test_a_known_call_after_the_end_of_its_communicator_raises(transport):
    async def main(comm: Communicator) -> None:
        part = await comm.split(0)
        for _ in range(2):
            await part.allreduce(np.ones(4))
            await part.barrier()
        await comm.barrier()
        if comm.rank == 0:
            part.abort("a test")
        for start in (lambda: part.allreduce(np.ones(4)), part.barrier):
            with pytest.raises(AbortedError, match="a test"):
                await endless(start)
        await comm.barrier()

    run_ranks(3, main, transport)


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


@pytest.mark.parametrize("core", KINDS)
def test_a_call_keeps_its_promises_however_its_caller_treats_it(forked_world, core):
    for rank in forked_world(dict(os.environ), 2, SCRIPTS / "algorithms/dense/short_calls_in_every_way.py", core):
        code, out, err = rank.end()
        assert (code, out) == (0, "all is well\n"), err


@pytest.mark.slow
def test_calls_beside_a_signal_handler_end_and_leave_no_reference_to_their_arrays():
    """The runtime carries out those that an exception of the handler could leave half done."""
    command = [
        sys.executable,
        "-m",
        "asyncoll",
        "launch",
        "-n",
        "2",
        str(SCRIPTS / "algorithms/dense/short_calls_with_signals.py"),
    ]
    done = subprocess.run(command, env=os.environ | LIGHT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all calls are over") == 2


@pytest.mark.skipif(_core.native is None, reason="needs the compiled core")
@pytest.mark.parametrize(
    ("key", "nbytes", "divisor", "done", "kernel"),
    [
        ("float64", 8, 1, 8, 0),
        ("float64", 8, 1, 8, 1 << 20),
        ("float64", 8, 1, 8, -1),
        ("float64", 8, 0, 8, 1),
        ("float64", 8, 1, 16, 1),
        ("float64", 0, 1, 0, 1),
        ("float64", -8, 1, -8, 1),
        (None, 8, 1, 8, 1),
    ],
)
def test_the_compiled_core_refuses_kinds_that_make_no_sense(key, nbytes, divisor, done, kernel):
    async def main(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="no kind of short calls"):
            comm._short.learn(key, SUM, nbytes, None, 5, divisor, done, kernel, 1)

    run_ranks(2, main, "shm")


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
