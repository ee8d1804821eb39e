"""The end of a communicator at its ranks: which calls it still has, and when its memory comes back.

Ending is local: ranks close a communicator at any time and in any order. A rank whose program has dropped it, so that
nothing can make a call on it any more, closes it then. The end of one rank has three steps:

1. It *leaves*. It makes no more calls, and tells the other members the number of its last call (message Leave). All
   calls up to that number end as usual, because this rank takes part in them. A later call that needs it fails at once,
   with a PeerLostError that names it.
2. It is *through*, as soon as its own calls are over, and tells that (message Unused). From then on it touches no
   memory of the communicator, and sends no message for it. A send to it, or a receive from it, fails now.
3. It *forgets* the communicator once all ranks are through. No rank reads its memory any more, and no message for it is
   under way, because messages of a rank arrive in order. So the memory and all tables come back.

A rank with an error, or one that leaves the world (see `departures`), does not wait for its calls: it ends them. It
tells the number up to which they were over. One that leaves because of an error, or whose program ends without leaving,
has not left in order: no rank that is in the middle of rounds makes more of them without it.

A rank whose program has ended, and that waits for the others before it leaves the world, makes no more calls either. It
leaves the communicators made by `split`, and tells that it sends and receives nothing more (message Returned). On the
communicator of the world collectives meet the end of its program, which is a collective, too.

A send or a receive that no rank matches is never over. Where nobody may wait for it after the end (`keeps_messages`),
it ends once all ranks have left.

This takes no collective call, and no count in shared memory that a dead rank could leave wrong. The death of a rank
ends the epoch; the memory stays until the rank leaves the world.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from asyncoll.errors import ProtocolError, Reason
from asyncoll.runtime.departures import IN_ORDER
from asyncoll.runtime.failures import Closed, Departed, Failure, error_of
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCalls
from asyncoll.runtime.standstill import Kind
from asyncoll.transport.wire import Ending, Leave, Returned, Unused

_CLOSED = Reason("it has left: it has closed this communicator")
_DROPPED = Reason("it has left: its program has ended, or has dropped this communicator")
_RETURNED = Reason("it has left: its program has ended")


class CommunicatorPart(Protocol):
    """A part of a communicator at one rank, which its end concerns. On the runtime's loop."""

    def retire(self) -> None:
        """This rank makes no more calls. Some may be under way."""

    def is_idle(self, wake: Callable[[], None]) -> bool:
        """Whether no call is under way. If one is, `wake` is called, in any thread, when that may have changed."""

    def finished(self) -> None:
        """This rank has no call under way any more."""

    def forget(self) -> None:
        """All ranks are through."""


