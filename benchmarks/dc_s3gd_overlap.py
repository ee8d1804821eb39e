"""DC-S3GD hides the allreduce behind the gradient: iterations against max(compute, allreduce) (seed 003, equation 14).

    python benchmarks/dc_s3gd_overlap.py [--ranks 4] [--parameters 1000000] [--factors 0.5,1,2,4] [--rounds 30]

Real processes. The gradient of a model of so many float32 parameters is emulated: a sleep, which blocks the caller's
loop as a computation would. It is as long as the factors say, times the allreduce that was measured first. The
synchronous trainer beside it takes compute + allreduce (equation 13). A time is the slowest rank's median iteration,
and of several repeats (worlds of processes) the median.

`waits` is how long an iteration waits for its allreduce after the gradient: the communication that is not hidden.
`local` is what is left of it: the optimizer's step, and DC-S3GD's compensation and copies, by all ranks at once on the
same cores. Nothing hides it, and the paper's equation leaves it out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import torch
from common import Record, ask, parser, program

import asyncoll
from trainers.allreduce_sgd import allreduce_sgd
from trainers.dc_s3gd import dc_s3gd

WARMUP = 3
LEARNING_RATE = 1e-3
TRAINERS: dict[str, Callable[..., AsyncIterator[asyncoll.Reduction]]] = {
    "synchronous": allreduce_sgd,
    "DC-S3GD": dc_s3gd,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--parameters", type=int, default=1_000_000)
    options.add_argument("--factors", type=factors, default=factors("0.25,0.5,1,2,4"))
    options.add_argument("--rounds", type=int, default=30, help="counted iterations of each trainer in a repeat")
    options.add_argument("--repeats", type=int, default=3)
    record = Record(options, "dc_s3gd_overlap")
    chosen = record.arguments
    question = {"parameters": chosen.parameters, "factors": chosen.factors, "rounds": chosen.rounds}
    repeats = [ask(chosen.ranks, __file__, question) for _ in range(chosen.repeats)]
    rows = [summary([found["sweep"][place] for found in repeats]) for place in range(len(chosen.factors))]
    paper = "paper: DC-S3GD/max and synchronous/sum are 1, equations 13 and 14"
    record.table(f"{chosen.ranks} ranks, {4e-6 * chosen.parameters:g} MB of gradients ({paper})", table(rows))
    plot(record, rows)
    record.write({"repeats": repeats, "summary": rows})


def factors(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def summary(repeats: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the repeats; ratios are taken in each of them."""
    row = {key: statistics.median(found[key] for found in repeats) for key in repeats[0]}
    for key, ratio in RATIOS.items():
        row[key] = statistics.median(ratio(found) for found in repeats)
    return row


RATIOS: dict[str, Callable[[dict[str, float]], float]] = {
    "DC-S3GD/max": lambda found: found["DC-S3GD_s"] / max(found["compute_s"], found["allreduce_s"]),
    "DC-S3GD/(max + local)": lambda found: (
        found["DC-S3GD_s"] / (max(found["compute_s"], found["allreduce_s"]) + found["DC-S3GD local_s"])
    ),
    "synchronous/sum": lambda found: found["synchronous_s"] / (found["compute_s"] + found["allreduce_s"]),
    "synchronous/DC-S3GD": lambda found: found["synchronous_s"] / found["DC-S3GD_s"],
}


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = asyncoll.run(measure, question)
    return found


async def measure(comm: asyncoll.Communicator, question: dict[str, Any]) -> dict[str, Any]:
    """The allreduce, then both trainers in turn for each compute time."""
    parameters, rounds = question["parameters"], question["rounds"]
    allreduce_s = await slowest_median(comm, await allreduces(comm, parameters, rounds))
    sweep = []
    for factor in question["factors"]:
        compute_s = factor * allreduce_s
        times = {}
        for trainer in TRAINERS:
            seconds, waits = await iterations(comm, trainer, parameters, rounds, compute_s)
            times[f"{trainer}_s"] = await slowest_median(comm, seconds)
            times[f"{trainer} waits_s"] = await slowest_median(comm, waits)
            own_s = float(np.median(seconds) - np.median(waits)) - compute_s
            times[f"{trainer} local_s"] = await slowest_median(comm, [own_s])
        sweep.append({"compute_s": compute_s, "allreduce_s": allreduce_s, **times})
    return {"sweep": sweep}


