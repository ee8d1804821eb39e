"""The calls of one rank on one wait-avoiding operation: what each aims at, waits for and is told.

The round is the clock. A call aims at the round after the newest one that this rank's callers were given. If that round
is over already, the call is late: it stages its contribution and takes the newest result at once, without opening
anything. A late rank that opened rounds would be alone in them (of 8 ranks, 1.8 instead of 6.1 stay active).

A rank is told of each round once: as the result of a call, as a missed result, or as one of the skipped rounds. A call
that is cancelled when its answer is ready tells its caller of nothing. The rounds of that answer are owed to the next
call. That call may be under way already, so its aim must not move: only a delivery moves it.

Events come in as method calls, and decisions go out as their results: no lock, no loop, no clock, no message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class Numbered(Protocol):
    """The result of a round, in whatever form."""

    @property
    def number(self) -> int: ...


R = TypeVar("R", bound=Numbered)


class Call(NamedTuple):
    """What a call is going to do."""

    aim: int
    number: int  # the round that it waits for; 0: it is late, and takes the newest result


class Told(NamedTuple, Generic[R]):
    """What a call tells its caller beside its own result."""

    missed: list[R]  # results of rounds before, oldest first
    skipped: int  # rounds before that it has no results of
    dropped: list[R]  # results that were owed, are too old to be told, and count as skipped


class Engine(Generic[R]):
    """At one rank. `take_back` may be called in any thread."""

    def __init__(self, history: int) -> None:
        """A call tells of the results of the last `history` rounds before its own, and skips the older ones."""
        self._history = history
        self._seen = 0  # the newest round of all deliveries
        self._owed: deque[tuple[Sequence[R], int]] = deque()  # of each answer taken back: its results, its other rounds

    @property
    def aim(self) -> int:
        """The round that the next call aims at."""
        return self._seen + 1

    def begin(self, latest: int, late_call_opens: Callable[[], bool]) -> Call:
        """A call begins, and `latest` is the newest round that is over. Asks `late_call_opens` if the call is late."""
        aim = self._seen + 1
        return Call(aim, latest + 1 if latest < aim or late_call_opens() else 0)

    def first_missed(self, aim: int, latest: int) -> int:
        """The oldest round that a call which aims at `aim` is told of as missed, when `latest` is the newest."""
        return max(aim, latest + 1 - self._history)

    def deliver(self, number: int, missed: Sequence[R]) -> Told[R]:
        """A call is given the result of round `number`, and `missed` of the rounds between its aim and that one."""
        results, skipped = list(missed), number - self.aim - len(missed)
        while self._owed:
            owed, others = self._owed.popleft()
            results += owed
            skipped += others
        results.sort(key=lambda result: result.number)
        told = [result for result in results if result.number >= number - self._history]
        dropped = results[: len(results) - len(told)]
        self._seen = number
        return Told(told, skipped + len(dropped), dropped)

    def take_back(self, results: Sequence[R], others: int) -> None:
        """An answer did not reach its caller. It told of these results, which can be told again, and `others` more."""
        self._owed.append((results, others))

    def owes(self, result: R) -> bool:
        """Whether this very result is to be told again, so that its memory is not to be used for anything else."""
        return any(result is owed for results, _ in tuple(self._owed) for owed in results)


class Gathering:
    """A `RoundView` that is filled in by messages: the ranks that are known to be at one round."""

    def __init__(self, number: int, size: int, drawn: Sequence[int]) -> None:
        self.number = number
        self.size = size
        self.drawn = drawn
        self._waiting: set[int] = set()
        self._here: set[int] = set()

    def arrived(self, rank: int) -> None:
        """The caller of `rank` waits for the round."""
        self._waiting.add(rank)
        self._here.add(rank)

    def gone(self, rank: int) -> None:
        """`rank` has ended its program."""
        self._here.add(rank)

    def is_waiting(self, rank: int) -> bool:
        return rank in self._waiting

    @property
    def has_caller(self) -> bool:
        return bool(self._waiting)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def count(self) -> int:
        return len(self._here)

    def has(self, rank: int) -> bool:
        return rank in self._here
