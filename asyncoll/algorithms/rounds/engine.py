"""The decisions of one rank on one wait-avoiding operation: the accounting of its calls, and the opening of rounds.

Events come in as method calls, and decisions go out as their results: no lock, no loop, no clock, no message.

`Engine` decides which round a call waits for and what its caller is told, for every carrier of rounds. The round is the
clock. A call aims at the round after the newest one that this rank's callers were given. If that round is over already,
the call is late: it stages its contribution and takes the newest result at once, without opening anything. A late rank
that opened rounds would be alone in them (of 8 ranks, 1.8 instead of 6.1 stay active).

A rank is told of each round once: as the result of a call, as a missed result, or as one of the skipped rounds. A call
that is cancelled when its answer is ready tells its caller of nothing. The rounds of that answer are owed to the next
call. That call may be under way already, so its aim must not move: only a delivery moves it.

`NextRound` decides when a round by message opens, and which signals the ranks send each other for that. The carriers
only carry out its instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.activation import OPEN, REDUCE, Step, activation, edges, heard, synchronous
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.tally import OperationStatistics


class Answer(Protocol):
    """The result of a round as one rank has it, in whatever form."""

    @property
    def number(self) -> int: ...

    @property
    def taken(self) -> int:
        """The ticket of this rank's newest contribution when the round took the staged one."""


R = TypeVar("R", bound=Answer)


class Told(NamedTuple, Generic[R]):
    """What a call tells its caller beside its own result."""

    included: bool  # whether the contribution of the call is in the result
    missed: Sequence[R]  # results of rounds before, oldest first
    skipped: int  # rounds before that it has no results of
    dropped: Sequence[R]  # results that were owed, are too old to be told, and count as skipped
    lag: int  # rounds from the one that the call aimed at to the one of its result


class Engine(Generic[R]):
    """The calls of one rank on one operation. `take_back` may be called in any thread."""

    def __init__(self, operation: Operation) -> None:
        self.aim = 1  # the round that the next call aims at
        self._operation = operation
        self._owed: deque[tuple[Sequence[R], int]] = deque()  # of each answer taken back: its results, its other rounds
        self._lag: Counter[int] = Counter()  # calls, by the number of rounds from their aim to their result
        self._stale = 0  # calls whose contribution was not in their result

    def begin(self, latest: int, late_call_opens: Callable[[], bool]) -> int:
        """A call begins, and `latest` is the newest round that is over. Returns the round that the call waits for.

        Returns 0 if the call is late and takes the newest result. Asks `late_call_opens` if the call is late.
        """
        return latest + 1 if latest < self.aim or late_call_opens() else 0

    def first_missed(self, latest: int) -> int:
        """The oldest round that the call under way is told of as missed, when `latest` is the newest of them.

        A call tells of the results of the last `history` rounds before its own, and skips the older ones.
        """
        return max(self.aim, latest + 1 - self._operation.history)

    def deliver(self, ticket: int, result: R, missed: Sequence[R]) -> Told[R]:
        """The call with contribution `ticket` is given `result`, and `missed` of the rounds from its aim to that."""
        # Gradients add up until a round takes them. In groups a model that another has replaced is in no round.
        included = ticket == result.taken if self._operation.group_size else ticket <= result.taken
        lag = result.number - self.aim
        self.aim = result.number + 1
        self._lag[lag] += 1
        self._stale += not included
        skipped = lag - len(missed)
        if not self._owed:
            return Told(included, missed, skipped, [], lag)
        results = list(missed)
        while self._owed:
            owed, others = self._owed.popleft()
            results += owed
            skipped += others
        results.sort(key=lambda result: result.number)
        told = [old for old in results if old.number >= result.number - self._operation.history]
        dropped = results[: len(results) - len(told)]
        return Told(included, told, skipped + len(dropped), dropped, lag)

    def take_back(self, results: Sequence[R], rounds: int) -> None:
        """An answer of `rounds` rounds did not reach its caller. The `results` of some of them can be told again."""
        self._owed.append((results, rounds - len(results)))

    def owes(self, result: R) -> bool:
        """Whether this very result is to be told again, so that its memory is not to be used for anything else."""
        return any(result is owed for results, _ in tuple(self._owed) for owed in results)

    def statistics(
        self, rounds: int, active: dict[int, int], waits_s: Sequence[float], late_s: Sequence[float]
    ) -> OperationStatistics:
        """The totals of these calls, together with those of the rounds."""
        calls = self._lag.total()
        return OperationStatistics(
            rounds=rounds,
            calls=calls,
            active=dict(sorted(active.items())),
            lag=dict(sorted(self._lag.items())),
            stale=self._stale / calls if calls else 0.0,
            waits_s=tuple(waits_s),
            late_s=tuple(late_s),
        )


