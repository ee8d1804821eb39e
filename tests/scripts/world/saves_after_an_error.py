"""Rank 1 raises, and saves its state once it has left the world. The others go on meanwhile: it waits for them.

Its argument is a pipe.
"""

import contextlib
import os
import sys

import numpy as np

import asyncoll
from asyncoll.transport.processes import is_gone


async def main(comm):
    pid = np.array([os.getpid() if comm.rank == 1 else 0])
    await comm.allreduce(pid)
    if comm.rank == 1:
        raise ValueError("out of data")
    with contextlib.suppress(asyncoll.AbortedError):
        while True:
            await comm.barrier()
    comm = await comm.shrink()
    assert (await comm.allreduce(np.ones(3)))[0] == comm.size == 2
    assert not is_gone(pid[0]), "it was killed"
    await comm.barrier()
    return comm.rank


try:
    rank = asyncoll.run(main)
except ValueError:
    with open(sys.argv[1]) as pipe:
        assert pipe.read() == "went on"
    print("saved")
else:
    if rank == 0:
        with open(sys.argv[1], "w") as pipe:
            pipe.write("went on")
