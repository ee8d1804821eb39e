"""Contributions of one rank that are in no round yet, as far as it knows: what it makes again after a death."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

import asyncoll


class Contributed(NamedTuple):
    """What this rank has contributed: in one call, or in several, added up."""

    call: int  # the number of the call, from 1
    gradients: Tensor  # times the weight
    weight: float | None  # None: unweighted
    metrics: asyncoll.Metrics | None
    steps: int  # how many of this rank


class Untaken:
    """Copies of the contributions of one rank to the rounds of one epoch, and what is carried over from those before.

    Contributions are taken by rounds in the order of their calls.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._kept = deque[Contributed]()
        self._carried: Contributed | None = None  # of earlier epochs: to be part of the next call
        self._spare: list[Tensor] = []  # memory of contributions that have been taken

    def __bool__(self) -> bool:
        return bool(self._kept) or self._carried is not None

    @property
    def steps(self) -> int:
        """How many steps the contributions are of."""
        return sum(each.steps for each in self._kept) + (self._carried.steps if self._carried else 0)

    def add(
        self, gradients: Tensor, weight: float | None, metrics: asyncoll.Metrics | None, steps: int
    ) -> float | None:
        """The next call contributes these, and what is carried over: it is added to them. Returns the weight of all."""
        carried, self._carried = self._carried, None
        # At least in single precision: a weight, or a sum, may overflow in half of it.
        precise = torch.promote_types(gradients.dtype, torch.float32)
        copy = self._spare.pop() if self._spare else torch.empty_like(gradients, dtype=precise)
        copy.copy_(gradients)
        if weight is not None:
            copy.mul_(weight)
        if carried is not None:
            copy.add_(carried.gradients)
            if weight is not None and carried.weight is not None:
                weight += carried.weight
            if metrics is not None and carried.metrics is not None:
                metrics.add(carried.metrics)
            steps += carried.steps
            gradients.copy_(copy / weight if weight else copy)
        self._calls += 1
        self._kept.append(Contributed(self._calls, copy, weight, None if metrics is None else metrics.copy(), steps))
        return weight

    def undo(self) -> None:
        """The call that was added last was not made."""
        if self._kept:
            self._carried = self._kept.pop()
            self._calls -= 1

    def drop(self, taken: int) -> None:
        """The first `taken` calls are in rounds."""
        while self._kept and self._kept[0].call <= taken:
            self._spare.append(self._kept.popleft().gradients)

    def carry(self) -> None:
        """The epoch has ended: what is not taken is part of the next call."""
        for contributed in self._kept:
            if self._carried is None:
                self._carried = contributed
                continue
            _, gradients, weight, metrics, steps = self._carried
            gradients.add_(contributed.gradients)
            if weight is not None and contributed.weight is not None:
                weight += contributed.weight
            if metrics is not None and contributed.metrics is not None:
                metrics.add(contributed.metrics)
            self._carried = Contributed(0, gradients, weight, metrics, steps + contributed.steps)
        self._kept.clear()
        self._calls = 0
