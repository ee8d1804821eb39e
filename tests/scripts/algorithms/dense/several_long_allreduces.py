"""Several allreduces of long arrays that are not registered, under way at the same time.

The runtime carries out the longest, and their callers the others: two threads reduce.
"""

import asyncio

import numpy as np

import asyncoll
from asyncoll import Communicator

COUNTS = 700_000, 4_000_000, 800_000, 300_000  # elements; the last array is copied, others are read where they are


async def main(comm: Communicator) -> None:
    total = comm.size * (comm.size + 1) / 2
    for _ in range(25):
        arrays = [np.full(count, 10.0**i * (comm.rank + 1), "f4") for i, count in enumerate(COUNTS)]
        await asyncio.gather(*map(comm.allreduce, arrays))
        for i, x in enumerate(arrays):
            assert (x == 10.0**i * total).all()
    print("all right")


asyncoll.run(main)
