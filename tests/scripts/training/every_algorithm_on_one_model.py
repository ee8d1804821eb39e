"""Every algorithm on a model with BatchNorm and a frozen layer; rank 0 alone has an optimizer with a state.

All ranks print the same digests of the model at the end, buffers included.
"""

import hashlib
from functools import partial

import torch

import asyncoll
from asyncoll.training import DCS3GD, AllreduceSGD, EagerSGD, OkTopkSGD, OverlappedSGD, WagmaSGD

ALGORITHMS = {
    "synchronous": AllreduceSGD,
    "overlapped": OverlappedSGD,
    "eager": partial(EagerSGD, history=4, sync_every=4),
    "wagma": WagmaSGD,
    "dc_s3gd": DCS3GD,
    "sparse": partial(OkTopkSGD, residual="gradients", density=0.3),
}


async def main(comm: asyncoll.Communicator) -> None:
    """Train with each."""
    for name, algorithm in ALGORITHMS.items():
        torch.manual_seed(comm.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if comm.rank == 0:
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        sgd = algorithm(comm, model, optimizer)
        await sgd.start()
        while sgd.round < 10:
            model(torch.randn(4, 8)).square().mean().backward()
            await sgd.step()
        await sgd.finish()
        tensors = [*model.parameters(), *model.buffers()]
        bits = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
        print(f"{name} ended: model {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    asyncoll.run(main)
