"""Two ranks make short calls in every way in which a caller can treat them, between processes.

The first argument is the core of each rank: `c`, `python`, or `mixed`.
"""

from __future__ import annotations

import asyncio
import os
import sys

core = {"mixed": ("c", "python")[int(os.environ["RANK"]) % 2]}.get(sys.argv[1], sys.argv[1])
os.environ["ASYNCOLL_CORE"] = core

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import asyncoll  # noqa: E402
from asyncoll import (  # noqa: E402
    AbortedError,
    Communicator,
    DeadlineError,
    MismatchError,
    _core,
)


def ones() -> np.ndarray:
    return np.ones(10, np.float32)


async def warm(comm: Communicator) -> None:
    """Both ranks know these calls afterwards."""
    for _ in range(3):
        await comm.allreduce(ones())
        await comm.barrier()


async def taken_over(comm: Communicator) -> None:
    """Rank 0 makes calls that it does not await before the other rank has them all; the runtime completes them."""
    if comm.rank == 0:
        calls, x = [comm.allreduce(ones()) for _ in range(3)], ones()
        comm.allreduce(x)  # never awaited
        await comm.recv(np.empty(1), 1)
        while x[0] != 2:
            await asyncio.sleep(0.001)
        assert [float((await call)[0]) for call in calls] == [2.0] * 3
    else:
        for _ in range(4):
            assert (await comm.allreduce(ones()))[0] == 2
        await comm.send(np.empty(1), 0)


async def awaited_late(comm: Communicator) -> None:
    """Several calls under way, awaited in another order, by tasks and directly."""
    for turn in range(20):
        calls = [comm.allreduce(ones() * number) for number in range(4)]
        tasks = [asyncio.create_task(call) for call in calls[:2]]
        if turn % 5 == comm.rank:
            await asyncio.sleep(0.002)
        assert (await calls[3])[0] == 6
        assert (await calls[2])[0] == 4
        assert [float(x[0]) for x in await asyncio.gather(*tasks)] == [0.0, 2.0]


async def closed(comm: Communicator) -> None:
    """A call that its caller closes runs to its end, and cannot be awaited."""
    x = ones()
    call = comm.allreduce(x)
    call.close()
    await comm.barrier()
    while x[0] != 2:
        await asyncio.sleep(0.001)
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await call


async def loops_turn(comm: Communicator) -> None:
    """Another task runs while calls end that are over at once."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    for _ in range(400):  # some of them wait, and do not count
        await comm.barrier()
    counting.cancel()
    assert turns >= 3, turns


async def counted(comm: Communicator) -> None:
    before = comm.statistics().calls["allreduce"]
    for number in range(70):
        x = ones() if number % 2 else np.ones((2, 5))[:, ::2]  # the latter is copied
        await comm.allreduce(x)
    after = comm.statistics().calls["allreduce"]
    assert after.calls - before.calls == 70
    assert after.messages_sent - before.messages_sent == 70
    assert comm.statistics().messages_sent >= after.messages_sent


async def deadline(comm: Communicator) -> None:
    part = await comm.split(0)
    await warm(part)
    if comm.rank == 0:
        called, place = (
            r"allreduce #7 of 10 float32, SUM at short_calls_in_every_way.py:\d+",
            r"at short_calls_in_every_way.py:\d+",
        )
        told = f"{called} was not over after .*; arrived: 0; missing: rank 1 .*, after barrier #6 {place}"
        with pytest.raises(DeadlineError, match=told), asyncoll.deadline(0.05):
            await part.allreduce(ones())
    await comm.barrier()


async def mismatch(comm: Communicator) -> None:
    part = await comm.split(0)
    await warm(part)
    with pytest.raises(MismatchError) as caught:
        await (part.barrier() if comm.rank == 0 else part.allreduce(ones()))
    for call in ("barrier #7 at", "allreduce #7 of 10 float32, SUM at"):
        assert f"{call} short_calls_in_every_way.py:" in str(caught.value)
    await comm.barrier()


async def cancelled(comm: Communicator, *, at_once: bool) -> None:
    """A call whose caller is cancelled ends its communicator, and no other one."""
    part = await comm.split(0)
    await warm(part)
    await comm.barrier()  # no call of `warm` is under way at any rank
    if comm.rank == 0:
        task = asyncio.create_task(part.allreduce(ones()))
        if not at_once:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await comm.barrier()
    else:
        await comm.barrier()
        with pytest.raises(AbortedError, match="was cancelled"):
            await endless(part)  # the first call may be over: rank 0 had arrived


async def endless(part: Communicator) -> None:
    while True:
        await part.allreduce(ones())


async def main(comm: Communicator) -> None:
    assert (_core.of_rank() is None) == (core == "python")
    await warm(comm)
    await taken_over(comm)
    await awaited_late(comm)
    await closed(comm)
    await loops_turn(comm)
    await counted(comm)
    await deadline(comm)
    await mismatch(comm)
    await cancelled(comm, at_once=False)
    await cancelled(comm, at_once=True)
    await comm.barrier()
    print("all is well")


asyncoll.run(main)
