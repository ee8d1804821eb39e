"""A rank that receives from any source: runs the case of its first argument, and prints a line once it has passed."""

import asyncio
import contextlib
import os
import signal
import sys

import numpy as np

import asyncoll
from tests.support.receiving import LONG, take_with_cancellations

SECONDS = 60.0  # for a wait that must end


async def cancels() -> None:
    async with asyncoll.connect() as comm:
        cancelled = 0
        for seed in range(10):
            cancelled += await take_with_cancellations(comm, seed)
            await comm.barrier()
        assert comm.rank or cancelled > 20
        print("passed,", cancelled, "cancelled")


def blocking() -> None:
    comm = asyncoll.init()
    if comm.rank:
        comm.send(np.full(LONG, comm.rank), 0, 1).wait(SECONDS)
        comm.send(np.full(3, comm.rank), 0).wait(SECONDS)
        comm.send(np.full(3, 10 * comm.rank), 0).wait(SECONDS)
    else:
        long = [comm.recv_any(np.empty(LONG, int), 1) for _ in range(2)]
        got = [handle.wait(SECONDS) for handle in long]
        assert sorted(sender for _, sender in got) == [1, 2]
        assert all((x == sender).all() for x, sender in got)
        taken = np.zeros(3, int)
        handle = comm.recv_any(taken)
        while not handle.done():
            pass
        del handle  # it keeps its message
        assert taken[0] in (1, 2)
        others = [comm.recv_any(np.empty(3, int)).wait(SECONDS)[0][0] for _ in range(3)]
        assert sorted([taken[0], *others]) == [1, 2, 10, 20]
    comm.barrier().wait(SECONDS)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = None
    try:
        comm.recv_any(np.empty(3)).wait(SECONDS)
    except asyncoll.PeerLostError as error:
        lost = error.rank
    assert lost == 2
    print("passed")
    with contextlib.suppress(asyncoll.PeerLostError):
        comm.close()


async def outlives(comm) -> None:
    if comm.rank == 0:
        await comm.recv(np.empty(3), 1)


def outlives_without_a_loop() -> None:
    with asyncoll.init() as comm:
        if comm.rank == 0:
            comm.recv(np.empty(3), 1).wait(SECONDS)


if sys.argv[1] == "cancels":
    asyncio.run(cancels())
elif sys.argv[1].startswith("outlives"):
    try:
        asyncoll.run(outlives) if sys.argv[1] == "outlives" else outlives_without_a_loop()
    except (asyncoll.PeerLostError, asyncoll.AbortedError) as error:
        print(type(error).__name__, "of rank", error.rank)
else:
    blocking()
