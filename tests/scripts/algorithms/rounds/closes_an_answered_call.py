"""Rank 0 closes a call whose answer is there, and changes its array at once: its next call gets that answer."""

import asyncio

import numpy as np

import asyncoll

COUNT = 200_000  # a round of so many elements is reduced in the memory of its callers


def call(comm, name, value):
    x = np.full(COUNT, value)
    return x, comm.quorum_allreduce(x, quorum=2, name=name)


async def main(comm):
    for name in map(str, range(10)):
        if comm.rank == 0:
            x, answered = call(comm, name, 10.0)
            while name not in comm.statistics().operations or not comm.statistics().operations[name].calls:
                await asyncio.sleep(0)
            answered.close()
            x[:] = 999.0
            y, late = call(comm, name, 100.0)
            assert (await late).round == 1
            assert set(y.tolist()) == {11.0}
        else:
            await call(comm, name, 1.0)[1]
        await comm.barrier()
    print("answered")


asyncoll.run(main)
