"""A lock in shared memory that survives the death of its owner: the robust mutex of the C library, through ctypes.

On a platform without robust mutexes (macOS), `initialize` raises AttributeError, and the host has no arena.
"""

from __future__ import annotations

import ctypes
import errno
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from asyncoll.errors import AsyncollError, PeerLostError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Loss
from asyncoll.transport.lock_cells import HOLDER_OFFSET, MUTEX_BYTES, UNSIGNED, signed_by
from asyncoll.transport.processes import has_thread, is_ending, is_gone, is_stopped

# The cell of the holder contains UNSIGNED or the signature of the holder; or ~cell, if the holder died with that in it;
# or _INTERRUPTED - local_rank of a holder that an exception has interrupted. A negative value means that the lock is
# lost for ever.
_INTERRUPTED = -(1 << 32)
_PROCESS_SHARED = 1
_ROBUST = 1
_ERROR_CHECKING = 2  # a thread that locks twice gets EDEADLK, instead of waiting for itself

# trylock and unlock never block, so they run with the GIL held (PyDLL): to release and take it again costs more. They
# declare no argument types, because the fastest way to pass a ctypes array is as its address without a conversion.
_holding_gil = ctypes.PyDLL(None)
_try_lock = _holding_gil.pthread_mutex_trylock
_unlock = _holding_gil.pthread_mutex_unlock
_unlock.restype = None
_timed_lock = ctypes.CDLL(None).pthread_mutex_timedlock
# The bits of the futex word, the first 32 bits of the mutex, that contain the thread id of the owner. This is the
# kernel's format for robust futexes, so no C library can choose another one.
_OWNER_BITS = (1 << 30) - 1
_LOOK_S = 0.001  # between two looks for the process that has died
# pthread_mutex_timedlock uses the wall clock, which may be set while a thread waits. Short waits bound the error.
_WAIT_SLICE_S = 0.05


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class LockPolicy:
    """How the locks of an arena treat a lost owner. All locks of an arena share one object."""

    def __init__(self, patience_s: float = math.inf) -> None:
        self.patience_s = patience_s  # how long `acquire` waits for a lock whose owner is stopped; 0 after a loss
        # By local rank: a cell with the process id, or with 0 while the rank uses no lock. Empty: they are not known.
        self.processes: list[Array] = []
        # It reports a loss, and returns the error to raise.
        self.report: Callable[[Loss], AsyncollError] = lambda loss: PeerLostError(
            loss.rank, loss.cause, last_seen_s=loss.last_seen_s
        )


