"""Say "ready", go on until a rank is gone, and say what was heard of it."""

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    await comm.barrier()
    print(f"{comm.rank} is ready", flush=True)
    try:
        while True:
            await comm.allreduce(np.ones(1))
    except asyncoll.PeerLostError as error:
        print(f"{comm.rank} lost {error.rank}", flush=True)
        raise


asyncoll.run(main)
