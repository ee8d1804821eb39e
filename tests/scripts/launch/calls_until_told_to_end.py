"""Note this process in the folder of the argument, and make calls until that has a file "end"."""

import os
import sys
from pathlib import Path

import numpy as np

import asyncoll

folder = Path(sys.argv[1])


async def main(comm: asyncoll.Communicator) -> None:
    (folder / str(os.getpid())).touch()
    await comm.barrier()
    print("ready", flush=True)
    go_on = np.ones(1)
    while go_on:
        go_on[:] = not (folder / "end").exists()
        await comm.broadcast(go_on, root=0)


asyncoll.run(main)
