"""What is trained: a model, a stream of local batches, and a score of the model.

A workload is built at every rank from the same seed. The model starts equal everywhere; the batches differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


class Workload(Protocol):
    """One rank's share of a learning task."""

    model: nn.Module

    def loss(self) -> Tensor:
        """The model's mean loss over this rank's next batch."""

    def score(self) -> float:
        """How good the model is on held-out data; higher is better."""


class Digits:
    """Handwritten digits: 1,797 real 8x8 images bundled with scikit-learn, and a small perceptron.

    The test set is a fixed 30 %, stratified: 540 images, so one percentage point is 5.4 images.
    """

    HIDDEN = 64

    def __init__(self, rank: int, size: int, batch: int, seed: int) -> None:
        train, self._test = _digits()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: nn.Module = nn.Sequential(nn.Linear(64, self.HIDDEN), nn.ReLU(), nn.Linear(self.HIDDEN, 10))
        self._batches = _batches(train, rank, size, batch, seed)

    def next_batch(self) -> tuple[Tensor, Tensor]:
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


@cache  # the ranks of one process share it
def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
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


def _batches(
    data: tuple[Tensor, Tensor], rank: int, size: int, batch: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches, for ever: of each epoch's shared permutation it takes every size-th sample.

    A late rank skips rounds, not samples: the next batch is the next one of its own epoch.
    """
    images, labels = data
    for epoch in range(2**31):
        order = np.random.default_rng((seed, epoch)).permutation(len(labels))[rank::size]
        for start in range(0, len(order) - batch + 1, batch):
            index = torch.from_numpy(order[start : start + batch])
            yield images[index], labels[index]


WORKLOADS: dict[str, Callable[[int, int, int, int], Workload]] = {"digits": Digits}
