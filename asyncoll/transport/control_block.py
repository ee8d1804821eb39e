"""A control block: cells in shared memory under one lock, and those who sleep until somebody changes them.

Whatever ranks of a host tell each other in shared memory stands on a control block, or lies in memory that an address
on a control block leads to. It is written before its writer leaves the lock, and read after its reader has entered it,
so the lock alone orders all of it, on every processor. Nothing is ever concluded from a cell that was read without the
lock: such a look is a hint that the lock is worth taking.

Algorithms in memory are coroutines that await nothing but `until`, and `turn_of` where they wait for another of the
same rank. They know no loop: who drives one decides how it waits.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, Protocol

from asyncoll.errors import AsyncollError


class Mutex(Protocol):
    """A lock that survives the death of its owner."""

    def acquire(self) -> None:
        """Raises PeerLostError, now and ever after, once an owner has died: what it was changing is half done."""

    def release(self) -> None: ...

    def abandon(self) -> None:
        """Give the lock back, if this thread has it, and let nobody have it again: an exception has come between."""


class Doorbells(Protocol):
    """Wakes the ranks of a host."""

    def ring(self, doorbells: Iterable[int]) -> None: ...


_SLEEPING = 0  # how many of the cells that follow are not zero
_DOORBELLS = 1  # for each doorbell, whether somebody who hears it sleeps here

DOORBELLS = 2  # of each rank: the caller's loop hears one, the runtime's the other


class ControlBlock:
    """Use it as a context manager: it is the lock, held for some microseconds and never across an await."""

    __slots__ = ("_count", "_doorbells", "_mutex", "_ringing", "_sleepers", "cells", "created", "interleaved")

    def __init__(
        self,
        raw: memoryview,
        local_size: int,
        mutex: Mutex,
        doorbells: Doorbells,
        *,
        created: bool,
        interleaved: bool = False,
    ) -> None:
        """`raw` is the shared memory, `control_block_bytes` of it, zero at first."""
        cells = raw.cast("q")
        self._count = local_size * DOORBELLS
        self._waiters = cells[: _DOORBELLS + self._count]
        self.cells = cells[_DOORBELLS + self._count :]  # the user's, of 64 bits each
        self.created = created  # here, and not by another rank
        self.interleaved = interleaved  # all ranks share a thread, and must be given turns
        self._mutex = mutex
        self._doorbells = doorbells
        self._ringing: list[int] = []

    def __enter__(self) -> ControlBlock:
        try:
            self._mutex.acquire()
        except BaseException:  # a signal handler may raise just after the lock is taken
            self._mutex.abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, AsyncollError):  # cells may be half changed
            self._mutex.abandon()
            return
        if not self._ringing:
            self._mutex.release()
            return
        ringing, self._ringing = self._ringing, []
        self._mutex.release()
        self._doorbells.ring(ringing)

    def abandon(self, mutex: Mutex) -> None:
        """In a forked child: `mutex` refuses everybody."""
        self._mutex = mutex

    def wake(self, at_most: int = sys.maxsize) -> None:
        """Those who sleep here look again, once the lock, which the caller holds, is free.

        `at_most` so many, where more could not run at once anyway: the rest sleep on until somebody wakes all.
        """
        waiters = self._waiters
        for doorbell in range(self._count if waiters[_SLEEPING] else 0):
            if waiters[_DOORBELLS + doorbell] and at_most > 0:
                waiters[_DOORBELLS + doorbell] = 0
                waiters[_SLEEPING] -= 1
                at_most -= 1
                self._ringing.append(doorbell)

    def ring_at_next_wake(self, doorbell: int) -> None:
        """Under the lock: whoever hears `doorbell` sleeps, until the next `wake`."""
        if not self._waiters[_DOORBELLS + doorbell]:
            self._waiters[_DOORBELLS + doorbell] = 1
            self._waiters[_SLEEPING] += 1


def control_block_bytes(cells: int, local_size: int) -> int:
    """The shared memory of a control block with so many cells of its user's, on a host of so many ranks."""
    return 8 * (_DOORBELLS + local_size * DOORBELLS + cells)


class Wait(NamedTuple):
    """What a coroutine in memory waits for. `ready` only reads; it is called under the lock, or without as a hint."""

    control_block: ControlBlock
    ready: Callable[[], bool]


class Turn:
    """What one coroutine of this rank waits for and another ends: other ranks need not be told, nor any lock taken."""

    __slots__ = ("_rouse", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._rouse: Callable[[], None] | None = None

    def set(self) -> None:
        """It is the waiter's turn. From any thread."""
        self.is_set = True  # before looking for a waiter, who looks at this after it has said that it waits
        if self._rouse is not None:
            self._rouse()

    def on_set(self, rouse: Callable[[], None]) -> None:
        """`rouse` is called, in any thread, when it comes; look at `is_set` afterwards."""
        self._rouse = rouse


@types.coroutine
def checkpoint(control_block: ControlBlock) -> Generator[Wait, None, None]:
    """Where other ranks may do anything: said once for each piece of long work.

    Between processes they may at any time. Where they share a thread, nothing would ever be seen half done without it.
    """
    if control_block.interleaved:
        yield Wait(control_block, _always)


def _always() -> bool:
    return True


@types.coroutine
def failure(control_block: ControlBlock) -> Generator[Wait, None, None]:
    """Wait for what has gone wrong elsewhere to be heard of here, which ends every wait."""
    yield Wait(control_block, _never)


def _never() -> bool:
    return False


@types.coroutine
def until(control_block: ControlBlock, ready: Callable[[], bool]) -> Generator[Wait, None, None]:
    """Wait until `ready()`, which only reads the cells of `control_block`."""
    if ready():  # a hint
        with control_block:
            if ready():
                return
    yield Wait(control_block, ready)


@types.coroutine
def turn_of(turn: Turn) -> Generator[Turn, None, None]:
    """Wait until `turn` has come."""
    if not turn.is_set:
        yield turn
