"""A world that grows and shrinks: argv[1] lists what comes next, as "+2" for two newcomers and "-1,3" for deaths.

"!" is a newcomer that is killed as it waits, and "?" a member that is killed as the others are connected to a newcomer.

Each process is one of the first ranks, or a newcomer, which is told how many steps have come before. In each epoch the
members make collectives, rounds, calls of RPC and a communicator of a part of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch

import asyncoll

SHORT, LONG = 3, 300_000  # elements


def start(count: int, done: int) -> list[subprocess.Popen[bytes]]:
    """Start newcomers that take part from the step after `done` on."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ASYNCOLL_RANK_OF")
    env = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, *sys.argv[:2], str(done)]
    return [subprocess.Popen(command, env=env | {"ASYNCOLL_JOIN": "1"}) for _ in range(count)]


async def use(comm: asyncoll.Communicator) -> None:
    size, total = comm.size, comm.size * (comm.size + 1) / 2
    for count in (SHORT, LONG):
        x = torch.full((count,), float(comm.rank + 1))
        await comm.allreduce(x)
        assert x.unique().tolist() == [total]
        await comm.solo_allreduce(torch.ones(count), name=f"solo{count}", sync_every=1)
    half = await comm.split(comm.rank % 2)
    assert (await half.allgather(torch.tensor(comm.rank))).tolist() == list(range(comm.rank % 2, size, 2))
    assert await comm.rpc.call((comm.rank + 1) % size, "twice", comm.rank) == 2 * comm.rank
    await comm.barrier()


async def wait_for(comm: asyncoll.Communicator, count: int) -> None:
    while True:
        least = torch.tensor(comm.waiting)
        await comm.allreduce(least, op=asyncoll.MIN)
        if int(least) >= count:
            return


async def survive(comm: asyncoll.Communicator) -> asyncoll.Communicator:
    """Go on after the deaths that come now."""
    try:
        while True:
            await comm.barrier()
    except asyncoll.PeerLostError:
        return await comm.shrink()


async def grow_without(comm: asyncoll.Communicator, done: int) -> asyncoll.Communicator:
    """Grow as the newcomer dies: it is no member of the new epoch, or one that is lost."""
    started = start(1, done) if not comm.rank else []
    await wait_for(comm, 1)
    for process in started:
        process.kill()
    size, comm = comm.size, await comm.grow()
    if comm.size > size:
        comm = await survive(comm)
    assert comm.size == size
    return comm


async def lose_one_as_a_newcomer_comes(comm: asyncoll.Communicator, done: int) -> asyncoll.Communicator:
    """The last rank dies once it is connected to a newcomer, which joins the others."""
    if not comm.rank:
        start(1, done)
    try:
        while not comm.waiting or comm.rank < comm.size - 1:
            await comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    except asyncoll.PeerLostError:
        comm = await comm.shrink()
    await wait_for(comm, 1)
    return await comm.grow()


async def main(comm: asyncoll.Communicator) -> None:
    steps, done = sys.argv[1].split(), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    comm.rpc.register(lambda value: 2 * value, name="twice")
    await use(comm)
    for step in steps[done:]:
        done += 1
        if step.startswith("+"):
            if not comm.rank:
                start(int(step[1:]), done)
            await wait_for(comm, int(step[1:]))
            comm = await comm.grow()
        elif step == "!":
            comm = await grow_without(comm, done)
        elif step == "?":
            comm = await lose_one_as_a_newcomer_comes(comm, done)
        else:
            if comm.rank in map(int, step[1:].split(",")):
                await comm.barrier()  # the others wait for the deaths
                os.kill(os.getpid(), signal.SIGKILL)
            comm = await survive(comm)
        await use(comm)
    print(f"epoch {comm.epoch}, {comm.size} ranks: grown")


asyncoll.run(main)
