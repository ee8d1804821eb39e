"""A call on the short way of its backend: it needs no coroutine, and no record for deadlines, unless it has to sleep.

A signal handler may raise between any two lines of it. So what is not atomic, in shared memory, is left to `finish`,
which the runner calls where no handler runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from asyncoll.algorithms.backend import Body, Host, Plan, ShortWay
from asyncoll.errors import AsyncollError
from asyncoll.runtime import deadlines
from asyncoll.runtime.signature import Signature
from asyncoll.statistics import Traffic
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import Array

T = TypeVar("T")


class ShortCall(Generic[T]):
    """One call on the short way, as `runtime.work.Driven`."""

    __slots__ = (
        "__weakref__",
        "_body",
        "_call",
        "_error",
        "_expires_s",
        "_has_arrived",
        "_has_begun",
        "_host",
        "_operand",
        "_outcome",
        "_plan",
        "_result",
        "_since_s",
        "_way",
        "is_atomic",
        "is_over",
    )

    def __init__(
        self,
        host: Host,
        way: ShortWay,
        plan: Plan,
        call: Signature,
        body: Body[T],
        operand: Operand | None,
        result: Callable[[], T],
    ) -> None:
        """`body` carries out the whole call. `result` is called once the operand has the result."""
        self._host = host
        self._way = way
        self._plan = plan
        self._call = call
        self._operand = operand
        self._result = result
        self._body = body
        self._error: AsyncollError | None = None
        self._has_begun = False
        self._has_arrived = False  # and shown its array to the other ranks
        self.is_atomic = plan.is_atomic
        self.is_over = False

    @property
    def _array(self) -> Array | None:
        return None if self._operand is None else self._operand.flat

    def begin(self) -> None:
        self._has_begun = True
        over = None
        try:
            self._host.check()
            over = self._way.begin(self._plan, self._call.number, self._array)
        except AsyncollError as error:
            self._error = error
        self._has_arrived = over is not None or self._error is not None  # perhaps, if there was an error
        if over:
            self._end(self._plan.reducing)
        else:
            # The deadline of the caller's context: the rest of the call may run in another one.
            self._since_s, self._expires_s = self._way.now_s(), deadlines.expires_s()

    def look(self) -> bool:
        if self._has_arrived and self._error is None:
            try:
                if self._way.look(self._plan, self._call.number, self._array):
                    self._end(self._plan.receiving)
            except AsyncollError as error:
                self._error = error
        return self.is_over

    poll = look

    async def finish(self) -> T:
        if not self._has_begun:
            self.begin()
        if self.is_over:
            return self.result()
        since_s, expires_s = self._since_s, self._expires_s
        if self._has_arrived:
            x, result = self._array, self._result
            rest = self._host.rest(self._call, self._plan, x, result, since_s, expires_s, self._error)
        else:
            rest = self._host.whole(self._call, self._body, since_s, expires_s)
        return await rest.finish()

    def result(self) -> T:
        return self._outcome

    def _end(self, traffic: Traffic) -> None:
        self._outcome = self._result()
        self.is_over = True
        self._host.count(self._call, traffic)