class Lifetime:
    """The end of one communicator at one rank. On the runtime's loop, but for `close`, `drop` and the making of it."""

    def __init__(
        self,
        member: Member,
        calls: PendingCalls,
        backend: CommunicatorPart,
        last: Callable[[], int],
        *,
        is_world: bool,
        keeps_messages: bool,
    ) -> None:
        """`last` gives the number of the last call of this rank. The communicator of the world has no steps 2 and 3.

        `keeps_messages`: sends and receives under way may be waited for after `close`.
        """
        self._member = member
        self._calls = calls
        self._backend = backend
        self._last = last
        self._parts: tuple[CommunicatorPart, ...] = (calls, backend)
        self.is_world = is_world
        self._keeps_messages = keeps_messages
        self.serves = False  # other ranks may still ask for something of this one: it is never through
        self._is_left = False  # by this rank
        self._has_returned = False  # the program of this rank has ended, and the others are not told of its messages
        self._leaving: set[int] = set()  # world ranks whose Leave has come
        self._through: set[int] = set()  # world ranks
        self.is_forgotten = False
        self._failure: Failure | None = None  # once it is forgotten: what has ended it before
        member.on_control(Leave, self._told_leave)
        member.on_control(Returned, self._told_returned)
        if not is_world:
            member.on_control(Unused, self._told_unused)
        member.endpoint.departures.opened(member.communicator, self)

    def close(self, error: Reason | None = None) -> None:
        """Refuse all new calls, and leave. Idempotent. In any thread.

        Calls under way end as usual, unless this rank closes because of an error: the others are told the reason.
        """
        if not self._member.is_closed:
            self._member.post(lambda: self._close(error))
            # Last: a signal handler may raise before the others are told.
            self._member.is_closed = True

    def drop(self, check_started: Callable[[], None]) -> None:
        """The finalizer of what makes calls: this rank makes no more of them, and leaves as by `close`. In any thread.

        `check_started` aborts the communicator if a call has a number and was never started. Without effect if this
        rank has closed the communicator or left the world, in a forked child, and for the communicator of the world,
        which `World` ends.
        """

        def leave() -> None:
            check_started()
            self._close(None, _DROPPED)

        if not (self.is_world or self.serves or self._member.is_closed or self._member.endpoint.closed):
            self._member.runner.post_from_finalizer(leave)

    def _close(self, error: Reason | None, reason: Reason = _CLOSED) -> None:
        if self._member.endpoint.closed or self._is_left:
            return
        self._member.is_closed = True
        for part in self._parts:
            part.retire()
        if error:
            self.leave_at_once(error)
        else:
            self._leave(self._last(), reason, in_order=True)
        self._finish_when_idle()

    def leave_at_once(self, reason: Reason | None) -> None:
        """Leave, and end the calls under way. The others are told the `reason`; None: this is in order."""
        self._leave(self._calls.completed(), reason or IN_ORDER, in_order=not reason)
        # Also if nothing is pending: other threads may be about to make a call.
        self._member.endpoint.failures.fail(Closed(), self._member.communicator)

    def returned(self) -> None:
        """The program of this rank has ended: it makes no more calls."""
        if self._is_left:
            return
        if not self.is_world:
            self._leave(self._last(), _RETURNED, in_order=True)
        self._has_returned = True
        self._calls.is_idle(self._wake)
        self._end_returned()

    def _end_returned(self) -> None:
        """Tell the others once the sends and receives of this rank are over. A port may serve those of others."""
        if self._has_returned and not self._member.ports and not self._calls.has_messages():
            self._has_returned = False
            self._tell(Returned(self._member.communicator))

    def _leave(self, calls: int, reason: Reason, *, in_order: bool) -> None:
        self._is_left = True
        told = self._member.endpoint.departures.told(reason)
        self._tell(Leave(self._member.communicator, calls, in_order, *told))

    def _tell(self, message: Leave | Returned | Unused) -> None:
        gone = self._member.endpoint.membership.ended
        for rank in self._member.group.ranks:
            if rank != self._member.endpoint.rank and rank not in gone:
                self._member.endpoint.router.tell(rank, message)

    def is_settled(self) -> bool:
        """Whether no numbered call is pending, or all have failed."""
        return self._calls.is_settled() or self.has_failed()

    def has_failed(self) -> bool:
        """Whether the communicator, or the world, has failed."""
        return self._member.endpoint.failures.has_failed(self._member.communicator)

    def check(self) -> None:
        """Raise the error of that, also once the communicator is forgotten."""
        if self._failure is not None:
            raise error_of(self._failure)
        self._member.check()

    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return all(part.is_idle(self._wake) for part in self._parts)

    def _wake(self) -> None:
        self._member.post(self._finish_when_idle)

    def _finish_when_idle(self) -> None:
        member = self._member
        if member.endpoint.closed:
            return
        self._end_returned()
        if member.endpoint.rank in self._through or not member.is_closed:
            return
        self._end_messages()
        # A rank with an open port may have to send messages for calls of the others, and does not know the last one. So
        # it is never through.
        if self.serves or member.ports or not self._is_left or not self.is_idle():
            return
        for part in self._parts:
            part.finished()
        self._tell(Unused(member.communicator))
        self._is_through(member.endpoint.rank)

    def _end_messages(self) -> None:
        """End the sends and receives under way if nobody may wait for them, and no rank makes their counterparts."""
        group, gone = self._member.group, self._leaving | self._through | {self._member.endpoint.rank}
        if self._keeps_messages or len(gone) < group.size or not self._calls.has_only_messages():
            return
        if self._backend.is_idle(self._wake):
            self._member.endpoint.failures.fail(Closed(), group.communicator)

    # -- other ranks ------------------------------------------------------------------------------

    def _told_leave(self, source: int, leave: Leave) -> None:
        self._check_part(source)
        self._leaving.add(source)
        self._has_left(source, leave, leave.calls)
        self._finish_when_idle()

    def _told_returned(self, source: int, _: Returned) -> None:
        self._check_part(source)
        if self.is_world:
            number = self._member.endpoint.membership.numbers[source]
            self._calls.left(source, self._departed(number, _RETURNED.cause, in_order=True), sys.maxsize)
        self._calls.lacks(source, Kind.PAIR)

    def _told_unused(self, source: int, _: Unused) -> None:
        self._check_part(source)
        self._calls.lacks(source, Kind.PAIR)
        self._is_through(source)

    def ended(self, rank: int, ending: Ending) -> None:
        """World rank `rank` has left the world: it is through with all communicators and serves none. In any thread."""
        if rank not in self._member.group.ranks:
            return
        # It has left the world without a Leave: it has not known this communicator.
        if rank not in self._leaving:
            self._has_left(rank, ending, 0)
        self._calls.lacks(rank, Kind.ROUND)
        self._is_through(rank)
        self._wake()

    def _check_part(self, source: int) -> None:
        if source not in self._member.group.ranks:
            raise ProtocolError("it has left a communicator that it has no part in")

    def _has_left(self, rank: int, news: Leave | Ending, calls: int) -> None:
        if news.rank not in self._member.endpoint.membership.numbers:
            raise ProtocolError(f"it has left because of rank {news.rank}, which the world has not")
        departed = self._departed(news.rank, news.cause, in_order=news.in_order)
        self._calls.left(rank, departed, calls)
        if not departed.in_order:
            self._calls.deserted(departed)

    def _departed(self, number: int, cause: str, *, in_order: bool) -> Departed:
        membership = self._member.endpoint.membership
        process = membership.process(membership.numbers.index(number))
        return Departed(number, cause, process.host, process.pid, in_order)

    def _is_through(self, rank: int) -> None:
        self._through.add(rank)
        if self.is_world or self.is_forgotten or len(self._through) < self._member.group.size:
            return
        self.is_forgotten = True
        self._failure = self._member.endpoint.failures.of(self._member.communicator)
        for part in self._parts:
            part.forget()
        self._member.forget()
        self._member.endpoint.departures.open.pop(self._member.communicator, None)
