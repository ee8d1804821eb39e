"""Rank 1 is stopped, and continues once the others have gone on without it."""

import asyncio
import contextlib
import os
import signal

import numpy as np

import asyncoll
from asyncoll.transport.processes import is_gone


async def main(comm):
    number, pid = comm.rank, np.array([os.getpid() if comm.rank == 1 else 0])
    await comm.allreduce(pid)
    try:
        await comm.barrier()
        if number == 0:
            os.kill(pid[0], signal.SIGSTOP)
        while True:
            await comm.allreduce(np.ones(1000))
    except asyncoll.PeerLostError:
        pass
    comm = await comm.shrink()
    assert (await comm.allreduce(np.ones(3)))[0] == comm.size
    if number == 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid[0], signal.SIGCONT)
    while not is_gone(pid[0]):
        await asyncio.sleep(0.01)
    await comm.barrier()
    print("went on")


asyncoll.run(main)
