"""The last rank's process is stopped while others do rounds; what it has staged is in them, and it catches up."""

import os
import signal
from pathlib import Path

import numpy as np

import asyncoll

AHEAD, MORE = 3, 20


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def main(comm: asyncoll.Communicator) -> None:
    rules = {"name": "g", "history": 2 * MORE}
    last = comm.rank == comm.size - 1
    pids = (await comm.allgather(np.array([os.getpid()]))).ravel().tolist()
    ones = lambda: np.ones(20_000)  # noqa: E731
    if comm.rank == 0:
        for _ in range(AHEAD):
            await comm.solo_allreduce(ones(), **rules)
    await comm.barrier()
    if last:
        reduction = await comm.solo_allreduce(ones(), **rules)
        assert (reduction.round, reduction.included) == (AHEAD, False)  # it is late, so what it gave is staged
    await comm.barrier()
    if last:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif comm.rank == 0:
        while state(pids[-1]) != "T":
            pass
        sums = []
        for _ in range(MORE):
            x = ones()
            await comm.solo_allreduce(x, **rules)
            sums.append(x[0])
            await comm.majority_allreduce(ones(), name="m", candidates=comm.size)
            await comm.quorum_allreduce(ones(), name="q", quorum=1)
        assert sums == [2, *[1] * (MORE - 1)], sums
        os.kill(pids[-1], signal.SIGCONT)
    if last:
        x = ones()
        reduction = await comm.solo_allreduce(x, **rules)
        assert reduction.round == AHEAD + MORE
        assert [old[0] for old in reduction.missed] == [2, *[1] * (MORE - 2)]
        print("it caught up")
    await comm.barrier()
    x = ones()
    assert (await comm.solo_allreduce(x, sync_every=1, name="all")).active == comm.size


asyncoll.run(main)
