"""DC-S3GD hides the allreduce behind the gradient: time of an iteration against max(compute, allreduce).

This is equation 14 of Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD for large-scale decentralized neural
network training", DLS 2019.

    python benchmarks/dc_s3gd_overlap.py [--ranks 2,4] [--networks host,1] [--computes sleep,burn] [--factors 2,1,0.5]

The ranks are real processes on one host. The parts of an iteration are measured in the same processes: `compute` is the
gradient alone, by all ranks at once; `allreduce` is the allreduce alone; `local` is an iteration of DC-S3GD without
both, by all ranks at once: copies, compensation and the optimizer's step (momentum SGD). The equation leaves `local`
out, and nothing hides it. The synchronous trainer beside it takes compute + allreduce (equation 13). A time is the
slowest rank's mean over iterations from step to step, everything included; of several repeats (worlds of processes)
the median.

The gradient of so many float32 parameters is emulated, and takes `factor` times the allreduce. It `sleep`s, as if an
accelerator computed, or it `burn`s the processor with matrix products, the same number of them in each iteration, so
that it takes longer where communication needs the processor too. What burning takes alone is its processor time, shared
evenly by the cores: where ranks outnumber cores, the scheduler does worse, which would flatter the iterations.

The network `host` is the sockets of this host: every byte costs processor time. A number is a network of so many
Gbit/s, emulated: no allreduce returns before its call is 2 (P - 1) / P x bytes / bandwidth old, which costs nothing.

`processors` is the processor time of compute, allreduce and local, each measured alone, over all ranks and shared by
all cores. No order of work takes less, so where it exceeds max(compute, allreduce) by 15 %, the target is out of reach
on this machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import Record, ask, numbers, parser, program

import asyncoll
from asyncoll.training import DCS3GD, AllreduceSGD, Trainer

WARMUP = 3
TARGET = 1.15
LEARNING_RATE, MOMENTUM = 1e-4, 0.9
PRODUCT = 128  # rows of the matrices that are multiplied: they stay in a core's cache
CALIBRATION = 300  # products
TRAINERS: dict[str, type[Trainer]] = {"DC-S3GD": DCS3GD, "synchronous": AllreduceSGD}
RATIOS: dict[str, Callable[[dict[str, Any]], float]] = {
    "DC-S3GD/max": lambda row: row["DC-S3GD_s"] / longest(row),
    "processors/max": lambda row: row["processors_s"] / longest(row),
    "synchronous/sum": lambda row: row["synchronous_s"] / (row["compute_s"] + row["allreduce_s"]),
    "synchronous/DC-S3GD": lambda row: row["synchronous_s"] / row["DC-S3GD_s"],
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=numbers("2,4"))
    options.add_argument("--networks", default="host,1", help="host, or Gbit/s")
    options.add_argument("--computes", default="sleep,burn")
    options.add_argument("--factors", type=factors, default=factors("2,1,0.5"), help="compute over allreduce")
    options.add_argument("--parameters", type=int, default=1_000_000)
    options.add_argument("--rounds", type=int, default=25, help="counted iterations of each trainer in a repeat")
    options.add_argument("--repeats", type=int, default=5)
    record = Record(options, "dc_s3gd_overlap")
    chosen = record.arguments
    question = {
        "networks": chosen.networks.split(","),
        "computes": chosen.computes.split(","),
        "factors": chosen.factors,
        "parameters": chosen.parameters,
        "rounds": chosen.rounds,
    }
    found = {}
    for ranks in chosen.ranks:
        repeats = [ask(ranks, __file__, question) for _ in range(chosen.repeats)]
        rows = [summary(list(row)) for row in zip(*repeats, strict=True)]
        found[ranks] = {"repeats": repeats, "summary": rows}
        record.table(f"{ranks} ranks, {4e-6 * chosen.parameters:g} MB of gradients, times in ms", table(rows))
    plot(record, {ranks: of_ranks["summary"] for ranks, of_ranks in found.items()})
    record.write(found)


def factors(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def longest(row: dict[str, Any]) -> float:
    return float(max(row["compute_s"], row["allreduce_s"]))


def summary(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the repeats; ratios are taken in each of them."""
    row = dict(repeats[0])
    for key in row:
        if key.endswith("_s"):
            row[key] = statistics.median(found[key] for found in repeats)
    for key, ratio in RATIOS.items():
        row[key] = statistics.median(ratio(found) for found in repeats)
    return row


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = asyncoll.run(measure, question)
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one iteration: seconds of the slowest rank, and processor seconds of all ranks."""

    wall_s: float
    processor_s: float


class Meter:
    """Measures from the last `start` to each `stop`: seconds, and processor seconds of all threads of this process."""

    def __init__(self) -> None:
        self._parts: list[tuple[float, float]] = []
        self.start()

    def start(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self._parts.append((time.perf_counter() - self._start[0], time.process_time() - self._start[1]))
        self.start()

    async def cost(self, comm: asyncoll.Communicator) -> Cost:
        wall_s, processor_s = (await comm.allgather(np.mean(self._parts[WARMUP:], axis=0))).T
        return Cost(float(wall_s.max()), float(processor_s.sum()))


class Network:
    """A communicator whose allreduces take at least `wire_s`, counted from this rank's call."""

    def __init__(self, comm: asyncoll.Communicator, wire_s: float) -> None:
        self._comm = comm
        self._wire_s = wire_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: torch.Tensor, op: asyncoll.ReduceOp) -> Coroutine[Any, Any, torch.Tensor]:
        end_s = time.perf_counter() + self._wire_s
        work = self._comm.allreduce(x, op=op)  # has started

        async def wait() -> torch.Tensor:
            await work
            rest_s = end_s - time.perf_counter()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            return x

        return wait()


