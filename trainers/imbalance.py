"""Emulated load imbalance: the time that a rank waits after computing, drawn from a shared seed, no communication.

A draw is indexed by the round that the rank's step aims at (the newest round it has seen + 1), not by its local step.
So the delays of a round are the same schedule at every rank, also after a late rank has skipped rounds. The delay of a
skipped round is not made up for: the rank takes no step for that round. (The code of Li et al., PPoPP 2020, draws from
one stream for each rank and step; after the first hit the streams drift apart.)

Two kinds of models share one method, `delay_s`. A *delay* comes on top of the computation, whose length it ignores. A
*trace* draws the length of the whole step; the computation is a part of it, and the rank waits for the rest. A step
that computes for `computed_s` takes `computed_s + delay_s(..., computed_s)` with both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

import asyncoll
from asyncoll.testing import Delays

_UNITS_S = {"ms": 1e-3, "s": 1.0}

TraceName = Literal["video", "language", "cloud"]

# The forms of `parse_imbalance`, each with a summary and its source.
IMBALANCES = {
    "none": "No delays; every step takes the time that is asked for.",
    "real": "No emulation: steps take the time that the machine needs.",
    "one-random:200ms": "One random rank of each round is late (Li et al., PPoPP 2020, section 6.2.1).",
    "k-random:4:300ms": "K random ranks of each round are late (Li et al., PPoPP 2020, 6.2.2; TPDS 2021, section V).",
    "rotating:200ms:10": "One rank is late for 10 rounds, then the next one.",
    "all-skewed:50ms-400ms": "All ranks are late, shifted by one rank each round (Li et al., PPoPP 2020, 6.2.3).",
    "fixed-skewed:50ms-400ms": "All ranks are late, evenly spread; each rank always by the same time.",
    "trace-video:0.1": "Step times of an LSTM on videos, times 0.1 (Li et al., PPoPP 2020, section 2.1).",
    "trace-language:0.1": "Step times of a Transformer on sentences, times 0.1 (Li et al., PPoPP 2020, section 2.2).",
    "trace-cloud:0.1": "Step times of ResNet-50 on a cloud machine, times 0.1 (Li et al., PPoPP 2020, section 2.3).",
}


class Imbalance(Delays, Protocol):
    """A model of the ranks' imbalance. `str` gives what `parse_imbalance` reads.

    `delay_s` raises UsageError if the model needs more ranks.
    """


@dataclass(frozen=True, slots=True)
class Balanced:
    """No delays."""

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """0."""
        return 0.0

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class Real:
    """No emulation at all: no delays, and a driver must not stretch steps either."""

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """0."""
        return 0.0

    def __str__(self) -> str:
        return "real"


@dataclass(frozen=True, slots=True)
class OneRandom:
    """One random rank of each round is late (Li et al., PPoPP 2020, section 6.2.1: light imbalance)."""

    late_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """`late_s` for the rank drawn for this round, 0 for the others."""
        drawn = int(np.random.default_rng((seed, round_)).integers(size))
        return self.late_s if rank == drawn else 0.0

    def __str__(self) -> str:
        return f"one-random:{_text(self.late_s)}"


@dataclass(frozen=True, slots=True)
class KRandom:
    """`count` random ranks of each round are late.

    Li et al. delay 4 of 64 ranks (PPoPP 2020, section 6.2.2: ImageNet) and 2 ranks (WAGMA-SGD, TPDS 2021, section V).
    """

    count: int
    late_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """`late_s` for the ranks drawn for this round, 0 for the others. Raises UsageError below `count` ranks."""
        if self.count > size:
            raise asyncoll.UsageError(f"{self} delays {self.count} ranks of each round, and there are {size}")
        drawn = np.random.default_rng((seed, round_)).permutation(size)[: self.count]
        return self.late_s if rank in drawn else 0.0

    def __str__(self) -> str:
        return f"k-random:{self.count}:{_text(self.late_s)}"


@dataclass(frozen=True, slots=True)
class Rotating:
    """One straggler: rank 0 for the first `rounds` rounds, then rank 1 for as many, and so on."""

    late_s: float
    rounds: int

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """`late_s` for the straggler of this round, 0 for the others."""
        return self.late_s if rank == (round_ - 1) // self.rounds % size else 0.0

    def __str__(self) -> str:
        return f"rotating:{_text(self.late_s)}:{self.rounds}"


@dataclass(frozen=True, slots=True)
class AllSkewed:
    """All ranks are late, evenly spread, shifted by one rank each round (section 6.2.3: severe imbalance)."""

    least_s: float
    most_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """From `least_s` to `most_s`; over `size` rounds each rank gets each delay once."""
        return _spread(self.least_s, self.most_s, (rank + round_) % size, size)

    def __str__(self) -> str:
        return f"all-skewed:{_text(self.least_s)}-{_text(self.most_s)}"


@dataclass(frozen=True, slots=True)
class FixedSkewed:
    """All ranks are late, evenly spread, as on machines of different speed: rank 0 is the fastest in every round."""

    least_s: float
    most_s: float

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """`least_s` at rank 0 to `most_s` at the last rank."""
        return _spread(self.least_s, self.most_s, rank, size)

    def __str__(self) -> str:
        return f"fixed-skewed:{_text(self.least_s)}-{_text(self.most_s)}"


def _spread(least_s: float, most_s: float, position: int, size: int) -> float:
    return least_s + (most_s - least_s) * position / max(1, size - 1)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The distribution of a step's seconds: shift + exp(location + scale t), clipped to [least, most].

    t has Student's distribution with `freedom` degrees: 50 is nearly normal; 5 has the rare long steps of sentences.
    """

    least_s: float
    most_s: float
    shift_s: float
    location: float
    scale: float
    freedom: float

    def draw_s(self, generator: np.random.Generator) -> float:
        drawn_s = self.shift_s + math.exp(self.location + self.scale * generator.standard_t(self.freedom))
        return min(max(drawn_s, self.least_s), self.most_s)


