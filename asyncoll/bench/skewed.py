"""Skewed arrivals: rank r arrives r skews late. Measures the waits of the ranks and the number of active processes.

This is the micro-benchmark of Li, Ben-Nun, Di Girolamo, Alistarh and Hoefler, "Taming unbalanced training workloads in
deep learning with partial collective operations", PPoPP 2020, section 6.1, figures 8 and 9.

After each measured call every rank takes part in a synchronous round with zeros. That round takes the contributions
that came too late for the measured one. So a rank is in a measured round if and only if it arrived in time. Every
contribution is 1.0, so the sum of a measured round is the number of active processes (NAP), and the sum of the round
after it must be P - NAP: nothing is lost, nothing is counted twice. Both sums are checked.

If the arrival of rank k opens a round, rank r <= k waits (k - r) skews, later ranks do not wait, and k + 1 ranks are
active. Without the cost of communication the mean wait is, in skews:

    full      (k = P-1)         (P - 1) / 2               active P
    quorum Q  (k = Q-1)         Q (Q - 1) / (2 P)         active Q
    solo      (k = 0)           0                         active 1
    majority  (k uniform)       (P^2 - 1) / (6 P)         active (P + 1) / 2, on average

The ratio of the mean waits of full and of another mode is bounded by the ratio of these. For majority, few rounds may
draw ranks that come late or early on average, so its bound is that of the ranks that were drawn (`bound`).
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.bench.dense_calls import wrong_elements
from asyncoll.bench.plan import ITEM_BYTES, MODES, BenchPlan, Row
from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array, ReduceOp

WARMUP = 2  # calls before the measured ones

Pause = Callable[[float], Awaitable[None]]


def expected(mode: str, ranks: int) -> tuple[float, float]:
    """The expected mean wait in skews, and the expected mean number of active processes, by the table above."""
    if mode == "majority":
        return (ranks * ranks - 1) / (6 * ranks), (ranks + 1) / 2
    quorum = {"full": ranks, "quorum": half(ranks), "solo": 1}[mode]
    return quorum * (quorum - 1) / (2 * ranks), float(quorum)


def half(ranks: int) -> int:
    """The quorum of the benchmark: half of the ranks, at least one."""
    return max(1, ranks // 2)


def bound(mode: str, ranks: int, iterations: int) -> float:
    """The ratio of the mean waits of full and `mode` in so many measured rounds, with free communication.

    For majority these are the rounds that `solo` measures: which ranks open them is drawn. Infinite for solo.
    """
    skews = expected(mode, ranks)[0]
    if mode == "majority":
        operation = Operation("", (), ReduceOp.SUM, Opening.MAJORITY)
        numbers = range(2 * WARMUP + 1, 2 * (WARMUP + iterations), 2)  # every second round is synchronous
        drawn = [operation.first_drawn(number, ranks) for number in numbers]
        skews = sum(k * (k + 1) for k in drawn) / (2 * ranks * len(drawn))
    return expected("full", ranks)[0] / skews if skews else math.inf


async def solo(comm: Communicator, plan: BenchPlan, pause: Pause) -> AsyncIterator[Row]:
    """Measure all modes at each size, one row each. All ranks call it.

    `pause(seconds)` delays a rank before its call. The column `ratio` is the mean wait of `full` divided by that of the
    mode.
    """
    for size in plan.sizes:
        full_s = 0.0
        for mode in MODES:
            row = await _measure(comm, plan, size, mode, pause)
            full_s = full_s or row["mean_us"]
            yield {**row, "ratio": full_s / row["mean_us"]}


async def _measure(comm: Communicator, plan: BenchPlan, size: int, mode: str, pause: Pause) -> Row:
    x = np.empty(size // ITEM_BYTES, np.float32)
    waits, active, wrong = [], [], 0
    for _ in range(WARMUP + plan.iterations):
        x.fill(1)
        await comm.barrier()
        await pause(comm.rank * plan.skew_s)
        start = time.perf_counter()
        taking_part = await _call(comm, mode, x)
        waits.append(time.perf_counter() - start)
        active.append(taking_part)
        wrong += wrong_elements(x, taking_part)
        if mode != "full":  # the synchronous round that takes the late contributions
            x.fill(0)
            await _call(comm, mode, x)
            wrong += wrong_elements(x, comm.size - taking_part)
    everyones = await comm.allgather(np.array([waits[WARMUP:], active[WARMUP:]], np.float64))
    total = await comm.allgather(np.array(wrong))
    mean_skews, nap = expected(mode, comm.size)
    return {
        "size": size,
        "mode": mode,
        "mean_us": float(everyones[:, 0].mean()) * 1e6,
        "median_us": float(np.median(everyones[:, 0])) * 1e6,
        "expected_us": mean_skews * plan.skew_s * 1e6,
        "nap": float(everyones[:, 1].mean()),
        "expected_nap": nap,
        "bound": bound(mode, comm.size, plan.iterations),
        "wrong": int(total.sum()),
    }


async def _call(comm: Communicator, mode: str, x: Array) -> int:
    """Make a call of this mode. Returns the number of ranks in its result. Every second round is synchronous."""
    name = f"bench {mode} {x.nbytes}"
    if mode == "full":
        await comm.allreduce(x)
        return comm.size
    if mode == "majority":
        reduction = await comm.majority_allreduce(x, name=name, sync_every=2)
    elif mode == "quorum":
        reduction = await comm.quorum_allreduce(x, name=name, quorum=half(comm.size), sync_every=2)
    else:
        reduction = await comm.solo_allreduce(x, name=name, sync_every=2)
    return reduction.active
