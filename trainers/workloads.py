"""The learning tasks: a model, a stream of local batches, and a score of the model.

Every rank builds a workload from the same seed. The model starts equal at all ranks; the batches differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import asyncoll

Data = tuple[Tensor, Tensor]  # samples by row, and a target for each


class Workload(Protocol):
    """One rank's share of a learning task."""

    metric: ClassVar[str]  # the name of the score
    defaults: ClassVar[dict[str, Any]]  # the settings that make sense for it, on four to eight ranks
    model: nn.Module

    def __init__(self, rank: int, size: int, batch: int, seed: int) -> None: ...

    def loss(self) -> Tensor:
        """The model's mean loss over this rank's next batch."""

    def score(self) -> float:
        """The quality of the model on held-out data; higher is better, and 1 is perfect."""


class Digits:
    """Handwritten digits: the 1,797 images of 8x8 of scikit-learn, and a perceptron of 4,810 parameters.

    The test set is a fixed 30 %, stratified: 540 images, so one percentage point is 5.4 images.
    """

    metric: ClassVar[str] = "test accuracy"
    defaults: ClassVar[dict[str, Any]] = {}  # `Settings` has them
    HIDDEN: ClassVar[tuple[int, ...]] = (64,)

    def __init__(self, rank: int, size: int, batch: int, seed: int) -> None:
        train, self._test = _digits()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: nn.Module = _perceptron(64, *self.HIDDEN, 10)

        def order(epoch: int) -> NDArray[np.int64]:
            """Every size-th sample of a permutation that all ranks share."""
            return np.random.default_rng((seed, epoch)).permutation(len(train[0]))[rank::size]

        self._batches = _batches(train, order, batch)

    def next_batch(self) -> Data:
        """This rank's next images and labels."""
        return next(self._batches)

    def loss(self) -> Tensor:
        """Cross-entropy of the next batch."""
        images, labels = self.next_batch()
        return nn.functional.cross_entropy(self.model(images), labels)

    def score(self) -> float:
        """Test accuracy."""
        images, labels = self._test
        with torch.inference_mode():
            return float((self.model(images).argmax(dim=1) == labels).float().mean())


class DigitsWide(Digits):
    """The same digits, and a perceptron of 1,045,450 parameters: 4 MB to reduce where `Digits` has 19 KB.

    Each of its two middle matrices has 47 % of them.
    """

    defaults: ClassVar[dict[str, Any]] = {"rounds": 120, "batch": 32, "learning_rate": 0.8}
    HIDDEN: ClassVar[tuple[int, ...]] = (704, 704, 704)


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@cache  # shared by ranks of one process
def _digits() -> tuple[Data, Data]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images.astype(np.float32), labels, test_size=0.3, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)
    mean, deviation = (
        train_images.mean(dim=0),
        train_images.std(dim=0).clamp(min=1.0),
    )  # grey levels are 0..16
    return ((train_images - mean) / deviation, train_labels), ((test_images - mean) / deviation, test_labels)


class Hyperplane:
    """The hyperplane regression of Li et al., PPoPP 2020, section 6.2.1, at its size.

    y = a·x + noise, 8,193 parameters, 32,768 points. The paper does not state the distributions. Here x is normal, so
    are the coefficients, with |a| about 1, and the noise has a deviation of 0.1: the best model explains 99 % of the
    variance. Row i of the data is drawn from (seed, i) alone, so any number of ranks shares the same data. Each rank
    makes only the rows that it keeps: every size-th, 134 MB on 8 ranks.
    """

    metric: ClassVar[str] = "R² on held-out points"
    # The paper's total batch is 2,048: 256 on each of 8 ranks. 96 rounds are 6 of its 48 epochs. Twice this rate is
    # stable if gradients are averaged before a step, but not for DC-S3GD, whose steps are whole and one round stale.
    defaults: ClassVar[dict[str, Any]] = {"rounds": 96, "batch": 256, "learning_rate": 0.05, "target": 0.9}
    DIMENSIONS = 8192
    POINTS = 32768
    HELD_OUT = 512
    NOISE = 0.1

    def __init__(self, rank: int, size: int, batch: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: nn.Module = nn.Linear(self.DIMENSIONS, 1)
        share = self._points(seed, range(rank, self.POINTS, size))
        self._test = self._points(seed, range(self.POINTS, self.POINTS + self.HELD_OUT))

        def order(epoch: int) -> NDArray[np.int64]:
            """A permutation of this rank's own rows."""
            return np.random.default_rng((seed, rank, epoch)).permutation(len(share[0]))

        self._batches = _batches(share, order, batch)

    def next_batch(self) -> Data:
        """This rank's next points x, and their y."""
        return next(self._batches)

    def loss(self) -> Tensor:
        """Mean squared error of the next batch."""
        x, y = self.next_batch()
        return nn.functional.mse_loss(self.model(x), y)

    def score(self) -> float:
        """The share of the variance of y that the model explains; the rest is the loss."""
        x, y = self._test
        with torch.inference_mode():
            return 1.0 - float(nn.functional.mse_loss(self.model(x), y) / y.var(correction=0))

    def _points(self, seed: int, rows: range) -> Data:
        behind_all_rows = self.POINTS + self.HELD_OUT
        coefficients = _normal(self.DIMENSIONS, (seed, behind_all_rows)) / np.sqrt(np.float32(self.DIMENSIONS))
        x = np.empty((len(rows), self.DIMENSIONS), np.float32)
        y = np.empty((len(rows), 1), np.float32)
        for index, row in enumerate(rows):
            drawn = _normal(self.DIMENSIONS + 1, (seed, row))
            x[index] = drawn[:-1]
            y[index] = x[index] @ coefficients + self.NOISE * drawn[-1]
        return torch.from_numpy(x), torch.from_numpy(y)


def _normal(count: int, seed: tuple[int, ...]) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def _batches(data: Data, order: Callable[[int], NDArray[np.int64]], batch: int) -> Iterator[Data]:
    """This rank's batches, without end, from its samples in the `order` of each epoch.

    A late rank skips rounds, not samples: the next batch is the next one of its own epoch.
    """
    own = len(order(0))
    if batch > own:
        raise asyncoll.UsageError(
            f"a batch of {batch} is more than a rank's share of {own} samples: use a smaller --batch, or fewer ranks"
        )
    return _endless(data, order, batch)


def _endless(data: Data, order: Callable[[int], NDArray[np.int64]], batch: int) -> Iterator[Data]:
    samples, targets = data
    for epoch in itertools.count():
        rows = torch.from_numpy(order(epoch))
        for chosen in rows[: len(rows) // batch * batch].split(batch):
            yield samples[chosen], targets[chosen]


WORKLOADS: dict[str, type[Workload]] = {"digits": Digits, "digits-wide": DigitsWide, "hyperplane": Hyperplane}
