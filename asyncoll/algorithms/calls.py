"""The calls of one communicator at one rank: numbers them, starts them on the backend, tracks them until they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from functools import lru_cache
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Backend, Body, Collectives
from asyncoll.arguments import digest
from asyncoll.errors import describe
from asyncoll.runtime.member import Member
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.signature import Signature, Site
from asyncoll.statistics import Ledger, Traffic
from asyncoll.tensors.reductions import Array

T = TypeVar("T")


class Completed(Coroutine[Any, Any, Any]):
    """The coroutine that the caller gets for a call that has ended; its result is None."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self  # an iterator is enough for `await`

    def __iter__(self) -> Completed:
        return self

    def __next__(self) -> Any:
        raise StopIteration

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, error: Any, *more: Any) -> Any:
        raise error

    def close(self) -> None:
        """Without effect."""


@lru_cache(maxsize=4096)
def _pair_context(communicator: int, source: int, dest: int, tag: int) -> int:
    return digest(communicator, "pair", source, dest, tag)


class Calls:
    """Starts the collective and pair calls of one rank."""

    def __init__(self, member: Member, backend: Backend, pending: PendingCalls) -> None:
        self._member = member
        self._backend = backend
        self._number = 0
        self._unstarted: Signature | None = None  # the call that is numbered and not yet started
        self._pairs: defaultdict[tuple[int, int], Numbering] = defaultdict(Numbering)  # by (source, dest)
        self._pending = pending
        self.ledger = Ledger()

    def number(self, operation: str, dtype: str, count: int, detail: str, site: Site) -> Signature:
        """Number the next call. All checks that raise UsageError come before: a number that is taken must be used.

        `count` is the number of elements, -1 if it does not matter. Raises UsageError in a thread without a running
        loop. Aborts the communicator if the last call was numbered and never started.
        """
        self._member.check_caller()
        # A signal handler may raise between the number of a call and its start. The other ranks wait for that call, so
        # this rank cannot go on with the next one.
        if self._unstarted is not None:
            self._member.abort(f"{self._unstarted} was interrupted before it had begun")
        self._number += 1
        self._unstarted = call = Signature(operation, self._number, dtype, count, detail, site)
        return call

    def start(
        self, call: Signature, body: Body[T], nbytes: int = 0, discarded: Callable[[], None] = lambda: None
    ) -> Coroutine[Any, Any, T]:
        """Start a call of all ranks, which runs `body` with the collectives of this call.

        Returns a coroutine that waits for it. `nbytes` and `discarded` are those of `Backend.start`. An exception here
        aborts the communicator.
        """
        pending = self._pending.enter(call, call.number)
        try:
            self._unstarted = None  # inside the try: from here on an interruption is reported below
            work = self._carry_out(call, self._backend.collectives(call), body, pending)
            return self._backend.start(work, call.__str__, nbytes, discarded)
        except BaseException as error:
            self._pending.leave(pending)
            self._member.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def start_pair(self, call: Signature, source: int, dest: int, tag: int, body: Body[T]) -> Coroutine[Any, Any, T]:
        """Start a call of the two ranks `source` and `dest`.

        Messages of one pair and tag have a context of their own, because calls of two ranks are not in the order of the
        communicator's calls.
        """
        member = self._member
        pending = self._enter_pair(call, source, dest)
        context = _pair_context(member.communicator, source, dest, tag)
        return member.runner.start(self._carry_out(call, self._backend.pair(call, context), body, pending))

    def send_directly(self, call: Signature, dest: int, tag: int, data: Array) -> bool:
        """Carry out a call of two ranks in which this rank sends `data` to `dest`, in the calling thread.

        Returns False if the call needs the runtime's loop: then `start_pair` must follow, with the same `call`.
        """
        member, source = self._member, self._member.group.rank
        pending = self._enter_pair(call, source, dest)
        try:
            if not member.send_directly(call, _pair_context(member.communicator, source, dest, tag), dest, data):
                return False
        finally:
            self._pending.leave(pending)
        traffic = Traffic()
        traffic.sent(data.nbytes)
        self.ledger.enter(call.operation, traffic)
        return True

    def _enter_pair(self, call: Signature, source: int, dest: int) -> PendingCall:
        ranks = self._member.group.ranks
        return self._pending.enter(call, ranks=(ranks[source], ranks[dest]))

    def number_pair(self, source: int, dest: int, tag: int) -> int:
        """The number of the next message from `source` to `dest` with `tag`.

        All checks come before, `Member.check_caller` among them.
        """
        return self._pairs[source, dest].next(tag)

    async def _carry_out(self, call: Signature, collectives: Collectives, body: Body[T], pending: PendingCall) -> T:
        """The whole call, on whichever loop drives it."""
        try:
            async with collectives:
                self._member.check()
                return await body(collectives)
        finally:
            self._pending.leave(pending)
            self.ledger.enter(call.operation, collectives.traffic)
