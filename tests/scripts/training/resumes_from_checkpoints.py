"""A training that saves every round and goes on from the newest checkpoint that it finds. It may be killed at any time.

Arguments: the algorithm, and the folder of the checkpoints. Every rank prints its process and each round, and at the
end a digest of its model and its optimizer.
"""

import hashlib
import os
import sys
from functools import partial

import torch

import asyncoll
from asyncoll.training import DCS3GD, DPSGD, SGP, AllreduceSGD, Checkpoints, LocalSGD, OkTopkSGD, OverlappedSGD

ALGORITHMS = {
    "synchronous": AllreduceSGD,
    "overlapped": partial(OverlappedSGD, bucket_bytes=64),
    "dc_s3gd": DCS3GD,
    "sparse": partial(OkTopkSGD, density=0.3, thresholds_every=4, regions_every=8, residual="gradients"),
    "local": partial(LocalSGD, every=2),
    "dpsgd": DPSGD,
    "sgp": SGP,
    "sgp with overlap": partial(SGP, peers=2, overlap=True),
}
ROUNDS = 40
KEEP = {"sgp": 4, "sgp with overlap": 5}  # for up to 5 ranks, as `Checkpoints` says; others: 3


class Shuffled:
    """Batches in an order that each epoch shuffles anew. A checkpoint has the position, too."""

    def __init__(self, rank: int) -> None:
        self._draw = torch.Generator().manual_seed(rank)
        self._samples = torch.randn(22, 5, generator=self._draw)
        self._order = torch.empty(0, dtype=torch.int64)
        self._position = 0

    def next_batch(self) -> torch.Tensor:
        """The next four samples."""
        if self._position + 4 > len(self._order):
            self._order, self._position = torch.randperm(len(self._samples), generator=self._draw), 0
        self._position += 4
        return self._samples[self._order[self._position - 4 : self._position]]

    def state_dict(self) -> dict:
        return {"draw": self._draw.get_state(), "order": self._order, "position": self._position}

    def load_state_dict(self, state: dict) -> None:
        self._draw.set_state(state["draw"])
        self._order, self._position = state["order"], state["position"]


async def main(comm: asyncoll.Communicator, algorithm: str, folder: str, rounds: int = ROUNDS, tell=print) -> str:
    """The digest at the end."""
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=ROUNDS + 1)
    data = Shuffled(comm.rank)
    sgd = ALGORITHMS[algorithm](comm, model, optimizer, scheduler=scheduler, clip_norm=0.5)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "sgd": sgd}
    checkpoints = Checkpoints(comm, folder, keep=KEEP.get(algorithm, 3))
    if saved := await checkpoints.newest():
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    await sgd.start()
    while sgd.round < rounds:
        tell(f"process {os.getpid()} begins round {sgd.round + 1}")
        model(data.next_batch()).square().mean().backward()
        if await sgd.step():
            checkpoints.save(sgd.round, **{name: part.state_dict() for name, part in parts.items()})
    await sgd.finish()
    kept = [value for of in optimizer.state.values() for _, value in sorted(of.items()) if value is not None]
    tensors = [*model.parameters(), *model.buffers(), *kept]
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(bits).hexdigest()


async def tell(comm: asyncoll.Communicator) -> None:
    print(f"ended with {await main(comm, *sys.argv[1:], tell=partial(print, flush=True))}")


if __name__ == "__main__":
    asyncoll.run(tell)
