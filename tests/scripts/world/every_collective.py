"""Every collective once; each rank checks the results. With the argument "torch", a long tensor is torch's."""

import sys

import numpy as np

import asyncoll


def long_tensor(value: int):
    if "torch" not in sys.argv:
        return np.full(1 << 19, float(value))
    import torch

    return torch.full((1 << 19,), float(value))


async def main(comm: asyncoll.Communicator) -> None:
    rank, size = comm.rank, comm.size
    everybody = np.arange(size, dtype="f4")
    mine = np.full(3, rank, "f4")
    total = everybody.sum()
    assert (await comm.allreduce(mine.copy()) == total).all()
    assert (await comm.allreduce(long_tensor(rank)) == total).all()
    assert (await comm.broadcast(mine.copy(), 1) == 1).all()
    assert (await comm.reduce(mine.copy(), 2) == (total if rank == 2 else rank)).all()
    assert (await comm.reduce_scatter(np.repeat(mine, size)) == total).all()
    stacked = await comm.allgather(mine)
    assert np.array_equal(stacked.T, [everybody] * 3)
    assert [len(x) for x in await comm.allgatherv(np.ones(rank))] == list(range(size))
    gathered = await comm.gather(mine)
    assert gathered is None if rank else np.array_equal(gathered.T, [everybody] * 3)
    assert (await comm.scatter([mine + place for place in range(size)] if rank == 0 else None) == rank).all()
    assert (await comm.alltoall(np.full(size, rank, "f4")) == everybody).all()
    assert [x[0] for x in await comm.alltoallv([np.array([rank])] * size)] == list(range(size))
    await comm.barrier()
    for count in (3, 1 << 19):  # short and long
        sending = comm.send(np.full(count, rank), (rank + 1) % size)
        assert (await comm.recv(np.zeros(count, int), (rank - 1) % size) == (rank - 1) % size).all()
        await sending
    for call, more in (
        (comm.solo_allreduce, {}),
        (comm.majority_allreduce, {}),
        (comm.quorum_allreduce, {"quorum": 2}),
    ):
        x = np.full(5, 1.0)
        reduction = await call(x, sync_every=1, **more)
        assert (reduction.active, x[0]) == (size, size)
    part = await comm.split(rank % 2)
    assert (await part.allreduce(np.ones(1)))[0] == part.size
    print(f"{rank} of {size} on {len(set(comm.hosts))}: local {comm.local_rank} of {comm.local_size}, all right")


asyncoll.run(main)
