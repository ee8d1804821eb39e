"""Hyperplane regression: one linear layer, whose gradients are large and cheap."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainers.workloads.base import Data, EpochWorkload, Rows, refuse_data, seeded


class Hyperplane(EpochWorkload):
    """The hyperplane regression of Li et al., PPoPP 2020, section 6.2.1, at its size.

    y = a·x + noise, 8,193 parameters, 32,768 points. The paper does not state the distributions. Here x is normal, so
    are the coefficients, with |a| about 1, and the noise has a deviation of 0.1: the best model explains 99 % of the
    variance. Row i of the data is drawn from (seed, i) alone, so any number of ranks shares the same data. Each rank
    makes only the rows that it keeps: every size-th, 134 MB on 8 ranks. This is the paper's size with and without
    `full`; its data are generated, too.
    """

    name: ClassVar[str] = "hyperplane"
    summary: ClassVar[str] = "Linear regression of 8,193 parameters on 32,768 generated points."
    paper: ClassVar[str] = "Li et al., PPoPP 2020, section 6.2.1"
    metric: ClassVar[str] = "R² on held-out points"
    # The paper's total batch is 2,048: 256 on each of 8 ranks. 96 rounds are 6 of its 48 epochs. Twice this rate is
    # stable if gradients are averaged before a step, but not for DC-S3GD, whose steps are whole and one round stale.
    defaults: ClassVar[dict[str, Any]] = {"rounds": 96, "batch": 256, "learning_rate": 0.05, "target": 0.9}
    DIMENSIONS = 8192
    POINTS = 32768
    HELD_OUT = 512
    NOISE = 0.1
    is_synthetic = False

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        refuse_data(self.name, data)
        with seeded(seed):
            self.model: nn.Module = nn.Linear(self.DIMENSIONS, 1)
        self._share = self._points(seed, range(rank, self.POINTS, size))
        self._test = self._points(seed, range(self.POINTS, self.POINTS + self.HELD_OUT))

        def order(epoch: int) -> Rows:
            """A permutation of this rank's own rows."""
            return np.random.default_rng((seed, rank, epoch)).permutation(len(self._share[0]))

        super().__init__(rank, batch, order, size=size, seed=seed)

    def next_batch(self) -> Data:
        """This rank's next points x, and their y."""
        return self._rows(self._epochs.next_rows())

    def _rows(self, rows: Rows) -> Data:
        x, y = self._share
        return x[rows], y[rows]

    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        x, y = self._moved(self._rows(rows))
        self.weight = float(len(rows))
        return nn.functional.mse_loss(self.model(x), y)

    def score(self) -> float:
        """The share of the variance of y that the model explains; the rest is the loss."""
        x, y = self._moved(self._test)
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
