"""A rank that may be in namespaces of its own: it makes calls, and prints how many ranks share its memory."""

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    for _ in range(20):
        total = await comm.allreduce(np.ones(1000))
        assert total[0] == comm.size
        await comm.solo_allreduce(np.ones(1000))
    await comm.barrier()
    print(comm.local_size)


asyncoll.run(main)
