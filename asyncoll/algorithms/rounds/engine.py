"""The decisions of one rank on one wait-avoiding operation: the accounting of its calls, and the opening of rounds.

Events come in as method calls, and decisions go out as their results: no lock, no loop, no clock, no message.

`Engine` decides which round a call waits for and what its caller is told, for every carrier of rounds. The round is the
clock. A call aims at the round after the newest one that this rank's callers were given. If that round is over already,
the call is late: it stages its contribution and takes the newest result at once, without opening anything. A late rank
that opened rounds would be alone in them (of 8 ranks, 1.8 instead of 6.1 stay active).

A rank is told of each round once, in order: as the result of a call, as a missed result, or as one of the skipped
rounds. An answer that is ready may have no receiver: its call is cancelled, closed or never awaited. Its rounds are
owed then, and the aim goes back to them. So the next call is late, and tells of them at once. If a newer answer was
given meanwhile, the owed rounds would be told out of order: they count as skipped, in the next call, or in `join`.

`NextRound` decides when a round by message opens, and which signals the ranks send each other for that. The carriers
only carry out its instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.activation import OPEN, REDUCE, ActivationStep, activation, edges, heard, synchronous
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.policies import check_rank
from asyncoll.algorithms.rounds.round_cells import AIM, ENGINE_CELLS, LAGS, STALE, first_missed
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.tensors.reductions import Array

Parts = list[Array]  # a contribution or a result: one flat array for each entry of the operation's layout


class Result(NamedTuple):
    """The result of a round. `parts` do not change any more, until their memory is used again."""

    number: int
    parts: Parts
    ranks: tuple[int, ...]  # those with a contribution in it, in order; ranks of the communicator, as `members`
    members: tuple[int, ...]  # the ranks that reduced together
    taken: int  # the ticket of this rank's newest contribution when the round took the staged one
    synchronous: bool
    weight: float  # the sum of the weights of its contributions, if the operation is weighted
    deserted: bool = False  # the round was synchronous, and all ranks were gone: no rank makes calls any more
    lent: bool = False  # `parts` are the memory of the caller that waits for the round
    averaged: bool = False  # `parts` are divided already, if the reduction is an average
    block: int = 0  # in memory: the block that has `parts`; 0: none


class Delivery(NamedTuple):
    """The answer to one call."""

    results: tuple[Result, ...]  # that of the call comes last, after those that it has missed, oldest first
    included: bool  # whether the contribution of the call is in the result of the call
    skipped: int  # rounds before that one that the caller is given no result of
    lag: int  # rounds from the one that the call aimed at to that one


# `Result(...)` goes through a function of Python. This makes the same of all fields in a third of its time.
result_of = partial(tuple.__new__, Result)
_TOO_OLD = -1  # the newest one of owed rounds that can only count as skipped


class Engine:
    """The calls of one rank on one operation, one after another. `take_back` may be called at any moment."""

    def __init__(self, operation: Operation) -> None:
        self.cells = memoryview(bytearray(8 * ENGINE_CELLS)).cast("q")  # the core counts calls, too
        self.cells[AIM] = 1
        self._operation = operation
        self._replaces = operation.group_size > 0  # contributions replace each other
        # Of each answer taken back: how many rounds it told of, one after another, and the newest of them.
        self.owed: deque[tuple[int, int]] = deque()
        self._lag: Counter[int] = Counter()  # calls that are too late for the cells, by lag

    @property
    def aim(self) -> int:
        """The round that the next call aims at."""
        return self.cells[AIM]

    def begin(self, latest: int, late_call_opens: Callable[[], bool]) -> int:
        """A call begins, and `latest` is the newest round that is over. Returns the round that the call waits for.

        Returns 0 if the call is late and takes the newest result. Asks `late_call_opens` if the call is late.
        """
        if self.owed:
            self.step_back()
        return latest + 1 if latest < self.aim or late_call_opens() else 0

    def step_back(self) -> bool:
        """Move the aim back over answers that were taken back, if no newer one was given. Returns whether it did.

        A call that waits asks once more when its round is over: the answer before it may have been taken back since.
        """
        if not self.owed:
            return False
        answers = [self.owed.popleft() for _ in range(len(self.owed))]
        answers.sort(key=itemgetter(1))
        aim = self.aim
        while answers and answers[-1][1] == self.aim - 1:
            self.cells[AIM] -= answers.pop()[0]
        self.owed.extend(answers)
        return self.aim < aim

    def first_missed(self, latest: int) -> int:
        """The oldest round that the call under way is told of as missed, when `latest` is the newest of them."""
        return first_missed(self.aim, latest, self._operation.history)

    def deliver(self, ticket: int, results: tuple[Result, ...]) -> Delivery:
        """The call with contribution `ticket` is given `results`, of rounds from its aim on; its own comes last."""
        told = self.tell(ticket, results)
        if told.lag < ENGINE_CELLS - LAGS:
            self.cells[LAGS + told.lag] += 1
        else:
            self._lag[told.lag] += 1
        if not told.included:
            self.cells[STALE] += 1
        return told

    def deliver_own(self, number: int) -> None:
        """Count a frequent call: it is given round `number`, its aim, with its contribution, and nothing is owed."""
        self.cells[AIM] = number + 1
        self.cells[LAGS] += 1

    def has_news(self, latest: int) -> bool:
        """Whether the newest round, `latest`, was not told to a caller of this rank."""
        self.step_back()
        return latest >= self.aim

    def tell(self, ticket: int, results: tuple[Result, ...]) -> Delivery:
        """The same without a call that is counted: of one that joins, if the newest round is news."""
        newest = results[-1]
        # Gradients add up until a round takes them. In groups a model that another has replaced is in no round.
        included = ticket == newest.taken if self._replaces else ticket <= newest.taken
        lag = newest.number - self.cells[AIM]
        self.cells[AIM] = newest.number + 1
        skipped = lag + 1 - len(results) + self._skip_owed()
        return tuple.__new__(Delivery, (results, included, skipped, lag))  # in half the time of `Delivery(...)`

    def end(self) -> tuple[int, int]:
        """All ranks have joined, and there is no news: the newest round that was told, and how many are skipped."""
        return self.aim - 1, self._skip_owed()

    def _skip_owed(self) -> int:
        """How many rounds are owed, all older than one that was told: they count as skipped now."""
        return sum([self.owed.popleft()[0] for _ in range(len(self.owed))])

    def take_back(self, newest: int, lag: int, rounds: int) -> None:
        """An answer of `rounds` rounds up to `newest`, which was `lag` rounds after its aim, has no receiver.

        Takes no lock: a finalizer may call this, in any thread, also in one that holds the lock of the rounds.
        """
        self.owed.append((1 + lag, newest))
        if rounds > 1 + lag:
            self.owed.append((rounds - 1 - lag, _TOO_OLD))

    def statistics(
        self, rounds: int, active: dict[int, int], waits_s: Sequence[float], late_s: Sequence[float]
    ) -> OperationStatistics:
        """The totals of these calls, together with those of the rounds."""
        lag = self._lag + Counter(dict(enumerate(self.cells[LAGS:])))
        calls = lag.total()
        return OperationStatistics(
            rounds=rounds,
            calls=calls,
            active=dict(sorted(active.items())),
            lag=dict(sorted(lag.items())),
            stale=self.cells[STALE] / calls if calls else 0.0,
            waits_s=tuple(waits_s),
            late_s=tuple(late_s),
        )


class Accounted:
    """What the rounds of one operation at one rank have in common, however they are carried out."""

    begin: Any = None
    at_once: Any = None
    _engine: Engine

    def end(self) -> tuple[int, int]:
        return self._engine.end()

    def take_back(self, delivery: Delivery) -> None:
        self._engine.take_back(delivery.results[-1].number, delivery.lag, len(delivery.results) + delivery.skipped)


# The events of a round at a rank, which are the steps of the signals that tell other ranks of them. The numbers are
# above those of the edges of the activation tree, which are steps of signals too.
ARRIVED = 255  # its caller waits for the round
LATE = 254  # its caller has contributed, and does not wait for the round
GONE = 253  # it makes no more calls: do not wait for it
JOINED = 251  # the same, and it waits until no rank makes calls any more


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
    is_opener = False  # whether this rank has opened it

    def __init__(self, operation: Operation, number: int, size: int, rank: int) -> None:
        self.number = number
        self.size = size
        self.drawn = operation.drawn(number, size)
        self.arrived_ranks: set[int] = set()  # callers of these have come to wait for the round
        self._operation = operation
        self._rank = rank
        self.gone_ranks: set[int] = set()  # GONE or JOINED
        self._has_joined = False  # whether one of them is JOINED

    @property
    def arrived(self) -> int:
        return len(self.arrived_ranks)

    def count(self) -> int:
        return len(self.arrived_ranks | self.gone_ranks)

    def has(self, rank: int) -> bool:
        check_rank(rank, self.size)
        return rank in self.arrived_ranks or rank in self.gone_ranks

    def late_call_opens(self) -> bool:
        """Whether a late call of this rank opens the round."""
        return rules.late_call_opens(self._operation, self, self._rank)

    def may_open(self) -> bool:
        """Whether this rank opens the round now. Where all ranks are gone and none waits, nothing happens.

        If all ranks are gone and one has joined, this is the last round: it takes all that is still staged.
        """
        if self.has_begun:
            return False
        is_last = self._has_joined and len(self.gone_ranks) == self.size
        return is_last or (bool(self.arrived_ranks) and rules.may_open(self._operation, self))

    def _note(self, rank: int, event: int) -> None:
        """ARRIVED, GONE or JOINED at `rank`."""
        (self.arrived_ranks if event == ARRIVED else self.gone_ranks).add(rank)
        self._has_joined |= event == JOINED

    @abstractmethod
    def here(self, event: int) -> list[Instruction]:
        """ARRIVED, LATE, GONE or JOINED at this rank, with its contribution staged."""

    @abstractmethod
    def signalled(self, rank: int, step: int) -> list[Instruction]:
        """The signal `step` of the round has come from group rank `rank`."""


class CoordinatedRound(NextRound):
    """One rank, the coordinator, is told of every event, and carries out the round for all: the first drawn one."""

    def here(self, event: int) -> list[Instruction]:
        # To the coordinator, which tells itself too: its later events must not overtake its earlier contributions.
        return [Tell(self.drawn[0], event)]

    def signalled(self, rank: int, step: int) -> list[Instruction]:
        if step != LATE:
            self._note(rank, step)
        elif rules.late_call_opens(self._operation, self, rank):
            self._note(rank, ARRIVED)
        if not self.may_open():
            return []
        self.has_begun = self.is_opener = True
        return [Begin()]


class ActivatedRound(NextRound):
    """A rank that may open the round tells all others along the activation tree, and each carries out its part."""

    def __init__(self, operation: Operation, number: int, size: int, rank: int) -> None:
        super().__init__(operation, number, size, rank)
        self._is_synchronous = operation.is_synchronous(number)
        plan = synchronous(size) if self._is_synchronous else activation(size, flood=operation.group_size > 0)
        self._schedule = plan.fresh()  # a new one for each round, as section 4.1.1 of the PPoPP 2020 paper has it
        self._told: set[bool] = set()  # the drawn ranks are told once that this rank arrives (True), and that it leaves

    def may_open(self) -> bool:
        # Each rank opens a synchronous round for itself, and the schedule waits for the others.
        return self.has(self._rank) and not self.has_begun if self._is_synchronous else super().may_open()

    def here(self, event: int) -> list[Instruction]:
        # A late contribution stays staged. If the round has begun, it ends without a signal of this rank.
        if event == LATE or self.has_begun:
            return []
        self._note(self._rank, event)
        if self.may_open():
            return self._fire(OPEN)
        arrives = event == ARRIVED
        if arrives in self._told or not (arrives or rules.counts_gone_ranks(self._operation)):
            return []
        self._told.add(arrives)
        # The first of the drawn ranks counts those that are gone. A quorum has no other, and a majority does not count.
        drawn = self.drawn if arrives else self.drawn[:1]
        return [Tell(rank, event) for rank in drawn if rank != self._rank]

    def signalled(self, rank: int, step: int) -> list[Instruction]:
        if step in edges(self.size):
            return self._fire(heard(step))
        self._note(rank, step)
        return self._fire(OPEN) if self.may_open() else []

    def _fire(self, step: ActivationStep) -> list[Instruction]:
        """`step` has happened: signals along the tree, and this rank's part, as the schedule says."""
        instructions: list[Instruction] = []
        self.is_opener |= step == OPEN
        for fired in self._schedule.fire(step):
            if fired.kind == "forward":
                instructions.append(Tell((self._rank + (1 << fired.edge)) % self.size, fired.edge))
            elif fired == REDUCE:
                self.has_begun = True
                instructions.append(Begin())
        return instructions
