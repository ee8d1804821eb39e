"""The calls of one communicator at one rank: numbers them, starts them on the backend, tracks them until they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Backend, Body, Collectives
from asyncoll.algorithms.dense.alone import Alone
from asyncoll.algorithms.short_calls import ShortCall
from asyncoll.arguments import digest
from asyncoll.errors import describe
from asyncoll.runtime.member import Member
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.signature import Signature, Site
from asyncoll.runtime.work import Driven, Immediate
from asyncoll.statistics import Ledger, Traffic
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import Array, ReduceOp

T = TypeVar("T")


@lru_cache(maxsize=64)
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
        self._is_alone = member.group.size == 1
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
        if self._is_alone:
            return self._start_alone(call, body)
        pending = self._pending.enter(call, call.number)
        try:
            self._unstarted = None  # inside the try: from here on an interruption is reported below
            work = self._carry_out(call, self._backend.collectives(call), body, pending)
            return self._backend.start(work, call.__str__, nbytes, discarded)
        except BaseException as error:
            self._pending.leave(pending)
            self._member.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def start_shortly(
        self, call: Signature, body: Body[T], operand: Operand | None, op: ReduceOp, result: Callable[[], T]
    ) -> Coroutine[Any, Any, T]:
        """Start `call`, an allreduce of `operand`, or a barrier without one. Otherwise as `start`.

        If the backend has a short way for it, the call goes that way, and `body` is not used unless the way is not
        free. `result` is called once `operand` has the result.
        """
        way, nbytes = self._backend.short_way, 0 if operand is None else operand.flat.nbytes
        if way is None or (operand is not None and not way.takes(operand.flat)):
            return self.start(call, body, nbytes)
        try:
            self._unstarted = None  # inside the try, as in `start`
            short = ShortCall(self, way, way.plan(call, op, nbytes), call, body, operand, result)
            return self._member.runner.drive(short)
        except BaseException as error:
            self._member.abort(f"{call} was interrupted: {describe(error)}")
            raise

    def end_alone(self, operation: str) -> bool:
        """Whether a call of `operation` is over now, because one rank has nothing to do for it. It is counted then.

        Raises UsageError as `number` does.
        """
        if not self._is_alone or self._member.has_failed:
            return False
        self._member.check_caller()
        self._number += 1
        self.ledger.enter(operation, Alone.traffic)
        return True

    def _start_alone(self, call: Signature, body: Body[T]) -> Coroutine[Any, Any, T]:
        """Carry out a call of one rank, which is over at once."""

        async def work() -> T:
            self._member.check()
            result = await body(Alone())
            self.count(call, Alone.traffic)
            return result

        self._unstarted = None
        return self._member.runner.drive(Immediate(work()))

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

    def general(
        self, call: Signature, body: Body[T], since_s: float, expires_s: float | None, arrived: Operand | None
    ) -> Driven[T]:
        """Implements `short_calls.Host`."""
        way = self._backend.short_way
        assert way is not None
        pending = self._pending.enter_late(call, call.number, since_s, expires_s)
        collectives = self._backend.collectives(call)
        if arrived is not None:
            way.rejoin(collectives, arrived.flat)
        return way.work(self._carry_out(call, collectives, body, pending), call.__str__)

    def count(self, call: Signature, traffic: Traffic) -> None:
        """Implements `short_calls.Host`."""
        self._pending.note(call, call.number)
        self.ledger.enter(call.operation, traffic)
        self._member.endpoint.in_memory.enter(call.operation, traffic)

    def check(self) -> None:
        """Implements `short_calls.Host`."""
        self._member.check()

    async def _carry_out(self, call: Signature, collectives: Collectives, body: Body[T], pending: PendingCall) -> T:
        """The whole call, on whichever loop drives it."""
        try:
            async with collectives:
                self._member.check()
                return await body(collectives)
        finally:
            self._pending.leave(pending)
            self.ledger.enter(call.operation, collectives.traffic)
