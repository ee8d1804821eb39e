"""The `Backend` protocol: every backend gives the same results."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from asyncoll import AVG, AbortedError
from asyncoll.algorithms.alone_backend import AloneBackend
from asyncoll.algorithms.choice import choose_backend
from asyncoll.algorithms.memory_backend import MemoryBackend
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing import run_ranks
from asyncoll.transport.memory import inproc as memory
from asyncoll.transport.messages import inproc
from asyncoll.world.world import World
from tests.support.toy_backend import ToyBackend

BACKENDS = ["messages", "memory", "toy"]


def run(size, backend, main):
    """The results of `main(comm)` by rank, in a world of that backend."""

    async def rank(endpoint, choose):
        async with World(endpoint, SharedLoop(), choose=choose) as comm:
            return await main(comm)

    async def world():
        arenas = memory.arenas(size) if backend == "memory" else [None] * size
        choose = partial(ToyBackend, defaultdict(dict)) if backend == "toy" else choose_backend
        endpoints = [Endpoint(*both) for both in zip(inproc.world(size), arenas, strict=True)]
        return await asyncio.gather(*(rank(endpoint, choose) for endpoint in endpoints))

    return asyncio.run(asyncio.wait_for(world(), 60))


async def every_call(comm):
    """Whole numbers, so that no order of additions makes a difference."""
    rank, size = comm.rank, comm.size
    x = np.arange(2.0 * size).reshape(size, 2) + rank
    half = await comm.split(rank % 2, key=-rank)
    results = [
        await comm.allreduce(x.copy()),
        await comm.allreduce(x.astype(np.float16), AVG),
        await comm.broadcast(x.copy(), root=size - 1),
        await comm.reduce(x.copy(), root=size - 1),
        await comm.reduce_scatter(x),
        await comm.allgather(x),
        *await comm.allgatherv(x[: rank + 1]),
        await comm.gather(x, root=0),
        await comm.scatter([x[:place] for place in range(size)] if rank == 0 else None),
        await comm.alltoall(x),
        *await comm.alltoallv([x[:place] for place in range(size)]),
        await half.allreduce(x.copy()),
        await comm.neighbor_average(6 * x, graph="ring"),
    ]
    pushed, weight = 6 * x, np.ones(1)
    received, received_weight = await comm.push_sum(pushed, weight, iteration=1, peers=2)
    gossip = await comm.gossip(x)
    assert (await gossip.update(-x.copy()) == 0).all()
    results += [pushed, weight, received, np.array(received_weight), await gossip.close()]
    await comm.barrier()
    sparse = await comm.sparse_allreduce(x.copy(), density=1.0, algorithm="topka", dense=True)
    y = x.copy()
    reduction = await comm.quorum_allreduce(y, quorum=size)
    comm.rpc.register(lambda: np.full(3, float(rank)), name="mine")
    called = await comm.rpc.call((rank + 1) % size, "mine")
    if size > 1:
        await asyncio.gather(comm.send(x, (rank + 1) % size), comm.recv(z := x.copy(), (rank - 1) % size))
        results.append(z)
    return [*results, sparse.dense, y, np.array([reduction.round, reduction.active]), called]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_backends_agree(size):
    expected = run(size, "messages", every_call)
    for backend in BACKENDS[1:]:
        for mine, theirs in zip(run(size, backend, every_call), expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_aborts_ends_the_calls_of_all_ranks(backend):
    async def main(comm):
        if comm.rank == 1:
            comm.abort("enough")
        with pytest.raises(AbortedError, match="enough"):
            await comm.allreduce(np.ones(3))
        return comm.rank

    async def guarded(comm):
        rank = await main(comm)
        raise ValueError(rank)  # a world that has failed is left with an error

    with pytest.raises(ValueError, match=r"\d"):
        run(3, backend, guarded)


@pytest.mark.parametrize(("transport", "kind"), [("inproc", MessageBackend), ("shm", MemoryBackend)])
def test_ranks_that_share_an_arena_use_it(transport, kind):
    async def main(comm):
        alone = await comm.split(comm.rank)
        return type(comm._core.backend), type(alone._core.backend)

    assert run_ranks(2, main, transport) == [(kind, AloneBackend)] * 2