# The paper gives the least, the greatest, the mean and the deviation of each; location and scale are fitted to them.
_TRACES: dict[TraceName, _Steps] = {
    # LSTM on UCF101: 201-3,410 ms, mean 1,235, deviation 706
    "video": _Steps(0.201, 3.410, 0.0, 6.9685 - math.log(1000), 0.5676, 50),
    # Transformer on WMT16: 179-3,482 ms, mean 475, deviation 144
    "language": _Steps(0.179, 3.482, 0.0, 6.1249 - math.log(1000), 0.2126, 5),
    # ResNet-50 on ImageNet, on a cloud machine with two V100s: 399-1,892 ms, mean 454, deviation 116
    "cloud": _Steps(0.399, 1.892, 0.399, 3.0568 - math.log(1000), 1.3578, 50),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Step times with the moments that Li et al. measured (PPoPP 2020, section 2), times `factor`.

    The steps of all ranks and rounds are drawn independently from one distribution, which has the paper's least and
    greatest step, mean and deviation. The paper states no more: the shape between them is an assumption.
    """

    name: TraceName
    factor: float

    def step_s(self, seed: int, round_: int, rank: int) -> float:
        """The seconds of the whole step of `rank` that aims at `round_`."""
        return self.factor * _TRACES[self.name].draw_s(np.random.default_rng((seed, round_, rank)))

    def delay_s(self, seed: int, round_: int, rank: int, size: int, computed_s: float = 0.0) -> float:
        """The rest of the drawn step after `computed_s`; 0 if the computation took longer than the drawn step."""
        return max(0.0, self.step_s(seed, round_, rank) - computed_s)

    def __str__(self) -> str:
        return f"trace-{self.name}:{self.factor:g}"


def are_drawn(imbalance: Imbalance) -> bool:
    """Whether the delays of a round do not depend on those of the round before."""
    return isinstance(imbalance, Balanced | OneRandom | KRandom | Trace)


def parse_duration(text: str) -> float:
    """Seconds from "100ms" or "0.2s". Raises ValueError with an explanation."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 100ms or 0.2s")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_imbalance(text: str) -> Imbalance:
    """A model from a text of one of the forms in `IMBALANCES`. Raises ValueError with an explanation."""
    kind, _, argument = text.partition(":")
    parse = _PARSERS.get(kind)
    if parse is None:
        raise ValueError(f"{text!r} is none of: {', '.join(IMBALANCES)}")
    return parse(argument)


def _without_argument(model: Imbalance) -> Callable[[str], Imbalance]:
    def parse(argument: str) -> Imbalance:
        if argument:
            raise ValueError(f"{str(model)!r} has no argument, and {argument!r} was given")
        return model

    return parse


def _k_random(argument: str) -> Imbalance:
    count, _, late = argument.partition(":")
    return KRandom(_count(count), parse_duration(late))


def _rotating(argument: str) -> Imbalance:
    late, _, rounds = argument.partition(":")
    return Rotating(parse_duration(late), _count(rounds))


def _skewed(kind: type[AllSkewed] | type[FixedSkewed]) -> Callable[[str], Imbalance]:
    def parse(argument: str) -> Imbalance:
        least, _, most = argument.partition("-")
        skewed = kind(parse_duration(least), parse_duration(most))
        if skewed.least_s > skewed.most_s:
            raise ValueError(f"{argument!r} skews from a longer to a shorter delay")
        return skewed

    return parse


def _trace(name: TraceName) -> Callable[[str], Imbalance]:
    def parse(argument: str) -> Imbalance:
        if not re.fullmatch(r"\d*\.?\d+", argument or "1") or not float(argument or "1"):
            raise ValueError(f"{argument!r} is not a factor above 0 such as 0.1")
        return Trace(name, float(argument or "1"))

    return parse


_PARSERS: dict[str, Callable[[str], Imbalance]] = {
    "none": _without_argument(Balanced()),
    "real": _without_argument(Real()),
    "one-random": lambda argument: OneRandom(parse_duration(argument)),
    "k-random": _k_random,
    "rotating": _rotating,
    "all-skewed": _skewed(AllSkewed),
    "fixed-skewed": _skewed(FixedSkewed),
    **{f"trace-{name}": _trace(name) for name in get_args(TraceName)},
}


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"{text!r} is not a positive number")
    return int(text)


def _text(seconds: float) -> str:
    return f"{seconds * 1000:g}ms"
