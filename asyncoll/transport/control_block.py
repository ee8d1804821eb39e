"""A board: words in shared memory under one lock, and those who sleep until somebody changes them.

Whatever ranks of a host tell each other in shared memory stands on a board, or lies in memory that an address on a
board leads to. It is written before its writer leaves the lock, and read after its reader has entered it, so the lock
alone orders all of it, on every processor. Nothing is ever concluded from a word that was read without the lock: such a
look is a hint that the lock is worth taking.

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


class Bells(Protocol):
    """Wakes the ranks of a host."""

    def ring(self, bells: Iterable[int]) -> None: ...


_SLEEPING = 0  # how many of the words that follow are not zero
_BELLS = 1  # for each bell, whether somebody who hears it sleeps here

BELLS = 2  # of each rank: the caller's loop hears one, the runtime's the other


class Board:
    """Use it as a context manager: it is the lock, held for some microseconds and never across an await."""

    __slots__ = ("_bells", "_count", "_mutex", "_ringing", "_sleepers", "created", "interleaved", "words")

    def __init__(
        self,
        raw: memoryview,
        places: int,
        mutex: Mutex,
        bells: Bells,
        *,
        created: bool,
        interleaved: bool = False,
    ) -> None:
        """`raw` is the shared memory, `board_bytes` of it, zero at first."""
        words = raw.cast("q")
        self._count = places * BELLS
        self._sleepers = words[: _BELLS + self._count]
        self.words = words[_BELLS + self._count :]  # the user's, of 64 bits each
        self.created = created  # here, and not by another rank
        self.interleaved = interleaved  # all ranks share a thread, and must be given turns
        self._mutex = mutex
        self._bells = bells
        self._ringing: list[int] = []

    def __enter__(self) -> Board:
        try:
            self._mutex.acquire()
        except BaseException:  # a signal handler may raise just after the lock is taken
            self._mutex.abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, AsyncollError):  # words may be half changed
            self._mutex.abandon()
            return
        if not self._ringing:
            self._mutex.release()
            return
        ringing, self._ringing = self._ringing, []
        self._mutex.release()
        self._bells.ring(ringing)

    def abandon(self, mutex: Mutex) -> None:
        """In a forked child: `mutex` refuses everybody."""
        self._mutex = mutex

    def wake(self, at_most: int = sys.maxsize) -> None:
        """Those who sleep here look again, once the lock, which the caller holds, is free.

        `at_most` so many, where more could not run at once anyway: the rest sleep on until somebody wakes all.
        """
        sleepers = self._sleepers
        for bell in range(self._count if sleepers[_SLEEPING] else 0):
            if sleepers[_BELLS + bell] and at_most > 0:
                sleepers[_BELLS + bell] = 0
                sleepers[_SLEEPING] -= 1
                at_most -= 1
                self._ringing.append(bell)

    def sleep(self, bell: int) -> None:
        """Under the lock: whoever hears `bell` sleeps, until the next `wake`."""
        if not self._sleepers[_BELLS + bell]:
            self._sleepers[_BELLS + bell] = 1
            self._sleepers[_SLEEPING] += 1


def board_bytes(words: int, places: int) -> int:
    """The shared memory of a board with so many words of its user's, on a host of so many ranks."""
    return 8 * (_BELLS + places * BELLS + words)


class Wait(NamedTuple):
    """What a coroutine in memory waits for. `ready` only reads; it is called under the lock, or without as a hint."""

    board: Board
    ready: Callable[[], bool]


class Turn:
    """What one coroutine of this rank waits for and another ends: other ranks need not be told, nor any lock taken."""

    __slots__ = ("_rouse", "has_come")

    def __init__(self) -> None:
        self.has_come = False
        self._rouse: Callable[[], None] | None = None

    def come(self) -> None:
        """It is the waiter's turn. From any thread."""
        self.has_come = True  # before looking for a waiter, who looks at this after it has said that it waits
        if self._rouse is not None:
            self._rouse()

    def on_come(self, rouse: Callable[[], None]) -> None:
        """`rouse` is called, in any thread, when it comes; look at `has_come` afterwards."""
        self._rouse = rouse


@types.coroutine
def breathe(board: Board) -> Generator[Wait, None, None]:
    """Where other ranks may do anything: said once for each piece of long work.

    Between processes they may at any time. Where they share a thread, nothing would ever be seen half done without it.
    """
    if board.interleaved:
        yield Wait(board, _always)


def _always() -> bool:
    return True


@types.coroutine
def failure(board: Board) -> Generator[Wait, None, None]:
    """Wait for what has gone wrong elsewhere to be heard of here, which ends every wait."""
    yield Wait(board, _never)


def _never() -> bool:
    return False


@types.coroutine
def until(board: Board, ready: Callable[[], bool]) -> Generator[Wait, None, None]:
    """Wait until `ready()`, which only reads the words of `board`."""
    if ready():  # a hint
        with board:
            if ready():
                return
    yield Wait(board, ready)


@types.coroutine
def turn_of(turn: Turn) -> Generator[Turn, None, None]:
    """Wait until `turn` has come."""
    if not turn.has_come:
        yield turn
