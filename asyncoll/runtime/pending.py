"""The calls in progress of one rank on one communicator, and the report of the missing ranks when a call is overdue.

A call is overdue at the end of `asyncoll.deadline` or after ASYNCOLL_DEADLINE_S seconds. Its rank then asks all ranks
of the call where they are (message Where), waits a short time for the answers (message Here), and fails the
communicator with a message that names the ranks that have arrived and the ranks that are missing (message Overdue). A
rank whose tensor has not arrived from its device is missing, as if it had not made the call.

A call that waits for a rank which has left (see `lifetime`) fails the communicator, too. So does a rank that has not
left in order, if this one is in the middle of rounds: they would go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from asyncoll.runtime import deadlines
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import Departed
from asyncoll.runtime.group import Group
from asyncoll.runtime.standstill import Kind, ToldCall
from asyncoll.tensors.staged import Arriving
from asyncoll.transport.wire import Here, Overdue, Where

# The time for answers. The progress thread of a rank answers, also while its program computes.
_ANSWER_S = 0.25

# A call may be over without a rank that has left, if all that it needs has come. It has this long to end.
_COMPLETION_S = 0.02
# The loop may have been busy for all of that time, so it also has to turn so often.
_COMPLETION_TURNS = 4

# Defaults of deadlines are half an hour. A shorter one is the program's own.
_DEFAULT_S = 1700.0
_SHOWN_MAX = 8  # ranks of a communicator that an error lists

# So many numbered calls are remembered by name, for the answer what this rank has called instead.
_RECENT_MAX = 64


class Described(Protocol):
    """A call; `str(call)` describes it for errors, with the line of the user's code."""

    @property
    def key(self) -> str:
        """A name of the call, of one line, that is the same at every rank."""


@dataclass(slots=True, weakref_slot=True, eq=False)  # not frozen: that takes five times as long to make
class PendingCall:
    """One call in progress. Times are in seconds of the clock of deadlines, which is virtual in simulations."""

    call: Described
    number: int  # in the order of calls that all ranks make, from 1; 0 for a call without a number
    ranks: tuple[int, ...]  # the world ranks that take part
    since_s: float
    expires_s: float  # when it is overdue; may be infinite
    kind: Kind


@dataclass(slots=True)
class _OverdueQuestion:
    """What this rank has asked others about one overdue call, and what they have answered so far."""

    number: int  # of the call; 0 for every round and message
    unanswered: set[int]  # world ranks
    answers: dict[int, Here] = field(default_factory=dict)  # by world rank
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)


