"""Measures the best sizes of pieces in shared memory on this host (the table in `asyncoll.algorithms.dense.tuning`).

The sizes are tuned one after another. All candidates of a size take turns in the allreduces that depend on it, several
times, so that a drift of the machine affects all of them equally. The fastest candidate is chosen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import NamedTuple
from unittest import mock

import numpy as np

from asyncoll.algorithms.dense.tuning import VARIABLE, Sizes, choose
from asyncoll.bench.plan import BenchPlan
from asyncoll.bench.runs import rows_of
from asyncoll.testing.progress_bar import progress

_REPEATS = 3
_CHUNKS = tuple(1 << power for power in range(15, 20))
_PIECES = tuple(1 << power for power in range(18, 23))
_SHORTS = tuple(1 << power for power in range(12, 21))
_LONG = (4 << 20, 32 << 20)
IN_PIECES = {"whole": 64, "private_max": 0}  # sizes with which arrays that are not registered go in pieces
HEADINGS = ("what", "bytes", "time (us)", "of", "time (us)", "of", "chosen")
_RUNS = _REPEATS * (len(_CHUNKS) + len(_PIECES) + 2)
_NO_SHORT = 64  # a limit below all measured sizes: every array is cut into chunks

Times = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Timing(NamedTuple):
    """Median times of allreduces with a candidate."""

    what: str  # the size that is tuned
    bytes: int  # the candidate, or for "short" the length of the array
    times_us: dict[str, float]  # by length of the array, or for "short" by the way it goes
    chosen: bool

    def line(self) -> list[str]:
        """Its line of the table."""
        times = chain.from_iterable((f"{time:.0f}", what) for what, time in self.times_us.items())
        return [self.what, str(self.bytes), *times, "*" if self.chosen else ""]


def tune(ranks: int, tell: Callable[[Timing], None]) -> Sizes:
    """The best sizes for `ranks` ranks on this host. Tells all timings of a size when it is chosen, or at Ctrl-C."""
    sizes, long = choose(ranks, {}), BenchPlan("allreduce", ranks, _LONG)
    shorts = BenchPlan("allreduce", ranks, _SHORTS)
    with progress("chunk", _RUNS) as advance:
        for name, candidates, plan in (("chunk", _CHUNKS, replace(long, registered=True)), ("piece", _PIECES, long)):
            found = _Comparison(plan, [sizes._replace(**IN_PIECES | {name: candidate}) for candidate in candidates])
            try:
                found.measure(partial(advance, name))
            finally:
                times = found.medians()
                # The sum of logarithms, because the times of the longer array would outweigh those of the shorter one
                # in a sum.
                best = int(np.argmin(np.log(times).sum(axis=1))) if found.is_complete else None
                for index, candidate in enumerate(candidates):
                    times_us = dict(zip(map(str, _LONG), times[index], strict=True))
                    _tell_measured(tell, Timing(name, candidate, times_us, index == best))
            assert best is not None
            sizes = sizes._replace(**{name: candidates[best]})
        found = _Comparison(shorts, [sizes._replace(short=_SHORTS[-1]), sizes._replace(short=_NO_SHORT)])
        try:
            found.measure(partial(advance, "short"))
        finally:
            at_once, cut = found.medians()
            # Take the sizes from the smallest on, up to the first at which cutting is faster: noise may make a longer
            # one win.
            worthwhile = list(takewhile(lambda index: at_once[index] <= cut[index], range(len(_SHORTS))))
            short = _SHORTS[max(worthwhile, default=0)] if found.is_complete else None
            for size, first, second in zip(_SHORTS, at_once, cut, strict=True):
                _tell_measured(tell, Timing("short", size, {"at once": first, "cut": second}, size == short))
    assert short is not None
    return sizes._replace(short=short)


def _tell_measured(tell: Callable[[Timing], None], timing: Timing) -> None:
    if not any(map(math.isnan, timing.times_us.values())):
        tell(timing)


class _Comparison:
    """Times of candidates that take turns."""

    def __init__(self, plan: BenchPlan, candidates: list[Sizes]) -> None:
        self._plan = plan
        self._candidates = candidates
        self._times = np.full((_REPEATS, len(candidates), len(plan.sizes)), math.nan)

    def measure(self, advance: Callable[[], None]) -> None:
        """Measure all. Raises SystemExit if a run fails, and RuntimeError if a result is wrong."""
        for repeat in range(_REPEATS):
            for index, candidate in enumerate(self._candidates):
                with mock.patch.dict(os.environ, {VARIABLE: setting(candidate)}):
                    self._times[repeat, index] = [row["time_us"] for row in rows_of(self._plan)]
                advance()

    @property
    def is_complete(self) -> bool:
        return not np.isnan(self._times).any()

    def medians(self) -> Times:
        """In microseconds, by candidate (first axis) and size of the plan (second axis); NaN without a measurement."""
        medians: Times = np.full(self._times.shape[1:], math.nan)
        for index in range(len(self._candidates)):
            times = self._times[:, index]
            if len(measured := times[~np.isnan(times).any(axis=1)]):
                medians[index] = np.median(measured, axis=0)
        return medians


def setting(sizes: Sizes) -> str:
    """The value of ASYNCOLL_SIZES that selects these sizes."""

    return ",".join(f"{name}={value}" for name, value in sizes._asdict().items())
