"""Allreduce of float32 by size: asyncoll in shared memory (registered, and not) and by message, Gloo, Open MPI.

    python benchmarks/allreduce.py [--ranks 2,4,8] [--sizes 4,1K,...] [--cold 1K,256K] [--repeats 3]

The systems take turns, with the same protocol: three uncounted calls, then for each call a fresh input, a barrier, the
timed allreduce, and a check of every element. A time is the slowest rank's median (and 99th percentile), and of several
repeats the median; a ratio is taken within each repeat, and of the ratios the median. Open MPI is
measured where `mpirun` and mpi4py are installed. Memory is the growth of a rank during the calls: its own memory, and
its part of shared memory.

The bound is that of the memory: in an allreduce of registered arrays a rank reads its share of all arrays, and writes
as much, which is one array of each. So it takes at least as long as it takes all ranks, at the same time, to copy one
array. It is measured if each rank has a core.

A program calls a collective after milliseconds of other work. So there is a table of cold calls: asyncoll (registered)
and Gloo alternate in the same processes, and before each timed call a rank multiplies matrices for about 2 ms and meets
the others at a barrier of the peer. The time is that from the start of the last rank to the end of the last rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import RANK, Record, answer, ask, numbers, parser

import asyncoll
from asyncoll.bench.claims import Cells, show_bytes
from asyncoll.bench.dense_calls import WARMUP, pattern
from asyncoll.bench.plan import ITEM_BYTES, parse_sizes, repeats
from asyncoll.tensors.reductions import Array

SIZES = "4,1K,16K,64K,256K,1M,4M,16M,100M"
COLD_SIZES = "1K,256K"
COLD_CALLS = 100
COLD_WORK_S = 0.002  # of matrix multiplication before each cold call
MPI_RANK = "as-mpi-rank"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-n"]
REGISTERED, MEMORY, MESSAGES = "registered", "not registered", "by message"
GLOO, MPI = "Gloo", "Open MPI"
COLD, COPY = "cold", "copy"
OURS = (REGISTERED, MEMORY, MESSAGES)
Row = dict[str, float]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[2, 4, 8])
    options.add_argument("--sizes", type=parse_sizes, default=parse_sizes(SIZES))
    options.add_argument("--cold", type=parse_sizes, default=parse_sizes(COLD_SIZES))
    options.add_argument("--repeats", type=int, default=3)
    record = Record(options, "allreduce")
    chosen = record.arguments
    raw: dict[Any, Any] = {}
    for ranks in chosen.ranks:
        runs = [{system: measure(system, ranks, chosen.sizes) for system in systems()} for _ in range(chosen.repeats)]
        raw[ranks] = runs
        record.table(f"{ranks} ranks: time (us)", times(runs, chosen.sizes))
        record.table(f"{ranks} ranks: 99th percentile (us)", times(runs, chosen.sizes, "p99_us"))
        record.table(f"{ranks} ranks: how many times faster", ratios(runs, chosen.sizes))
        if ranks <= len(os.sched_getaffinity(0)):
            copies = [measure(COPY, ranks, chosen.sizes) for _ in range(chosen.repeats)]
            raw[f"{ranks}, copy"] = copies
            record.table(f"{ranks} ranks: the bound by memory bandwidth (us)", bounds(runs, copies, chosen.sizes))
        cold = [measure(COLD, ranks, chosen.cold) for _ in range(chosen.repeats)]
        raw[f"{ranks}, cold"] = cold
        record.table(f"{ranks} ranks: cold calls (us)", cold_times(cold, chosen.cold))
        record.table(f"{ranks} ranks: memory of a rank after {chosen.sizes[-1]} bytes (MiB)", memory(runs))
    plot(record, {ranks: raw[ranks] for ranks in chosen.ranks}, chosen.sizes)
    record.write(raw, cells(raw[chosen.ranks[0]], chosen.sizes))


def systems() -> list[str]:
    installed = shutil.which(MPIRUN[0]) is not None and importlib.util.find_spec("mpi4py") is not None
    return [*OURS, GLOO, *[MPI] * installed]


def measure(system: str, ranks: int, sizes: tuple[int, ...]) -> list[Row]:
    question = {"system": system, "sizes": sizes}
    if system == MPI:
        command = [*MPIRUN, str(ranks), sys.executable, __file__, MPI_RANK, json.dumps(question)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows: list[Row] = json.loads(printed.splitlines()[-1])
    else:
        rows = ask(ranks, __file__, question, transport="zmq" if system == MESSAGES else "shm")
    if any(row.get("wrong") for row in rows):
        sys.exit(f"{system}, {ranks} ranks: wrong results: {rows}")
    return rows


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> list[Row]:
    if question["system"] == GLOO:
        return gloo(question["sizes"])
    return asyncoll.run({COLD: cold, COPY: copy}.get(question["system"], ours), question)


async def ours(comm: asyncoll.Communicator, question: dict[str, Any]) -> list[Row]:
    rows = []
    for size in question["sizes"]:
        count = size // ITEM_BYTES
        inputs = Inputs(comm.rank, comm.size, count)
        before = occupied()
        x = comm.empty(count, "float32") if question["system"] == REGISTERED else np.empty(count, np.float32)
        seconds = []
        for _ in range(WARMUP + repeats(size)):
            inputs.fill(x)
            await comm.barrier()
            start = time.perf_counter()
            await comm.allreduce(x)
            seconds.append(time.perf_counter() - start)
            inputs.check(x)
        rows.append(row(await comm.allgather(inputs.found(seconds, before))))
    return rows


async def copy(comm: asyncoll.Communicator, question: dict[str, Any]) -> list[Row]:
    """All ranks copy a registered array at the same time."""
    rows = []
    for size in question["sizes"]:
        count = size // ITEM_BYTES
        inputs, before = Inputs(comm.rank, comm.size, count), occupied()
        x, y = comm.empty(count, "float32"), comm.empty(count, "float32")
        seconds = []
        for _ in range(WARMUP + repeats(size)):
            inputs.fill(x)
            await comm.barrier()
            start = time.perf_counter()
            y[...] = x
            seconds.append(time.perf_counter() - start)
        rows.append(row(await comm.allgather(inputs.found(seconds, before))))
    return rows


async def cold(comm: asyncoll.Communicator, question: dict[str, Any]) -> list[Row]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = matrix_work()
    rows = []
    for size in question["sizes"]:
        x, y = comm.empty(size // ITEM_BYTES, "float32"), torch.zeros(size // ITEM_BYTES)
        x[...] = 0
        moments = np.empty((COLD_CALLS, 2, 2))  # call, system, start and end; the clock is that of the host
        for call in range(-WARMUP, COLD_CALLS):
            work()
            dist.barrier()
            start = time.perf_counter()
            await comm.allreduce(x)
            moments[call, 0] = start, time.perf_counter()
            work()
            await comm.barrier()
            start = time.perf_counter()
            dist.all_reduce(y)
            moments[call, 1] = start, time.perf_counter()
        last = (await comm.allgather(moments)).max(axis=0)
        ours, gloos = np.median(last[:, :, 1] - last[:, :, 0], axis=0) * 1e6
        rows.append({"time_us": float(ours), "gloo_us": float(gloos)})
    dist.barrier()
    dist.destroy_process_group()
    return rows


def matrix_work() -> Callable[[], None]:
    """A function that multiplies matrices for about COLD_WORK_S, with other data at each rank."""
    a = np.random.default_rng().standard_normal((192, 192), np.float32)
    start = time.perf_counter()
    for _ in range(50):
        a @ a
    count = max(1, round(COLD_WORK_S / ((time.perf_counter() - start) / 50)))

    def work() -> None:
        for _ in range(count):
            a @ a

    return work


def gloo(sizes: list[int]) -> list[Row]:
    import torch  # here, as the ranks of mpirun would spend a minute on it
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def gather(mine: Array) -> Array:
        everyones = [torch.empty(mine.size, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, torch.from_numpy(mine))
        return torch.stack(everyones).numpy()

    def measured(size: int) -> Row:
        x = torch.empty(size // ITEM_BYTES)
        allreduce = lambda: dist.all_reduce(x)  # noqa: E731
        return blocking(dist.get_rank(), dist.get_world_size(), x.numpy(), dist.barrier, allreduce, gather)

    rows = [measured(size) for size in sizes]
    dist.barrier()
    dist.destroy_process_group()
    return rows


def mpi() -> None:
    """The program of a rank under mpirun. Rank 0 prints its answer."""
    from mpi4py import MPI as mpi4py  # type: ignore[import-not-found, unused-ignore]  # noqa: N811

    world = mpi4py.COMM_WORLD

    def gather(mine: Array) -> Array:
        everyones = np.empty((world.size, mine.size))
        world.Allgather(mine, everyones)
        return everyones

    rows = []
    for size in json.loads(sys.argv[2])["sizes"]:
        x = np.empty(size // ITEM_BYTES, np.float32)
        allreduce = lambda: world.Allreduce(mpi4py.IN_PLACE, x)  # noqa: B023, E731
        rows.append(blocking(world.rank, world.size, x, world.Barrier, allreduce, gather))
    if world.rank == 0:
        print(json.dumps(rows))


def blocking(
    place: int,
    size: int,
    x: Array,
    barrier: Callable[[], Any],
    allreduce: Callable[[], Any],
    gather: Callable[[Array], Array],
) -> Row:
    inputs = Inputs(place, size, x.size)
    before = occupied()
    seconds = []
    for _ in range(WARMUP + repeats(x.nbytes)):
        inputs.fill(x)
        barrier()
        start = time.perf_counter()
        allreduce()
        seconds.append(time.perf_counter() - start)
        inputs.check(x)
    return row(gather(inputs.found(seconds, before)))


class Inputs:
    """The input of a rank, and the expected result."""

    def __init__(self, place: int, size: int, count: int) -> None:
        base = pattern(count)
        self._mine, self._total = base * (place + 1), base * (size * (size + 1) // 2)
        self._wrong = 0

    def fill(self, x: Array) -> None:
        x[...] = self._mine

    def check(self, x: Array) -> None:
        self._wrong += int(np.count_nonzero(x != self._total))

    def found(self, seconds: list[float], before: float) -> Array:
        counted = seconds[WARMUP:]
        p99 = float(np.percentile(counted, 99, method="inverted_cdf"))
        return np.array([np.median(counted), p99, self._wrong, occupied() - before])


def row(everyones: Array) -> Row:
    return {
        "time_us": float(everyones[:, 0].max()) * 1e6,
        "p99_us": float(everyones[:, 1].max()) * 1e6,
        "wrong": float(everyones[:, 2].sum()),
        "memory_mib": float(everyones[:, 3].mean()),
    }


def occupied() -> float:
    """Memory in MiB: of this process alone, and its share of memory that several processes map."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


