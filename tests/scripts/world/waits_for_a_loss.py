"""Say "ready", go on until a rank is gone, and say what was heard of it: `waits_for_a_loss.py [CALL]`."""

import sys

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    calls = {
        "allreduce": lambda: comm.allreduce(np.ones(1)),
        "registered": lambda: comm.allreduce(x),
        "solo": lambda: comm.solo_allreduce(x),
        "quorum": lambda: comm.quorum_allreduce(x, quorum=comm.size),
    }
    call = calls[sys.argv[1] if len(sys.argv) > 1 else "allreduce"]
    x = comm.empty(300_000, "f4")
    x.fill(0)
    await comm.barrier()
    print(f"{comm.rank} is ready", flush=True)
    try:
        while True:
            await call()
    except asyncoll.PeerLostError as error:
        print(f"{comm.rank} lost {error.rank}", flush=True)
        raise


asyncoll.run(main)
