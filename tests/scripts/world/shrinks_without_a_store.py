"""Asks for the next epoch, and prints the error."""

import asyncoll


async def main(comm):
    try:
        await comm.shrink()
    except asyncoll.UsageError as error:
        print(error)
    await comm.barrier()


asyncoll.run(main)
