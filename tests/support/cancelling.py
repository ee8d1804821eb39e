"""Collectives that are cancelled at one rank, for tests and for ranks in processes of their own, without pytest."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from asyncoll import AbortedError, Communicator
from asyncoll.testing.faults.checked_calls import OPERATIONS

WAIT_AVOIDING = ("solo", "majority", "quorum", "group", "synchronous_solo", "eager_step")
SYNCHRONOUS = [name for name in OPERATIONS if name not in (*WAIT_AVOIDING, "rpc")]


async def cancelled_in_turn(call, turns: int) -> bool:
    """Cancel `call` after `turns` turns of the loop; return False if it was over by then."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, AbortedError):
        await task
    return task.cancelled()


async def pending(comm: Communicator) -> list[str]:
    """The waits of this rank."""

    async def look() -> list[str]:
        return comm._core.member.endpoint.waiting() + list(map(str, comm._calls._pending._pending))

    # On the runtime's loop: its state changes while another thread reads it.
    return await comm._core.member.runner.start(look())


async def nothing_is_pending(comm: Communicator) -> None:
    found = await pending(comm)
    assert found == [], found


async def interrupt(comm: Communicator, seed: int, times: int, cancel) -> int:
    """Make `times` collectives, each cancelled at one rank. Returns how many this rank has cancelled in time.

    A cancelled collective ends its communicator, and no other.
    """
    count, common = 0, np.random.default_rng(seed)
    for _ in range(times):
        part = await comm.split(0, key=comm.rank)
        operation = OPERATIONS[str(common.choice(SYNCHRONOUS))]
        elements = int(common.choice([6, 600, 300_000]))
        if common.integers(comm.size) == comm.rank:
            count += await cancel(operation(part, elements))
        else:
            with contextlib.suppress(AbortedError):
                await operation(part, elements)
        assert (await comm.allreduce(np.ones(3)) == comm.size).all()
        await nothing_is_pending(comm)
    return count
