"""Ranks that wait for each other for ever: all are in calls, in different ones, and none makes the missing call.

A rank *stands still* if it has been in calls for some seconds, and meanwhile none of them has begun or ended, no
message has come or gone, and no thread of its process has computed. It tells that to one rank, with all of its calls,
and how many messages it has sent and received (message Still). Once that rank has it from all, no call of theirs has
all that it needs, and as many messages were received as sent, it asks all of them again (message Stillness). If nothing
has changed at any rank, all have stood still at the same moment, between the last report and the question: nothing is
under way, so no call ends any more.

It may still go on where a program has something else that can make the missing call. Each rank says whether it knows
that there is nothing (`ProgramActivity.is_stuck`). If all do, the world fails with a DeadlockError. Otherwise one rank
logs a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from asyncoll.errors import ProtocolError
from asyncoll.runtime.failures import WORLD, Failures
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.transport.wire import Deadlock, Still, Stillness

logger = logging.getLogger("asyncoll")

STILL_S = 5.0
_TICK_S = 1.0
_IDLE = 0.5  # of the time: a thread that computes is on a core, or waits for one, all of the time


class Kind(IntEnum):
    """What a call needs of its ranks. A rank that leaves ends its part in calls of these kinds one after another."""

    COLLECTIVE = 1  # all its ranks, as far as their calls with numbers go
    PAIR = 2  # its two ranks
    FROM_ANY = 3  # one other rank
    ROUND = 4  # the runtime of its ranks, which serves the rounds of others after the last call


class ToldCall(NamedTuple):
    """A call in progress, as other ranks are told of it."""

    communicator: int
    number: int  # of a call of all ranks
    kind: Kind
    size: int  # the number of its ranks
    key: str  # the same at all of its ranks


class CallsInProgress(Protocol):
    """The calls in progress on one communicator: `pending.PendingCalls`."""

    changes: int  # how many have begun or ended

    def waits(self) -> list[ToldCall]:
        """The calls in progress."""

    def begun(self) -> tuple[int, int]:
        """The communicator, and the number of the last call of all its ranks."""

    def doing(self) -> str:
        """What this rank does: the calls that it is in, or its last call."""

    def among(self) -> str:
        """The ranks of the communicator, for errors; empty if all of the world are."""

    def may_arrive(self) -> bool:
        """Whether a call waits for a device or a deadline: then it ends without another rank."""


class ProgramActivity(Protocol):
    """What the program of this rank does besides its calls: `progress.Runner`."""

    def is_waiting(self) -> bool:
        """Whether the program waits for a call, as far as this can be known. It may have calls under way and go on."""

    def is_stuck(self) -> bool:
        """Whether nothing but the end of a call wakes the program, as far as this can be known for certain."""

    def computed_s(self) -> float:
        """The seconds that the threads of this process have computed, or waited for a core."""


class Report(NamedTuple):
    """What a rank tells as it stands still."""

    waits: Sequence[ToldCall]
    begun: Mapping[int, int]  # by communicator: the number of its last call of all ranks


def can_go_on(reports: Sequence[Report]) -> bool:
    """Whether some call in progress has all that it needs, as far as all ranks of the world have told."""
    shared = Counter((wait.communicator, wait.key) for report in reports for wait in set(report.waits))
    messages = Counter(wait.communicator for report in reports for wait in report.waits if wait.kind is Kind.PAIR)
    from_any = Counter(wait.communicator for report in reports for wait in report.waits if wait.kind is Kind.FROM_ANY)

    def is_met(wait: ToldCall) -> bool:
        if wait.kind is Kind.COLLECTIVE:
            return sum(report.begun.get(wait.communicator, 0) >= wait.number for report in reports) >= wait.size
        if wait.kind is Kind.FROM_ANY:
            return messages[wait.communicator] > 0
        if wait.kind is Kind.PAIR and from_any[wait.communicator]:
            return True
        return shared[wait.communicator, wait.key] >= wait.size

    return any(is_met(wait) for report in reports for wait in report.waits)


class Standstill:
    """One rank's part in it. On the runtime's loop, but for `is_asleep` and the making of it."""

    def __init__(self, router: Router, failures: Failures, membership: Membership) -> None:
        self._router = router
        self._failures = failures
        self._membership = membership
        self._calls: dict[CallsInProgress, None] = {}  # an ordered set
        self.program: ProgramActivity | None = None
        self.is_asleep = True  # the next change of calls has to `wake` this
        self._timer: asyncio.TimerHandle | None = None
        self._own_sent, self._own_received = Counter[int](), Counter[int]()  # messages of this object, by rank
        self._mark: tuple[int, ...] = ()  # changes with all that happens at this rank
        self._since_s = 0.0
        self._computed_s: tuple[float, float] | None = None  # at a moment since then: that moment, and `computed_s`
        self._stamp = 0  # of the last report
        # At the rank that is told: the reports, the question that is open, and the ranks that have answered it.
        self._told: dict[int, Still] = {}
        self._question = 0
        self._answered: set[int] | None = None

    def opened(self, calls: CallsInProgress) -> None:
        self._calls[calls] = None

    def closed(self, calls: CallsInProgress) -> None:
        self._calls.pop(calls, None)

    def finished(self) -> None:
        """This rank makes no more calls."""
        if self._timer is not None:
            self._timer.cancel()
        self._calls.clear()

    # -- a rank that may stand still --------------------------------------------------------------

    def wake(self) -> None:
        """Calls have begun or ended, or another rank has left the world.

        Then what this one has told counts no more, and perhaps the one that it told.
        """
        if self.is_asleep and self._waits():
            self.is_asleep = False
            self._watch()

    def _watch(self) -> None:
        """From now on this rank may stand still."""
        loop = asyncio.get_running_loop()
        self._mark, self._since_s, self._computed_s = self._state(), loop.time(), None
        self._timer = loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._waits() or self._failures.any or any(calls.may_arrive() for calls in self._calls):
            self.is_asleep = True
        elif self._state() != self._mark or (self.program is not None and not self.program.is_waiting()):
            self._watch()
        elif self._computed_s is None:  # not before: it takes a system call for each thread
            self._computed_s = loop.time(), self._computed()
            self._timer = loop.call_later(_TICK_S, self._tick)
        elif loop.time() - self._since_s < STILL_S:
            self._timer = loop.call_later(_TICK_S, self._tick)
        elif not self._is_idle():
            self._watch()
        else:
            # First: from here on a change wakes this object.
            self.is_asleep = True
            self._stamp += 1
            self._tell(min(self._ranks()), self._still(0))

    def _waits(self) -> list[ToldCall]:
        return [wait for calls in self._calls for wait in calls.waits()]

    def _state(self) -> tuple[int, ...]:
        numbers = [calls.begun()[1] for calls in self._calls]
        return (*self._messages(), sum(calls.changes for calls in self._calls), len(numbers), sum(numbers))

    def _messages(self) -> tuple[int, int]:
        """How many others have been sent and received. Without those of ranks that have left, which tell no numbers."""
        sent, received, ranks = self._router.sent_to, self._router.received_from, self._ranks()
        return (
            sum(sent[rank] - self._own_sent[rank] for rank in ranks),
            sum(received[rank] - self._own_received[rank] for rank in ranks),
        )

    def _is_idle(self) -> bool:
        """Whether no thread of this process has computed for most of the time."""
        assert self._computed_s is not None
        at_s, before_s = self._computed_s
        return self._computed() - before_s < _IDLE * (asyncio.get_running_loop().time() - at_s)

    def _computed(self) -> float:
        return 0.0 if self.program is None else self.program.computed_s()

    def _still(self, question: int) -> Still:
        waits = "\n".join(f"{w.communicator} {w.number} {w.kind:d} {w.size} {w.key}" for w in self._waits())
        begun = "\n".join(f"{communicator} {number}" for communicator, number in (c.begun() for c in self._calls))
        doing = " and ".join(calls.doing() + calls.among() for calls in self._calls if calls.waits())
        is_sure = self.program is not None and self.program.is_stuck()
        return Still(self._stamp, question, int(is_sure), *self._messages(), waits, begun, doing)

    def _ranks(self) -> set[int]:
        """The ranks that are in the world."""
        return set(self._membership.members) - self._membership.ended

    def _tell(self, rank: int, message: Still | Stillness) -> None:
        if rank != self._router.rank:
            self._own_sent[rank] += 1
            self._router.tell(rank, message)
        elif isinstance(message, Still):
            self._hear(rank, message)
        else:
            self._answer(rank, message)

    # -- messages ---------------------------------------------------------------------------------

    def received(self, source: int, message: Still | Stillness) -> None:
        self._own_received[source] += 1
        if isinstance(message, Still):
            self._hear(source, message)
        else:
            self._answer(source, message)

    def _answer(self, source: int, question: Stillness) -> None:
        """Whether this rank still stands as it has told. If not, it tells that again once it does."""
        is_same = self.is_asleep and question.stamp == self._stamp and self._state() == self._mark
        if is_same and self._is_idle():
            self._tell(source, self._still(question.number))
        else:
            self.wake()

    def _hear(self, source: int, still: Still) -> None:
        """A report, or an answer."""
        ranks = self._ranks()
        if still.question and still.question != self._question:
            return  # to an earlier question
        if not still.question:
            self._answered = None
        self._told[source] = still
        if self._answered is not None:
            self._answered.add(source)
            if self._answered >= ranks:
                self._answered = None
                self._conclude(sorted(ranks))
        elif self._told.keys() >= ranks and not self._may_go_on(ranks):
            self._question += 1
            self._answered = set()
            for rank in ranks:
                self._tell(rank, Stillness(self._told[rank].stamp, self._question))

    def _may_go_on(self, ranks: set[int]) -> bool:
        """Whether a message is under way, so that it was sent and not received yet, or a call has all that it needs."""
        told = [self._told[rank] for rank in ranks]
        if sum(still.sent for still in told) != sum(still.received for still in told):
            return True
        return can_go_on([_report(rank, self._told[rank]) for rank in ranks])

    def _conclude(self, ranks: Sequence[int]) -> None:
        told = [self._told[rank] for rank in ranks]
        where = "; ".join(f"{self._membership.name(rank)}, {self._told[rank].doing}" for rank in ranks)
        self._told.clear()
        if all(still.is_sure for still in told):
            text = f"all ranks wait in different calls, and none can make the one that another waits for: {where}"
            self._failures.give_up(Deadlock(WORLD, text), WORLD, ranks)
        else:
            logger.warning(
                "all ranks wait in different calls. They wait for ever, unless a task, a thread, a timer or a signal "
                "makes the missing call: %s",
                where,
            )


def _report(source: int, still: Still) -> Report:
    try:
        waits = []
        for line in filter(None, still.waits.split("\n")):
            communicator, number, kind, size, key = line.split(" ", 4)
            waits.append(ToldCall(int(communicator), int(number), Kind(int(kind)), int(size), key))
        begun = (line.split(" ") for line in filter(None, still.begun.split("\n")))
        return Report(waits, {int(communicator): int(number) for communicator, number in begun})
    except ValueError as error:
        raise ProtocolError(f"a Still that cannot be read: {error}", source) from None
