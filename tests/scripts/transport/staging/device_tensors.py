"""A rank whose tensors are on a device without hardware: runs the case of its argument, and prints a line."""

import asyncio
import sys
import threading

import numpy as np
import torch

import asyncoll
from asyncoll.testing import FakeDevice, fake_device

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
        gossip = await comm.gossip(made(device, comm.rank, 300_000))
        increment(device, await gossip.update(made(device, comm.rank, 300_000)))
        await gossip.exchange()
        model = await gossip.close()
        increment(device, model)
        assert (device.values(await comm.allreduce(model)) == 2 * total + comm.size).all()
        found = await comm.sparse_allreduce(x, density=0.5)
        increment(device, x)
        assert (device.values(found.values) == total).all()
        assert sorted(device.values(x)[[0, -1]]) == [1, sender + 2]
        await called(device, comm)


async def called(device, comm):
    def in_a_thread(x: torch.Tensor) -> torch.Tensor:
        y = device.tensor(x.clone())
        increment(device, y)
        return y

    async def on_the_loop(x: torch.Tensor) -> torch.Tensor:
        return in_a_thread(x)

    comm.rpc.register(in_a_thread)
    comm.rpc.register(on_the_loop)
    await comm.barrier()
    rpc = comm.rpc.to("fake:0")
    for count in SIZES:
        x = made(device, comm.rank, count)
        for name in ("in_a_thread", "on_the_loop"):
            x = await rpc.call((comm.rank + 1) % comm.size, name, x)
            increment(device, x)
        assert (device.values(x) == comm.rank + 5).all()
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
        whole = made(device, comm.rank, 600).view(20, 30)
        x = whole.t()
        handle = comm.allreduce(x)
        handle.wait(SECONDS)
        increment(device, whole)
        handle.wait(SECONDS)  # does not put the result there again
        assert (device.values(x) == total + 1).all()
        for received in (comm.recv_any(made(device, 0, 9)), comm.recv(made(device, 0, 9), (comm.rank - 1) % comm.size)):
            comm.send(made(device, comm.rank, 9), (comm.rank + 1) % comm.size).wait(SECONDS)
            result = received.wait(SECONDS)
            x = result[0] if isinstance(result, tuple) else result
            increment(device, x)
            assert (device.values(x) == (comm.rank - 1) % comm.size + 2).all()
        gossip = comm.gossip(made(device, comm.rank, 20_000)).wait(SECONDS)
        gossip.update(made(device, comm.rank, 20_000))  # nothing waits for it
        gossip.exchange().wait(SECONDS)
        model = gossip.close().wait(SECONDS)
        increment(device, model)
        assert (device.values(comm.allreduce(model).wait(SECONDS)) == 2 * total + comm.size).all()
        in_rounds = 0.0
        for _ in range(10):
            reduction = comm.solo_allreduce(made(device, comm.rank, 20_000), history=99).wait(SECONDS)
            in_rounds += sum(device.values(x)[0] for x in reduction.results())
        if (last := comm.join("solo", made(device, 0, 20_000)).wait(SECONDS)) is not None:
            in_rounds += sum(device.values(x)[0] for x in last.results())
        assert in_rounds == 10 * total
        comm.barrier().wait(SECONDS)


class Slow(FakeDevice):
    """A message may be there before a receive is marked."""

    def mark(self, x):
        threading.Event().wait(0.002)
        return super().mark(x)


with fake_device() as of_rank:
    of_rank.__class__ = Slow
    if sys.argv[1] == "awaited":
        asyncio.run(awaited(of_rank))
    else:
        waited(of_rank)
print("passed", flush=True)
