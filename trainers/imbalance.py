"""Injected load imbalance: the additional compute time of a rank, drawn from a shared seed without communication.

A draw is indexed by the round that the rank's step aims at (the newest round it has seen + 1), not by its local step.
So the delays of a round are the same schedule at every rank, also after a late rank has skipped rounds. The delay of a
skipped round is not made up for: the rank takes no step for that round. (The code of Li et al., PPoPP 2020, draws from
one stream for each rank and step; after the first hit the streams drift apart.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_UNITS_S = {"ms": 1e-3, "s": 1.0}


class Imbalance(Protocol):
    """A schedule of delays; a pure function of its arguments."""

    def delay_s(self, seed: int, round_: int, rank: int, size: int) -> float:
        """The extra seconds that `rank` of `size` computes in the step that aims at `round_`."""


@dataclass(frozen=True, slots=True)
class Balanced:
    """No delays."""

    def delay_s(self, seed: int, round_: int, rank: int, size: int) -> float:
        """0."""
        return 0.0

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class OneRandom:
    """One random rank of each round is late (Li et al., PPoPP 2020, section 6.2.1: light imbalance)."""

    late_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int) -> float:
        """`late_s` for the rank drawn for this round, 0 for the others."""
        drawn = int(np.random.default_rng((seed, round_)).integers(size))
        return self.late_s if rank == drawn else 0.0

    def __str__(self) -> str:
        return f"one-random:{_text(self.late_s)}"


@dataclass(frozen=True, slots=True)
class AllSkewed:
    """All ranks are late, evenly spread, shifted by one rank each round (section 6.2.3: severe imbalance)."""

    least_s: float
    most_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int) -> float:
        """From `least_s` to `most_s`; over `size` rounds each rank gets each delay once."""
        position = (rank + round_) % size
        return self.least_s + (self.most_s - self.least_s) * position / max(1, size - 1)

    def __str__(self) -> str:
        return f"all-skewed:{_text(self.least_s)}-{_text(self.most_s)}"


def parse_duration(text: str) -> float:
    """Seconds from "100ms" or "0.2s". Raises ValueError with an explanation."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 100ms or 0.2s")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_imbalance(text: str) -> Imbalance:
    """A schedule from "none", "one-random:200ms" or "all-skewed:50ms-400ms". Raises ValueError with an explanation."""
    kind, _, argument = text.partition(":")
    if text == "none":
        return Balanced()
    if kind == "one-random":
        return OneRandom(parse_duration(argument))
    if kind == "all-skewed":
        least, _, most = argument.partition("-")
        skewed = AllSkewed(parse_duration(least), parse_duration(most))
        if skewed.least_s > skewed.most_s:
            raise ValueError(f"{text!r} skews from a longer to a shorter delay")
        return skewed
    raise ValueError(f"{text!r} is none of: none, one-random:200ms, all-skewed:50ms-400ms")


def _text(seconds: float) -> str:
    return f"{seconds * 1000:g}ms"
