"""A rank of the training of `late_training`.

The process that starts the ranks loads no torch: with torch it would end a second later at Ctrl-C on a busy machine.
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
from asyncoll.bench.late_training import COMPUTE_S, LATE_S, RULES
from asyncoll.training import AllreduceSGD, EagerSGD

FEATURES, HIDDEN, CLASSES, BATCH, HELD_OUT = 32, 64, 4, 64, 2048
RATE, HISTORY = 0.2, 64
TARGET = 0.9  # accuracy on held-out points


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
