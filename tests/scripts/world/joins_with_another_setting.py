"""Joins a world in which rank 1 has another value of a setting; prints the error."""

import os
import sys

import asyncoll

_, variable, usual, other = sys.argv
os.environ[variable] = other if os.environ["RANK"] == "1" else usual


async def main(comm):
    await comm.barrier()


try:
    asyncoll.run(main)
except asyncoll.AsyncollError as error:
    print(error, flush=True)
