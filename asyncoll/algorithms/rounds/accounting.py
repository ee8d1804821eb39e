"""Which rounds the callers of one rank have been told of, and which are still owed to them.

A rank is told of each round once: as the result of a call, as a missed result, or as one of the skipped rounds. A call
that is cancelled when its answer is ready tells its caller of nothing. The rounds of that answer are owed to the next
call. That call may be under way already, so its aim must not move: only a delivery moves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """The result of a round, in whatever form."""

    @property
    def number(self) -> int: ...


R = TypeVar("R", bound=Numbered)


class Accounting(Generic[R]):
    """The accounts of one operation at one rank. `take_back` may be called in any thread."""

    def __init__(self, history: int) -> None:
        """A call tells of the results of the last `history` rounds before its own, and skips the older ones."""
        self._history = history
        self._seen = 0  # the newest round of all deliveries
        self._owed: deque[tuple[Sequence[R], int]] = deque()  # of each answer taken back: its results, its other rounds

    @property
    def aim(self) -> int:
        """The round that the next call aims at."""
        return self._seen + 1

    def deliver(self, number: int, missed: Sequence[R]) -> tuple[list[R], int, list[R]]:
        """A call is given the result of round `number`, and `missed` of the rounds between its aim and that one.

        Returns all missed results that the call tells of, oldest first, the number of rounds that it skips, and the
        results among those, which nobody needs any more.
        """
        results, skipped = list(missed), number - self.aim - len(missed)
        while self._owed:
            owed, others = self._owed.popleft()
            results += owed
            skipped += others
        results.sort(key=lambda result: result.number)
        told = [result for result in results if result.number >= number - self._history]
        dropped = results[: len(results) - len(told)]
        self._seen = number
        return told, skipped + len(dropped), dropped

    def take_back(self, results: Sequence[R], others: int) -> None:
        """An answer did not reach its caller. It told of these results, which can be told again, and `others` more."""
        self._owed.append((results, others))

    def owes(self, result: R) -> bool:
        """Whether this very result is to be told again, so that its memory is not to be used for anything else."""
        return any(result is owed for results, _ in tuple(self._owed) for owed in results)
