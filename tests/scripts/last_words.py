"""Rank 1 raises; the others say what they are told."""

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    if comm.rank == 1:
        raise KeyError("lost it")
    try:
        await comm.barrier()
    except asyncoll.AbortedError as error:
        print(f"{comm.rank} heard of {error.rank}: {error.reason}", flush=True)
        raise


asyncoll.run(main)
