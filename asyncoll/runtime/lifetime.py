"""The end of a communicator before that of the world: when its ranks may forget it, and give its memory back.

Closing is local: ranks close a communicator at any time and in any order. A rank that has closed it makes no new calls
on it. As soon as its calls under way are over, it *leaves*: it tells all other ranks (message Unused). From then on it
touches no memory of the communicator, and sends no message for it. A rank that has left, and knows that all others
have, forgets the communicator: no rank reads its memory any more, and no message for it is under way, because messages
of a rank arrive in order. This takes no collective call, and no count in shared memory that a dead rank could leave
wrong.
The death of a rank ends the world, and with it all memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncoll.errors import ProtocolError
from asyncoll.runtime.member import Member
from asyncoll.transport.wire import Unused


class Part(Protocol):
    """A part of a communicator at one rank, which its end concerns. On the runtime's loop."""

    def retire(self) -> None:
        """This rank makes no more calls. Some may be under way."""

    def is_idle(self, wake: Callable[[], None]) -> bool:
        """Whether no call is under way. If one is, `wake` is called, in any thread, when that may have changed."""

    def depart(self) -> None:
        """This rank has no call under way any more."""

    def forget(self) -> None:
        """All ranks have left."""


class Lifetime:
    """The end of one communicator at one rank. On the runtime's loop, but for `close`."""

    def __init__(self, member: Member, parts: tuple[Part, ...]) -> None:
        self._member = member
        self._parts = parts
        self._left: set[int] = set()  # world ranks
        self.is_forgotten = False
        member.on_control(Unused, self._told)

    def close(self) -> None:
        """Refuse all new calls, and leave when those under way are over. Idempotent. In any thread."""
        if not self._member.is_closed:
            self._member.is_closed = True
            self._member.post(self._close)

    def _close(self) -> None:
        if not self._member.endpoint.closed:
            for part in self._parts:
                part.retire()
            self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        member = self._member
        # A rank with an open port may have to send messages for calls of the others, and does not know the last one. So
        # it never leaves.
        if member.endpoint.closed or member.endpoint.rank in self._left or member.ports:
            return
        if not all(part.is_idle(self._wake) for part in self._parts):
            return
        for part in self._parts:
            part.depart()
        self._left.add(member.endpoint.rank)
        for rank in range(member.group.size):
            if rank != member.group.rank:
                member.tell(rank, Unused(member.communicator))
        self._forget_if_all_left()

    def _wake(self) -> None:
        self._member.post(self._leave_when_idle)

    def _told(self, source: int, _: Unused) -> None:
        if source not in self._member.group.ranks:
            raise ProtocolError("it has left a communicator that it has no part in")
        self._left.add(source)
        self._forget_if_all_left()

    def _forget_if_all_left(self) -> None:
        if self.is_forgotten or len(self._left) < self._member.group.size:
            return
        self.is_forgotten = True
        for part in self._parts:
            part.forget()
        self._member.forget()
