"""Threads for plain functions.

An executor passes work and results through queues, conditions and two futures, which takes longer than a short
function. Here each thread sleeps on a lock of its own, and all results that are ready share one wake-up of the loop.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

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
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []  # the last one is given work first: its stack is in the cache
        self._queue: deque[_Job] = deque()
        self._over: deque[tuple[_Worker, Done, Any, BaseException | None]] = deque()
        self._will_settle = False
        self._is_closed = False
        _all.add(self)

    def submit(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work()` in a thread, and then `done(result, exception)` on the loop, unless this is closed by then.

        If the result is SETTLED, `done` is called later: by the next `settle`, at the latest.
        """
        self.settle()
        job = _Job(work, done)
        if self._idle:
            self._idle.pop().give(job)
        elif len(self._all) < self._most:
            worker = _Worker(f"{self._name}_{len(self._all)}", self._report)
            self._all.append(worker)
            worker.give(job)
        else:
            self._queue.append(job)
            self.settle()  # a thread that ended its work before it could see the queue

    def close(self) -> None:
        """Drop the functions that have not begun, and end the threads: at once, or at the end of their functions.

        Waits for the threads if no function runs.
        """
        self.settle()
        self._is_closed = True
        self._queue.clear()
        self.finish(join=len(self._idle) == len(self._all))

    def finish(self, *, join: bool) -> None:
        """End all threads after their functions. In any thread."""
        for worker in self._all:
            worker.end()
        if join:
            for worker in self._all:
                worker.thread.join()

    def _report(self, worker: _Worker, done: Done, result: Any, error: BaseException | None) -> None:
        """Pass the outcome of a function to the loop. In the thread of `worker`."""
        self._over.append((worker, done, result, error))
        if (result is not SETTLED or self._queue) and not self._will_settle:
            self._will_settle = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no receiver
                self._loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        """Process the outcomes that have come."""
        self._will_settle = False  # first: an outcome that comes meanwhile causes another run
        while self._over:
            worker, done, result, error = self._over.popleft()
            if self._is_closed:
                continue
            if self._queue:
                worker.give(self._queue.popleft())
            else:
                self._idle.append(worker)
            done(result, error)


class _Worker:
    """One thread, which sleeps on a lock until it has work."""

    def __init__(self, name: str, report: Callable[[_Worker, Done, Any, BaseException | None], None]) -> None:
        self._report = report
        self._job: _Job | None = None
        self._has_news = _thread.allocate_lock()  # released when there is a job, or the thread is to end
        self._has_news.acquire()
        self._is_ending = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def give(self, job: _Job) -> None:
        """Give work to the thread, which is idle."""
        self._job = job
        self._has_news.release()

    def end(self) -> None:
        """Let the thread end, after its function if it runs one. Idempotent."""
        if not self._is_ending:
            self._is_ending = True
            with contextlib.suppress(RuntimeError):  # it has a job that it has not seen yet
                self._has_news.release()

    def _run(self) -> None:
        while True:
            self._has_news.acquire()
            job, self._job = self._job, None
            if job is not None:
                result, error = None, None
                try:
                    result = job.work()
                except BaseException as raised:  # also SystemExit and KeyboardInterrupt, which are for the loop
                    error = raised
                self._report(self, job.done, result, error)
                del job, result, error  # an idle thread keeps no arguments and no results
            if self._is_ending:
                return


_all: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _wait_for_functions() -> None:
    """Let the functions that run end before the interpreter does. In a forked child there are no such threads."""
    for threads in list(_all):
        threads.finish(join=True)
