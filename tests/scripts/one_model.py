"""Every trainer on a model with BatchNorm and a frozen layer; rank 0 alone has an optimizer with a state.

All ranks print the same digests: of the model, buffers included, at the end or where the loop was left early.
"""

import hashlib
from functools import partial

import torch

import asyncoll
from trainers.allreduce_sgd import allreduce_sgd
from trainers.dc_s3gd import dc_s3gd
from trainers.eager_sgd import eager_sgd
from trainers.oktopk_sgd import oktopk_sgd
from trainers.wagma_sgd import wagma_sgd

TRAINERS = {
    "allreduce_sgd": allreduce_sgd,
    "eager_sgd": partial(eager_sgd, history=4, sync_every=4),
    "wagma_sgd": wagma_sgd,
    "dc_s3gd": dc_s3gd,
    "oktopk_sgd": partial(oktopk_sgd, accumulate="gradients", density=0.3),
}


async def main(comm: asyncoll.Communicator) -> None:
    """Train with each."""
    for name, trainer in TRAINERS.items():
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        async def gradient(round_: int, model: torch.nn.Module = model) -> None:
            model(torch.randn(4, 8)).square().mean().backward()

        if comm.rank == 0:
            await gradient(0)
            optimizer.step()
        async for _ in trainer(comm, model, optimizer, gradient, rounds=10):
            pass
        tensors = [*model.parameters(), *model.buffers()]
        bits = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
        print(f"{name} ended: model {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    asyncoll.run(main)
