"""The short way of a call in memory: an allreduce of a short array or a barrier, in its caller's thread.

Most of these calls are over when they return, or after a look of some microseconds. So they need none of what a call
that sleeps needs: no coroutine, no lane, no record for deadlines. A call that has to sleep after all goes on as any
other call (`algorithms.calls`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from asyncoll._core import Core
from asyncoll.algorithms.backend import BegunCall, Entry, Host, Plan
from asyncoll.algorithms.dense.meetings import LAST, NOT_FREE, OVER, meetings_of
from asyncoll.algorithms.dense.short_calls import Closing, Failures, PythonShortCalls
from asyncoll.algorithms.dense.staging import StagingArea, signed
from asyncoll.runtime import deadlines
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.progress import Runner
from asyncoll.runtime.signature import Signature
from asyncoll.runtime.work import Driven, Work
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import BFLOAT16, Array, ReduceOp, kernel_number, reducer

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
        self.nbytes_max = staging.sizes.short
        self._native = staging.arena.native
        self.now_s = deadlines.clock()
        self._check = check
        self._note = note
        self._staging = staging
        self._meetings = meetings_of(staging)
        self._polls = staging.arena.polls
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
            asyncio.get_running_loop,
            deadlines.expiry.get,
            np.ndarray,
            self._address_of,
            self._polls,
            _SLEEP_NS,
        )
        return self._compiled

    def _address_of(self, x: Array) -> int | None:
        """The address of `x`, if it is registered; else 0. None if a signal handler may raise.

        A call that shows its caller's memory takes it back after an exception, which takes more than one step.
        """
        return None if may_interrupt() else self._staging.address_of_short(x)

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
        is_copied = 0 < nbytes < self._staging.sizes.shown
        is_atomic = self._native is not None and ((kernel > 0 and is_copied) or not nbytes)
        plan = Plan(
            key, signed(call.fingerprint()), reduce, kernel, divisor, nbytes or 1, reducing, receiving, is_atomic
        )
        self._plans[key] = plan
        if not nbytes or (kernel if self._compiled is not None else is_copied):
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
        staging = self._staging
        state = NOT_FREE
        # The first call with an array goes the general way, which allocates the memory of short arrays.
        if staging.is_over(number - staging.sizes.calls) and (x is None or staging.has_short_arrays):
            address = 0 if x is None else staging.address_of_short(x)
            clear = staging.is_alone(number)
            state = self._meetings.arrive(number, plan.fingerprint, x, address, plan.kernel, plan.divisor, clear)
        if state == LAST:
            self._reduce(plan, number, x)
        if state in (LAST, OVER):
            staging.end(number)
            return True
        return None if state == NOT_FREE else False

    def _reduce(self, plan: Plan, number: int, x: Array | None) -> None:
        """Reduce the arrays of all ranks, and publish the result."""
        staging = self._staging
        if x is not None and plan.reduce is not None:
            staging.rendezvous(number, 0, plan.fingerprint).reduce_shortly(x, plan.reduce, plan.divisor)
        self._meetings.publish(number, plan.done, staging.is_alone(number))

    def look(self, plan: Plan, number: int, x: Array | None) -> bool:
        staging, meetings = self._staging, self._meetings
        if not meetings.look(number, plan.done, self._polls, _SLEEP_NS):
            return False
        if not meetings.complete(number, plan.done, x, staging.is_alone(number)):
            return False
        staging.end(number)
        return True

    def rest(self, call: Signature, x: Array | None) -> BegunCall:
        collectives = self._collectives(call)
        collectives.rejoin(x)
        return collectives

    def work(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Driven[T]:
        return Work(self._staging.arena, work, self._check, describe)
