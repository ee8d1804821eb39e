"""Ranks of one host share memory, and those of different hosts do not; collectives and rounds do both."""

import numpy as np

import asyncoll


async def main(comm: asyncoll.Communicator) -> None:
    arena = comm._core.member.endpoint.arena
    neighbours = await comm.split(arena.ranks[0])
    others = await comm.split(arena.local_rank)
    memories = [each._core.backend.memory for each in (neighbours, comm, others)]
    assert memories == [arena, None, None]
    for part in (neighbours, comm, others):
        for x in (comm.empty(300_000, "f4"), neighbours.empty(300_000, "f4"), np.empty(3)):
            x.fill(1)
            await part.allreduce(x)
            assert (x == part.size).all()
            reduction = await part.solo_allreduce(x, sync_every=1, name=str(x.size))
            assert reduction.active == part.size
            assert (x == part.size**2).all()
        assert (await part.allgather(np.array([comm.rank]))).size == part.size
    print(f"{comm.rank} shares memory with {arena.ranks}")


asyncoll.run(main)
