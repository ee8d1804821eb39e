"""The cost of an uncontended solo round over a synchronous allreduce of the same tensor, on the same transport.

    python benchmarks/solo_overhead.py [--ranks 2,4] [--sizes 1M,4M,16M] [--calls 20] [--repeats 3]

All ranks arrive together, after a barrier, and the two take turns, call by call. A time is the slowest rank's median,
and of several repeats (worlds of processes) the median. The target is a ratio of at most 1.3 at 1 MB and above.

The parts of the difference: `bookkeeping` is a synchronous round of the same tensor, less the allreduce;
`activation, lateness` is the rest. A rank that comes a moment after a round has begun takes part with nothing, and has
its contribution and the result copied; `one copy` is what that costs each time, measured apart while the others do the
same, and `rounds with all` counts rounds in which no rank was late.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from common import Record, ask, numbers, parser, program

import asyncoll
from asyncoll.bench.dense_calls import slowest, wrong_elements
from asyncoll.bench.plan import ITEM_BYTES, parse_sizes
from asyncoll.tensors.reductions import Array

WARMUP = 3
TARGET = 1.3
Part = Callable[[], Awaitable[int]]  # returns the expected value of every element


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[2, 4])
    options.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1M,4M,16M"))
    options.add_argument("--calls", type=int, default=20, help="counted calls of each in a repeat")
    options.add_argument("--repeats", type=int, default=3)
    record = Record(options, "solo_overhead")
    chosen = record.arguments
    raw: dict[int, Any] = {}
    for ranks in chosen.ranks:
        question = {"sizes": chosen.sizes, "calls": chosen.calls}
        repeats = [ask(ranks, __file__, question) for _ in range(chosen.repeats)]
        rows = [summary([found[place] for found in repeats]) for place in range(len(chosen.sizes))]
        record.table(f"{ranks} ranks over unix sockets, float32 (target: {TARGET})", table(rows))
        raw[ranks] = {"repeats": repeats, "summary": rows}
    plot(record, raw)
    record.write(raw)


def summary(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the repeats, and the ratio of each repeat's two."""
    row = {key: statistics.median(found[key] for found in repeats) for key in repeats[0]}
    return row | {"ratio": statistics.median(found["solo_us"] / found["allreduce_us"] for found in repeats)}


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asyncoll.run(measure, question["sizes"], question["calls"])
    return found


async def measure(comm: asyncoll.Communicator, sizes: list[int], calls: int) -> list[dict[str, Any]]:
    return [await one_size(comm, size, calls) for size in sizes]


async def one_size(comm: asyncoll.Communicator, size: int, calls: int) -> dict[str, Any]:
    x = np.empty(size // ITEM_BYTES, np.float32)
    ones = np.ones_like(x)
    parts: dict[str, Part] = {
        "allreduce": allreduce(comm, x),
        "solo": solo(comm, x, f"solo of {size}", sync_every=2),
        "waiting": solo(comm, x, f"waiting of {size}", sync_every=1),
        "copy": copying(x, ones),
    }
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    wrong = together = 0
    for _ in range(WARMUP + calls):
        for part, call in parts.items():
            x.fill(1)
            await comm.barrier()
            start = time.perf_counter()
            active = await call()
            seconds[part].append(time.perf_counter() - start)
            wrong += wrong_elements(x, active)
            if part == "solo":  # a synchronous round takes the contributions that were too late for this one
                together += active == comm.size
                x.fill(0)
                await call()
                wrong += wrong_elements(x, comm.size - active)
    medians = {part: (await slowest(comm, found[WARMUP:], 0))[0] for part, found in seconds.items()}
    _, _, wrong = await slowest(comm, [0.0], wrong)
    if wrong:
        raise RuntimeError(f"{wrong} wrong elements")
    times = {f"{part}_us": 1e6 * median for part, median in medians.items()}
    return {"size": size, **times, "together": together / (WARMUP + calls)}


def allreduce(comm: asyncoll.Communicator, x: Array) -> Part:
    async def call() -> int:
        await comm.allreduce(x)
        return comm.size

    return call


def solo(comm: asyncoll.Communicator, x: Array, name: str, sync_every: int) -> Part:
    async def call() -> int:
        return (await comm.solo_allreduce(x, name=name, sync_every=sync_every)).active

    return call


def copying(x: Array, source: Array) -> Part:
    async def call() -> int:
        np.copyto(x, source)
        return 1

    return call


# -- showing --------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["bytes", "allreduce (us)", "solo (us)", "solo/allreduce", "difference (us)"]]
    lines[0] += ["bookkeeping", "activation, lateness", "one copy", "rounds with all"]
    for row in rows:
        base, solo_us, waiting = row["allreduce_us"], row["solo_us"], row["waiting_us"]
        ratio, together = f"{row['ratio']:.2f}", f"{row['together']:.0%}"
        parts = [solo_us - base, waiting - base, solo_us - waiting, row["copy_us"]]
        lines.append(
            [str(row["size"]), f"{base:.0f}", f"{solo_us:.0f}", ratio, *(f"{part:.0f}" for part in parts), together]
        )
    return lines


def plot(record: Record, raw: dict[int, Any]) -> None:
    """The ratio by size, and the target."""
    with record.figure() as (axes,):
        for ranks, found in raw.items():
            sizes = [row["size"] / 2**20 for row in found["summary"]]
            axes.plot(sizes, [row["ratio"] for row in found["summary"]], marker="o", label=f"{ranks} ranks")
        axes.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", xlabel="MiB", ylabel="solo / allreduce")
        axes.legend()


if __name__ == "__main__":
    program(main, rank)
