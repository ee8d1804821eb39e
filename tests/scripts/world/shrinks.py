"""Ranks are killed in turns, and the others go on each time: `shrinks.py 1 0,3` kills rank 1, and then 0 and 3."""

import asyncio
import os
import signal
import sys

import numpy as np

import asyncoll


async def survive(comm, number, killed, x):
    """Make calls until `killed` are dead; they die amid one. Returns the communicator of the others."""
    half = await comm.split(comm.rank % 2)
    await comm.barrier()
    try:
        while True:
            if number in killed:
                asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGKILL)
            x[...] = 1.0
            await comm.allreduce(x)
    except asyncoll.PeerLostError:
        old = comm
    while True:
        try:
            half = await half.shrink()
            comm = await comm.shrink()
            await comm.barrier()
            break
        except asyncoll.PeerLostError:  # the second of two deaths
            pass
    try:
        await old.barrier()
    except (asyncoll.PeerLostError, asyncoll.ClosedError):
        pass
    else:
        raise AssertionError("a communicator of an earlier epoch takes calls")
    return comm, half


async def main(comm):
    number, alive = comm.rank, list(range(comm.size))
    comm.rpc.register(lambda: number, name="number")
    x = comm.empty(100_000, np.float64)
    for group in sys.argv[1:]:
        killed = [int(rank) for rank in group.split(",")]
        comm, half = await survive(comm, number, killed, x)
        alive = [rank for rank in alive if rank not in killed]
        assert (comm.size, comm.rank) == (len(alive), alive.index(number))
        assert len(comm.hosts) == comm.size
        assert (await comm.allreduce(np.ones(3)))[0] == len(alive)
        assert (await half.allreduce(np.ones(3)))[0] == half.size
        numbers = [await comm.rpc.call(rank, "number") for rank in range(comm.size)]
        assert numbers == alive, numbers
        parts = await comm.split(comm.rank % 2)
        await parts.allreduce(np.ones(50_000))
        await comm.solo_allreduce(np.ones(4), sync_every=1)
    assert comm.epoch >= len(sys.argv)
    print("went on")


asyncoll.run(main)
