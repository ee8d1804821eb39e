"""Rank 2 blocks its loop, in pure Python, until the others have finished rounds that need its part."""

import asyncio
import sys
from pathlib import Path

import numpy as np

import asyncoll

ROUNDS = 20
signpost = Path(sys.argv[1])


async def main(comm: asyncoll.Communicator) -> None:
    x = np.ones(1)
    if comm.rank == 2:
        (signpost / "blocked").touch()
        while not all((signpost / f"{rank}").exists() for rank in (0, 1)):
            pass  # awaits nothing
    while not (signpost / "blocked").exists():
        await asyncio.sleep(0.001)
    for _ in range(ROUNDS) if comm.rank != 2 else ():
        await comm.solo_allreduce(x)
    (signpost / f"{comm.rank}").touch()
    reduction = await comm.solo_allreduce(x)
    if comm.rank == 2:
        assert reduction.round >= ROUNDS
        assert reduction.skipped >= ROUNDS - 1
        print("the others went on")


asyncoll.run(main)