# -- showing --------------------------------------------------------------------------------------


def cells(runs: list[dict[str, list[Row]]], sizes: tuple[int, ...]) -> Cells:
    """What the page of benchmarks shows: the times in seconds with the first number of ranks."""
    return {
        show_bytes(size): {system: median(runs, system, place, "time_us") / 1e6 for system in systems()}
        for place, size in enumerate(sizes)
    }


def times(runs: list[dict[str, list[Row]]], sizes: tuple[int, ...], key: str = "time_us") -> list[list[str]]:
    lines = [["size (B)", *systems()]]
    for place, size in enumerate(sizes):
        lines.append([str(size), *(f"{median(runs, system, place, key):.0f}" for system in systems())])
    return lines


def ratios(runs: list[dict[str, list[Row]]], sizes: tuple[int, ...]) -> list[list[str]]:
    peers = systems()[len(OURS) :]
    lines = [["size (B)", *(f"{ours}, than {peer}" for peer in peers for ours in OURS)]]
    for place, size in enumerate(sizes):
        cells = [f"{ratio(runs, peer, ours, place):.2f}" for peer in peers for ours in OURS]
        lines.append([str(size), *cells])
    return lines


def bounds(runs: list[dict[str, list[Row]]], copies: list[list[Row]], sizes: tuple[int, ...]) -> list[list[str]]:
    lines = [["size (B)", "bound", REGISTERED, "registered / bound"]]
    for place, size in enumerate(sizes):
        bound = float(np.median([rows[place]["time_us"] for rows in copies]))
        time_us = median(runs, REGISTERED, place, "time_us")
        lines.append([str(size), f"{bound:.0f}", f"{time_us:.0f}", f"{time_us / bound:.2f}"])
    return lines


