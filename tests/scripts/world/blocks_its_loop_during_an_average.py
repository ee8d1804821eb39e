"""Rank 1 blocks its loop, in pure Python, until rank 0 has averaged its model with that of rank 1."""

import sys
from pathlib import Path

import numpy as np

import asyncoll

AVERAGES = 20
averaged = Path(sys.argv[1]) / "averaged"


async def main(comm: asyncoll.Communicator) -> None:
    gossip = await comm.gossip(np.full(int(sys.argv[2]), 2.0 * comm.rank))
    if comm.rank == 1:
        while not averaged.exists():
            pass  # awaits nothing
    else:
        for _ in range(AVERAGES):
            assert await gossip.exchange() == 1
        averaged.touch()
    model = await gossip.close()
    assert (model == 1).all()
    assert gossip.averages == AVERAGES
    if comm.rank == 1:
        print("averaged meanwhile")


asyncoll.run(main)
