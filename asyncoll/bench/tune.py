"""Measures the best sizes of pieces in shared memory on this host (the table in `asyncoll.algorithms.dense.tuning`).

The sizes are tuned one after another. All candidates of a size take turns in the allreduces that depend on it, several
times, so that a drift of the machine affects all of them equally. The fastest candidate is chosen.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import takewhile
from unittest import mock

import numpy as np

from asyncoll.algorithms.dense.tuning import VARIABLE, Sizes, choose
from asyncoll.bench.plan import BenchPlan
from asyncoll.bench.runs import rows_of

_REPEATS = 3
_CHUNKS = tuple(1 << power for power in range(15, 20))
_PIECES = tuple(1 << power for power in range(18, 23))
_SHORTS = tuple(1 << power for power in range(12, 21))
_LONG = (4 << 20, 32 << 20)
IN_PIECES = {"whole": 64, "private_max": 0}  # sizes with which arrays that are not registered go in pieces
_NO_SHORT = 64  # a limit below all measured sizes: every array is cut into chunks


def tune(ranks: int) -> tuple[Sizes, list[list[str]]]:
    """The best sizes for `ranks` ranks on this host, and a table of the measured times."""
    sizes, lines = choose(ranks, {}), [["what", "bytes", "time (us) of", *map(str, _LONG), "chosen"]]
    long = BenchPlan("allreduce", ranks, _LONG)
    for name, candidates, plan in (
        ("chunk", _CHUNKS, replace(long, registered=True)),
        ("piece", _PIECES, long),
    ):
        times = _compare(plan, [sizes._replace(**IN_PIECES | {name: candidate}) for candidate in candidates])
        # The sum of logarithms, because the times of the longer array would outweigh those of the shorter one in a sum.
        best = int(np.argmin(np.log(times).sum(axis=1)))
        for index, candidate in enumerate(candidates):
            cells = [f"{time:.0f}" for time in times[index]]
            lines.append([name, str(candidate), "allreduce", *cells, "*" if index == best else ""])
        sizes = sizes._replace(**{name: candidates[best]})
    shorts = BenchPlan("allreduce", ranks, _SHORTS)
    at_once, cut = _compare(shorts, [sizes._replace(short=_SHORTS[-1]), sizes._replace(short=_NO_SHORT)])
    # Take the sizes from the smallest on, up to the first at which cutting is faster: noise may make a longer one win.
    worthwhile = list(takewhile(lambda index: at_once[index] <= cut[index], range(len(_SHORTS))))
    sizes = sizes._replace(short=_SHORTS[max(worthwhile, default=0)])
    for size, first, second in zip(_SHORTS, at_once, cut, strict=True):
        chosen = "*" if size == sizes.short else ""
        lines.append(["short", str(size), "at once, cut", f"{first:.0f}", f"{second:.0f}", chosen])
    return sizes, lines


def _compare(plan: BenchPlan, candidates: list[Sizes]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Median times in microseconds, by candidate (first axis) and by size of the plan (second axis).

    Raises RuntimeError if a run fails or a result is wrong.
    """
    times = np.empty((_REPEATS, len(candidates), len(plan.sizes)))
    for repeat in range(_REPEATS):
        for index, candidate in enumerate(candidates):
            with mock.patch.dict(os.environ, {VARIABLE: setting(candidate)}):
                times[repeat, index] = [row["time_us"] for row in rows_of(plan)]
    return np.median(times, axis=0)


def setting(sizes: Sizes) -> str:
    """The value of ASYNCOLL_SIZES that selects these sizes."""

    return ",".join(f"{name}={value}" for name, value in sizes._asdict().items())
