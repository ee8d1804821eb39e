"""Who drives a coroutine in memory: the caller who awaits it, or the runtime if nobody does.

Such a coroutine awaits nothing but conditions of shared memory and turns (`transport.control_block.until`, `turn_of`),
so it belongs to no loop and may be driven by any, one after another. Its first steps are taken at the call, in the
caller's own thread: a call between ranks that are all there is over without any other thread, or the loop, having
turned.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any, Generic, TypeVar

from asyncoll.transport import Arena, Turn, Wait

T = TypeVar("T")


class Work(Generic[T]):
    """A coroutine in memory, to be driven to its end once."""

    __slots__ = ("__weakref__", "_arena", "_body", "_check", "_error", "_result", "_wait", "_what", "is_over")

    def __init__(
        self, arena: Arena, body: Coroutine[Wait | Turn, None, T], check: Callable[[], None], what: Callable[[], str]
    ) -> None:
        """`check` raises if there is nothing to wait for any more; `what` describes the work."""
        self._arena = arena
        self._body = body
        self._check = check
        self._what = what
        self._wait: Wait | Turn | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_over = False

    def begin(self) -> None:
        """Go as far as possible without waiting."""
        self._step(self._body.send, None)

    async def finish(self) -> T:
        """Go on to the end, on the loop that runs here, and return what the coroutine returns.

        If this is cancelled, or `check` raises, the coroutine gets the exception where it waits, and may clean up.
        """
        if self._wait is None and not self.is_over:
            self.begin()
        while self._wait is not None:
            try:
                if isinstance(self._wait, Turn):
                    await self._arena.wait_for_turn(self._wait, self._check, self._what)
                else:
                    await self._arena.wait(self._wait, self._check, self._what)
            except BaseException as error:
                self._check = _nothing  # it has said what it had to say: what waits now is cleaning up
                self._step(self._body.throw, error)
            else:
                self._step(self._body.send, None)
        return self.result()

    def result(self) -> T:
        """What the coroutine has returned. Raises what it has raised."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _step(self, step: Callable[[Any], Wait | Turn], argument: object) -> None:
        self._wait = None
        try:
            self._wait = step(argument)
        except StopIteration as stop:
            self._result = stop.value
            self.is_over = True
        except BaseException as error:
            if getcoroutinestate(self._body) != CORO_CLOSED:  # a signal handler raised after the step
                self._step(self._body.throw, error)
                return
            self._error = error
            self.is_over = True


def _nothing() -> None:
    pass
