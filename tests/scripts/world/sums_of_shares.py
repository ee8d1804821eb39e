"""Sums that do not depend on how many ranks there are: each takes its share of the work."""

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    work = np.arange(1000)
    share = np.array([work[comm.rank :: comm.size].sum()])
    await comm.allreduce(share)
    eager = np.array([work[comm.rank :: comm.size].sum()])
    await comm.solo_allreduce(eager, sync_every=1)
    if comm.rank == 0:
        print("sums", share[0], eager[0])


asyncoll.run(main)
