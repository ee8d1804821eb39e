"""The cost of a training object beside its collective: time of `step()`, and memory, for each algorithm.

    python benchmarks/training_overhead.py [--ranks 2] [--parameters 1000000] [--repeats 60]

*Time.* Real processes; all ranks call together, on a model of 24 layers. `step` is the median of `await t.step()` with
gradients in place; `raw` that of the same exchange by bare calls of the communicator on one flat tensor, and of the
optimizer's step; both alternate in one run. `over 50 ms` is the difference as a share of a step of 50 ms. An exchange
that overlaps the next gradient is awaited at once in both.

*Memory.* Of one rank, in multiples of the parameters' bytes: all tensors that live after three steps, less the model,
its gradients and the state of the optimizer. What the runtime keeps outside of tensors (staged contributions, results
of rounds) is not in it; the classes' docstrings state it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from common import Record, ask, parser, program

import asyncoll
from asyncoll import training

Raw = Callable[[asyncoll.Communicator, torch.Tensor, int], Awaitable[Any]]
LAYERS = 24
STEP_S = 0.05


async def allreduce(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    del iteration
    await comm.allreduce(x, op=asyncoll.AVG)


async def solo(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    del iteration
    await comm.solo_allreduce(x, name="raw", op=asyncoll.AVG, history=16)


async def group(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    del iteration
    await comm.group_allreduce(x.clone(), name="raw", group_size=2, sync_every=10)


async def oktopk(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    del iteration
    await comm.sparse_allreduce(x, name="raw", density=0.01)


async def ring(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    del iteration
    await comm.neighbor_average(x)


async def push(comm: asyncoll.Communicator, x: torch.Tensor, iteration: int) -> None:
    received, _ = await comm.push_sum(x, torch.ones(1, dtype=torch.float64), iteration=iteration)
    x.add_(received)


METHODS: dict[str, tuple[type[training.Trainer], dict[str, Any], Raw]] = {
    "AllreduceSGD": (training.AllreduceSGD, {}, allreduce),
    "OverlappedSGD": (training.OverlappedSGD, {}, allreduce),
    "EagerSGD, history 16": (training.EagerSGD, {"history": 16}, solo),
    "WagmaSGD": (training.WagmaSGD, {"group_size": 2}, group),
    "DCS3GD": (training.DCS3GD, {}, allreduce),
    "OkTopkSGD": (training.OkTopkSGD, {}, oktopk),
    "DPSGD": (training.DPSGD, {}, ring),
    "SGP": (training.SGP, {}, push),
    "SGP, overlap": (training.SGP, {"overlap": True}, push),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--parameters", type=int, default=1_000_000)
    options.add_argument("--repeats", type=int, default=60)
    record = Record(options, "training_overhead")
    chosen = record.arguments
    question = {"parameters": chosen.parameters, "repeats": chosen.repeats}
    rows = {name: ask(chosen.ranks, __file__, question | {"method": name}) for name in METHODS}
    lines = [["", "step (ms)", "raw (ms)", "over 50 ms", "memory, x parameters"]]
    for name, row in rows.items():
        step_s, raw_s = statistics.median(row["step_s"]), statistics.median(row["raw_s"])
        times = [f"{1e3 * step_s:.2f}", f"{1e3 * raw_s:.2f}", f"{(step_s - raw_s) / STEP_S:.1%}"]
        lines.append([name, *times, f"{row['memory']:.2f}"])
    record.table(f"{chosen.ranks} ranks, {chosen.parameters} parameters, plain SGD", lines)
    record.write(rows)


def rank(question: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return asyncoll.run(measure, question)


async def measure(comm: asyncoll.Communicator, question: dict[str, Any]) -> dict[str, Any]:
    kind, options, raw = METHODS[question["method"]]
    width = round((question["parameters"] / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    bytes_ = sum(parameter.nbytes for parameter in model.parameters())
    before = live_bytes()
    trainer = kind(comm, model, optimizer, **options)
    await trainer.start()
    for _ in range(3):
        fill(model)
        await trainer.step()
    memory = (live_bytes() - before - bytes_) / bytes_  # the gradients were not there before
    x, bare = comm.empty(bytes_ // 4, torch.float32).zero_(), torch.nn.Parameter(torch.zeros(bytes_ // 4))
    bare.grad = torch.zeros_like(bare)
    bare_optimizer = torch.optim.SGD([bare], lr=1e-6)
    steps_s, raws_s = [], []
    for iteration in range(question["repeats"]):
        fill(model)
        await comm.barrier()
        began = time.perf_counter()
        await trainer.step()
        steps_s.append(time.perf_counter() - began)
        x.fill_(1e-3)
        await comm.barrier()
        began = time.perf_counter()
        await raw(comm, x, iteration)
        bare_optimizer.step()
        raws_s.append(time.perf_counter() - began)
    await trainer.finish()
    return {"step_s": steps_s, "raw_s": raws_s, "memory": memory}


def fill(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.fill_(1e-3)


def live_bytes() -> int:
    """The bytes in the storages of all tensors, each once: the storages of a flat tensor and of its pieces overlap."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    total = end = 0
    for start, length in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        total += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return total


if __name__ == "__main__":
    program(main, rank)
