"""Ranks kill themselves amid trainings, one after another; the survivors check what is in their models.

The element of the parameter that a call of a rank adds 1 to tells how often its gradient counts.
"""

import asyncio
import os
import random
import signal
import threading

import torch

import asyncoll
from asyncoll.training import AllreduceSGD, EagerSGD

CALLS = 30


async def train(comm, number, kind, padding, **options):
    size = 4
    model = torch.nn.Linear(padding + size * CALLS, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = kind(comm, model, torch.optim.SGD(model.parameters(), lr=1.0), elastic=True, **options)
    await sgd.start()
    for call in range(CALLS):
        model.weight.grad.zero_()
        model.weight.grad[0, padding + number * CALLS + call] = -1.0
        await asyncio.sleep(0.003 * random.random())
        await sgd.step()
    await sgd.finish()
    counts = model.weight.detach()[0, padding:].reshape(size, CALLS)
    assert (counts[number] > 0).all()
    if kind is EagerSGD:
        assert set(counts.ravel().tolist()) <= {0.0, 1.0}
    return sgd.comm, float(counts.sum())


def kill_later(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


async def main(comm):
    number, sums = comm.rank, []
    if number in (1, 2):
        kill_later((0.05, 0.3)[number - 1] * random.random())
    for kind, padding, options in (
        (EagerSGD, 0, {"op": asyncoll.SUM}),
        (EagerSGD, 30_000, {"op": asyncoll.SUM, "partial": "quorum", "name": "long"}),
        (AllreduceSGD, 0, {}),
    ):
        comm, total = await train(comm, number, kind, padding, **options)
        sums.append(total)
    print(f"trained on {sums}")


asyncoll.run(main)
