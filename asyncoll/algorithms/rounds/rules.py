"""Who may open a round, and whose contribution is in its result: pure functions, the same for every carrier of rounds.

Rounds of solo, majority and quorum allreduces: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training
workloads in deep learning with partial collective operations", PPoPP 2020, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncoll.algorithms.rounds.operation import Opening, Operation


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
    def has_caller(self) -> bool:
        """Whether any rank has a caller that waits for this round."""

    @property
    def waiting(self) -> int:
        """How many ranks have a caller that waits for this round."""

    def count(self) -> int:
        """How many ranks have a caller that waits for this round, or are gone."""

    def has(self, rank: int) -> bool:
        """Whether `rank` has a caller that waits for this round, or is gone."""


def may_open(operation: Operation, round: RoundView) -> bool:  # noqa: A002 (the papers' word)
    """Whether the round may begin. At least one caller must wait for it: where all ranks are gone, nothing happens."""
    if not round.has_caller:
        return False
    if operation.is_synchronous(round.number):
        return round.count() == round.size
    if operation.opening is Opening.MAJORITY:
        return any(round.has(rank) for rank in round.drawn)
    return operation.quorum == 1 or round.count() >= operation.quorum


def late_call_opens(operation: Operation, round: RoundView, rank: int) -> bool:  # noqa: A002
    """Whether a late call of `rank` opens the round at once, instead of taking the newest result.

    It does if `rank` is drawn to open the round and at least half of the ranks wait for that: another step of
    computation would only keep them waiting. If fewer wait, the round would come too early for the rest.
    """
    return (
        operation.opening is Opening.MAJORITY
        and not operation.is_synchronous(round.number)
        and 2 * round.waiting >= round.size
        and rank in round.drawn
    )


def is_included(operation: Operation, ticket: int, taken: int) -> bool:
    """Whether contribution `ticket` of a rank is in a result that has taken those up to `taken`.

    Gradients add up until a round takes them. In groups a model replaces the one before, which is then in no round.
    """
    return ticket == taken if operation.group_size else ticket <= taken
