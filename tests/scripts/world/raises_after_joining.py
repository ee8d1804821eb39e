"""Rank 1 raises, once all have joined; the others say what they are told."""

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    if comm.rank == 1:
        await comm.barrier()
        raise KeyError("lost it")
    try:
        await comm.barrier()  # which they may not have left when it raises
        await comm.barrier()
    except asyncoll.AbortedError as error:
        print(f"{comm.rank} heard of {error.rank}: {error.reason}", flush=True)
        raise


asyncoll.run(main)
