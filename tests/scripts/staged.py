"""A rank whose tensors are on a device without hardware: runs the case of its argument, and prints a line."""

import asyncio
import sys

import numpy as np
import torch

import asyncoll
from asyncoll.testing import fake_device

SIZES = (0, 1, 1000, 20_000, 300_000)
SECONDS = 60.0


def increment(device, x):
    device.compute(lambda array: np.add(array, 1, out=array), x)


def made(device, rank, count):
    """A tensor of a rank, with work that is queued."""
    x = device.tensor(torch.full((count,), float(rank)))
    increment(device, x)
    return x


async def awaited(device):
    async with asyncoll.connect() as comm:
        total = comm.size * (comm.size + 1) / 2
        for _ in range(5):
            tensors = [made(device, comm.rank, count) for count in SIZES]
            calls = [comm.allreduce(x) for x in tensors]
            _ = comm.allreduce(made(device, 0, 1000))  # is never awaited
            for x, call in zip(reversed(tensors), reversed(calls), strict=True):
                assert await call is x
                increment(device, x)
                assert (device.values(x) == total + 1).all()
            gathered = await comm.allgather(tensors[2])
            assert (device.values(gathered) == total + 1).all()
        dest = (comm.rank + 1) % comm.size
        sent = comm.send(made(device, comm.rank, 300_000), dest)
        x, sender = await comm.recv_any(made(device, 0, 300_000))
        assert (device.values(x) == sender + 1).all()
        await sent
        await comm.barrier()


def waited(device):
    with asyncoll.init() as comm:
        total = comm.size * (comm.size + 1) / 2
        for _ in range(5):
            tensors = [made(device, comm.rank, count) for count in SIZES]
            handles = [comm.allreduce(x) for x in tensors]
            comm.allreduce(made(device, 0, 1000))  # nothing waits for it
            for x, handle in zip(tensors, handles, strict=True):
                assert handle.wait(SECONDS) is x
                increment(device, x)
                assert handle.wait(SECONDS) is x  # again
                assert (device.values(x) == total + 1).all()
        assert (device.values(comm.allgather(made(device, comm.rank, 7)).wait(SECONDS))[-1] == comm.size).all()
        comm.barrier().wait(SECONDS)


with fake_device() as of_rank:
    if sys.argv[1] == "awaited":
        asyncio.run(awaited(of_rank))
    else:
        waited(of_rank)
print("passed", flush=True)
