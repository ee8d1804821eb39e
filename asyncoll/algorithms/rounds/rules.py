"""The rank that may open a round: pure functions, the same for every carrier of rounds.

Rounds of solo, majority and quorum allreduces: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training
workloads in deep learning with partial collective operations", PPoPP 2020, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.round_cells import are_enough


class RoundView(Protocol):
    """The next round of an operation, as one rank knows it. A rank that has ended its program is gone, not late."""

    @property
    def number(self) -> int: ...

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def drawn(self) -> Sequence[int]:
        """The ranks that are drawn for this round."""

    @property
    def arrived(self) -> int:
        """How many ranks have arrived: a caller has come to wait for this round, even if it was cancelled since."""

    def count(self) -> int:
        """How many ranks have arrived, or are gone."""

    def has(self, rank: int) -> bool:
        """Whether `rank` has arrived, or is gone."""


def may_open(operation: Operation, round: RoundView) -> bool:  # noqa: A002 (the papers' word)
    """Whether the round, for which at least one caller waits, may begin."""
    if operation.is_synchronous(round.number):
        return round.count() == round.size
    match operation.opening:
        case Opening.SOLO:
            return True
        case Opening.MAJORITY:
            return any(round.has(rank) for rank in round.drawn)
        case Opening.QUORUM:
            return round.count() >= operation.quorum


def first_caller_opens(operation: Operation) -> bool:
    """Whether `may_open` is true of every round for which a caller waits. Rounds in memory then do not ask it."""
    is_solo = operation.opening is Opening.SOLO or (operation.opening is Opening.QUORUM and operation.quorum == 1)
    return is_solo and not operation.sync_every


def counts_gone_ranks(operation: Operation) -> bool:
    """Whether the first drawn rank of a round must be told of ranks that are gone, before a caller waits for it.

    A quorum counts them. In the other kinds that rank opens the last round, when it knows that no rank makes calls any
    more. Rounds in groups have no last one.
    """
    return not operation.group_size


def late_calls_count(operation: Operation) -> bool:
    """Whether `late_call_opens` may be true: the ranks that open rounds must be told of late calls."""
    return operation.opening is Opening.MAJORITY


def late_call_opens(operation: Operation, round: RoundView, rank: int) -> bool:  # noqa: A002
    """Whether a late call of `rank` opens the round at once, instead of taking the newest result.

    It does if late calls count, `rank` is drawn to open the round, and at least half of the ranks wait for that:
    another step of computation would only keep them waiting. If fewer wait, the round would come too early for the
    rest.
    """
    return (
        late_calls_count(operation)
        and not operation.is_synchronous(round.number)
        and are_enough(round.arrived, round.size)
        and rank in round.drawn
    )
