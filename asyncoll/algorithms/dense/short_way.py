"""The short way of a call in memory: an allreduce of a short array or a barrier, in its caller's thread.

Most of these calls are over when they return, or after a look of some microseconds. So they need none of what a call
that sleeps needs: no coroutine, no lane, no record for deadlines. A call that has to sleep after all goes on as any
other call (`algorithms.calls`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from asyncoll._core import Core
from asyncoll.algorithms.backend import BegunCall, Entry, Host, Plan
from asyncoll.algorithms.dense.meetings import LAST, NOT_FREE, OVER, meetings_of
from asyncoll.algorithms.dense.short_calls import Closing, Failures, PythonShortCalls
from asyncoll.algorithms.dense.staging import Copy, StagingArea, signed
from asyncoll.runtime import deadlines
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.progress import Runner
from asyncoll.runtime.signature import Signature, place_outside
from asyncoll.runtime.work import Driven, Work
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import BFLOAT16, Array, ReduceOp, into_all, kernel_number, reducer

if TYPE_CHECKING:
    from asyncoll._core.native import ShortCalls

T = TypeVar("T")

_PLANS_MAX = 1024
_SLEEP_NS = 200_000  # how long a call may block its caller's loop, after polling, instead of waking through the loop


class ShortWay:
    """Implements `ShortWay` in memory, for one communicator at one rank."""

    def __init__(
        self,
        staging: StagingArea,
        check: Callable[[], None],
        note: Callable[[Signature | Entry], None],
        collectives: Callable[[Signature], BegunCall],
    ) -> None:
        """`check` raises if the communicator has failed. `note` is told of each call, for reports of a mismatch.

        `collectives` makes those of a call.
        """
        self._collectives = collectives
        self._native = staging.arena.native
        self.now_s = deadlines.clock()
        self._check = check
        self._note = note
        self._staging = staging
        self._meetings = meetings_of(staging)
        self._polls = staging.arena.polls
        # With fewer cores than ranks the others come later, and each wake-up through a loop keeps a core from them.
        self._sleep_ns = _SLEEP_NS * -(-staging.size // staging.arena.cores)
        self._copies: dict[int, Copy] = {}  # by the number of the call: those that are under way, or have failed
        self._plans: dict[tuple[str, str, int, str], Plan] = {}
        self._compiled: ShortCalls | None = None
        self._in_python: PythonShortCalls | None = None

    def calls(
        self, core: Core | None, host: Host, runner: Runner, closing: Closing, failures: Failures
    ) -> ShortCalls | PythonShortCalls:
        """What starts usual calls. It learns the plans of this object.

        `closing.closed` says whether this rank has left, and `failures.any` whether anything has failed.
        """
        staging = self._staging
        if core is None:
            self._in_python = PythonShortCalls(staging, host, runner, closing, failures, self._note)
            return self._in_python
        assert isinstance(self._meetings, core.Meetings)
        sizes, own = staging.sizes, staging.arena.segments[staging.arena.local_rank]
        self._compiled = core.ShortCalls(
            self._meetings,
            host,
            runner,
            runner.home if runner.held is None else None,
            runner.held,
            closing,
            failures,
            host.unused,
            *staging.under_way,
            staging.end,
            self._note,
            place_outside,
            runner.caller,
            deadlines.expiry.get,
            np.ndarray,
            may_interrupt,
            (own.ctypes.data, own.size, staging.arena.locate(own) or 0),
            (
                max(sizes.private, sizes.whole + 1, sizes.short + 1),
                sizes.private_max if staging.peers is not None else 0,
            ),
            self._polls,
            self._sleep_ns,
        )
        return self._compiled

    def _shown_at(self, x: Array) -> int | None:
        """Where the other ranks see `x`: its address if it is registered, negated if it is private, 0 for a copy.

        None if it is too long to be copied here, and neither registered nor readable by the others.
        """
        sizes, peers = self._staging.sizes, self._staging.peers
        address = self._staging.address_of_short(x)
        if address or x.nbytes <= sizes.short:
            return address
        is_private = x.nbytes > sizes.whole and sizes.is_private(x.nbytes) and peers is not None and peers.can_read()
        return -x.ctypes.data if is_private else None

    def takes(self, x: Array, may_block: bool) -> bool:
        sizes = self._staging.sizes
        if x.nbytes <= sizes.short:
            return x.nbytes > 0
        is_compiled = self._native is not None and (x.nbytes <= sizes.long or may_block)
        return is_compiled and (x.nbytes <= sizes.whole or self._shown_at(x) is not None)

    def plan(self, call: Signature, op: ReduceOp, nbytes: int) -> Plan:
        self._note(call)
        self._staging.begin(call.number)  # a later call that would use the same record waits for this one
        key = call.operation, call.dtype, call.elements, call.detail
        return self._plans.get(key) or self._make(key, call, op, nbytes)

    def _make(self, key: tuple[str, str, int, str], call: Signature, op: ReduceOp, nbytes: int) -> Plan:
        if len(self._plans) == _PLANS_MAX:
            self._plans.clear()
        size = self._staging.size
        reducing, receiving = Traffic(), Traffic()
        if nbytes:
            for traffic, received in ((reducing, nbytes * (size - 1)), (receiving, nbytes)):
                traffic.sent(nbytes)
                traffic.received(received)
        reduce = reducer(op, call.dtype, self._native) if nbytes else None
        divisor = size if op is ReduceOp.AVG else 1
        kernel = kernel_number(op, call.dtype, self._native) if nbytes else 0
        # An array that is shown where it is has to be withdrawn after an exception, which takes more than one step.
        is_copied = 0 < nbytes < self._staging.shown
        is_atomic = self._native is not None and ((kernel > 0 and is_copied) or not nbytes)
        plan = Plan(
            key, signed(call.fingerprint()), reduce, kernel, divisor, nbytes or 1, reducing, receiving, is_atomic
        )
        self._plans[key] = plan
        is_learnt = not nbytes or (kernel if self._compiled is not None else is_copied)
        if is_learnt and nbytes <= self._staging.sizes.long:
            self._teach(plan, op, nbytes)
        return plan

    def _teach(self, plan: Plan, op: ReduceOp, nbytes: int) -> None:
        """From now on the short calls of this plan begin with their arguments alone."""
        _, dtype, elements, _ = plan.kind
        keys: list[object] = [None]
        if nbytes:
            keys = [sys.intern(dtype)]  # of torch tensors
            if dtype != BFLOAT16:
                keys.append(np.dtype(dtype))
        for key in keys:
            reduction = op if nbytes else None
            if self._compiled is not None:
                meeting = plan.fingerprint, plan.divisor, plan.done, plan.kernel
                self._compiled.learn(key, reduction, nbytes, plan, *meeting)
            elif self._in_python is not None:
                self._in_python.learn(key, reduction, elements if nbytes else 0, plan)

    def begin(self, plan: Plan, number: int, x: Array | None) -> bool | None:
        if x is None or self._shown_at(x) is not None:
            return self._begin(plan, number, x)
        copy = self._staging.copy(x.view(np.uint8))
        if copy is None:
            return None
        self._copies[number] = copy
        over = self._begin(plan, number, copy.raw.view(x.dtype))
        if over is not False:
            self._end_copy(number, x if over else None)
        return over

    def _end_copy(self, number: int, x: Array | None) -> None:
        """The call is over, or has not begun: `x`, of which there is a copy, gets the result, unless it is None."""
        copy = self._copies.pop(number, None)
        if copy is not None:
            if x is not None:
                x.view(np.uint8)[...] = copy.raw
            self._staging.give_back(copy.address, copy.room)

    def _begin(self, plan: Plan, number: int, x: Array | None) -> bool | None:
        staging = self._staging
        state = NOT_FREE
        address = 0 if x is None else self._shown_at(x) or 0
        if address < 0 and not plan.kernel:
            return None
        # The first call with an array to copy goes the general way, which allocates the memory for copies.
        has_memory = x is None or address or staging.has_short_arrays
        if has_memory and staging.is_over(number - staging.sizes.calls):
            clear = staging.is_alone(number)
            state = self._meetings.arrive(number, plan.fingerprint, x, address, plan.kernel, plan.divisor, clear)
        if state == OVER or (state == LAST and self._reduce(plan, number, x)):
            staging.end(number)
            return True
        return None if state == NOT_FREE else False

    def _reduce(self, plan: Plan, number: int, x: Array | None) -> bool:
        """Reduce the arrays of all ranks. Returns whether the call is over: other ranks may still reduce chunks."""
        staging, clear = self._staging, self._staging.is_alone(number)
        rendezvous = staging.rendezvous(number, 0, plan.fingerprint)
        if x is not None and plan.reduce is not None and rendezvous.is_shown(x.nbytes):
            reduce, arrays = into_all(plan.reduce, plan.kernel, self._native), rendezvous.arrays(x.nbytes, x.dtype)
            while chunk := rendezvous.claim(x.nbytes):
                rendezvous.reduce_chunk(chunk, arrays, reduce, plan.divisor)
            return self._meetings.complete(number, plan.done, x, clear)
        if x is not None and plan.reduce is not None:
            rendezvous.reduce_copies(x, plan.reduce, plan.divisor)
        self._meetings.publish(number, plan.done, clear)
        return True

    def look(self, plan: Plan, number: int, x: Array | None) -> bool:
        staging, meetings = self._staging, self._meetings
        if not meetings.look(number, plan.done, self._polls, self._sleep_ns, plan.kernel, plan.divisor):
            return False
        copy = self._copies.get(number)
        array = x if copy is None or x is None else copy.raw
        if not meetings.complete(number, plan.done, array, staging.is_alone(number)):
            return False
        self._end_copy(number, x)
        staging.end(number)
        return True

    def rest(self, call: Signature, x: Array | None) -> BegunCall:
        collectives = self._collectives(call)
        collectives.rejoin(x)
        return collectives

    async def finish(self, begun: BegunCall, plan: Plan, number: int, x: Array | None) -> None:
        copy = self._copies.get(number)
        await begun.finish_shortly(x if copy is None or x is None else copy.raw.view(x.dtype), plan)
        self._end_copy(number, x)

    def work(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Driven[T]:
        return Work(self._staging.arena, work, self._check, describe)
