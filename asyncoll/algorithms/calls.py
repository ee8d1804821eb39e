"""The calls of one communicator at one rank: numbered, followed until they are over, and started on its backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Backend, Body
from asyncoll.algorithms.by_message import start_on_lane
from asyncoll.arguments import digest
from asyncoll.errors import describe
from asyncoll.runtime.group import Lane
from asyncoll.runtime.member import Member
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.signature import Signature, Site
from asyncoll.statistics import Ledger, Traffic

T = TypeVar("T")


class Calls:
    """Starts the calls of one rank."""

    def __init__(self, member: Member, backend: Backend, pending: PendingCalls) -> None:
        self._member = member
        self._backend = backend
        self._number = 0
        self._unstarted: Signature | None = None  # numbered
        self._pairs: defaultdict[tuple[int, int], Numbering] = defaultdict(Numbering)  # messages by (source, dest)
        self._pending = pending
        self.ledger = Ledger()

    def number(self, operation: str, dtype: str, count: int, detail: str, site: Site) -> Signature:
        """The next call. The caller's checks are done: whatever raises UsageError comes before this.

        A signal handler may have raised between the number of the last call and its start. The others wait for it.
        """
        self._member.check_caller()
        if self._unstarted is not None:
            self._member.abort(f"{self._unstarted} was interrupted before it had begun")
        self._number += 1
        self._unstarted = call = Signature(operation, self._number, dtype, count, detail, site)
        return call

    def start(
        self, call: Signature, body: Body[T], nbytes: int = 0, discarded: Callable[[], None] = lambda: None
    ) -> Coroutine[Any, Any, T]:
        """Start a call of all ranks, as `Backend.start` does."""
        pending = self._pending.enter(call, call.number)
        try:
            self._unstarted = None
            return self._backend.start(call, body, nbytes, partial(self._ended, pending, call.operation), discarded)
        except BaseException as error:
            self._pending.leave(pending)
            self._member.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def start_pair(
        self, call: Signature, source: int, dest: int, tag: int, body: Callable[[Lane], Awaitable[T]]
    ) -> Coroutine[Any, Any, T]:
        """Start a call of two ranks."""
        member = self._member
        pending = self._pending.enter(call, ranks=(member.group.ranks[source], member.group.ranks[dest]))
        context = digest(member.communicator, "pair", source, dest, tag)
        return start_on_lane(member, call, context, body, partial(self._ended, pending, call.operation))

    def number_pair(self, source: int, dest: int, tag: int) -> int:
        """The caller's checks are done, `Member.check_caller` among them."""
        return self._pairs[source, dest].next(tag)

    def _ended(self, pending: PendingCall, operation: str, traffic: Traffic) -> None:
        self._pending.leave(pending)
        self.ledger.enter(operation, traffic)
