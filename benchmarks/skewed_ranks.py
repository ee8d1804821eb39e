"""The programs of ranks of `skewed_arrivals.py` that `asyncoll bench` lacks: Gloo, Open MPI, and the cost of a round.

Started by `ask` with a question: the system, the plan of `asyncoll.bench`, and how long all ranks sleep alike after the
barrier, so that they arrive together and not as the barrier lets them go.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from common import answer

import asyncoll
from asyncoll.bench import skewed
from asyncoll.bench.plan import ITEM_BYTES, MODES, BenchPlan
from asyncoll.bench.skewed import WARMUP
from asyncoll.tensors.reductions import Array

Row = dict[str, Any]
MPI_RANK = "as-mpi-rank"
CHAINED = 64


def rank(question: dict[str, Any]) -> Any:
    plan, settle_s = BenchPlan.from_json(question["plan"]), question["settle_s"]
    return gloo(plan, settle_s) if question["system"] == "Gloo" else asyncoll.run(ours, plan, settle_s)


# -- asyncoll: without skew, and how much processor time a round takes ----------------------------


async def ours(comm: asyncoll.Communicator, plan: BenchPlan, settle_s: float) -> dict[str, Any]:
    async def pause(seconds: float) -> None:
        time.sleep(settle_s + seconds)  # noqa: ASYNC251 (as `asyncoll bench` does: progress comes from elsewhere)

    together = [row async for row in skewed.solo(comm, plan, pause)]
    return {"together": together, "chained": {mode: await chained(comm, plan, mode) for mode in MODES}}


async def chained(comm: asyncoll.Communicator, plan: BenchPlan, mode: str) -> Row:
    """Rounds without a pause between them: messages and processor time of one, over all ranks."""
    call = chain(comm, mode, np.ones(plan.sizes[0] // ITEM_BYTES, np.float32))
    first = await call()
    await comm.barrier()
    begun_s, cpu_s, sent = time.perf_counter(), time.process_time(), comm.statistics().messages_sent
    while await call() < first + CHAINED:  # a late rank sees fewer rounds, so it makes fewer calls
        pass
    await comm.barrier()
    cpu_s, sent = time.process_time() - cpu_s, comm.statistics().messages_sent - sent
    everyones = await comm.allgather(np.array([cpu_s, sent, time.perf_counter() - begun_s]))
    total_cpu_s, total_sent, _ = everyones.sum(axis=0)
    return {
        "messages": float(total_sent) / CHAINED,
        "message_us": 1e6 * float(total_cpu_s / total_sent) if total_sent else 0.0,  # none in memory
        "cpu_us": 1e6 * float(total_cpu_s) / CHAINED,
        "wall_us": 1e6 * float(everyones[:, 2].max()) / CHAINED,
    }


def chain(comm: asyncoll.Communicator, mode: str, x: Array) -> Callable[[], Awaitable[int]]:
    """A call of `mode` that returns its round."""
    name, quorum, calls = f"chained {mode}", skewed.half(comm.size), itertools.count(1)

    async def full() -> int:
        await comm.allreduce(x)
        return next(calls)

    async def wait_avoiding() -> int:
        return (await reductions[mode]()).round

    reductions: dict[str, Callable[[], Awaitable[asyncoll.Reduction]]] = {
        "majority": lambda: comm.majority_allreduce(x, name=name),
        "quorum": lambda: comm.quorum_allreduce(x, name=name, quorum=quorum),
        "solo": lambda: comm.solo_allreduce(x, name=name),
    }
    return full if mode == "full" else wait_avoiding


# -- the peers: the protocol of `asyncoll.bench.skewed` -------------------------------------------


def gloo(plan: BenchPlan, settle_s: float) -> Row:
    import torch  # here, as the ranks of mpirun would spend a minute on it
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.empty(plan.sizes[0] // ITEM_BYTES)
    waits, wrong = timed(dist.get_rank(), plan, settle_s, x.numpy(), dist.barrier, lambda: dist.all_reduce(x))
    mine = torch.tensor([*waits, wrong], dtype=torch.float64)
    everyones = [torch.empty_like(mine) for _ in range(plan.ranks)]
    dist.all_gather(everyones, mine)
    dist.barrier()
    dist.destroy_process_group()
    return peer_row(plan, torch.stack(everyones).numpy())


def mpi() -> None:
    """Under mpirun. Rank 0 prints its answer."""
    from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]  # only where MPI is installed

    world, question = MPI.COMM_WORLD, json.loads(sys.argv[2])
    plan = BenchPlan.from_json(question["plan"])
    x = np.empty(plan.sizes[0] // ITEM_BYTES, np.float32)
    allreduce = lambda: world.Allreduce(MPI.IN_PLACE, x)  # noqa: E731
    waits, wrong = timed(world.rank, plan, question["settle_s"], x, world.Barrier, allreduce)
    mine = np.array([*waits, wrong])
    everyones = np.empty((plan.ranks, mine.size))
    world.Allgather(mine, everyones)
    if world.rank == 0:
        print(json.dumps(peer_row(plan, everyones)))


def timed(
    rank: int, plan: BenchPlan, settle_s: float, x: Array, barrier: Callable[[], Any], allreduce: Callable[[], Any]
) -> tuple[list[float], int]:
    """This rank's counted waits, and wrong elements."""
    waits, wrong = [], 0
    for _ in range(WARMUP + plan.iterations):
        x.fill(1)
        barrier()
        time.sleep(settle_s + rank * plan.skew_s)
        start = time.perf_counter()
        allreduce()
        waits.append(time.perf_counter() - start)
        wrong += int(np.count_nonzero(x != plan.ranks))
    return waits[WARMUP:], wrong


def peer_row(plan: BenchPlan, everyones: Array) -> Row:
    waits = everyones[:, :-1]
    return {
        "mean_us": float(waits.mean()) * 1e6,
        "median_us": float(np.median(waits)) * 1e6,
        "nap": float(plan.ranks),
        "wrong": int(everyones[:, -1].sum()),
    }


if __name__ == "__main__":
    if sys.argv[1] == MPI_RANK:
        mpi()
    else:
        answer(rank)
