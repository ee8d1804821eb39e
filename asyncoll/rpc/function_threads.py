"""Threads for plain functions.

An executor passes work and results through queues, conditions and two futures, which takes longer than a short
function. Here a thread that is idle sleeps until there is work, and all results that are ready share one wake-up of the
loop.

One of the idle threads sleeps in a read of a pipe, and is woken first. Linux wakes the reader of a pipe on the core of
the writer, unless its own core is idle, because the writer is expected to wait for it. A thread that sleeps on a lock
is woken on the core that it has slept on. Between two ranks on two cores that may be the core of the polling caller,
for thousands of calls: a call of a short function then took 130 to 180 us instead of 50. The other idle threads sleep
on locks, and the last one is woken first: its stack is in the cache.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from asyncoll import forks

Done = Callable[[Any, BaseException | None], None]  # takes the result of a function, or its exception
SETTLED = object()  # the result of a function whose outcome is not urgent, for which the loop is not woken


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: Done


class _Sleeper(Protocol):
    """One sleep of a thread. It is woken at most once, but may be told so several times."""

    def sleep(self) -> None: ...

    def wake(self) -> bool:
        """Returns False if the thread was woken before."""


class _OnLock:
    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def sleep(self) -> None:
        self._lock.acquire()

    def wake(self) -> bool:
        try:
            self._lock.release()
        except RuntimeError:
            return False
        return True


class _OnPipe:
    __slots__ = ("_reader", "_writer")

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer

    def sleep(self) -> None:
        """May return at once, if a thread that did not sleep any more was told to wake."""
        os.read(self._reader, 1)

    def wake(self) -> bool:
        os.write(self._writer, b"\0")
        return True


class Threads:
    """At most `most` threads, made when they are needed.

    Functions that wait for each other may take all threads; further ones wait in a queue. Threads are daemons, and the
    end of the program waits for the functions that still run. Methods are called on the loop that made this object,
    unless they say otherwise. A signal handler may raise in any of them: no wake-up is lost then.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._all: list[threading.Thread] = []
        self._over: deque[tuple[Done, Any, BaseException | None]] = deque()  # outcomes for the loop
        self._unsettled = 0  # functions that are queued, running, or in `_over`
        self._will_settle = False
        self._is_closed = False
        self._is_ending = False
        # The loop and the threads change these two, each in one step under the GIL. A thread that sleeps has entered
        # `_sleepers` first, and has looked for jobs afterwards. The loop adds a job first, and looks for sleepers then.
        self._jobs: deque[_Job] = deque()
        self._sleepers: list[_Sleeper] = []  # the last one is woken first
        self._pipe: tuple[int, int] | None = None
        self._may_read: list[tuple[int, int]] = []  # the pipe, while no thread reads it
        # There may be no descriptors left: then all idle threads sleep on locks.
        with contextlib.suppress(OSError):
            self._pipe = os.pipe()
            self._may_read.append(self._pipe)
        # The threads refer to this object, so none of them reads any more when it is collected.
        self._close_pipe = weakref.finalize(self, _close, *self._pipe or ())
        self._close_pipe.atexit = False  # functions may still run then
        _all.add(self)
        forks.register(self)

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work()` in a thread, and then `done(result, exception)` on the loop, unless this is closed by then.

        If the result is SETTLED, `done` is called later: by the next `settle`, at the latest. Raises RuntimeError if
        the system allows no thread at all.
        """
        self.settle()
        job = _Job(work, done)
        self._unsettled += 1
        self._jobs.append(job)
        if not self._wake_one() and self._unsettled > len(self._all) < self._most:
            # Otherwise a thread is about to look for jobs, and finds this one.
            self._add_thread(job)

    def _add_thread(self, job: _Job) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._all)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if self._all:  # one of these will take the job
                return
            self._jobs.remove(job)
            self._unsettled -= 1
            raise
        self._all.append(thread)

    def close(self) -> None:
        """Drop the functions that wait in the queue, and end the threads: at once, or at the end of their functions.

        Waits for the threads if no function runs.
        """
        self.settle()
        self._is_closed = True
        running = self._unsettled - len(self._jobs)
        with contextlib.suppress(IndexError):  # a thread has taken the last one
            while len(self._jobs) > len(self._all) - running:  # the others have a thread, which is about to take them
                self._jobs.pop()
        is_idle = not self._jobs and not running
        self.finish(join=is_idle)
        if is_idle:
            self._close_pipe()
            forks.unregister(self)

    def finish(self, *, join: bool) -> None:
        """End all threads after their functions. In any thread. Idempotent."""
        self._is_ending = True
        while self._wake_one():
            pass
        if join:
            for thread in self._all:
                thread.join()

    def abandon(self, parent: int) -> None:
        """Give up the threads and the pipe in a forked child, which has none of the threads."""
        self._all.clear()
        self._sleepers.clear()
        forks.give_up(self._pipe or ())

    def settle(self) -> None:
        """Process the outcomes that have come."""
        # First: an outcome that comes meanwhile causes another run.
        self._will_settle = False
        while self._over:
            done, result, error = self._over.popleft()
            self._unsettled -= 1
            if not self._is_closed:
                done(result, error)

    def _wake_one(self) -> bool:
        """Wake a thread that sleeps. Returns False if none does. In any thread.

        A sleeper is woken first and forgotten then: a signal handler may raise in between.
        """
        while self._sleepers:
            sleeper = self._sleepers[-1]
            is_woken = sleeper.wake()
            self._forget(sleeper)
            if is_woken:
                return True
        return False

    def _forget(self, sleeper: _Sleeper) -> None:
        with contextlib.suppress(ValueError):  # the other thread has done it
            self._sleepers.remove(sleeper)

    # -- in the threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Run functions until the end."""
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                if self._is_ending:
                    return
                self._sleep()
            else:
                self._report(job)
                del job  # an idle thread keeps no arguments and no results

    def _sleep(self) -> None:
        """Sleep until there may be a job, or the end."""
        try:
            pipe = self._may_read.pop()
        except IndexError:
            sleeper: _Sleeper = _OnLock()
            # Before the sleeper with the pipe, if that is the last one.
            self._sleepers.insert(-1, sleeper)
            self._sleep_as(sleeper)
        else:
            sleeper = _OnPipe(*pipe)
            self._sleepers.append(sleeper)
            self._sleep_as(sleeper)
            self._may_read.append(pipe)

    def _sleep_as(self, sleeper: _Sleeper) -> None:
        if not self._jobs and not self._is_ending:
            sleeper.sleep()
        self._forget(sleeper)

    def _report(self, job: _Job) -> None:
        """Run one function and pass its outcome to the loop."""
        result, error = None, None
        try:
            result = job.work()
        # SystemExit and KeyboardInterrupt, too, are outcomes for the loop.
        except BaseException as raised:
            error = raised
        self._over.append((job.done, result, error))
        if result is not SETTLED and not self._will_settle:
            self._will_settle = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no receiver
                self._loop.call_soon_threadsafe(self.settle)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _wait_for_functions() -> None:
    """Let the functions that run end before the interpreter does."""
    for threads in list(_all):
        threads.finish(join=True)
