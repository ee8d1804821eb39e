"""Ranks call each other: values, tensors, streams, nested and cancelled calls; or, with `death`, one that dies."""

import asyncio
import os
import signal
import sys

import torch

import asyncoll


async def echo(x):
    return x


async def count(n: int):
    for i in range(n):
        yield i


callers = asyncio.Semaphore(0)  # who is in `forever`


async def forever() -> None:
    callers.release()
    await asyncio.Event().wait()


def compute(x: torch.Tensor) -> torch.Tensor:
    return x @ x


async def main(comm):
    rpc, following = comm.rpc, (comm.rank + 1) % comm.size
    for fn in (echo, count, forever, compute):
        rpc.register(fn)

    @rpc.register
    async def around(times: int) -> int:
        return await rpc.call(following, "around", times - 1) + 1 if times else 0

    if "death" in sys.argv:
        await die(comm)
        return
    for n in (1, 1000, 100_000, 5_000_000):
        x = torch.arange(n)
        assert torch.equal((await rpc.call(following, "echo", {"x": [x]}))["x"][0], x)
    assert [i async for i in rpc.stream(following, "count", 200)] == list(range(200))
    assert await rpc.call(following, "around", 10) == 10
    assert torch.equal(await rpc.call(following, "compute", torch.eye(50)), torch.eye(50))
    for _ in range(20):
        call = asyncio.ensure_future(rpc.call(following, "echo", torch.ones(1_000_000)))
        await asyncio.sleep(1e-3)
        call.cancel()
        await asyncio.wait([call])
        assert await rpc.call(following, "echo", 1) == 1
    assert await rpc.call_all(range(comm.size), "echo", comm.rank) == dict.fromkeys(range(comm.size), comm.rank)
    await comm.barrier()
    print("called", comm.rank)


async def die(comm):
    if comm.rank == 1:
        for _ in range(comm.size - 1):
            await callers.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await comm.rpc.call(1, "forever")
    except asyncoll.PeerLostError as error:
        print("told", comm.rank, "of", error.rank, flush=True)
        raise


asyncoll.run(main)
