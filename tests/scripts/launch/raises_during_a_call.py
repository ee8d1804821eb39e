"""Rank 1 raises while a call of its own is under way in shared memory, which the others never join."""

import asyncio

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    x = np.zeros(3_000_000, "f4")  # long enough to be the runtime's from the start
    if comm.rank == 1:
        call = asyncio.ensure_future(comm.allreduce(x))
        await asyncio.sleep(0)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())
        raise RuntimeError("enough")
    await comm.recv(x, source=1)


asyncoll.run(main)
