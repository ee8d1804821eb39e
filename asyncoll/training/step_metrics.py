"""Metrics of the steps of one rank: numbers that ride along with its contributions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import asyncoll


class StepMetrics:
    """Collects the metrics of one step.

    Whether steps have metrics is fixed by the first one at all ranks, as with weights: contributions without metrics
    have no place for them. So a training that has none pays nothing.
    """

    def __init__(self, remedy: str) -> None:
        """`remedy` says how a program gives metrics in its first step."""
        self._remedy = remedy
        self.are_used: bool | None = None  # None: before the first step
        self._own: asyncoll.Metrics | None = None

    def note(self, values: Mapping[str, object]) -> None:
        """The step has these values, too."""
        if self.are_used is False:
            raise asyncoll.UsageError(f"this training has begun without metrics: {self._remedy}")
        own, self._own = asyncoll.Metrics(values), self._own
        if self._own is not None:
            own.add(self._own)
        self._own = own

    def begin(self) -> bool:
        """The first step, or a later one, begins. Returns whether steps have metrics."""
        if self.are_used is None:
            self.are_used = self._own is not None
        return self.are_used

    def taken(self) -> asyncoll.Metrics | None:
        """What was collected, which the next step begins without; None if steps have no metrics."""
        own, self._own = self._own, None
        return (own or asyncoll.Metrics()) if self.are_used else None


def beside(x: Tensor, metrics: asyncoll.Metrics | None) -> Any:
    """The contribution of `x` and `metrics`, if there are any."""
    return x if metrics is None else [x, metrics]


def without(reduction: asyncoll.Reduction, metrics: asyncoll.Metrics | None) -> asyncoll.Reduction:
    """The reduction of `beside(x, metrics)` as one of `x`."""
    if metrics is None:
        return reduction
    result = None if reduction.result is None else reduction.result[0]
    return replace(reduction, missed=tuple(x for x, _ in reduction.missed), result=result)


def means(metrics: asyncoll.Metrics | None) -> dict[str, float]:
    """The means after a call, if there are any."""
    return {} if metrics is None else metrics.means()


async def means_of_all(comm: asyncoll.Communicator, metrics: asyncoll.Metrics) -> dict[str, float]:
    """The means over the metrics of all ranks. Collective."""
    total = asyncoll.Metrics()
    for row in await comm.allgather(torch.from_numpy(metrics.packed())):
        total.add(asyncoll.Metrics.unpacked(row.numpy()))
    return total.means()
