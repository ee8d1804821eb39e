"""Rank 1 goes in the way that is asked for, and the others say what they hear of it, and when."""

import asyncio
import ctypes
import os
import signal
import sys
import time

import numpy as np

import asyncoll

FAULTS = {
    "exits": lambda: os._exit(0),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the GIL": lambda: ctypes.PyDLL(None).usleep(1_500_000),
}


async def main(comm: asyncoll.Communicator) -> None:
    fault, elements = sys.argv[1], int(sys.argv[2])
    pids = (await comm.allgather(np.array([os.getpid()]))).ravel()
    await comm.barrier()
    if comm.rank == 1:
        FAULTS[fault]()
    try:
        x = await comm.allreduce(np.ones(elements))
    except asyncoll.PeerLostError as error:
        whole = any(call in error.doing for call in ("barrier", "allreduce", "allgather", "joining"))
        known = (error.host, error.pid) == (comm.hosts[1], pids[1])
        fate = "frozen" if error.last_seen_s > 0 else "dead"
        print(f"rank {error.rank} is {fate}" if whole and known else repr(error))
        if comm.rank == 0 and fault == "stopped":
            os.kill(error.pid, signal.SIGCONT)
        return
    print(f"all {x[0]:g} are there")


async def late(comm: asyncoll.Communicator) -> None:
    """Rank 2 computes with the GIL in its hands, and the others lose their patience."""
    await comm.barrier()
    if comm.rank == 2:
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
        await asyncio.sleep(0)
    try:
        await comm.allreduce(np.ones(3))
    except asyncoll.DeadlineError as error:
        where = "in its own code" if "in its own code for" in str(error) else str(error)
        print(f"arrived {error.arrived}, missing {error.missing} {where}")
        return
    print("it was in time")


asyncoll.run(late if sys.argv[1] == "is late" else main)
