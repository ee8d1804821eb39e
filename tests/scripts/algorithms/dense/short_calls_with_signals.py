"""Ranks with a signal handler make short calls of two kinds: one that the runtime carries out, and atomic ones."""

from __future__ import annotations

import asyncio
import gc
import signal
import weakref

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    await comm.allreduce(np.ones(10, np.float32))  # the first one of an array takes the general way
    if comm.rank == 0:
        signal.signal(signal.SIGUSR1, lambda *_: None)
    for _ in range(20):
        calls = [comm.allreduce(np.ones(10, np.complex64))]
        calls += [comm.allreduce(np.ones(10, np.float32)) for _ in range(4)]
        for x in await asyncio.gather(*calls):
            assert (x == comm.size).all()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    gc.disable()
    for _ in range(20):
        x = np.ones(100, np.float32)
        is_alive = weakref.ref(x)
        await comm.allreduce(x)
        del x
        await comm.barrier()
        assert is_alive() is None
    print("all calls are over")


asyncoll.run(main)
