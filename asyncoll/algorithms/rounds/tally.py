"""Who is in a round, how long each waited or how late it came, and the totals of an operation.

Each rank's part of it rides along with the round's reduction, so that every rank knows all of it without asking.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from asyncoll.tensors.reductions import Array

_PRESENT, _GONE, _TIMES_S = 0, 1, slice(2, 4)  # the rows of an participation list; times: waited, late
PARTICIPATION_BYTES = 16  # of each rank in an participation list


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Totals of one wait-avoiding operation, as one rank knows them.

    Times are in seconds. Each rank measures its own with its own clock and sends them with its contributions. A short
    contribution is sent before the wait of its caller is over, so it has the times of the waits before.
    """

    rounds: int
    """The number of rounds that were executed."""

    calls: int
    """The number of calls that this rank has made and that have returned."""

    active: dict[int, int]
    """Number of contributors: number of rounds with so many.

    In groups, of the rounds of this rank's own groups; in shared memory, of the rounds of every group.
    """

    lag: dict[int, int]
    """Number of rounds between the one that a call of this rank aimed at and the one given: number of such calls."""

    stale: float
    """The share of this rank's calls whose contribution was not in the round that they were given."""

    waits_s: tuple[float, ...]
    """By rank: how long its callers have waited for rounds to begin. The rank that waits least arrives last."""

    late_s: tuple[float, ...]
    """By rank: how long after the beginning of the rounds that they aimed at its callers have arrived."""


class Tally:
    """The totals of one operation at one rank."""

    def __init__(self, size: int) -> None:
        self._came_s: float | None = None  # when the caller came that waits for the next round to begin
        self._passed_s: float | None = None  # when the first round began that the caller has not seen
        self._newest_s = 0.0  # when the newest round began
        self._own_times_s = [0.0, 0.0]  # waited and late, since this rank last took part
        self._times_s = np.zeros((2, size))
        self._rounds = 0
        self._active: Counter[int] = Counter()
        self._lag: Counter[int] = Counter()
        self._stale = 0

    def came(self, now_s: float) -> None:
        """This rank's caller is here."""
        if self._passed_s is None:
            self._came_s = now_s
        else:
            self._own_times_s[1] += now_s - self._passed_s

    def left(self, now_s: float) -> None:
        """This rank's caller has stopped waiting."""
        if self._came_s is not None:
            self._own_times_s[0] += now_s - self._came_s
            self._came_s = None

    def began(self, now_s: float) -> None:
        """A round begins."""
        if self._came_s is not None:
            self._own_times_s[0] += now_s - self._came_s
            self._came_s = None
        self._newest_s = now_s
        if self._passed_s is None:
            self._passed_s = now_s

    def sign(self, members: int, place: int, *, contributes: bool, gone: bool) -> Array:
        """This rank's participation list of a round among so many members: its own column filled, to be summed."""
        participation = np.zeros((4, members), np.float32)
        participation[:, place] = contributes, gone, *self._own_times_s
        self._own_times_s = [0.0, 0.0]
        return participation.reshape(-1)

    def count_round(self, members: tuple[int, ...], participation: Array) -> tuple[int, int]:
        """Take in the list of a finished round; returns how many contributed, and how many make no more calls."""
        rows = participation.reshape(4, len(members))
        active, gone = int(np.count_nonzero(rows[_PRESENT])), int(np.count_nonzero(rows[_GONE]))
        if len(members) == self._times_s.shape[1]:
            self._times_s += rows[_TIMES_S]
        else:
            self._times_s[:, members] += rows[_TIMES_S]
        self._rounds += 1
        self._active[active] += 1
        return active, gone

    def count_call(self, lag: int, *, included: bool, next_has_begun: bool) -> None:
        """A call returns the newest result."""
        self._lag[lag] += 1
        self._stale += not included
        self._came_s = None
        self._passed_s = self._newest_s if next_has_begun else None

    def statistics(self) -> OperationStatistics:
        calls = self._lag.total()
        return OperationStatistics(
            rounds=self._rounds,
            calls=calls,
            active=dict(sorted(self._active.items())),
            lag=dict(sorted(self._lag.items())),
            stale=self._stale / calls if calls else 0.0,
            waits_s=tuple(self._times_s[0].tolist()),
            late_s=tuple(self._times_s[1].tolist()),
        )
