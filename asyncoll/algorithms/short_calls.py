"""A call on the short way of its backend: it needs no coroutine, and no record for deadlines, unless it has to sleep."""

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

    def general(self, call: Signature, body: Body[T], since_s: float, expires_s: float | None) -> Driven[T]:
        """The whole of `call`, with a record for deadlines: it began at `since_s`, and is overdue at `expires_s`."""


class ShortCall(Generic[T]):
    """One call on the short way, as `runtime.work.Driven`."""

    __slots__ = (
        "__weakref__",
        "_body",
        "_call",
        "_expires_s",
        "_general",
        "_host",
        "_operand",
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
        """`body` carries out the call if the way is not free. `result` is called once the operand has the result."""
        self._host = host
        self._way = way
        self._plan = plan
        self._call = call
        self._body = body
        self._operand = operand
        self._result = result
        self._general: Driven[T] | None = None
        self.is_atomic = way.is_atomic
        self.is_over = False

    @property
    def _array(self) -> Array | None:
        return None if self._operand is None else self._operand.flat

    def begin(self) -> None:
        rest: Body[T] | None = None
        try:
            self._host.check()
            over = self._way.begin(self._plan, self._call.number, self._array)
        except AsyncollError as error:
            over, rest = None, _raising(error)
        if over:
            self._end(self._plan.reducing)
            return
        # The deadline of the caller's context: the rest of the call may run in another one.
        self._since_s, self._expires_s = self._way.now_s(), deadlines.expires_s()
        if over is None:
            self._leave(rest or self._body)

    def look(self) -> bool:
        if self._general is None:
            try:
                if self._way.look(self._plan, self._call.number, self._array):
                    self._end(self._plan.receiving)
            except AsyncollError as error:
                self._leave(_raising(error))
        return self.is_over

    async def finish(self) -> T:
        if self.is_over:
            return self.result()
        if self._general is None:
            self._leave(self._rest)
        assert self._general is not None
        return await self._general.finish()

    def result(self) -> T:
        return self._result() if self._general is None else self._general.result()

    def _end(self, traffic: Traffic) -> None:
        self.is_over = True
        self._host.count(self._call, traffic)

    def _leave(self, body: Body[T]) -> None:
        """Leave the short way: `body` is the rest of the call."""
        self._general = general = self._host.general(self._call, body, self._since_s, self._expires_s)
        general.begin()
        self.is_over = general.is_over

    async def _rest(self, collectives: Collectives) -> T:
        await self._way.finish(self._plan, collectives, self._array)
        return self._result()


def _raising(error: AsyncollError) -> Body[T]:
    async def body(collectives: Collectives) -> T:
        raise error

    return body
