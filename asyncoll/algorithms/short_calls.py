"""A call on the short way of its backend: it needs no coroutine, and no record for deadlines, unless it has to sleep.

A signal handler may raise between any two lines of it. So what is not atomic, in shared memory, is left to `finish`,
which the runner calls where no handler runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from asyncoll.algorithms.backend import Body, Collectives, Plan, ShortWay
from asyncoll.errors import AsyncollError
from asyncoll.runtime import deadlines
from asyncoll.runtime.signature import Signature
from asyncoll.runtime.work import Driven
from asyncoll.statistics import Traffic
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import Array

T = TypeVar("T")


class Host(Protocol):
    """What a short call needs of the calls of its communicator."""

    def check(self) -> None:
        """Raise the error of the communicator if it or the world has failed."""

    def count(self, call: Signature, traffic: Traffic) -> None:
        """Count a call that has ended on the short way."""

    def general(
        self, call: Signature, body: Body[T], since_s: float, expires_s: float | None, arrived: Operand | None
    ) -> Driven[T]:
        """`call` with `body`, and with a record for deadlines: it began at `since_s`, and is overdue at `expires_s`.

        `arrived` is what this rank has shown to the others already.
        """


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

    async def finish(self) -> T:
        if not self._has_begun:
            self.begin()
        if self.is_over:
            return self.result()
        arrived = self._operand if self._has_arrived else None
        since_s, expires_s = self._since_s, self._expires_s
        general: Driven[T] = self._host.general(self._call, self._rest(), since_s, expires_s, arrived)
        return await general.finish()

    def _rest(self) -> Body[T]:
        if self._error is not None:
            return _raising(self._error)
        return self._receive if self._has_arrived else self._body

    def result(self) -> T:
        return self._outcome

    def _end(self, traffic: Traffic) -> None:
        self._outcome = self._result()
        self.is_over = True
        self._host.count(self._call, traffic)

    async def _receive(self, collectives: Collectives) -> T:
        await self._way.finish(self._plan, collectives, self._array)
        return self._result()


def _raising(error: AsyncollError) -> Body[T]:
    async def body(collectives: Collectives) -> T:
        raise error

    return body
