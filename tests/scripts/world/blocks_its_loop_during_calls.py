"""The last rank makes calls and blocks its loop, in pure Python, until the others have their results of all of them."""

import sys
from pathlib import Path

import numpy as np

import asyncoll

signpost = Path(sys.argv[1])


async def main(comm: asyncoll.Communicator) -> None:
    last = comm.rank == comm.size - 1
    short, long, registered = np.ones(3), np.ones(1 << 20), comm.empty(1 << 20, "f8")
    registered.fill(1)
    contribution = comm.empty(1 << 18, "f8")
    contribution.fill(1)
    calls = [
        comm.allreduce(short),
        comm.allreduce(long),
        comm.quorum_allreduce(contribution, quorum=comm.size),
        comm.allreduce(registered),
        comm.allgather(long[:1000]),
        comm.barrier(),
    ]
    while last and not all((signpost / f"{rank}").exists() for rank in range(comm.size - 1)):
        pass  # awaits nothing
    for call in calls[::-1] if last else calls:
        await call
    (signpost / f"{comm.rank}").touch()
    for x in (short, long, registered, contribution):
        assert (x == comm.size).all()
    if last:
        print("the runtime took over")


asyncoll.run(main)
