"""Dense calls, timed one by one after a barrier. Every element of every result is checked.

The rows are equal at all ranks. Times are in microseconds. Each rank takes the median and the 99th percentile of its
own calls; a row has the largest median and the largest percentile of any rank.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

from asyncoll.bench.places import OnGpu, OnHost
from asyncoll.bench.plan import ITEM_BYTES, BenchPlan, Row, repeats
from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array

WARMUP = 3  # calls before the measured ones: they allocate slots and fill caches
PERIOD = 1021  # a prime: an element that is shifted by any power of two differs


def pattern(count: int) -> Array:
    """1, 2, …, PERIOD, 1, …: small integers, because float32 holds their sums exactly."""
    return (np.arange(count) % PERIOD + 1).astype(np.float32)


async def allreduce(comm: Communicator, plan: BenchPlan, size: int) -> Row:
    """Measure `comm.allreduce` of float32, in place; on a GPU with the copies. All ranks call it."""
    base = pattern(size // ITEM_BYTES)
    mine, total = base * (comm.rank + 1), base * (comm.size * (comm.size + 1) // 2)
    place = OnGpu(comm, base.size) if plan.device == "cuda" else OnHost(comm, base.size, registered=plan.registered)
    prepare, call = partial(place.fill, mine), partial(place.allreduce, comm)
    seconds, wrong = await timed(comm, size, prepare, call, lambda: wrong_elements(place.values(), total))
    median, p99, wrong = await slowest(comm, seconds, wrong)
    algorithm = size / median / 1e9
    return {
        "size": size,
        "count": base.size,
        "type": "float32",
        "redop": "sum",
        "time_us": median * 1e6,
        "p99_us": p99 * 1e6,
        "algbw": algorithm,
        "busbw": bus_bandwidth(algorithm, comm.size),
        "wrong": wrong,
    }


def bus_bandwidth(algorithm: float, ranks: int) -> float:
    """The bandwidth of each rank's link in an optimal allreduce, from `algorithm`, the size divided by the time.

    It can be compared between numbers of ranks. The definition is that of nccl-tests, PERFORMANCE.md.
    """
    return algorithm * 2 * (ranks - 1) / ranks


async def pingpong(comm: Communicator, size: int) -> Row:
    """Measure `comm.send` and `comm.recv` between ranks 0 and 1. All ranks call it."""
    mine = pattern(size // ITEM_BYTES)
    x = np.empty_like(mine)

    async def call() -> None:
        if comm.rank == 0:
            await comm.send(mine, 1)
            await comm.recv(x, 1)
        elif comm.rank == 1:
            await comm.recv(x, 0)
            await comm.send(x, 0)

    def wrong() -> int:
        return wrong_elements(x, mine) if comm.rank < 2 else 0

    seconds, count = await timed(comm, size, lambda: x.fill(0), call, wrong)
    # Only the times of rank 0 count: the time of rank 1 begins with its wait for rank 0.
    median, p99, count = await slowest(comm, seconds if comm.rank == 0 else [0.0], count)
    return {
        "size": size,
        "count": mine.size,
        "type": "float32",
        "time_us": median / 2 * 1e6,
        "p99_us": p99 / 2 * 1e6,
        "bandwidth": size / (median / 2) / 1e9,
        "wrong": count,
    }


async def timed(
    comm: Communicator,
    size: int,
    prepare: Callable[[], None],
    call: Callable[[], Awaitable[object]],
    wrong: Callable[[], int],
) -> tuple[list[float], int]:
    """Seconds of each counted call, and the number of wrong elements in all calls. Only `call` is timed."""
    seconds, found = [], 0
    for _ in range(WARMUP + repeats(size)):
        prepare()
        await comm.barrier()
        start = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - start)
        found += wrong()
    return seconds[WARMUP:], found


def wrong_elements(x: Array, expected: Array | float) -> int:
    """The number of elements of `x` that differ from `expected`."""
    return int(np.count_nonzero(x != expected))


async def slowest(comm: Communicator, seconds: list[float], wrong: int) -> tuple[float, float, int]:
    """The largest median and 99th percentile of any rank, and the number of wrong elements at all ranks."""

    # "inverted_cdf" takes a measured time as the percentile, and does not interpolate.
    mine = np.array([np.median(seconds), np.percentile(seconds, 99, method="inverted_cdf"), wrong])
    everyones = await comm.allgather(mine)
    return float(everyones[:, 0].max()), float(everyones[:, 1].max()), int(everyones[:, 2].sum())
