"""Ranks send each other what is long, in every layout: one of 100 MB, and many of 1 MiB; each checks what it gets."""

import asyncio

import numpy as np
import torch

import asyncoll

MIB = 1 << 20
COUNT = 40  # more than there are slots


def numbered(rank: int, nbytes: int) -> np.ndarray:
    return np.arange(nbytes // 8) * 3 + rank


async def huge(comm: asyncoll.Communicator) -> None:
    """Around the ring, all at once."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = comm.send(numbered(comm.rank, 100_000_000), following)
    received = await comm.recv(np.empty(12_500_000, int), before)
    await sending
    assert np.array_equal(received, numbered(before, 100_000_000))


async def many(comm: asyncoll.Communicator) -> None:
    """All are sent, and come, before the first is asked for."""
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    sends = [comm.send(numbered(comm.rank + index, MIB), peer, tag=index) for index in range(COUNT) for peer in peers]
    await asyncio.gather(*sends)
    await comm.barrier()
    for index in reversed(range(COUNT)):
        for peer in peers:
            received = await comm.recv(np.empty(MIB // 8, int), peer, tag=index)
            assert np.array_equal(received, numbered(peer + index, MIB))


async def layouts(comm: asyncoll.Communicator) -> None:
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for columns in (700, 3000):  # short and long
        mine = np.arange(700 * columns, dtype="f4").reshape(700, columns) + comm.rank
        sending = comm.send(mine.T[::2], following)
        received = await comm.recv(np.empty((columns // 2, 700), "f4", order="F"), before)
        await sending
        assert np.array_equal(received, (mine - comm.rank + before).T[::2])
        halves = torch.full((columns, 1000), 1.5 + comm.rank, dtype=torch.bfloat16)
        sending = comm.send(halves[:, ::2], following)
        into = torch.zeros((500, columns), dtype=torch.bfloat16)
        await comm.recv(into.T, before)
        await sending
        assert (into == 1.5 + before).all()


async def main(comm: asyncoll.Communicator) -> None:
    for part in (huge, many, layouts):
        await part(comm)
    print(f"{comm.rank}: all right")


asyncoll.run(main)
