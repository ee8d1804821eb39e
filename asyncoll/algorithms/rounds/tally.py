"""Participation in rounds: which ranks contributed, how long each waited or how late it was, and the totals.

By message the participation of each rank travels with the round's reduction, so every rank knows that of all. In memory
the ranks count in the cells of the operation's control block (`round_record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncoll.tensors.reductions import Array

PRESENT, GONE, TIMES_S, WEIGHT = 0, 1, slice(2, 4), 4  # the rows of a participation list; times: waited, late
PARTICIPATION_BYTES = 16  # of each rank in a participation list: four float32
WEIGHTED_PARTICIPATION_BYTES = 40  # the same of a weighted operation: five float64


class Participation(NamedTuple):
    """What the summed participation list of a finished round tells."""

    ranks: tuple[int, ...]  # those that contributed, in order
    gone: int  # how many of the members make no more calls
    weight: float  # the sum of the weights of all contributions; 0 unless the operation is weighted


@dataclass(frozen=True, slots=True)
class OperationStatistics:
    """Totals of one wait-avoiding operation, as one rank knows them.

    Times are in seconds. Each rank measures its times with its own clock and sends them with its contributions. A short
    contribution by message is sent before the wait of its caller is over, so it has the times of earlier waits only; so
    does any between hosts.
    """

    rounds: int
    """The number of rounds that were executed."""

    calls: int
    """The number of calls that this rank has made and that have returned."""

    active: dict[int, int]
    """By number of contributors: the number of rounds with so many.

    In groups, each group counts as a round: by message only this rank's groups, in shared memory all of them.
    """

    lag: dict[int, int]
    """By number of rounds between the round that a call aimed at and the round that it was given: this rank's calls."""

    stale: float
    """The share of this rank's calls whose contribution was not in the round that they were given."""

    waits_s: tuple[float, ...]
    """By rank: the time that its callers have waited for rounds to begin. The rank that waits least arrives last."""

    late_s: tuple[float, ...]
    """By rank: the time from the beginning of the rounds that its callers aimed at until they arrived."""


def blank_totals(members: int, *, weighted: bool) -> Array:
    """A participation list of so many members, with zeros: [row, member]. Its times are those of all rounds so far.

    A float32 would count them in steps of 8 ms after a day.
    """
    return np.zeros((_shape(weighted)[0], members), np.float64)


def _shape(weighted: bool) -> tuple[int, type[np.floating[Any]]]:
    # The sum of weights has to be as exact as the reduction of float64, all else need not.
    return (5, np.float64) if weighted else (4, np.float32)


class Tally:
    """The totals of the rounds of one operation by message, at one rank."""

    def __init__(self, size: int, *, weighted: bool) -> None:
        self._rows, self.dtype = _shape(weighted)
        self.participation_bytes = WEIGHTED_PARTICIPATION_BYTES if weighted else PARTICIPATION_BYTES
        self._came_s: float | None = None  # the arrival of the caller that waits for the next round; None: none waits
        self._passed_s: float | None = None  # the beginning of the first round that no call was given; None: no such
        self._newest_s = 0.0  # the beginning of the newest round
        self._own_times_s = [0.0, 0.0]  # waited and late, since the last `sign`
        self.times_s = np.zeros((2, size))  # waited and late, by rank
        self.rounds = 0
        self.active: Counter[int] = Counter()  # rounds, by the number of contributors
        self.newest = np.zeros(size, np.int64)  # the newest round with a contribution of each rank
        self.taken = np.zeros(size)  # how many contributions of each rank are in the rounds of all ranks

    def came(self, now_s: float) -> None:
        """A call of this rank begins."""
        # No round has begun since its last call, so this one is in time.
        if self._passed_s is None:
            self._came_s = now_s
        else:
            self._own_times_s[1] += now_s - self._passed_s

    def left(self, now_s: float) -> None:
        """The call waits no longer: the round begins, or the caller was cancelled."""
        if self._came_s is not None:
            self._own_times_s[0] += now_s - self._came_s
            self._came_s = None

    def began(self, now_s: float) -> None:
        """A round begins."""
        self.left(now_s)
        self._newest_s = now_s
        if self._passed_s is None:
            self._passed_s = now_s

    def blank(self, members: int, gone: Iterable[int] = ()) -> Array:
        """A participation list of a round of so many members: [row, member], with zeros but for those that are gone."""
        participation = np.zeros((self._rows, members), self.dtype)
        for rank in gone:
            participation[GONE, rank] = 1
        return participation

    def sign(self, members: int, index: int, *, contributes: int, gone: bool, weight: float) -> Array:
        """This rank's participation list of a round of so many members: only the column at `index` is filled.

        `contributes` is the number of its contributions, which are added up. The lists of all members are summed. The
        times since the last list go into this one, and start again from 0.
        """
        participation = self.blank(members)
        participation[:, index] = (contributes, gone, *self._own_times_s, weight)[: self._rows]
        self._own_times_s = [0.0, 0.0]
        return participation.reshape(-1)

    def count_round(self, number: int, members: tuple[int, ...], participation: Array) -> Participation:
        """Add the summed list of round `number`, which is over."""
        rows = participation.reshape(self._rows, len(members))
        ranks, gone = tuple(rows[PRESENT].nonzero()[0].tolist()), int(np.count_nonzero(rows[GONE]))
        if len(members) == self.times_s.shape[1]:  # all ranks: no index array is made
            self.times_s += rows[TIMES_S]
            self.taken += rows[PRESENT]
        else:
            ranks = tuple([members[place] for place in ranks])
            self.times_s[:, members] += rows[TIMES_S]
        self.newest[list(ranks)] = number
        # Otherwise there is no result, and no caller for it.
        if ranks or gone < len(members):
            self.rounds += 1
            self.active[len(ranks)] += 1
        return Participation(ranks, gone, float(rows[WEIGHT].sum()) if self._rows > WEIGHT else 0.0)

    def returned(self, *, next_has_begun: bool) -> None:
        """The call of this rank returns."""
        self._came_s = None
        self._passed_s = self._newest_s if next_has_begun else None