class RobustMutex:
    """A `Mutex` between the threads of all processes that share the memory it lies in.

    The data that a dead owner has half changed is never repaired. The kernel reports the death to the next thread that
    locks the mutex, as EOWNERDEAD. That thread marks the holder cell, so that all later threads find out too. (POSIX
    has a state ENOTRECOVERABLE for this purpose, but glibc's trylock does not release a mutex in that state.)

    An owner signs the cell just after it has acquired the lock, and takes its signature back just before it releases
    the lock. So a signature names the dead owner for certain. An owner that dies unsigned is found among the processes
    of the host: one of them ends, so the search lasts until one is seen to end.
    """

    __slots__ = ("_futex", "_holder", "_local_rank", "_mutex", "_policy", "_ranks", "_signature")

    def __init__(
        self, memory: memoryview, local_rank: int, ranks: Sequence[int], policy: LockPolicy | None = None
    ) -> None:
        """`memory` has MUTEX_BYTES bytes; `local_rank` is this rank; `ranks` are the world ranks by local rank.

        If the owner is stopped and has not released the lock within the patience of `policy`, `acquire` reports its
        loss. Time alone is no reason for that. Critical sections take microseconds, but their thread may wait much
        longer for a core or for its GIL.
        """
        self._mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory)  # keeps the memory mapped
        self._futex = memory[:4].cast("I")
        self._holder = memory[HOLDER_OFFSET:MUTEX_BYTES].cast("q")
        self._local_rank = local_rank
        self._signature = signed_by(local_rank)
        self._ranks = ranks
        self._policy = policy or LockPolicy()

    @staticmethod
    def initialize(memory: memoryview) -> None:
        """Initialize the mutex. The owner of the memory does so once, before any other rank sees it."""
        mutex = (ctypes.c_char * MUTEX_BYTES).from_buffer(memory)
        attributes = (ctypes.c_char * MUTEX_BYTES)()
        _holding_gil.pthread_mutexattr_init(attributes)
        _holding_gil.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _holding_gil.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _holding_gil.pthread_mutexattr_settype(attributes, _ERROR_CHECKING)
        failure = _holding_gil.pthread_mutex_init(mutex, attributes)
        _holding_gil.pthread_mutexattr_destroy(attributes)
        if failure:
            raise OSError(failure, "cannot make a robust mutex")

    def acquire(self) -> None:
        failure = _try_lock(self._mutex)
        if failure or self._holder[0] < 0:
            self.resume(failure)
        self._holder[0] = self._signature

    def release(self) -> None:
        if self._holder[0] == self._signature:  # not after `abandon`: the lock stays lost
            self._holder[0] = UNSIGNED
        _unlock(self._mutex)

    def resume(self, failure: int) -> None:
        """Acquire the lock after a trylock that returned `failure`, which is 0 if the lock is held, but lost."""
        if failure:
            self._acquire_slowly(failure)
        if self._holder[0] < 0:
            self._raise_lost()

    def abandon(self) -> None:
        """Implements `Mutex.abandon`. The futex word, unlike the holder cell, tells for certain who owns the lock."""
        if self._futex[0] & _OWNER_BITS == threading.get_native_id():
            self._holder[0] = _INTERRUPTED - self._local_rank
            _unlock(self._mutex)

    def give_back(self) -> None:
        """Release the lock if this thread holds it: it has changed nothing. A dead owner stays on record."""
        if self._futex[0] & _OWNER_BITS == threading.get_native_id():
            _unlock(self._mutex)

    def _acquire_slowly(self, failure: int) -> None:
        """Acquire the lock after a failed trylock, whose error is `failure`."""
        if failure == errno.EBUSY:
            failure = self._wait()
        if failure == errno.EOWNERDEAD:
            # Otherwise the dead owner was about to raise for the death of an owner before it.
            if self._holder[0] >= 0:
                self._holder[0] = ~self._holder[0]
            failure = _holding_gil.pthread_mutex_consistent(self._mutex)
        # An exception in this thread has come between `acquire` and `release`.
        if failure == errno.EDEADLK:
            self.abandon()
            failure = _try_lock(self._mutex)
        if failure:
            raise OSError(failure, "cannot lock shared memory")

    def _wait(self) -> int:
        """Wait until the lock is acquired or its owner has died; returns 0 or an error number.

        Reports an owner that is stopped for longer than the patience, and raises the error of the report.
        """
        waited_since_s = _now()
        while (failure := self._wait_one_slice()) == errno.ETIMEDOUT:
            waited_s, owner = _now() - waited_since_s, self._futex[0] & _OWNER_BITS
            if (
                waited_s >= self._policy.patience_s
                and (cause := self._why_never_released(owner))
                and (rank := self._rank_of_thread(owner)) is not None
            ):
                error = self._policy.report(Loss(self._ranks[rank], cause, waited_s))
                self._policy.patience_s = 0.0  # one loss ends the world: do not wait for the next stopped owner
                raise error
        return failure

    def _why_never_released(self, owner: int) -> str:
        """Return why the thread `owner` will never release the lock; empty if it may.

        The kernel does not report the death of an owner whose process unmapped the memory before it ended. So once a
        rank is known to be lost, this also looks whether the owner's thread still exists.
        """
        if is_stopped(owner):
            return "its process was stopped while it was changing shared memory"
        if owner and self._policy.patience_s == 0.0 and is_gone(owner):
            return "it ended while it was changing shared memory"
        return ""

    def _rank_of_thread(self, owner: int) -> int | None:
        """The local rank of the thread `owner`, which has the lock; None if it has released it, or is not found."""
        holder = self._holder[0]
        if self._futex[0] & _OWNER_BITS != owner:
            return None  # it has gone on, and the signature may be that of another one
        if holder != UNSIGNED:
            rank = holder - signed_by(0)
            return rank if 0 <= rank < len(self._ranks) else None
        return next((rank for rank, pid in self._others() if has_thread(pid, owner) or is_gone(pid)), None)

    def _wait_one_slice(self) -> int:
        until = time.clock_gettime(time.CLOCK_REALTIME) + _WAIT_SLICE_S
        fraction, whole = math.modf(until)
        return int(_timed_lock(self._mutex, ctypes.byref(_TimeSpec(int(whole), int(1e9 * fraction)))))

    def _raise_lost(self) -> NoReturn:
        holder = self._holder[0]
        _unlock(self._mutex)
        if holder <= _INTERRUPTED:
            rank, event = _INTERRUPTED - holder, "an exception interrupted it"
        else:
            rank, event = self._dead_rank(~holder), "it died"
        raise self._policy.report(Loss(self._ranks[rank], f"{event} while it was changing shared memory"))

    def _dead_rank(self, signature: int) -> int:
        """The local rank of an owner that died with `signature` in the cell. Blocks while it looks alive."""
        if signature != UNSIGNED:
            return signature - signed_by(0)
        # Where a loss is known, the report returns that one.
        while self._policy.patience_s and (others := self._others()) and not sys.is_finalizing():
            for rank, pid in others:
                if is_ending(pid):
                    return rank
            time.sleep(_LOOK_S)  # noqa: TID251 (there are no processes in virtual time)
        return self._local_rank  # no other rank is left: a thread of this one has ended

    def _others(self) -> list[tuple[int, int]]:
        """The local rank and the process id of each other rank that uses locks."""
        pids = enumerate(int(cell[0]) for cell in self._policy.processes)
        return [(rank, pid) for rank, pid in pids if pid and rank != self._local_rank]


def _now() -> float:
    return time.monotonic()  # noqa: TID251 (no loop turns while this thread waits)