class Alone(Network):
    """A communicator whose allreduces return at once, so that an iteration consists of local work."""

    def __init__(self, comm: asyncoll.Communicator) -> None:
        super().__init__(comm, 0.0)

    async def allreduce(self, x: torch.Tensor, op: asyncoll.ReduceOp) -> torch.Tensor:
        x[0] += 1  # without a difference between the average and this rank's model, compensation has no work
        return x


async def measure(comm: asyncoll.Communicator, question: dict[str, Any]) -> list[dict[str, Any]]:
    """For each network, kind of compute and factor: the times of the parts, and of both trainers."""
    parameters, rounds = question["parameters"], question["rounds"]
    bytes_sent = 4 * parameters * 2 * (comm.size - 1) / comm.size
    local = await iterations(Alone(comm), "DC-S3GD", parameters, rounds, lambda: None)
    product_s = await products(comm)
    cores = len(os.sched_getaffinity(0))
    rows = []
    for name in question["networks"]:
        network = Network(comm, 0.0 if name == "host" else 8e-9 * bytes_sent / float(name))
        allreduce = await allreduces(network, parameters, rounds)
        for kind in question["computes"]:
            for factor in question["factors"]:
                compute = sleep(factor * allreduce.wall_s)
                if kind == "burn":
                    compute = burn(max(1, round(factor * allreduce.wall_s / product_s)))
                alone = await gradients(comm, parameters, rounds, compute)
                compute_s = alone.wall_s if kind == "sleep" else alone.processor_s / min(cores, comm.size)
                times = {
                    f"{trainer}_s": (await iterations(network, trainer, parameters, rounds, compute)).wall_s
                    for trainer in TRAINERS
                }
                processor_s = sum(cost.processor_s for cost in (alone, allreduce, local))
                rows.append(
                    {
                        "network": name if name == "host" else f"{name} Gbit/s",
                        "by": kind,
                        "factor": factor,
                        "compute_s": compute_s,
                        "allreduce_s": allreduce.wall_s,
                        "local_s": local.wall_s,
                        "processors_s": processor_s / cores,
                        **times,
                    }
                )
    return rows


