"""Handwritten digits, and perceptrons: the smallest workload, with real data that scikit-learn brings."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainers.workloads.base import Data, EpochWorkload, Rows, refuse_data, refuse_full, seeded, shuffled


class Digits(EpochWorkload):
    """Handwritten digits: the 1,797 images of 8x8 of scikit-learn, and a perceptron of 4,810 parameters.

    The test set is a fixed 30 %, stratified: 540 images, so one percentage point is 5.4 images.
    """

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "A perceptron of 4,810 parameters on the handwritten digits of scikit-learn."
    paper: ClassVar[str] = ""
    metric: ClassVar[str] = "test accuracy"
    defaults: ClassVar[dict[str, Any]] = {}  # `Settings` has them
    HIDDEN: ClassVar[tuple[int, ...]] = (64,)
    is_synthetic = False

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        refuse_full(self.name, full)
        refuse_data(self.name, data)
        self._train, self._test = _digits()
        with seeded(seed):
            self.model: nn.Module = _perceptron(64, *self.HIDDEN, 10)
        super().__init__(rank, batch, shuffled(len(self._train[0]), rank, size, seed), size=size, seed=seed)

    def next_batch(self) -> Data:
        """This rank's next images and labels."""
        return self._rows(self._epochs.next_rows())

    def _rows(self, rows: Rows) -> Data:
        images, labels = self._train
        return images[rows], labels[rows]

    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        images, labels = self._moved(self._rows(rows))
        self.weight = float(len(rows))
        return nn.functional.cross_entropy(self.model(images), labels)

    def score(self) -> float:
        """Test accuracy."""
        images, labels = self._moved(self._test)
        with torch.inference_mode():
            return float((self.model(images).argmax(dim=1) == labels).float().mean())


class DigitsWide(Digits):
    """The same digits, and a perceptron of 1,045,450 parameters: 4 MB to reduce where `Digits` has 19 KB.

    Each of its two middle matrices has 47 % of them.
    """

    name: ClassVar[str] = "digits-wide"
    summary: ClassVar[str] = "A perceptron of 1,045,450 parameters on the same digits."
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
