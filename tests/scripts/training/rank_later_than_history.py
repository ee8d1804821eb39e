"""Eager-SGD where the last rank is always later than its history: all ranks end with the same bits nevertheless.

Nobody sleeps: in each period of eight rounds the last rank computes until rank 0 is five rounds ahead of it. Every
period ends with a round for all, so rank 0 aims at one of its last rounds, however late it is itself.
"""

import hashlib
import sys

import torch

import asyncoll
from asyncoll.training import EagerSGD

PERIOD = 8


async def main(comm: asyncoll.Communicator, optimizer: str) -> tuple[str, int, int]:
    """The digest of model and optimizer, results lost for good, and results that history gave back."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.02, **options)
    word = torch.zeros(1)
    periods = 0  # that rank 0 has released the last rank in

    sgd = EagerSGD(comm, model, steps, history=1, sync_every=PERIOD)
    await sgd.start()
    lost = missed = 0
    while sgd.round < 4 * PERIOD:
        round_ = sgd.round + 1
        model(torch.randn(4, 8)).square().mean().backward()
        if comm.rank == 0 and periods < (round_ + PERIOD - 5) // PERIOD:
            periods += 1
            await comm.send(word, dest=comm.size - 1)
        if comm.rank == comm.size - 1 and periods < (round_ + PERIOD - 1) // PERIOD:
            periods += 1
            await comm.recv(word, source=0)
        done = await sgd.step()
        lost += done.skipped
        missed += len(done.missed)
    await sgd.finish()
    kept = [value for p in model.parameters() for _, value in sorted(steps.state[p].items())]
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *kept])
    return hashlib.sha256(bits).hexdigest(), lost, missed


async def tell(comm: asyncoll.Communicator) -> None:
    digest, lost, missed = await main(comm, sys.argv[1] if len(sys.argv) > 1 else "SGD")
    print(f"weights and state {digest}, {lost} results lost, {missed} caught up")


if __name__ == "__main__":
    asyncoll.run(tell)
