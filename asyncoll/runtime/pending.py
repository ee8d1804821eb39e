"""The calls that a rank has made on a communicator and that are not over; and who is to blame when one is overdue."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from asyncoll.runtime import deadlines
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.group import Group
from asyncoll.transport.wire import Here, Overdue, Where

_ANSWER_S = 0.25  # for the others to say where they are. Who computes answers all the same, on its progress thread


class Call(Protocol):
    """`str` of it describes the call as this rank made it."""

    @property
    def key(self) -> str:
        """Names it at every rank alike, in one line."""


@dataclass(slots=True, eq=False)  # not frozen: that takes five times as long to make
class PendingCall:
    """One call under way."""

    call: Call
    number: int
    ranks: tuple[int, ...]  # of the world, that it concerns
    since_s: float
    expires_s: float


class PendingCalls:
    """One rank's calls on one communicator that are not over.

    They begin and end in any thread; everything else happens on the runtime's loop.
    """

    def __init__(self, endpoint: Endpoint, group: Group, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` calls on the runtime's loop, soon."""
        self._endpoint = endpoint
        self._group = group
        self._post = post
        self._patience_s = endpoint.patience_s
        self._now_s = deadlines.clock()
        self._pending: dict[PendingCall, None] = {}
        self._calls = 0
        self._last: PendingCall | None = None
        self._idle_since_s = self._now_s()
        self._looks_at_s = math.inf  # when the runtime looks for calls that are overdue
        self._timer: asyncio.TimerHandle | None = None
        self._asking = asyncio.Lock()
        self._answers: dict[int, Here] = {}
        self._asked: set[int] = set()
        self._all_answered: asyncio.Event | None = None  # while it asks
        endpoint.router.on_control(Where, group.communicator, self._answer)
        endpoint.router.on_control(Here, group.communicator, self._heard)

    def enter(self, call: Call, number: int = 0, ranks: tuple[int, ...] = ()) -> PendingCall:
        """A call begins, in its caller's thread and context.

        `number` is its place among those that all ranks make; `ranks` are those that it concerns, if not all.
        """
        now_s, expires_s = self._now_s(), deadlines.expiry.get()
        patience_s = now_s + self._patience_s
        if expires_s is None or expires_s > patience_s:
            expires_s = patience_s
        pending = PendingCall(call, number, ranks or self._group.ranks, now_s, expires_s)
        self._pending[pending] = None
        self._last = pending
        self._calls = number or self._calls
        if pending.expires_s < self._looks_at_s:
            self._looks_at_s = pending.expires_s
            self._post(self._look)
        return pending

    def leave(self, pending: PendingCall) -> None:
        """It is over. Idempotent."""
        self._pending.pop(pending, None)
        self._idle_since_s = self._now_s()

    # -- on the runtime's loop --------------------------------------------------------------------

    def _look(self) -> None:
        """For a call that is overdue. The next look is when one may be: also one that has not been made yet, because
        setting a timer from another thread takes longer than a short call does."""
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at_s = math.inf  # before looking: who enters meanwhile has this called again
        now_s, pending = self._now_s(), tuple(self._pending)
        overdue = next((pending for pending in pending if pending.expires_s <= now_s), None)
        if overdue is not None:
            self._endpoint.spawn(self._give_up(overdue), self._group.communicator)
            return
        looks_at_s = min([now_s + self._patience_s, *(pending.expires_s for pending in pending)])
        if looks_at_s < math.inf:
            self._looks_at_s = min(looks_at_s, self._looks_at_s)
            self._timer = asyncio.get_running_loop().call_later(looks_at_s - now_s, self._look)

    async def _give_up(self, overdue: PendingCall) -> None:
        async with self._asking:  # one at a time: answers do not say to whose question
            await self._tell_who_is_late(overdue)

    async def _tell_who_is_late(self, overdue: PendingCall) -> None:
        await self._ask(overdue.ranks)
        if overdue not in self._pending:
            self._look()
            return
        missing = [rank for rank in overdue.ranks if not self._has_come(rank, overdue)]
        arrived = [rank for rank in overdue.ranks if rank not in missing]
        waited_s = self._now_s() - overdue.since_s
        where = "; ".join(self._whereabouts(rank) for rank in missing) or "none"
        text = f"{overdue.call} was not over after {waited_s:.1f} s; arrived: {_listed(arrived)}; missing: {where}"
        lists = (",".join(map(str, ranks)) for ranks in (arrived, missing))
        news = Overdue(self._group.communicator, text, *lists)
        self._endpoint.failures.give_up(news, self._group.communicator, self._group.ranks)

    async def _ask(self, ranks: tuple[int, ...]) -> None:
        """These where they are."""
        self._answers.clear()
        self._all_answered = asyncio.Event()
        self._asked = set(ranks) - {self._endpoint.rank}
        for rank in self._asked:
            self._endpoint.router.tell(rank, Where(self._group.communicator))
        try:
            with contextlib.suppress(TimeoutError):  # who has not answered by then is said not to
                await asyncio.wait_for(self._all_answered.wait(), _ANSWER_S)
        finally:
            self._all_answered = None

    def _heard(self, source: int, answer: Here) -> None:
        self._answers[source] = answer
        if self._all_answered is not None and self._answers.keys() >= self._asked:
            self._all_answered.set()

    def _has_come(self, rank: int, pending: PendingCall) -> bool:
        if rank == self._endpoint.rank:
            return True
        answer = self._answers.get(rank)
        if answer is None:
            return False
        return pending.call.key in answer.inside.split("\n") or 0 < pending.number <= answer.calls

    def _whereabouts(self, rank: int) -> str:
        answer = self._answers.get(rank)
        doing = answer.doing if answer is not None else "which does not answer"
        return f"{self._endpoint.membership.name(rank)}, {doing}"

    def _answer(self, source: int, question: Where) -> None:
        """Say where this rank is."""
        pending, now_s = tuple(self._pending), self._now_s()
        if pending:
            doing = " and ".join(f"in {pending.call} for {now_s - pending.since_s:.1f} s" for pending in pending)
        else:
            after = f", after {self._last.call}" if self._last is not None else " and has made no call"
            doing = f"in its own code for {now_s - self._idle_since_s:.1f} s{after}"
        inside = "\n".join(pending.call.key for pending in pending)
        self._endpoint.router.tell(source, Here(question.communicator, self._calls, inside, doing))


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
