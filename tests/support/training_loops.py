"""What the tests of training share: a program's loop, models, optimizers, batches, and replicas as bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training import (
    ADPSGD,
    DCASGD,
    DCS3GD,
    DPSGD,
    SGP,
    AllreduceSGD,
    EagerSGD,
    LocalSGD,
    OkTopkSGD,
    OverlappedSGD,
    ParameterServerSGD,
    Trainer,
    WagmaSGD,
)

Algorithm = Callable[..., Trainer]
Optimizing = Callable[[Any], torch.optim.Optimizer]
Gradient = Callable[[int], Awaitable[None]]

DETERMINISTIC: dict[str, Algorithm] = {
    "synchronous": AllreduceSGD,
    "overlapped": partial(OverlappedSGD, bucket_bytes=64),
    "sparse": partial(OkTopkSGD, density=0.3, thresholds_every=4, regions_every=8, residual="gradients"),
    "dc_s3gd": DCS3GD,
    "local": partial(LocalSGD, every=2),
    "dpsgd": DPSGD,
    "sgp": SGP,
    "sgp with overlap": partial(SGP, peers=2, overlap=True),
}
WITHOUT_WAITING: dict[str, Algorithm] = {
    "eager": partial(EagerSGD, history=0),
    "eager with averages": partial(EagerSGD, partial="majority", average_every=2),
    "eager with history": partial(EagerSGD, history=3, sync_every=4),
    "eager beyond history": partial(EagerSGD, history=1, sync_every=4),
    "wagma": partial(WagmaSGD, sync_every=4),
    "wagma, average first": partial(WagmaSGD, sync_every=4, order="average-then-step"),
}
ALGORITHMS = DETERMINISTIC | WITHOUT_WAITING
AT_OWN_PACE: dict[str, Algorithm] = {  # ranks count rounds of their own
    "adpsgd": ADPSGD,
    "parameter server": ParameterServerSGD,
    "dc_asgd": DCASGD,
}


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)  # a power of two: products with it are exact


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


async def train(sgd: Trainer, gradient: Gradient, rounds: int) -> AsyncIterator[asyncoll.Reduction]:
    """The loop of a program, until round `rounds`. Yields the reductions; ends the training after the last."""
    await sgd.start()
    while sgd.round < rounds:
        await gradient(sgd.round + 1)
        reduction = await sgd.step()
        if reduction is not None:
            yield reduction
    await sgd.finish()


async def trained(sgd: Trainer, gradient: Gradient, rounds: int) -> list[asyncoll.Reduction]:
    """The reductions of a whole training."""
    return [reduction async for reduction in train(sgd, gradient, rounds)]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def whole(model: nn.Module) -> dict[str, bytes]:
    """The parameters and the buffers."""
    return {name: bits(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def state(optimizer: torch.optim.Optimizer) -> str:
    """The hyper-parameters, and the state as bytes."""
    kept = {
        index: {name: bits(value) if isinstance(value, Tensor) else value for name, value in sorted(of.items())}
        for index, of in optimizer.state_dict()["state"].items()
    }
    return f"{optimizer.state_dict()['param_groups']} {kept}"


def network(seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` keeps a traceback for each device
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@cache
def _batch(rank: int, round_: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng((rank, round_)).normal(size=(4, 5)).astype("f4"))


def loss(model: nn.Module, rank: int, round_: int) -> Tensor:
    """The loss of a batch that belongs to this rank and round."""
    result: Tensor = model(_batch(rank, round_)).square().mean()
    return result


def on_batches(comm: asyncoll.Communicator, model: nn.Module) -> Gradient:
    async def gradient(round_: int) -> None:
        loss(model, comm.rank, round_).backward()

    return gradient


def quadratic(size: int) -> Any:
    """The first models of `size` ranks, three numbers each. An algorithm begins with rank 0's."""
    return np.random.default_rng(3).normal(size=(size, 3))


def quadratic_slope(rank: int, x: Any, step: int) -> Any:
    """The gradient of a rank's own quadratic loss at x, which also changes from step to step."""
    draw = np.random.default_rng((rank, 5))
    return (1 + draw.random(3)) * x - draw.normal(size=3) + 0.1 * step


def straggle(seed: int, comm: asyncoll.Communicator, round_: int) -> float:
    """Seconds that a step takes: mostly one, sometimes as long as five rounds."""
    draw = _drawn(seed, comm.rank, round_)
    return 1.0 + 4.5 * (draw < 0.15) + 0.5 * draw


@cache
def _drawn(*seed: int) -> float:
    return np.random.default_rng(seed).random()


@cache  # shared by ranks of one process
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images / 8 - 1).float(), torch.from_numpy(labels)


class Digits:
    """One rank's share of the 1,797 handwritten digits of scikit-learn, and a perceptron."""

    TRAINED = 1257

    def __init__(self, rank: int, size: int, batch: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        images, labels = _digits()
        self._order = np.random.default_rng(0).permutation(len(images))
        self._share = torch.from_numpy(self._order[: self.TRAINED][rank::size].copy())
        self._draw = torch.Generator().manual_seed(rank)
        self._batch = batch
        self._images, self._labels = images, labels

    def next_batch(self) -> tuple[Tensor, Tensor]:
        chosen = self._share[torch.randint(len(self._share), (self._batch,), generator=self._draw)]
        return self._images[chosen], self._labels[chosen]

    def loss(self) -> Tensor:
        images, labels = self.next_batch()
        return nn.functional.cross_entropy(self.model(images), labels)

    def score(self) -> float:
        """The accuracy on the digits that no rank trains with."""
        held_out = self._order[self.TRAINED :]
        with torch.inference_mode():
            return float((self.model(self._images[held_out]).argmax(dim=1) == self._labels[held_out]).float().mean())
