"""Four ranks on two hosts. Two processes of the first host stop for a while: an agent, and one that is none.

The other two ranks carry out rounds meanwhile, and then let them go on.
"""

import asyncio
import os
import signal
import threading
from pathlib import Path

import numpy as np

import asyncoll

ROUNDS = 20
STOPPED = (0, 2)  # of ranks 0, 1 and 2 on one host, of which 0 and 1 are agents


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def stop(comm):
    """Stop this process where it holds no lock of the host, which the other ranks would wait for.

    This thread waits on its loop, and the runtime's thread is between two callbacks of its own.
    """
    went_on = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_here():
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread runs no line before it has stopped
        loop.call_soon_threadsafe(went_on.set)

    comm._core.member.post(stop_here)
    await went_on.wait()


async def main(comm):
    pids = [int(pid[0]) for pid in await comm.allgather(np.array([os.getpid()]))]
    await comm.solo_allreduce(np.ones(1000))
    await comm.barrier()
    x = np.ones(1000)
    if comm.rank in STOPPED:
        await stop(comm)
    elif comm.rank == 1:
        try:
            while not all(is_stopped(pids[rank]) for rank in STOPPED):
                await asyncio.sleep(0.001)
            await comm.send(x, 3)
            await rounds(comm)
            await comm.recv(x, 3)
        finally:
            for rank in STOPPED:
                os.kill(pids[rank], signal.SIGCONT)
    else:
        await comm.recv(x, 1)
        await rounds(comm)
        await comm.send(x, 1)
    x = np.ones(1000)
    await comm.solo_allreduce(x)
    await comm.join("solo", x)
    print("passed")


async def rounds(comm):
    reached = 0
    while reached < ROUNDS:
        reached = (await comm.solo_allreduce(np.ones(1000))).round


asyncoll.run(main)
