"""Rank 1 stops itself. The others catch what follows from it and return: `returns_after_errors.py [DEADLINE_S]`."""

import contextlib
import os
import signal
import sys

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    await comm.barrier()
    if comm.rank == 1:
        print(f"stops as {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with asyncoll.deadline(float(sys.argv[1])) if sys.argv[1:] else contextlib.nullcontext():
            await comm.allreduce(np.ones(1))
    except (asyncoll.PeerLostError, asyncoll.DeadlineError):
        print("caught it", flush=True)


asyncoll.run(main)
