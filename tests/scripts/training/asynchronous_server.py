"""Asynchronous SGD with a server in real processes. Ranks leave their loops at different steps.

With an argument, that rank kills itself after some steps, and each survivor prints the rank whose loss it is told of.
"""

import hashlib
import os
import signal
import sys

import torch

import asyncoll
from asyncoll.training import DCASGD, ParameterServerSGD


async def train(comm: asyncoll.Communicator, sgd: ParameterServerSGD, victim: int | None) -> None:
    """Train for a number of rounds, and some steps more at some ranks."""
    await sgd.start()

    def compute() -> None:
        sgd.model(torch.randn(4, 8)).square().mean().backward()

    while sgd.round < 20:
        await asyncoll.offload(compute)
        await sgd.step()
        if comm.rank == victim and sgd.round > 5:
            os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(comm.rank):
        await asyncoll.offload(compute)
        await sgd.step()
    await sgd.finish()


async def main(comm: asyncoll.Communicator) -> None:
    """Train with both servers."""
    torch.manual_seed(comm.rank)
    victim = int(sys.argv[1]) if len(sys.argv) > 1 else None
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    for kind in (ParameterServerSGD, DCASGD):
        sgd = kind(comm, model, torch.optim.SGD(model.parameters(), lr=0.01), staleness=3)
        await train(comm, sgd, victim)
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *model.buffers()])
    print(f"model {hashlib.sha256(bits).hexdigest()} after {sgd.round} rounds")


try:
    asyncoll.run(main)
except asyncoll.PeerLostError as error:
    print(f"rank {error.rank} is lost")
