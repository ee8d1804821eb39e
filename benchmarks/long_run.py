"""Memory and time per call of a long-lived world: many rounds and many collectives in one world.

    python benchmarks/long_run.py [--ranks 2] [--calls 100000] [--transports shm,zmq] [--trace]

After the first 1,000 calls of each kind, memory and time per call should stay level. `RSS` is what a process has in
memory, `shared` what of it is shared memory, and `Python` what tracemalloc counts (with `--trace`, which makes calls
slower). Growth is since the first 1,000 calls, of the rank where it is largest; a time per call is rank 0's median.
"""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import Record, ask, parser, program

import asyncoll
from asyncoll import MAX

WARMUP = 1000  # calls
PARTS = 10  # of a run; memory is measured after each
ELEMENTS = 256
GROWTH_KB = 1024  # allowed
MEMORY = {"RSS": "VmRSS", "shared": "RssShmem"}  # as /proc/self/status names them, in KiB


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--calls", type=int, default=100_000, help="of each kind")
    options.add_argument("--transports", type=lambda text: text.split(","), default=["shm", "zmq"])
    options.add_argument("--trace", action="store_true", help="count Python's memory too")
    record = Record(options, "long_run")
    chosen, raw = record.arguments, {}
    for transport in chosen.transports:
        question = {"calls": chosen.calls, "trace": chosen.trace}
        raw[transport] = ask(chosen.ranks, __file__, question, transport)
        record.table(f"{chosen.ranks} ranks, {chosen.calls} calls of each kind, {transport}", table(raw[transport]))
    record.write(raw)


def table(found: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    lines = [["kind", "us per call: first part", "last part", "RSS KiB", "shared KiB", "Python KiB", "level"]]
    for kind, parts in found.items():
        growth = {what: parts[-1][what] - parts[0][what] for what in (*MEMORY, "Python")}
        level = "yes" if max(growth.values()) <= GROWTH_KB else "NO"
        times = [f"{part['us']:.0f}" for part in (parts[1], parts[-1])]
        lines.append([kind, *times, *[f"{grown:+.0f}" for grown in growth.values()], level])
    return lines


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    if question["trace"]:
        tracemalloc.start()
    found: dict[str, list[dict[str, float]]] = asyncoll.run(measure, question["calls"])
    return found


async def measure(comm: asyncoll.Communicator, calls: int) -> dict[str, list[dict[str, float]]]:
    """By kind of call: memory and time after the first 1,000 calls, and after each part of the others."""
    x = comm.empty(ELEMENTS, "float32")
    kinds: dict[str, Callable[[], Awaitable[Any]]] = {
        "collectives": lambda: comm.allreduce(x),
        "solo rounds": lambda: comm.solo_allreduce(x, name="solo", history=4),
        "synchronous rounds": lambda: comm.solo_allreduce(x, name="synchronous", sync_every=1),
        "group rounds": lambda: comm.group_allreduce(x, name="group", group_size=2),
    }
    found = {}
    for kind, call in kinds.items():
        found[kind] = [await part(comm, x, call, WARMUP)]
        for _ in range(PARTS):
            found[kind].append(await part(comm, x, call, (calls - WARMUP) // PARTS))
    return found


async def part(comm: asyncoll.Communicator, x: Any, call: Callable[[], Awaitable[Any]], calls: int) -> dict[str, float]:
    """Make `calls` calls. Returns the memory of this process afterwards, and the median time of a call."""
    await comm.barrier()
    seconds = np.empty(calls)
    for number in range(calls):
        x.fill(1)
        start = time.perf_counter()
        await call()
        seconds[number] = time.perf_counter() - start
    us = statistics.median(seconds) * 1e6
    del seconds
    gc.collect()
    return {"us": us} | await largest(comm, memory())


def memory() -> dict[str, float]:
    """KiB of this process, by kind."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {what: float(status[name].split()[0]) for what, name in MEMORY.items()}
    return found | {"Python": tracemalloc.get_traced_memory()[0] / 1024}


async def largest(comm: asyncoll.Communicator, found: dict[str, float]) -> dict[str, float]:
    """For each number, the largest of all ranks."""
    values = await comm.allreduce(np.array(list(found.values())), op=MAX)
    return dict(zip(found, values.tolist(), strict=True))


if __name__ == "__main__":
    program(main, rank)
