"""A rank's doorbell: a descriptor that any process of the host can ring, and who sleeps here until somebody does.

And the line of those at this rank who wait for others of it, which costs no ringing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable

from asyncoll.transport.control_block import Turn


class Waiter:
    """Somebody at this rank who waits until a doorbell rings."""

    def __init__(self, what: Callable[[], str]) -> None:
        self.what = what
        self.loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self.loop.create_future()

    def arm(self) -> asyncio.Future[None]:
        if self._rung.done():
            self._rung = self.loop.create_future()
        return self._rung

    def wake(self) -> None:
        """On its own loop."""
        if not self._rung.done():
            self._rung.set_result(None)

    def wake_from_any_thread(self) -> None:
        """Rouse it, from any thread."""
        if _running_loop() is self.loop:
            self.wake()
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is left to be roused
            self.loop.call_soon_threadsafe(self.wake)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class TurnQueue:
    """Those of this rank, on any loops, who wait for a turn. Whoever ends before one of them rouses that one alone."""

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}  # changed and copied as those of a doorbell

    async def wait(self, turn: Turn, check: Callable[[], None], what: Callable[[], str]) -> None:
        waiter = Waiter(what)
        self._waiters[waiter] = None
        try:
            while True:
                rung = waiter.arm()
                turn.on_set(waiter.wake_from_any_thread)
                if turn.is_set:
                    return
                check()
                await rung
        finally:
            del self._waiters[waiter]

    def recheck(self) -> None:
        """All of them ask their `check`. From any thread."""
        for waiter in tuple(self._waiters):
            waiter.wake_from_any_thread()

    def waiting(self) -> list[str]:
        return [waiter.what() for waiter in tuple(self._waiters)]


class Doorbell:
    """One of this rank's doorbells, and its waiters, on any loops. A loop listens as long as somebody sleeps on it."""

    def __init__(self, number: int, descriptor: int) -> None:
        """`descriptor`, an eventfd, is copied: a loop that listens must not be left with a closed one."""
        self.number = number
        self.waiters: list[Waiter] = []  # changed and copied by several threads, each time in one step of the GIL
        self.descriptor = os.dup(descriptor)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._is_closed = False

    def close(self) -> None:
        """Once nobody sleeps here any more."""
        self._is_closed = True
        if not self.waiters:
            self._closing()

    def add_waiter(self, what: Callable[[], str]) -> Waiter:
        waiter = Waiter(what)
        if not self._has_waiters(waiter.loop):
            waiter.loop.add_reader(self.descriptor, self._read)
        self.waiters.append(waiter)
        return waiter

    def remove_waiter(self, waiter: Waiter) -> None:
        self.waiters.remove(waiter)
        if not self._has_waiters(waiter.loop) and not waiter.loop.is_closed():
            waiter.loop.remove_reader(self.descriptor)
        if self._is_closed and not self.waiters:
            self._closing()

    def _has_waiters(self, loop: asyncio.AbstractEventLoop) -> bool:
        return any(waiter.loop is loop for waiter in tuple(self.waiters))

    def _read(self) -> None:
        """Whichever loop hears it first silences the doorbell, so it must rouse the waiters of all."""
        try:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            for waiter in tuple(self.waiters):
                waiter.wake_from_any_thread()
        except BaseException:  # a signal handler's: it is heard again
            os.eventfd_write(self.descriptor, 1)
            raise
