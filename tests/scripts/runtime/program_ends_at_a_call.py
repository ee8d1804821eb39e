"""Rank 0 ends its program where rank 1 makes a call; each rank prints the error that it gets."""

import asyncio
import sys

import asyncoll


async def main(comm):
    if comm.rank == 1:
        await comm.barrier()


async def connected():
    async with asyncoll.connect() as comm:  # the line of the end
        await main(comm)


def in_block():
    with asyncoll.init() as comm:  # the line of the end
        if comm.rank == 1:
            comm.barrier().wait()


def closed():
    comm = asyncoll.init()
    if comm.rank == 1:
        comm.barrier().wait()
    comm.close()  # the line of the end


WAYS = {
    "run": lambda: asyncoll.run(main),  # the line of the end
    "connect": lambda: asyncio.run(connected()),
    "block": in_block,
    "close": closed,
}
try:
    WAYS[sys.argv[1]]()
except asyncoll.MismatchError as error:
    print(error)
