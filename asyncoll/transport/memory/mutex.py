"""A lock in shared memory that survives the death of its owner: the C library's robust mutex, through ctypes.

Where the platform has no robust mutexes (macOS), `initialize` raises AttributeError, and there is no arena.
"""

from __future__ import annotations

import ctypes
import errno
import math
import threading
import time
from collections.abc import Sequence
from functools import partial

from asyncoll.errors import AsyncollError, PeerLostError
from asyncoll.forks import refusal
from asyncoll.transport.processes import is_gone, is_stopped

MUTEX_BYTES = 64
# The local rank of the holder; ~local_rank of one that died; _INTERRUPTED - local_rank of one that an exception has
# interrupted. A pthread_mutex_t has 40 bytes, or 48 on ARM.
_HOLDER = 56
_INTERRUPTED = -(1 << 32)
_PROCESS_SHARED = 1
_ROBUST = 1
_CHECKING = 2  # a thread that locks twice gets an error, instead of waiting for itself

# The first two never block, so they may keep the GIL, which costs less than to let it go and get it back. They have no
# argument types: an array passes as its address, and nothing is as fast.
_holding_gil = ctypes.PyDLL(None)
_try_lock = _holding_gil.pthread_mutex_trylock
_unlock = _holding_gil.pthread_mutex_unlock
_unlock.restype = None
_timed_lock = ctypes.CDLL(None).pthread_mutex_timedlock
_THREAD = (1 << 30) - 1  # the bits of its first cell that name the owner: the kernel needs them there, too, at a death
_SLICE_S = 0.05  # of waiting: timedlock goes by the clock on the wall, which may be set meanwhile


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Patience:
    """How long to wait for a lock whose owner is stopped."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds


class RobustMutex:
    """A `Mutex` between the threads of all processes that share `memory`, MUTEX_BYTES of it.

    What a dead owner left is never repaired. The kernel tells the next one, which notes it beside the mutex for all who
    come later. (POSIX would keep the note itself, but glibc's trylock does not let go of a mutex with such a note.) Who
    died before it could write its own local rank there has left that of the owner before: see `Membership.culprit`.
    """

    __slots__ = ("_futex", "_holder", "_local_rank", "_mutex", "_patience", "_ranks", "release")

    def __init__(
        self, memory: memoryview, local_rank: int, ranks: Sequence[int], patience: Patience | None = None
    ) -> None:
        """As `local_rank`, which is mine, sees it; `ranks` of the world, by local rank.

        Whose owner is stopped, and has not given it back within the `patience`, is lost. Nobody means to hold it for
        more than microseconds, but a thread that has it may wait longer than that for the processor, or for the GIL.
        """
        self._mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory)  # keeps the memory mapped
        self._futex = memory[:4].cast("I")
        self._holder = memory[_HOLDER:MUTEX_BYTES].cast("q")
        self._local_rank = local_rank
        self._ranks = ranks
        self._patience = patience or Patience()
        self.release = partial(_unlock, self._mutex)  # with no frame of Python around it

    @staticmethod
    def initialize(memory: memoryview) -> None:
        """Once, by whoever owns the memory, before anybody else sees it."""
        mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory)
        attributes = (ctypes.c_char * MUTEX_BYTES)()
        _holding_gil.pthread_mutexattr_init(attributes)
        _holding_gil.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _holding_gil.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _holding_gil.pthread_mutexattr_settype(attributes, _CHECKING)
        failure = _holding_gil.pthread_mutex_init(mutex, attributes)
        _holding_gil.pthread_mutexattr_destroy(attributes)
        if failure:
            raise OSError(failure, "cannot make a robust mutex")

    def __enter__(self) -> None:
        try:
            self.acquire()
        except BaseException:  # a signal handler may raise just after the lock is taken
            self.abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, AsyncollError):
            self.release()
        else:
            self.abandon()

    def acquire(self) -> None:
        if failure := _try_lock(self._mutex):
            self._insist(failure)
        if self._holder[0] < 0:
            self._refuse()
        self._holder[0] = self._local_rank

    def abandon(self) -> None:
        """Give the lock back, if this thread has it. What it guards is half done, so nobody gets it any more."""
        if self._futex[0] & _THREAD == threading.get_native_id():
            self._holder[0] = _INTERRUPTED - self._local_rank
            self.release()

    def _insist(self, failure: int) -> None:
        """Get the lock, whatever it takes."""
        if failure == errno.EBUSY:
            failure = self._wait()
        if failure == errno.EOWNERDEAD:
            if self._holder[0] >= 0:
                self._holder[0] = ~self._holder[0]
            failure = _holding_gil.pthread_mutex_consistent(self._mutex)
        if failure == errno.EDEADLK:  # an exception has kept this thread from giving it back
            self.abandon()
            failure = _try_lock(self._mutex)
        if failure:
            raise OSError(failure, "cannot lock shared memory")

    def _wait(self) -> int:
        """Until it is free, or its owner has died. Raises PeerLostError once the owner has lost our patience."""
        waited_since_s = _now()
        while (failure := self._wait_a_slice()) == errno.ETIMEDOUT:
            waited_s, holder = _now() - waited_since_s, self._holder[0]
            if waited_s >= self._patience.seconds and 0 <= holder < len(self._ranks) and (cause := self._why_never()):
                self._patience.seconds = 0.0  # there is none left for the next time
                raise PeerLostError(self._ranks[holder], cause, last_seen_s=waited_s)
        return failure

    def _why_never(self) -> str:
        """Why the owner will not give the lock back; empty if it may.

        A thread that has ended is looked for once a rank is known to be lost: of a process that had unmapped the memory
        before its end, the kernel does not tell.
        """
        owner = self._futex[0] & _THREAD
        if is_stopped(owner):
            return "its process was stopped while it was changing shared memory"
        if owner and self._patience.seconds == 0.0 and is_gone(owner):
            return "it ended while it was changing shared memory"
        return ""

    def _wait_a_slice(self) -> int:
        until = time.clock_gettime(time.CLOCK_REALTIME) + _SLICE_S
        fraction, whole = math.modf(until)
        return int(_timed_lock(self._mutex, ctypes.byref(_TimeSpec(int(whole), int(1e9 * fraction)))))

    def _refuse(self) -> None:
        holder = self._holder[0]
        self.release()
        if holder <= _INTERRUPTED:
            cause = "an exception interrupted it while it was changing shared memory"
            raise PeerLostError(self._ranks[_INTERRUPTED - holder], cause)
        raise PeerLostError(self._ranks[~holder], "it died while it was changing shared memory")


class AbandonedMutex:
    """A `Mutex` of the parent of this forked child, which must not take it."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def acquire(self) -> None:
        raise refusal(self._parent)

    def release(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def _now() -> float:
    return time.monotonic()  # noqa: TID251 (no loop turns while this thread waits)
