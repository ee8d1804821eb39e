"""Work in shared memory: a coroutine that any loop can drive.

Such a coroutine awaits only conditions of shared memory and turns (`transport.control_block.until` and `turn_of`). So
it belongs to no loop, and several loops may drive it one after another: the caller's loop if the call is awaited, or
else the runtime's loop. Its first steps run at the call, in the caller's thread. If all ranks have arrived, a short
call completes there, without a turn of any loop and without another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any, Generic, Protocol, TypeVar

from asyncoll.errors import UsageError
from asyncoll.transport import Arena, Turn, Wait

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class BegunWork(Protocol[T_co]):
    """Work in shared memory that has begun, and that any loop can drive to its end."""

    def finish(self) -> Coroutine[Any, Any, T_co]:
        """Run to the end, on the running loop of the calling thread, and return the result."""


class Driven(Protocol[T_co]):
    """Work in shared memory. Only one thread may drive it at a time. `Runner.drive` drives it."""

    is_over: bool
    is_atomic: bool  # whether an exception of a signal handler in `begin` leaves shared memory consistent

    def begin(self) -> None:
        """Run in the calling thread until the work has to wait. An exception of the work is kept for `result`."""

    def poll(self) -> bool:
        """Block the calling thread, which has nothing else to do, for a short time, and go on if the work can.

        Returns whether the work is over, or should be polled again.
        """

    def finish(self) -> Coroutine[Any, Any, T_co]:
        """Run to the end, on the running loop of the calling thread, and return the result. It may not have begun."""

    def result(self) -> T_co:
        """The result; raises the exception if the work has failed. Call it only if `is_over`, and once."""


class SharedWork(Generic[T]):
    """A coroutine in shared memory as `Driven`: it is driven to its end once."""

    is_atomic = False

    __slots__ = ("__weakref__", "_arena", "_body", "_check", "_error", "_result", "_wait", "_what", "is_over")

    def __init__(
        self, arena: Arena, body: Coroutine[Wait | Turn, None, T], check: Callable[[], None], what: Callable[[], str]
    ) -> None:
        """`check` raises if the communicator has failed; `what` describes the work, for the report of a deadlock."""
        self._arena = arena
        self._body = body
        self._check = check
        self._what = what
        self._wait: Wait | Turn | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self.is_over = False

    def begin(self) -> None:
        """Run `body` in the calling thread until it has to wait. An exception of `body` is kept for `result`."""
        self._step(self._body.send, None)

    def poll(self) -> bool:
        """Block the calling thread for a short time, until `body` can go on, and run it to its next wait.

        Returns whether it could.
        """
        wait = self._wait
        if not isinstance(wait, Wait) or not self._arena.look(wait.ready, wait.patience):
            return False
        # As in `Arena.wait`, what was read without the lock is a hint.
        with wait.control_block:
            if not wait.ready():
                return False
        self._step(self._body.send, None)
        return True

    async def finish(self) -> T:
        """Run `body` to its end, on the running loop of the calling thread, and return its result.

        If this is cancelled, or if `check` raises, the exception is thrown into `body` where it waits. `body` may wait
        while it cleans up.
        """
        if self._wait is None and not self.is_over:
            self.begin()
        while not self.is_over:
            try:
                if isinstance(self._wait, Wait):
                    await self._arena.wait(self._wait, self._check, self._what)
                elif isinstance(self._wait, Turn):
                    await self._arena.wait_for_turn(self._wait, self._check, self._what)
                else:  # of a function of the program
                    raise UsageError(
                        f"{self._what()} awaits {self._wait!r:.60}: the exchange of a sparse algorithm may await only "
                        "methods of its collectives"
                    )
            except BaseException as error:
                self._check = _nothing  # `body` has its exception; it must be able to wait while it cleans up
                self._step(self._body.throw, error)
            else:
                self._step(self._body.send, None)
        return self.result()

    def result(self) -> T:
        """The result of the coroutine; raises its exception if it has failed. Call it only if `is_over`."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def _step(self, step: Callable[[Any], Wait | Turn], argument: object) -> None:
        """Run `body` to its next wait by `step`, its `send` or `throw`, and keep the wait or the outcome."""
        self._wait = None
        try:
            self._wait = step(argument)
        except StopIteration as stop:
            self._result = stop.value
            self.is_over = True
        except BaseException as error:
            # If the body is not closed, it did not raise this itself: a signal handler raised after the step.
            if getcoroutinestate(self._body) != CORO_CLOSED:
                self._step(self._body.throw, error)
                return
            self._error = error
            self.is_over = True


def _nothing() -> None:
    pass


class Immediate(Generic[T]):
    """A coroutine that awaits nothing that is not ready, as `Driven`: it is over when it has begun."""

    __slots__ = ("__weakref__", "_body", "_error", "_result", "is_over")

    is_atomic = True

    def __init__(self, body: Coroutine[Any, None, T]) -> None:
        self._body = body
        self._error: BaseException | None = None
        self._result: T | None = None
        self.is_over = False

    def begin(self) -> None:
        self.is_over = True
        try:
            self._body.send(None)
        except StopIteration as stop:
            self._result = stop.value
        # Others are those of signal handlers, for the program.
        except (Exception, asyncio.CancelledError) as error:
            self._error = error
        else:
            self._error = RuntimeError("a call of one rank has to wait")

    async def finish(self) -> T:
        if not self.is_over:
            self.begin()
        return self.result()

    def poll(self) -> bool:
        return self.is_over

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]
