"""Whole short calls, an allreduce or a barrier, from the arguments of the caller to the end of its `await`.

`PythonShortCalls` and the compiled core (asyncoll/_core/short_calls.c) implement `backend.ShortCalls`. Both know the
kinds of calls that they have learned from `ShortWay`, and leave all other calls alone. A call that has to sleep, or
fails, goes on as any other call (`Host.general`).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

import numpy as np

from asyncoll.algorithms.backend import Entry, Host, Plan
from asyncoll.algorithms.dense.staging import Rendezvous, StagingArea
from asyncoll.runtime import deadlines
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.progress import CALLS_PER_TURN, Runner
from asyncoll.runtime.signature import place_outside
from asyncoll.tensors.reductions import Array, ReduceOp

_KINDS_MAX = 192
_UNCOUNTED_MAX = 256  # calls that have ended and are not counted yet
_PUBLIC = 2  # frames from `_start` to the public method


class Closing(Protocol):
    closed: bool


class Failures(Protocol):
    any: bool


class PythonShortCalls:
    """Implements `backend.ShortCalls` in memory. No signal handler may raise in the thread that makes these calls."""

    def __init__(
        self,
        staging: StagingArea,
        host: Host,
        runner: Runner,
        closing: Closing,
        failures: Failures,
        note: Callable[[Entry], None],
    ) -> None:
        self.last = 0
        self.libraries: tuple[str, ...] = ()  # what the names of files begin with that are not the user's
        self.runner = runner
        self.host = host
        self.staging = staging
        self.now_s = deadlines.clock()
        self.ended_s = 0.0
        self._turn = 0  # calls since the caller's loop has turned
        self._home = runner.home if runner.held is None else None
        self._closing = closing
        self._failures = failures
        self._note = note
        self._kinds: dict[tuple[object, object, int], Plan] = {}
        self._latest: Entry | None = None
        self._ended: deque[tuple[Plan, bool]] = deque()  # those that `counts` has not told yet
        self._unfinished, _ = staging.under_way

    def learn(self, key: object, op: object, elements: int, plan: Plan) -> None:
        """The next calls with these arguments begin here. A barrier has the key None.

        Without effect if too many kinds are known.
        """
        if len(self._kinds) < _KINDS_MAX:
            self._kinds[key, op, elements] = plan

    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None:
        if type(x) is not np.ndarray or type(op) is not ReduceOp:
            return None
        plan, flags = self._kinds.get((x.dtype, op, x.size)), x.flags
        if plan is None or not (flags.c_contiguous and flags.writeable):
            return None
        return self._start(plan, x if x.ndim == 1 else x.reshape(-1), x)

    def allreduce_view(self, x: Any, op: object, array: Array, key: str, /) -> Coroutine[Any, Any, Any] | None:
        plan = self._kinds.get((key, op, array.size)) if type(op) is ReduceOp else None
        return None if plan is None else self._start(plan, array, x)

    def barrier(self) -> Coroutine[Any, Any, None] | None:
        plan = self._kinds.get((None, None, 0))
        return None if plan is None else self._start(plan, None, None)

    def _start(self, plan: Plan, x: Array | None, result: Any) -> Coroutine[Any, Any, Any] | None:
        host, staging, number = self.host, self.staging, self.last + 1
        if self._closing.closed or self._failures.any or host.unstarted is not None or host.unused or may_interrupt():
            return None
        try:
            loop = self.runner.caller()
        except RuntimeError:
            return None
        if self._home not in (None, loop) or number - staging.sizes.calls in self._unfinished:
            return None
        rendezvous = staging.rendezvous(number, 0, plan.fingerprint)
        if not rendezvous.is_free_now():
            return None
        entry = plan, number, *place_outside(sys._getframe(_PUBLIC), self.libraries)
        if self.last + 1 != number:  # another thread has made a call meanwhile
            return None
        self.last = number
        self._latest = entry
        call = _ShortCall(self, entry, rendezvous, x, result)
        try:
            self._unfinished.add(number)
            self._note(entry)
            staging.note(number)
            if rendezvous.arrive_shortly(x):
                if x is not None and plan.reduce is not None:
                    rendezvous.reduce_copies(x, plan.reduce, plan.divisor)
                rendezvous.leave(reduced=plan.done)
                call.end(is_last=True)
                return call
            call.since_s, call.expires_s = self.now_s(), deadlines.expires_s()
            if self._home is not None:
                return call.go_on(None)
            assert self.runner.held is not None
            self.runner.held[call] = loop, self.runner.turn
            if not self.runner.is_timer_set:
                self.runner.set_timer()
            return call
        except BaseException as error:
            return call.go_on(error)

    def end(self, plan: Plan, number: int, *, is_last: bool) -> None:
        """Call `number` is over; `is_last`: this rank has reduced."""
        self.staging.end(number)
        self.ended_s = self.now_s()
        self._ended.append((plan, is_last))
        if len(self._ended) > _UNCOUNTED_MAX:
            self.host.collect()

    def counts(self) -> list[tuple[Plan, int, int]]:
        found: dict[int, tuple[Plan, list[int]]] = {}
        for _ in range(len(self._ended)):
            plan, is_last = self._ended.popleft()
            found.setdefault(id(plan), (plan, [0, 0]))[1][not is_last] += 1
        return [(plan, reduced, received) for plan, (reduced, received) in found.values()]

    def latest(self) -> tuple[Entry, float] | None:
        return None if self._latest is None else (self._latest, self.ended_s)

    def is_turn_due(self) -> bool:
        """Count a call that is over. Returns whether its caller has to let the loop turn."""
        self._turn += 1
        if self._turn < CALLS_PER_TURN:
            return False
        self._turn = 0
        return True


_BEGUN, _ENDED, _RESTING, _AWAITED = range(4)  # the states of a call


class _ShortCall(Coroutine[Any, Any, Any]):
    """A call that has begun; its caller awaits it. Implements `backend.BegunShortCall` and `handles.Shared`."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_rendezvous",
        "_rest",
        "_state",
        "array",
        "entry",
        "expires_s",
        "result",
        "since_s",
    )

    def __init__(
        self, calls: PythonShortCalls, entry: Entry, rendezvous: Rendezvous, array: Array | None, result: Any
    ) -> None:
        self._calls = calls
        self._rendezvous = rendezvous
        self._rest: Coroutine[Any, Any, Any] | None = None
        self._state = _BEGUN
        self.array = array
        self.entry = entry
        self.result = result
        self.since_s = 0.0
        self.expires_s: float | None = None

    def __await__(self) -> Generator[Any, None, Any]:
        return self  # an iterator is enough for `await`

    def __iter__(self) -> _ShortCall:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self._state == _AWAITED:
            raise RuntimeError("cannot reuse already awaited coroutine")
        if self._state == _BEGUN:
            self._resume()
        if self._state == _ENDED:
            if self._calls.is_turn_due():
                return None  # what `asyncio.sleep(0)` yields
            result, self.result = self.result, None
            self._state = _AWAITED
            raise StopIteration(result)
        assert self._rest is not None
        try:
            return self._rest.send(value)
        except BaseException:
            self._leave()
            raise

    def throw(self, error: Any, *more: Any) -> Any:
        """As `runtime.progress._Begun.throw`: the call takes its first step, so that a cancellation reaches it."""
        if self._state == _BEGUN:
            try:
                self.send(None)
            except StopIteration:
                raise error from None
        if self._rest is None:
            self._leave()
            raise error
        try:
            return self._rest.throw(error, *more)
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """The caller does not want the result. The runtime goes on with a call that has begun."""
        if self._rest is not None:
            self._rest.close()
            self._leave()
        self._state = _AWAITED

    def look(self) -> bool:
        # Ctrl-C may interrupt the main thread between any two lines, so the runtime does all that this cannot see.
        return self._state == _ENDED

    def claim(self) -> bool:
        held = self._calls.runner.held
        return held is not None and held.pop(self, None) is not None

    def finish(self) -> Coroutine[Any, Any, Any]:
        return self._calls.host.general(self, None).finish()

    def end(self, *, is_last: bool) -> None:
        plan, number, _, _ = self.entry
        self._state = _ENDED
        self.array = None
        self._calls.end(plan, number, is_last=is_last)

    def go_on(self, error: BaseException | None) -> Coroutine[Any, Any, Any]:
        """The rest of the call, with `error`, if there is one."""
        host = self._calls.host
        try:
            return self._calls.runner.drive(host.general(self, error))
        except BaseException:
            host.interrupted(self)
            raise

    def _leave(self) -> None:
        self._state = _AWAITED
        self._rest = self.array = None

    def _resume(self) -> None:
        """The first step of an `await`: end the call, or make the rest of it."""
        calls = self._calls
        runner = calls.runner
        assert runner.held is not None
        if runner.held.pop(self, None) is None:
            self._rest = runner.taken(self)
            self._state = _RESTING
            return
        error: BaseException | None = None
        if not may_interrupt():  # also if the program has set a signal handler since the call
            try:
                if self._look():
                    return
            except BaseException as caught:
                error = caught
        self._rest = self.go_on(error)
        self._state = _RESTING

    def _look(self) -> bool:
        rendezvous, done = self._rendezvous, self.entry[0].done
        if not self._calls.staging.arena.look(lambda: rendezvous.is_reduced(done)):
            return False
        if not rendezvous.complete_shortly(done, self.array):
            return False
        self.end(is_last=False)
        return True
