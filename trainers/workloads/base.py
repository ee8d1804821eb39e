"""A workload: one rank's share of a learning task; and what workloads with a data set have in common.

Every rank builds a workload from the same seed. The models start equal at all ranks; the batches differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import asyncoll

Data = tuple[Tensor, Tensor]  # samples by row, and a target for each
Rows = NDArray[np.int64]  # the numbers of samples in their data set
Order = Callable[[int], Rows]  # this rank's samples in the order of an epoch


class Workload(Protocol):
    """One rank's share of a learning task.

    `batch` is the number of samples per step (navigation: of episodes per rollout). `full` asks for the size of the
    paper instead of one for two cores and minutes. `data` is a folder with the data set. The constructor raises
    UsageError if the data are not there, if the workload reads none or has one size only, and if a rank's share has
    fewer than `batch` samples.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    paper: ClassVar[str]  # where the workload, or its full size, comes from; may be empty
    metric: ClassVar[str]  # the name of the score
    defaults: ClassVar[dict[str, Any]]  # the settings that make sense for it, on four to eight ranks
    is_weighted: ClassVar[bool]  # `weight` differs between batches
    model: nn.Module
    weight: float  # of the last loss, which is a mean: the number of its samples, tokens or steps of an environment
    is_synthetic: bool  # generated data stand in for the paper's

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None: ...

    def move(self, device: torch.device) -> None:
        """Move the model to `device`, and each batch once it is made. Before `optimizer`, and before any batch."""

    def loss(self) -> Tensor:
        """The model's mean loss over this rank's next batch, a scalar with gradients; sets `weight`."""

    def score(self) -> float:
        """The quality of the model on held-out data; higher is better, and 1 is perfect.

        A function of the model alone. It takes up to a few times as long as a loss.
        """

    def optimizer(self, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
        """A new optimizer of the model, of a kind that suits it. `momentum` is beta 1 of the Adam family."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream of batches, as numbers, texts and copied tensors. The model is not in it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that followed when `state` was taken, equal to the bit.

        Raises UsageError if the state is that of another workload, rank, size, batch, seed or data set.
        """


class EpochWorkload(ABC):
    """Base of workloads with a data set: batches are taken in epochs, and all randomness is a function of the position.

    A late rank skips rounds, not samples: the next batch is the next one of its own epoch.
    """

    name: ClassVar[str]
    is_weighted: ClassVar[bool] = False
    model: nn.Module

    def __init__(self, rank: int, batch: int, order: Order, **identity: int | str) -> None:
        self.weight = 0.0
        self._rank = rank
        self._seed = int(identity["seed"])
        self._identity = {"workload": self.name, "rank": rank, "batch": batch, **identity}
        self._epochs = Epochs(order, batch)
        self._device = torch.device("cpu")

    def move(self, device: torch.device) -> None:
        """Move the model to `device`, and each batch once it is made."""
        self.model.to(device)
        self._device = device

    def loss(self) -> Tensor:
        """The model's mean loss over this rank's next batch."""
        generator = np.random.default_rng((self._seed, self._rank, *self._epochs.position))
        return self._loss(self._epochs.next_rows(), generator)

    def _moved(self, data: Data) -> Data:
        samples, targets = data
        return samples.to(self._device), targets.to(self._device)

    @abstractmethod
    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        """The mean loss over these samples; sets `weight`. The `generator` is for this batch alone."""

    def optimizer(self, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.model.parameters(), lr=learning_rate, momentum=momentum)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream of batches, and of which stream it is."""
        epoch, step = self._epochs.position
        return {**self._identity, "epoch": epoch, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises UsageError if it is that of another stream."""
        check_identity(self._identity, state)
        self._epochs.position = state["epoch"], state["step"]


def check_identity(own: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise UsageError, with the differences, unless `state` has all items of `own`."""
    differences = [
        f"{key} {state.get(key)!r} instead of {value!r}" for key, value in own.items() if state.get(key) != value
    ]
    if differences:
        raise asyncoll.UsageError(f"this state is that of another workload: {', '.join(differences)}")


class Epochs:
    """The batches of one rank, epoch after epoch, without end. The rest of an epoch below a batch is left out.

    `position` is (epoch, step) of the next batch, from (0, 0); it can be set.
    """

    def __init__(self, order: Order, batch: int) -> None:
        """Raises UsageError if an epoch is shorter than a batch."""
        self.position = 0, 0
        self._order = order
        self._batch = batch
        self._epoch, self._rows = 0, order(0)
        if batch > len(self._rows):
            raise asyncoll.UsageError(
                f"a batch of {batch} is more than a rank's share of {len(self._rows)} samples: "
                "use a smaller --batch, or fewer ranks"
            )

    def next_rows(self) -> Rows:
        """The numbers of the next batch's samples; moves the position."""
        epoch, step = self.position
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._order(epoch)
        chosen = self._rows[step * self._batch : (step + 1) * self._batch]
        self.position = (epoch, step + 1) if (step + 2) * self._batch <= len(self._rows) else (epoch + 1, 0)
        return chosen


def shuffled(count: int, rank: int, size: int, seed: int) -> Order:
    """Every size-th sample of a permutation of `count` that all ranks share, another one for each epoch."""

    def order(epoch: int) -> Rows:
        return np.random.default_rng((seed, epoch)).permutation(count)[rank::size]

    return order


def bucketed(lengths: Rows, batch: int, rank: int, size: int, seed: int) -> Order:
    """Batches of samples of nearly equal length, so that little is padded, and steps differ in length.

    All ranks sort all samples by length, with 10 % of noise, which makes other batches in each epoch. Each rank takes
    every size-th batch, in random order, and the same number of them.
    """

    def order(epoch: int) -> Rows:
        generator = np.random.default_rng((seed, epoch))
        kept = generator.permutation(len(lengths))[: len(lengths) // batch * batch]
        by_length = kept[np.argsort(lengths[kept] * generator.uniform(1.0, 1.1, len(kept)), kind="stable")]
        batches = by_length.reshape(-1, batch)
        shared = generator.permutation(len(batches))[: len(batches) // size * size]
        return batches[shared[rank::size]].ravel()

    return order


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Makes models inside the block equal at all ranks; torch's global generator is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block; the mode before it afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def refuse_data(name: str, data: Path | None) -> None:
    """Raise UsageError if `data` is given to a workload that reads none."""
    if data is not None:
        raise asyncoll.UsageError(f"{name} reads no files: leave out --data")


def refuse_full(name: str, full: bool) -> None:
    """Raise UsageError if the full size is asked of a workload that has one size only."""
    if full:
        raise asyncoll.UsageError(f"{name} has one size only: leave out --full")
