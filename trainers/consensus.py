"""The distance between the ranks' models, measured from averages that a trainer makes anyway."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

import asyncoll


class Distance(NamedTuple):
    """The root mean square over ranks of |own model - mean model|, as a share of |mean model|."""

    round: int
    distance: float


class Consensus:
    """One rank's part of the distances. A trainer calls `observe`."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[float, float]] = {}

    def observe(self, round_: int, own: Tensor, mean: Tensor) -> None:
        """Record an average of all models.

        Of two at one round (the last), the first counts: the second follows it, when the models were equal already.
        """
        self._parts.setdefault(round_, (float((own - mean).square().sum()), float(mean.square().sum())))

    async def collect(self, comm: asyncoll.Communicator) -> list[Distance]:
        """The distances at all averages, the same at every rank.

        Collective; all ranks have observed the same averages.
        """
        squares = torch.tensor([part for part, _ in self._parts.values()], dtype=torch.float64)
        await comm.allreduce(squares, op=asyncoll.AVG)
        sizes = [size for _, size in self._parts.values()]
        parts = zip(self._parts, squares.tolist(), sizes, strict=True)
        return [Distance(round_, math.sqrt(square / size) if size else 0.0) for round_, square, size in parts]