def cold_times(runs: list[list[Row]], sizes: tuple[int, ...]) -> list[list[str]]:
    lines = [["size (B)", REGISTERED, GLOO, "times faster"]]
    for place, size in enumerate(sizes):
        ours, gloos = (float(np.median([rows[place][key] for rows in runs])) for key in ("time_us", "gloo_us"))
        times_faster = np.median([rows[place]["gloo_us"] / rows[place]["time_us"] for rows in runs])
        lines.append([str(size), f"{ours:.0f}", f"{gloos:.0f}", f"{times_faster:.2f}"])
    return lines


def memory(runs: list[dict[str, list[Row]]]) -> list[list[str]]:
    return [systems(), [f"{median(runs, system, -1, 'memory_mib'):.0f}" for system in systems()]]


def median(runs: list[dict[str, list[Row]]], system: str, place: int, key: str) -> float:
    return float(np.median([run[system][place][key] for run in runs]))


def ratio(runs: list[dict[str, list[Row]]], peer: str, ours: str, place: int) -> float:
    return float(np.median([run[peer][place]["time_us"] / run[ours][place]["time_us"] for run in runs]))


def plot(record: Record, raw: dict[int, Any], sizes: tuple[int, ...]) -> None:
    with record.figure(len(raw)) as panels:
        for axes, (ranks, runs) in zip(panels, raw.items(), strict=True):
            for system in systems():
                axes.loglog(
                    sizes, [median(runs, system, place, "time_us") for place in range(len(sizes))], label=system
                )
            axes.set(xlabel="bytes", ylabel="us", title=f"allreduce, {ranks} ranks")
            axes.legend()
            axes.grid(alpha=0.3)


if __name__ == "__main__":
    if sys.argv[1:2] == [MPI_RANK]:
        mpi()
    elif sys.argv[1:2] == [RANK]:
        answer(rank)
    else:
        main()
