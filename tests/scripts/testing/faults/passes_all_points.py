"""Make each of these operations until it has passed all its injection points of the compiled core.

Prints the operations whose points have all been passed. A point that no operation passes makes this run for ever.
"""

import asyncio
import sys

import numpy as np

import asyncoll
from asyncoll import MAX, Communicator
from asyncoll._core import native
from asyncoll.testing.faults.checked_calls import OPERATIONS, echo
from asyncoll.testing.faults.core_points import PASSED

CALLS = 10


async def main(comm: Communicator) -> None:
    comm.rpc.register(echo)
    random = np.random.default_rng(comm.rank)
    for (operation, elements), points in [each for each in PASSED.items() if each[0][0] in sys.argv[1:]]:
        passed: set[str] = set()
        while True:
            before = native.watch(passed.add)
            for _ in range(CALLS):
                if random.random() < 0.5:  # be late, so that each rank is the last one, and waits, before long
                    await asyncio.sleep(random.random() * 0.002)
                await OPERATIONS[operation](comm, elements // comm.size * comm.size)
            native.watch(before)
            if (await comm.allreduce(np.array([point in passed for point in points]), MAX)).all():
                break
        if comm.rank == 0:
            print(operation, elements, flush=True)


asyncoll.run(main)