async def allreduces(comm: asyncoll.Communicator, parameters: int, calls: int) -> list[float]:
    x, seconds = torch.zeros(parameters), []
    for _ in range(WARMUP + calls):
        await comm.barrier()
        start = time.perf_counter()
        await comm.allreduce(x, op=asyncoll.AVG)
        seconds.append(time.perf_counter() - start)
    return seconds[WARMUP:]


class Waiting:
    """A communicator that notes how long its allreduces were waited for."""

    def __init__(self, comm: asyncoll.Communicator) -> None:
        self._comm = comm
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allreduce(self, x: torch.Tensor, op: asyncoll.ReduceOp) -> Coroutine[Any, Any, torch.Tensor]:
        work = self._comm.allreduce(x, op=op)  # has started

        async def wait() -> torch.Tensor:
            start = time.perf_counter()
            await work
            self.seconds.append(time.perf_counter() - start)
            return x

        return wait()


async def iterations(
    comm: asyncoll.Communicator, trainer: str, parameters: int, rounds: int, compute_s: float
) -> tuple[list[float], list[float]]:
    """Seconds from update to update, and waited for an allreduce in each."""
    model, waiting = torch.nn.Linear(parameters, 1, bias=False), Waiting(comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    async def gradient(round_: int) -> None:
        time.sleep(compute_s)  # noqa: ASYNC251 (progress comes from elsewhere)
        assert model.weight.grad is not None
        model.weight.grad.fill_(comm.rank + 1)

    ends = []
    async for _ in TRAINERS[trainer](waiting, model, optimizer, gradient, rounds=WARMUP + rounds):
        ends.append(time.perf_counter())
    return list(np.diff(ends)[WARMUP - 1 :]), waiting.seconds[WARMUP:]


async def slowest_median(comm: asyncoll.Communicator, seconds: list[float]) -> float:
    everyones = await comm.allgather(np.array(np.median(seconds)))
    return float(everyones.max())


# -- showing --------------------------------------------------------------------------------------


def table(rows: list[dict[str, float]]) -> list[list[str]]:
    times = ["compute", "allreduce"]
    times += [f"{trainer}{part}" for trainer in TRAINERS for part in ("", " waits", " local")]
    lines = [[*(f"{name} (ms)" for name in times), *RATIOS.keys()]]
    for row in rows:
        cells = [f"{1e3 * row[f'{name}_s']:.1f}" for name in times]
        lines.append([*cells, *(f"{row[ratio]:.2f}" for ratio in RATIOS)])
    return lines


def plot(record: Record, rows: list[dict[str, float]]) -> None:
    """Iterations by compute time, and what equations 13 and 14 say."""
    compute = [1e3 * row["compute_s"] for row in rows]
    allreduce = 1e3 * rows[0]["allreduce_s"]
    with record.figure() as (axes,):
        for colour, trainer in enumerate(TRAINERS):
            axes.plot(compute, [1e3 * row[f"{trainer}_s"] for row in rows], "o", color=f"C{colour}", label=trainer)
        axes.plot(compute, [each + allreduce for each in compute], "-", color="C0", linewidth=0.8, label="sum")
        axes.plot(compute, [max(each, allreduce) for each in compute], "-", color="C1", linewidth=0.8, label="max")
        axes.set(xlabel="compute, ms", ylabel="iteration, ms")
        axes.legend()


if __name__ == "__main__":
    program(main, rank)
