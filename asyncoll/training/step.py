"""What a step of a training returns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import asyncoll


@dataclass(frozen=True, slots=True)
class Step(asyncoll.Reduction):
    """The round that the model is at after a step: a `Reduction`, and what happened at this rank."""

    recovered: bool = False
    """Whether this rank was later than `history`, and has taken the model and the optimizer of another rank."""

    epoch: int = 1
    """The epoch in which the step has ended: that of `Trainer.comm`. Once it grows, share the data anew."""

    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    """The means of the metrics in the round, by key: over the contributions that hold the key, of all ranks."""


def step_of_ranks(round_: int, ranks: tuple[int, ...], *, synchronous: bool, skipped: int = 0, **more: Any) -> Step:
    """The record of a round in which all of `ranks`, this one among them, took part."""
    return Step(
        round_, len(ranks), included=True, skipped=skipped, synchronous=synchronous, group=ranks, ranks=ranks, **more
    )


def step_of(reduction: asyncoll.Reduction, **changes: Any) -> Step:
    """`reduction` as a `Step`, with these attributes in place of its own."""
    return Step(**{each.name: getattr(reduction, each.name) for each in fields(reduction)} | changes)
