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


class Sleeper:
    """Somebody at this rank who waits until a doorbell rings."""

    def __init__(self, what: Callable[[], str]) -> None:
        self.what = what
        self.loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self.loop.create_future()

    def lie_down(self) -> asyncio.Future[None]:
        if self._rung.done():
            self._rung = self.loop.create_future()
        return self._rung

    def rouse(self) -> None:
        """On its own loop."""
        if not self._rung.done():
            self._rung.set_result(None)

    def call(self) -> None:
        """Rouse it, from any thread."""
        if _running_loop() is self.loop:
            self.rouse()
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is left to be roused
            self.loop.call_soon_threadsafe(self.rouse)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Line:
    """Those of this rank, on any loops, who wait for a turn. Whoever ends before one of them rouses that one alone."""

    def __init__(self) -> None:
        self._sleepers: dict[Sleeper, None] = {}  # changed and copied as those of a doorbell

    async def wait(self, turn: Turn, check: Callable[[], None], what: Callable[[], str]) -> None:
        sleeper = Sleeper(what)
        self._sleepers[sleeper] = None
        try:
            while True:
                rung = sleeper.lie_down()
                turn.on_come(sleeper.call)
                if turn.has_come:
                    return
                check()
                await rung
        finally:
            del self._sleepers[sleeper]

    def alarm(self) -> None:
        """All of them ask their `check`. From any thread."""
        for sleeper in tuple(self._sleepers):
            sleeper.call()

    def waiting(self) -> list[str]:
        return [sleeper.what() for sleeper in tuple(self._sleepers)]


class Doorbell:
    """One of this rank's doorbells, and its sleepers, on any loops. A loop listens as long as somebody sleeps on it."""

    def __init__(self, number: int, descriptor: int) -> None:
        """`descriptor`, an eventfd, is copied: a loop that listens must not be left with a closed one."""
        self.number = number
        self.sleepers: list[Sleeper] = []  # changed and copied by several threads, each time in one step of the GIL
        self.descriptor = os.dup(descriptor)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._is_closed = False

    def close(self) -> None:
        """Once nobody sleeps here any more."""
        self._is_closed = True
        if not self.sleepers:
            self._closing()

    def enter(self, what: Callable[[], str]) -> Sleeper:
        sleeper = Sleeper(what)
        if not self._has_sleepers(sleeper.loop):
            sleeper.loop.add_reader(self.descriptor, self._heard)
        self.sleepers.append(sleeper)
        return sleeper

    def leave(self, sleeper: Sleeper) -> None:
        self.sleepers.remove(sleeper)
        if not self._has_sleepers(sleeper.loop) and not sleeper.loop.is_closed():
            sleeper.loop.remove_reader(self.descriptor)
        if self._is_closed and not self.sleepers:
            self._closing()

    def _has_sleepers(self, loop: asyncio.AbstractEventLoop) -> bool:
        return any(sleeper.loop is loop for sleeper in tuple(self.sleepers))

    def _heard(self) -> None:
        """Whichever loop hears it first silences the doorbell, so it must rouse the sleepers of all."""
        try:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            for sleeper in tuple(self.sleepers):
                sleeper.call()
        except BaseException:  # a signal handler's: it is heard again
            os.eventfd_write(self.descriptor, 1)
            raise