# The events of a round at a rank, which are the steps of the signals that tell other ranks of them. The numbers are
# above those of the edges of the activation tree, which are steps of signals too.
ARRIVED = 255  # its caller waits for the round
LATE = 254  # its caller has contributed, and does not wait for the round
GONE = 253  # it makes no more calls: do not wait for it


class Tell(NamedTuple):
    """The instruction to send the signal `step` of the round to group rank `rank`."""

    rank: int
    step: int


@dataclass(frozen=True)
class Begin:
    """The instruction to carry out the round: it is open."""


Instruction = Tell | Begin


class NextRound(ABC):
    """The next round of an operation by message, as one rank knows it. It is a `rules.RoundView`."""

    has_begun = False  # whether the round runs, as far as this rank knows

    def __init__(self, operation: Operation, number: int, size: int, rank: int) -> None:
        self.number = number
        self.size = size
        self.drawn = operation.drawn(number, size)
        self.arrived_ranks: set[int] = set()  # callers of these have come to wait for the round
        self._operation = operation
        self._rank = rank
        self._gone: set[int] = set()

    @property
    def arrived(self) -> int:
        return len(self.arrived_ranks)

    def count(self) -> int:
        return len(self.arrived_ranks | self._gone)

    def has(self, rank: int) -> bool:
        return rank in self.arrived_ranks or rank in self._gone

    def late_call_opens(self) -> bool:
        """Whether a late call of this rank opens the round."""
        return rules.late_call_opens(self._operation, self, self._rank)

    def may_open(self) -> bool:
        """Whether this rank opens the round now. Where all ranks are gone and none waits, nothing happens."""
        return not self.has_begun and bool(self.arrived_ranks) and rules.may_open(self._operation, self)

    @abstractmethod
    def here(self, event: int) -> list[Instruction]:
        """ARRIVED, LATE or GONE at this rank, with its contribution staged."""

    @abstractmethod
    def signalled(self, rank: int, step: int) -> list[Instruction]:
        """The signal `step` of the round has come from group rank `rank`."""


class CoordinatedRound(NextRound):
    """One rank, the coordinator, is told of every event, and carries out the round for all."""

    @property
    def coordinator(self) -> int:
        return self.drawn[0]

    def here(self, event: int) -> list[Instruction]:
        # The coordinator tells itself too, by message. Its later events must not overtake its earlier contributions.
        return [Tell(self.coordinator, event)]

    def signalled(self, rank: int, step: int) -> list[Instruction]:
        if step == GONE:
            self._gone.add(rank)
        elif step == ARRIVED or rules.late_call_opens(self._operation, self, rank):
            self.arrived_ranks.add(rank)
        if not self.may_open():
            return []
        self.has_begun = True
        return [Begin()]


class ActivatedRound(NextRound):
    """A rank that may open the round tells all others along the activation tree, and each carries out its part."""

    def __init__(self, operation: Operation, number: int, size: int, rank: int) -> None:
        super().__init__(operation, number, size, rank)
        self._is_synchronous = operation.is_synchronous(number)
        plan = synchronous(size) if self._is_synchronous else activation(size, flood=operation.group_size > 0)
        self._schedule = plan.fresh()  # a new one for each round, as section 4.1.1 of the PPoPP 2020 paper has it
        self._has_told = False  # the drawn ranks are told once that this rank is here: it may arrive, and then leave

    def may_open(self) -> bool:
        # Each rank opens a synchronous round for itself, and the schedule waits for the others.
        return self.has(self._rank) and not self.has_begun if self._is_synchronous else super().may_open()

    def here(self, event: int) -> list[Instruction]:
        # A late contribution stays staged. If the round has begun, it ends without a signal of this rank.
        if event == LATE or self.has_begun:
            return []
        (self.arrived_ranks if event == ARRIVED else self._gone).add(self._rank)
        if self.may_open():
            return self._fire(OPEN)
        if self._has_told or (event == GONE and not rules.counts_gone_ranks(self._operation)):
            return []
        self._has_told = True
        return [Tell(rank, event) for rank in self.drawn if rank != self._rank]

    def signalled(self, rank: int, step: int) -> list[Instruction]:
        if step in edges(self.size):
            return self._fire(heard(step))
        (self.arrived_ranks if step == ARRIVED else self._gone).add(rank)
        return self._fire(OPEN) if self.may_open() else []

    def _fire(self, step: Step) -> list[Instruction]:
        """`step` has happened: signals along the tree, and this rank's part, as the schedule says."""
        instructions: list[Instruction] = []
        for fired in self._schedule.fire(step):
            if fired.kind == "forward":
                instructions.append(Tell((self._rank + (1 << fired.edge)) % self.size, fired.edge))
            elif fired == REDUCE:
                self.has_begun = True
                instructions.append(Begin())
        return instructions
