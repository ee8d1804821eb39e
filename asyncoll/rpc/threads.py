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
from typing import Any, NamedTuple

from asyncoll import forks

Done = Callable[[Any, BaseException | None], None]  # takes the result of a function, or its exception
SETTLED = object()  # the result of a function whose outcome is not urgent, for which the loop is not woken


class _Job(NamedTuple):
    work: Callable[[], Any]
    done: Done


class Threads:
    """At most `most` threads, made when they are needed. All methods are called on the loop that made this object.

    Functions that wait for each other may take all threads; further ones wait in a queue. Threads are daemons, and the
    end of the program waits for the functions that still run.
    """

    def __init__(self, most: int, name: str) -> None:
        """Raises OSError if this process has no descriptors left."""
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._all: list[threading.Thread] = []
        self._over: deque[tuple[Done, Any, BaseException | None]] = deque()  # outcomes for the loop
        self._unsettled = 0  # functions that are queued, running, or in `_over`
        self._will_settle = False
        self._is_closed = False
        # Guards what the loop and the threads change: the next four. A thread sleeps only if there are no jobs.
        self._mutex = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._asleep: list[_thread.LockType] = []  # a lock for each thread that sleeps, but one
        self._is_pipe_read = False  # by the one thread without a lock there
        self._is_ending = False
        self._reader, self._writer = os.pipe()
        # The threads refer to this object, so none of them reads any more when it is collected.
        self._close_pipe = weakref.finalize(self, _close, self._reader, self._writer)
        self._close_pipe.atexit = False  # functions may still run then
        _all.add(self)
        forks.register(self)

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work()` in a thread, and then `done(result, exception)` on the loop, unless this is closed by then.

        If the result is SETTLED, `done` is called later: by the next `settle`, at the latest.
        """
        self.settle()
        with self._mutex:
            self._jobs.append(_Job(work, done))
            wake = self._next_sleeper()
        self._unsettled += 1
        if wake is not None:
            wake()
        elif self._unsettled > len(self._all) < self._most:  # otherwise a thread is about to look for jobs
            thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._all)}", daemon=True)
            thread.start()
            self._all.append(thread)

    def close(self) -> None:
        """Drop the functions that wait in the queue, and end the threads: at once, or at the end of their functions.

        Waits for the threads if no function runs.
        """
        self.settle()
        self._is_closed = True
        with self._mutex:
            running = self._unsettled - len(self._jobs)
            while len(self._jobs) > len(self._all) - running:  # the others have a thread, which is about to take them
                self._jobs.pop()
            is_idle = not self._jobs and not running
        self.finish(join=is_idle)
        if is_idle:
            self._close_pipe()
            forks.unregister(self)

    def finish(self, *, join: bool) -> None:
        """End all threads after their functions. In any thread. Idempotent."""
        if self._all:
            with self._mutex:
                self._is_ending = True
                sleepers = list(iter(self._next_sleeper, None))
            for wake in sleepers:
                wake()
        if join:
            for thread in self._all:
                thread.join()

    def abandon(self, parent: int) -> None:
        """Give up the threads and the pipe in a forked child, which has none of the threads."""
        self._all.clear()
        forks.give_up((self._reader, self._writer))

    def settle(self) -> None:
        """Process the outcomes that have come."""
        self._will_settle = False  # first: an outcome that comes meanwhile causes another run
        while self._over:
            done, result, error = self._over.popleft()
            self._unsettled -= 1
            if not self._is_closed:
                done(result, error)

    def _next_sleeper(self) -> Callable[[], object] | None:
        """A function that wakes a sleeping thread, and must be called; None if none sleeps. With the mutex held."""
        if self._is_pipe_read:
            self._is_pipe_read = False
            return self._write
        return self._asleep.pop().release if self._asleep else None

    def _write(self) -> None:
        os.write(self._writer, b"\0")

    # -- in the threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Run functions until the end."""
        has_news = _thread.allocate_lock()
        has_news.acquire()
        while True:
            job, reads = None, False
            with self._mutex:
                if self._jobs:
                    job = self._jobs.popleft()
                elif self._is_ending:
                    return
                elif self._is_pipe_read:
                    self._asleep.append(has_news)
                else:
                    self._is_pipe_read = reads = True
            if job is not None:
                self._report(job)
                del job  # an idle thread keeps no arguments and no results
            elif reads:
                os.read(self._reader, 1)
            else:
                has_news.acquire()

    def _report(self, job: _Job) -> None:
        """Run one function and pass its outcome to the loop."""
        result, error = None, None
        try:
            result = job.work()
        except BaseException as raised:  # also SystemExit and KeyboardInterrupt, which are for the loop
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