def sleep(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)  # blocks the caller's loop, as a computation would


def burn(count: int) -> Callable[[], None]:
    a, result = torch.eye(PRODUCT), torch.empty(PRODUCT, PRODUCT)

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a, out=result)

    return compute


async def products(comm: asyncoll.Communicator) -> float:
    """Seconds of a matrix product while all ranks multiply."""
    compute, meter = burn(CALIBRATION), Meter()
    await comm.barrier()
    meter.start()
    for _ in range(2 * WARMUP):
        compute()
        meter.stop()
    return (await meter.cost(comm)).wall_s / CALIBRATION


async def allreduces(network: Network, parameters: int, rounds: int) -> Cost:
    x, meter = torch.zeros(parameters), Meter()
    for _ in range(WARMUP + rounds):
        await network.barrier()
        meter.start()
        await network.allreduce(x, op=asyncoll.AVG)
        meter.stop()
    return await meter.cost(network._comm)


def model_of(parameters: int) -> torch.nn.Linear:
    return torch.nn.Linear(parameters, 1, bias=False)


async def gradients(comm: asyncoll.Communicator, parameters: int, rounds: int, compute: Callable[[], None]) -> Cost:
    """The gradient alone, by all ranks at once."""
    gradient, meter = torch.zeros(parameters), Meter()
    await comm.barrier()
    meter.start()
    for _ in range(WARMUP + rounds):
        compute()
        gradient.fill_(comm.rank + 1)
        meter.stop()
    return await meter.cost(comm)


async def iterations(network: Any, trainer: str, parameters: int, rounds: int, compute: Callable[[], None]) -> Cost:
    """A trainer's iterations, from the end of one step to that of the next."""
    model, meter = model_of(parameters), Meter()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    sgd = TRAINERS[trainer](network, model, optimizer)
    await sgd.start()
    meter.start()
    for _ in range(WARMUP + rounds):
        compute()
        assert model.weight.grad is not None
        model.weight.grad.fill_(network.rank + 1)
        await sgd.step()
        meter.stop()
    await sgd.finish()
    return await meter.cost(network._comm)


# -- showing --------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    times = ["compute", "allreduce", "local", "processors", *TRAINERS]
    lines = [["network", "by", *times, *RATIOS, "within 15 %"]]
    for row in rows:
        cells = [row["network"], row["by"], *(f"{1e3 * row[f'{name}_s']:.1f}" for name in times)]
        lines.append([*cells, *(f"{row[ratio]:.2f}" for ratio in RATIOS), verdict(row)])
    return lines


def verdict(row: dict[str, Any]) -> str:
    if row["DC-S3GD/max"] <= TARGET:
        return "yes"
    return "no: processors" if row["processors/max"] > TARGET else "no"


def plot(record: Record, found: dict[int, list[dict[str, Any]]]) -> None:
    """Iterations over max(compute, allreduce)."""
    with record.figure(len(found)) as panels:
        for axes, (ranks, rows) in zip(panels, found.items(), strict=True):
            places = range(len(rows))
            for trainer, marker in zip(TRAINERS, "ox", strict=True):
                axes.plot(places, [row[f"{trainer}_s"] / longest(row) for row in rows], marker, label=trainer)
            axes.plot(places, [row["processors/max"] for row in rows], "_", color="grey", label="processors")
            axes.axhline(TARGET, color="grey", linewidth=0.8)
            labels = [f"{row['network']}, {row['by']}, {row['factor']:g}:1" for row in rows]
            axes.set_xticks(places, labels, rotation=75, fontsize=7)
            axes.set(title=f"{ranks} ranks", ylabel="iteration / max(compute, allreduce)", ylim=(0, None))
            axes.legend()


if __name__ == "__main__":
    program(main, rank)
