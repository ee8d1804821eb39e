"""Rank 1 is killed amid a training; the others make it anew, and end with equal models."""

import os
import signal

import numpy as np
import torch

import asyncoll
from asyncoll.training import EagerSGD


async def main(comm):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    torch.manual_seed(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    number, step = comm.rank, 0
    sgd = EagerSGD(comm, model, optimizer, history=64)
    while True:
        try:
            while step < 20:
                optimizer.zero_grad()
                model(torch.randn(16, 20)).pow(2).mean().backward()
                if number == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                await sgd.step()
                step += 1
            await sgd.finish()
            break
        except asyncoll.PeerLostError:
            comm = await comm.shrink()
            for parameter in model.parameters():
                await comm.broadcast(parameter.data, 0)
            sgd, step = EagerSGD(comm, model, optimizer, history=64), min(step, 15)  # each makes a step, at least
    sums = np.zeros(comm.size)
    sums[comm.rank] = sum(parameter.sum().item() for parameter in model.parameters())
    await comm.allreduce(sums)
    assert comm.size == 2
    assert sums[0] == sums[1]
    print("trained on")


asyncoll.run(main)
