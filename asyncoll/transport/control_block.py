"""A control block: 64-bit cells in shared memory under one lock, and the doorbells to ring when cells change.

All coordination between the ranks of a host uses control blocks. The writer of shared data writes before it releases
the lock, and the reader reads after it has acquired the lock. POSIX makes this pair of calls order memory accesses, so
the protocol is correct on every processor and does not depend on the store order of x86. This holds for the cells, and
for memory at addresses that cells contain. A read of a cell without the lock is only a hint that acquiring the lock may
be worthwhile; no conclusion is drawn from it alone.

Algorithms in memory are coroutines that await only `until`, `failure`, `checkpoint` and `turn_of`. These yield a `Wait`
or a `Turn` to the driver of the coroutine, which decides how to wait for it. So such a coroutine needs no event loop.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, Protocol

from asyncoll.errors import AsyncollError
from asyncoll.transport.lock_cells import FLAGGED, FLAGS


class Mutex(Protocol):
    """A lock that survives the death of its owner."""

    def acquire(self) -> None:
        """Acquire the lock. Blocks the thread.

        Reports a loss and raises the error of `Arena.on_loss`, at this and every later call, once an owner has died or
        an exception has interrupted it: the data under the lock may be half changed.
        """

    def release(self) -> None:
        """Release the lock, which this thread holds."""

    def abandon(self) -> None:
        """Release the lock if this thread holds it, and make every later `acquire` report a loss.

        For an exception inside a critical section.
        """


class RefusingMutex:
    """A lock that nothing may use any more: `acquire` raises the error that `refusal` makes."""

    def __init__(self, refusal: Callable[[], Exception]) -> None:
        self._refusal = refusal

    def acquire(self) -> None:
        raise self._refusal()

    def release(self) -> None: ...

    def abandon(self) -> None: ...


class Doorbells(Protocol):
    """The doorbells of all ranks of a host, by number."""

    def ring(self, doorbells: Iterable[int]) -> None: ...

    def wake_futex(self, cell: memoryview) -> None:
        """Wake the threads of all processes that sleep in a futex at the low half of `cell`."""


# For each rank: one doorbell for the loops of callers, and one for the runtime's loop. With a single one, the loop that
# reads a ring first would often be the wrong one, and would have to wake the other loop through its self-pipe.
DOORBELLS = 2


class ControlBlock(Protocol):
    """Cells of 64 bits (signed), and the lock that guards them.

    The control block is a context manager that holds the lock. Hold it for microseconds only, and never across an
    await.
    """

    passing: Callable[[], None] | None  # called before and after each acquisition of the lock, for fault tests

    @property
    def cells(self) -> memoryview: ...

    created: bool  # whether this rank has made the control block
    # Whether all ranks share a thread, so that work in memory must yield explicitly: see `checkpoint`.
    interleaved: bool

    def __enter__(self) -> ControlBlock: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def abandon(self, mutex: Mutex) -> None:
        """Replace the lock by `mutex`, which raises on `acquire`: in a forked child, and where a lease has ended."""

    def wake(self, at_most: int = ...) -> None:
        """Make the sleeping waiters evaluate their conditions again. The caller holds the lock.

        The doorbells ring when the lock is released. `at_most` limits their number, for changes that only so many
        ranks can use at the same time; the others sleep on until a later `wake`.
        """

    def ring_at_next_wake(self, doorbell: int) -> None:
        """Ring `doorbell` at the next `wake`. The caller holds the lock, so that no change comes in between."""

    def wake_futex(self, cell: int) -> None:
        """Wake the threads of all processes that sleep in a futex at the low half of `cell`. Without the lock."""


class PythonControlBlock:
    """A `ControlBlock` with any `Mutex`. Its counterpart in C is in asyncoll/_core/control_block.c."""

    __slots__ = ("_count", "_doorbells", "_flags", "_mutex", "_ringing", "cells", "created", "interleaved", "passing")

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
        """`raw` is the shared memory, of `control_block_bytes` bytes, initially zero."""
        cells = raw.cast("q")
        self._count = local_size * DOORBELLS
        self._flags = cells[: FLAGS + self._count]
        self.cells = cells[FLAGS + self._count :]
        self.created = created
        self.interleaved = interleaved
        self.passing: Callable[[], None] | None = None
        self._mutex = mutex
        self._doorbells = doorbells
        self._ringing: list[int] = []  # the doorbells to ring at the release; only the holder of the lock uses it

    def __enter__(self) -> PythonControlBlock:
        try:
            if self.passing is not None:
                self.passing()
            self._mutex.acquire()
            if self.passing is not None:
                self.passing()
        # A signal handler may raise just after the lock has been acquired.
        except BaseException:
            self._mutex.abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The package raises its own errors only while the cells are consistent. Any other exception, for instance one
        # from a signal handler, may leave them half changed.
        if kind is not None and not issubclass(kind, AsyncollError):
            self._mutex.abandon()
            return
        if not self._ringing:
            self._mutex.release()
            return
        ringing, self._ringing = self._ringing, []
        # Release first: a rank that wakes acquires the lock at once, and would have to sleep again.
        self._mutex.release()
        self._doorbells.ring(ringing)

    def abandon(self, mutex: Mutex) -> None:
        self._mutex = mutex

    def wake(self, at_most: int = sys.maxsize) -> None:
        flags = self._flags
        for doorbell in range(self._count if flags[FLAGGED] else 0):
            if flags[FLAGS + doorbell] and at_most > 0:
                flags[FLAGS + doorbell] = 0
                flags[FLAGGED] -= 1
                at_most -= 1
                self._ringing.append(doorbell)

    def ring_at_next_wake(self, doorbell: int) -> None:
        if not self._flags[FLAGS + doorbell]:
            self._flags[FLAGS + doorbell] = 1
            self._flags[FLAGGED] += 1

    def wake_futex(self, cell: int) -> None:
        self._doorbells.wake_futex(self.cells[cell : cell + 1])


def control_block_bytes(cells: int, local_size: int) -> int:
    """The size in bytes of a control block with `cells` cells for its user, on a host of `local_size` ranks."""
    return 8 * (FLAGS + local_size * DOORBELLS + cells)


class Wait(NamedTuple):
    """The condition that a coroutine in memory waits for.

    `ready` only reads the cells of `control_block`. It is called under the lock, and also without the lock as a hint.
    """

    control_block: ControlBlock
    ready: Callable[[], bool]
    patience: int = 1  # how many times as long as usual the waiter polls before it sleeps


class Turn:
    """An event between two coroutines of the same rank: one sets it once, and one waits for it.

    A `Turn` lives outside shared memory. It wakes exactly its waiter, and needs no lock and no doorbell.
    """

    __slots__ = ("_wake", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._wake: Callable[[], None] | None = None

    def set(self) -> None:
        """Set the event and wake the waiter. May be called in any thread."""
        # The order here and in the waiter avoids a lost wake-up without a lock. This thread writes `is_set` and then
        # reads `_wake`; the waiter writes `_wake` in `on_set` and then reads `is_set`. At least one sees the other.
        self.is_set = True
        if self._wake is not None:
            self._wake()

    def on_set(self, wake: Callable[[], None]) -> None:
        """Make `set` call `wake`, in any thread. Read `is_set` afterwards: it may have been set before this call."""
        self._wake = wake


@types.coroutine
def checkpoint(control_block: ControlBlock) -> Generator[Wait, None, None]:
    """Yield to other ranks, once for each piece of long work; a no-op between processes.

    Processes interleave by themselves. Ranks that share a thread interleave only here, so that tests see the states in
    the middle of long work.
    """
    if control_block.interleaved:
        yield Wait(control_block, lambda: True)


@types.coroutine
def failure(control_block: ControlBlock) -> Generator[Wait, None, None]:
    """Wait until the world or the communicator fails. The driver then throws the failure into this coroutine."""
    yield Wait(control_block, lambda: False)


@types.coroutine
def until(control_block: ControlBlock, ready: Callable[[], bool], patience: int = 1) -> Generator[Wait, None, None]:
    """Wait until `ready()` is true under the lock. `ready` only reads the cells of `control_block`.

    `patience`: poll so many times longer, where others end this work soon (`Wait`).
    """
    # Without the lock this is a hint: it is looked at again under the lock.
    if ready():
        with control_block:
            if ready():
                return
    yield Wait(control_block, ready, patience)


@types.coroutine
def turn_of(turn: Turn) -> Generator[Turn, None, None]:
    """Wait until `turn` is set."""
    if not turn.is_set:
        yield turn