class PendingCalls:
    """The calls in progress of one rank on one communicator.

    In, from any thread: `enter` and `leave`. In, on the runtime's loop: the timer (`_check_overdue`), Where messages
    (`_on_question`) and Here messages (`_on_answer`). Out, on the runtime's loop: Where and Here messages through the
    router, and an Overdue failure to `Failures`.

    There is one timer for all calls, because a timer for each call would take longer than a short call does.
    """

    def __init__(self, endpoint: Endpoint, group: Group, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` schedules a callback on the runtime's loop, from any thread."""
        self._endpoint = endpoint
        self._group = group
        self._post = post
        self._patience_s = endpoint.patience_s
        self._now_s = deadlines.clock()
        self._pending: dict[PendingCall, None] = {}  # an ordered set
        self._arriving: WeakKeyDictionary[PendingCall, Sequence[Arriving]] = WeakKeyDictionary()
        self.changes = 0  # calls that have begun or ended
        self._on_idle: Callable[[], None] | None = None
        self._calls = 0  # the number of the last numbered call
        self._last: Described | None = None  # the last call of this rank
        # Of calls that are not told here one by one: the newest, its number, and when one last ended. None before it.
        self.newest: Callable[[], tuple[Described, int, float] | None] = lambda: None
        self.makes_rounds: Callable[[], bool] = lambda: False  # whether this rank has begun rounds, and may make more
        self._idle_since_s = self._now_s()
        self._next_check_s = math.inf  # when `_check_overdue` runs next
        self._timer: asyncio.TimerHandle | None = None
        self._asking = asyncio.Lock()
        self._recent: deque[tuple[int, Described]] = deque(maxlen=_RECENT_MAX)  # the last calls with a number
        self._question: _OverdueQuestion | None = None  # the one that is open
        self._departed: dict[int, tuple[int, Departed]] = {}  # by world rank: its last call
        self._lacking: dict[int, Kind] = {}  # by world rank: the last kind of calls in which it has no part any more
        self._deserter: Departed | None = None  # the first rank that has not left in order
        self._looking = False  # for calls that wait for a rank which has left
        self._standstill = endpoint.standstill
        self._post(lambda: self._standstill.opened(self))
        endpoint.router.on_control(Where, group.communicator, self._on_question)
        endpoint.router.on_control(Here, group.communicator, self._on_answer)

    def enter(
        self,
        call: Described,
        kind: Kind = Kind.ROUND,
        number: int = 0,
        ranks: tuple[int, ...] = (),
        *,
        since: tuple[float, float | None] | None = None,
    ) -> PendingCall:
        """A call begins. Runs in the caller's thread and context, where `asyncoll.deadline` is set.

        `number` counts the calls that all ranks make, from 1; 0 for another call (send, recv, a round). `ranks` are the
        world ranks that take part, by default all of the communicator. A call that is entered late gives `since`: when
        it began, and its deadline.
        """
        since_s, expires_s = (self._now_s(), deadlines.expiry.get()) if since is None else since
        # The patience of the world bounds every call, also where the program has set a later deadline.
        patience_s = since_s + self._patience_s
        if expires_s is None or expires_s > patience_s:
            expires_s = patience_s
        pending = PendingCall(call, number, ranks or self._group.ranks, since_s, expires_s, kind)
        self._pending[pending] = None
        self.note(call, number)
        if pending.expires_s < self._next_check_s:
            self._post(self._check_overdue)
            # Last: if a signal handler raises before the check is posted, the next call posts one.
            self._next_check_s = pending.expires_s
        self._changed()
        # A rank that the call needs may have left already: then nothing else tells of it.
        if self._departed:
            self._post(self._look_soon)
        return pending

    def _changed(self) -> None:
        self.changes += 1
        if self._pending and self._standstill.is_asleep:
            self._post(self._standstill.wake)

    def arrives(self, pending: PendingCall, tensors: Sequence[Arriving]) -> None:
        """The call waits for `tensors`, which come from a device."""
        self._arriving[pending] = tensors

    def narrow(self, pending: PendingCall, ranks: tuple[int, ...]) -> None:
        """From now on a call in progress is one of the world ranks `ranks`, and needs both."""
        pending.ranks, pending.kind = ranks, Kind.PAIR
        if self._departed:
            self._post(self._look_soon)

    def replace(self, pending: PendingCall, call: Described) -> None:
        """The description of a call in progress is `call` from now on."""
        if self._last is pending.call:
            self._last = call
        pending.call = call

    def note(self, call: Described, number: int = 0) -> None:
        """This rank has made `call`, which is over or pending."""
        self._last = call
        if number:
            self._calls = max(number, self._calls)
            self._recent.append((number, call))
        self._idle_since_s = self._now_s()

    def age_s(self, pending: PendingCall) -> float:
        """The seconds since the call began."""
        return self._now_s() - pending.since_s

    def leave(self, pending: PendingCall) -> None:
        """The call has ended, in any way. Idempotent."""
        self._pending.pop(pending, None)
        self._idle_since_s = self._now_s()
        self._changed()
        if self._on_idle is not None:
            self._on_idle()

    def drop(self, call: Described) -> None:
        """`call` does not begin: a signal handler has raised, perhaps before `enter` had returned."""
        for pending in tuple(self._pending):
            if pending.call is call:
                self.leave(pending)

    # -- on the runtime's loop --------------------------------------------------------------------

    def is_idle(self, wake: Callable[[], None]) -> bool:
        """Whether no call is in progress; otherwise `wake` is called, in any thread, after the end of each."""
        self._on_idle = wake
        return not self._pending

    def retire(self) -> None:
        """Without effect: calls in progress go on."""

    def finished(self) -> None:
        """There are no more calls: stop the timer. Questions of other ranks are still answered."""
        self._patience_s = math.inf
        if self._timer is not None:
            self._timer.cancel()

    def forget(self) -> None:
        """No rank asks any more."""
        router, communicator = self._endpoint.router, self._group.communicator
        router.off_control(Where, communicator)
        router.off_control(Here, communicator)
        self._standstill.closed(self)

    # -- for `standstill` -------------------------------------------------------------------------

    def waits(self) -> list[ToldCall]:
        return [self._wait(pending) for pending in tuple(self._pending)]

    def _wait(self, pending: PendingCall) -> ToldCall:
        communicator, key = self._group.communicator, pending.call.key
        if pending.kind is Kind.PAIR:
            # It is the same for a send and for its receive.
            key = "{} to {}".format(*pending.ranks)
        return ToldCall(communicator, pending.number, pending.kind, len(pending.ranks), key)

    def among(self) -> str:
        """The ranks of the communicator, for errors; empty if all of the world are."""
        ranks = self._group.ranks
        if len(ranks) == self._endpoint.size:
            return ""
        more = ", ..." if len(ranks) > _SHOWN_MAX else ""
        return f", on a communicator of the ranks {_listed(ranks[:_SHOWN_MAX])}{more}"

    def begun(self) -> tuple[int, int]:
        self._catch_up()
        return self._group.communicator, self._calls

    def may_arrive(self) -> bool:
        pending = tuple(self._pending)
        return bool(self._arriving_keys()) or any(each.expires_s - each.since_s < _DEFAULT_S for each in pending)

    def _check_overdue(self) -> None:
        """Report the first overdue call, or set the timer for the next check.

        The timer is also set while no call is pending, for the earliest moment at which a later call without a deadline
        of its own can be overdue. So `enter` needs no timer for most calls; to set one from another thread takes longer
        than a short call does.
        """
        if self._timer is not None:
            self._timer.cancel()
        # Before `_pending` is read: a call that enters in its thread meanwhile posts another check.
        self._next_check_s = math.inf
        now_s, pending = self._now_s(), tuple(self._pending)
        overdue = next((pending for pending in pending if pending.expires_s <= now_s), None)
        if overdue is not None:
            self._endpoint.spawn(self._give_up(overdue), self._group.communicator)
            return
        next_check_s = min([now_s + self._patience_s, *(pending.expires_s for pending in pending)])
        if next_check_s < math.inf:
            self._next_check_s = min(next_check_s, self._next_check_s)
            self._timer = asyncio.get_running_loop().call_later(next_check_s - now_s, self._check_overdue)

    async def _give_up(self, overdue: PendingCall) -> None:
        """Fail the communicator with the arrived and the missing ranks, unless the call ends while this rank asks."""
        # One question at a time: an answer names its call by the number alone, which is 0 for all rounds and messages.
        async with self._asking:
            answers = await self._ask(overdue)
        # It may have ended while the others were asked. The timer was not set meanwhile.
        if overdue not in self._pending:
            self._check_overdue()
            return
        missing = [rank for rank in overdue.ranks if not self._has_arrived(rank, overdue, answers)]
        arrived = [rank for rank in overdue.ranks if rank not in missing]
        waited_s = self._now_s() - overdue.since_s
        where = "; ".join(self._location(rank, answers) for rank in missing) or "none"
        numbers = self._endpoint.membership.numbers
        arrived, missing = ([numbers[rank] for rank in ranks] for ranks in (arrived, missing))
        text = f"{overdue.call} was not over after {waited_s:.1f} s; arrived: {_listed(arrived)}; missing: {where}"
        lists = (",".join(map(str, each)) for each in (arrived, missing))
        news = Overdue(self._group.communicator, text, *lists)
        self._endpoint.failures.give_up(news, self._group.communicator, self._group.ranks)

    async def _ask(self, overdue: PendingCall) -> dict[int, Here]:
        """Ask the ranks of `overdue` where they are. Returns the answers that came in time, by world rank."""
        question = self._question = _OverdueQuestion(overdue.number, set(overdue.ranks) - {self._endpoint.rank})
        for rank in question.unanswered:
            self._endpoint.router.tell(rank, Where(self._group.communicator, question.number))
        try:
            # A rank that does not answer is missing.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(question.all_answered.wait(), _ANSWER_S)
        finally:
            self._question = None
        return question.answers

    def _on_answer(self, source: int, answer: Here) -> None:
        """A Here message. The question is over once all asked ranks have answered."""
        question = self._question
        # It may be late: the answer to an earlier question, whose call is over.
        if question is None or answer.number != question.number:
            return
        question.answers[source] = answer
        question.unanswered.discard(source)
        if not question.unanswered:
            question.all_answered.set()

    def _has_arrived(self, rank: int, pending: PendingCall, answers: dict[int, Here]) -> bool:
        """Whether `rank` is in this call, or has made it already."""
        answer, key = answers.get(rank), pending.call.key
        if rank == self._endpoint.rank:
            return key not in self._arriving_keys()
        if answer is None or key in answer.arriving.split("\n"):
            return False
        return key in answer.inside.split("\n") or (0 < pending.number <= answer.calls and answer.made in ("", key))

    def _arriving_keys(self) -> list[str]:
        """The names of the calls whose tensors have not arrived. Calls of one name go on one after another."""
        first: dict[str, PendingCall] = {}
        for pending in tuple(self._pending):
            first.setdefault(pending.call.key, pending)
        return [key for key, pending in first.items() if self._awaited(pending)]

    def _awaited(self, pending: PendingCall) -> str:
        """The device from which a tensor of the call has not arrived; empty if there is none."""
        return next(filter(None, (tensor.awaited for tensor in self._arriving.get(pending, ()))), "")

    def _location(self, rank: int, answers: dict[int, Here]) -> str:
        answer = answers.get(rank)
        if rank == self._endpoint.rank:
            doing = self.doing()
        else:
            doing = answer.doing if answer is not None else "which does not answer"
        return f"{self._endpoint.membership.name(rank)}, {doing}"

    def _on_question(self, source: int, question: Where) -> None:
        """A Where message: answer with the calls that this rank is in, or its last call."""
        self._catch_up()
        communicator, number = question
        made = next((call.key for each, call in tuple(self._recent) if each == number), "")
        inside = "\n".join(pending.call.key for pending in tuple(self._pending))
        arriving = "\n".join(self._arriving_keys())
        here = Here(communicator, number, self._calls, made, inside, arriving, self.doing())
        self._endpoint.router.tell(source, here)

    def doing(self) -> str:
        """What this rank does: the calls that it is in, or its last call."""
        pending, now_s = tuple(self._pending), self._now_s()
        if not pending:
            after = f", after {self._last}" if self._last is not None else " and has made no call"
            return f"in its own code for {now_s - self._idle_since_s:.1f} s{after}"
        calls = []
        for each in pending:
            device = self._awaited(each)
            why = f", and its tensor has not arrived from {device}" if device else ""
            calls.append(f"in {each.call} for {now_s - each.since_s:.1f} s{why}")
        return " and ".join(calls)

    # -- ranks that leave -------------------------------------------------------------------------

    def completed(self) -> int:
        """The number of the last call up to which all are over."""
        self._catch_up()
        numbers = [pending.number for pending in tuple(self._pending) if pending.number]
        return min(numbers) - 1 if numbers else self._calls

    def is_settled(self) -> bool:
        """Whether no numbered call is pending."""
        return not any(pending.number for pending in tuple(self._pending))

    def has_messages(self) -> bool:
        """Whether sends or receives are in progress."""
        return any(map(_is_message, tuple(self._pending)))

    def has_only_messages(self) -> bool:
        """Whether calls are in progress, all of them sends and receives."""
        pending = tuple(self._pending)
        return bool(pending) and all(map(_is_message, pending))

    def left(self, rank: int, failure: Departed, calls: int) -> None:
        """World rank `rank` takes no part in collectives after number `calls`. From any thread."""
        self._departed[rank] = calls, failure
        self.lacks(rank, Kind.COLLECTIVE)

    def lacks(self, rank: int, kind: Kind) -> None:
        """World rank `rank`, which has left, takes no part in calls up to `kind` any more. From any thread."""
        self._lacking[rank] = max(kind, self._lacking.get(rank, kind))
        if rank not in self._departed:
            return
        # In general no call needs the rank any more, and no task has to be made.
        calls, _ = self._departed[rank]
        if any(self._lacks(each, rank, calls) for each in tuple(self._pending)):
            self._post(self._look_soon)

    def deserted(self, failure: Departed) -> None:
        """A rank of the communicator has left, and not in order. From any thread."""
        self._deserter = self._deserter or failure
        self._post(self._look_soon)

    def _look_soon(self) -> None:
        if not self._looking and self._is_looked_for():
            self._looking = True
            self._endpoint.spawn(self._look(), self._group.communicator)

    def _is_looked_for(self) -> bool:
        return bool(self._calls_of_departed()) or (self._deserter is not None and self.makes_rounds())

    async def _look(self) -> None:
        """Fail the communicator if a call has waited for some time for a rank that has left.

        Or if a rank has deserted the rounds that this one makes.
        """
        failures, communicator = self._endpoint.failures, self._group.communicator
        while self._is_looked_for() and not failures.has_failed(communicator):
            waiting = self._calls_of_departed()
            await asyncio.sleep(_COMPLETION_S)
            for _ in range(_COMPLETION_TURNS):
                await asyncio.sleep(0)
            found = self._calls_of_departed()
            # A failure ends all calls of the communicator, also collectives that lack no rank: those end first.
            if any(pending.number and pending not in found for pending in tuple(self._pending)):
                continue
            for pending, failure in found.items():
                if pending in waiting:
                    failures.fail(failure, communicator)
            if self._deserter is not None and self.makes_rounds():
                failures.fail(self._deserter, communicator)
        self._looking = False

    def _calls_of_departed(self) -> dict[PendingCall, Departed]:
        """The pending calls that need a rank which has left, with the failure."""
        found = {}
        for pending in tuple(self._pending):
            absent = [
                failure for rank, (calls, failure) in tuple(self._departed.items()) if self._lacks(pending, rank, calls)
            ]
            # A receive from any rank needs one of the others: it fails once all of them have left.
            spare = len(pending.ranks) - 2 if pending.kind is Kind.FROM_ANY else 0
            if len(absent) > spare:
                found[pending] = absent[-1]
        return found

    def _lacks(self, pending: PendingCall, rank: int, calls: int) -> bool:
        if pending.kind is Kind.COLLECTIVE:
            is_over = pending.number > calls
        else:
            kind = Kind.PAIR if pending.kind is Kind.FROM_ANY else pending.kind
            is_over = self._lacking[rank] >= kind
        return is_over and rank in pending.ranks

    def _catch_up(self) -> None:
        newest = self.newest()
        if newest is None:
            return
        call, number, ended_s = newest
        # These calls are looked up only when something asks, so one that was told here may be newer.
        if number > self._calls:
            self._last, self._calls = call, number
            self._recent.append((number, call))
        self._idle_since_s = max(self._idle_since_s, ended_s)


def _is_message(pending: PendingCall) -> bool:
    return pending.kind in (Kind.PAIR, Kind.FROM_ANY)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
