"""How tasks of a rank sleep and wake: doorbells between processes, and a queue for tasks that wait for their own rank.

A doorbell is an eventfd. Any process of the host can ring it, and the event loops of its rank watch it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import Callable

from asyncoll.transport import settle, settle_from_any_thread
from asyncoll.transport.control_block import Turn


class Waiter:
    """A task of this rank that sleeps until a doorbell rings or a turn is set."""

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self.loop.create_future()

    def arm(self) -> asyncio.Future[None]:
        """Return the future of the next wake-up. Call this before the last look at the condition."""
        if self._woken.done():
            self._woken = self.loop.create_future()
        return self._woken

    def wake_from_any_thread(self) -> None:
        try:
            is_here = asyncio.get_running_loop() is self.loop
        except RuntimeError:
            is_here = False
        if is_here:
            settle(self._woken)
        else:
            settle_from_any_thread(self._woken)


class TurnQueue:
    """The tasks of this rank, on any loops, that wait for a turn. Setting a turn wakes its waiter alone.

    Waiters at a control block would all wake and evaluate their conditions at every change of it.
    """

    def __init__(self) -> None:
        # Several threads change and copy the dict. Each does so in one step under the GIL, as with `Doorbell.waiters`.
        self._waiters: dict[Waiter, None] = {}

    async def wait(self, turn: Turn, check: Callable[[], None], describe: Callable[[], str]) -> None:
        """Implements `Arena.wait_for_turn`."""
        waiter = Waiter(describe)
        self._waiters[waiter] = None
        try:
            while True:
                woken = waiter.arm()
                turn.on_set(waiter.wake_from_any_thread)
                if turn.is_set:
                    return
                check()
                await woken
        finally:
            del self._waiters[waiter]

    def recheck(self) -> None:
        """Make every waiter call its `check`. May be called in any thread."""
        for waiter in tuple(self._waiters):
            waiter.wake_from_any_thread()

    def waiting(self) -> list[str]:
        return [waiter.describe() for waiter in tuple(self._waiters)]


class Doorbell:
    """One doorbell of this rank, and the tasks that sleep until it rings, on any loops.

    A loop watches the doorbell while one of its tasks sleeps here.
    """

    def __init__(self, number: int, descriptor: int) -> None:
        """`descriptor` is an eventfd, of which this makes a copy: a loop must never watch a closed descriptor."""
        self.number = number
        self.waiters: list[Waiter] = []  # several threads change and copy it, each in one step under the GIL
        self.descriptor = os.dup(descriptor)
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        self._is_closed = False

    def close(self) -> None:
        """Close the descriptor, once no task sleeps here any more."""
        self._is_closed = True
        if not self.waiters:
            self._closing()

    def add_waiter(self, describe: Callable[[], str]) -> Waiter:
        """Register the current task, which must call `remove_waiter` in the end."""
        waiter = Waiter(describe)
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
        return loop in [waiter.loop for waiter in tuple(self.waiters)]

    def _read(self) -> None:
        """Reset the eventfd and wake all waiters, on whichever loop this runs.

        The reset hides the ring from the other loops that watch the doorbell, so this must wake their waiters too.
        """
        try:
            # Another loop has reset it first.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            for waiter in tuple(self.waiters):
                waiter.wake_from_any_thread()
        # A signal handler has raised before all waiters were woken: ring again.
        except BaseException:
            os.eventfd_write(self.descriptor, 1)
            raise
