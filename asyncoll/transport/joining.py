"""Waiting until all ranks of a world have joined: the time limit, the warnings, and the check for ranks that have died.

A rank that has not joined has no connection yet whose end would show its death. So ranks on one kernel exchange their
process ids first, and a rank that waits polls the state of these processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from asyncoll.errors import ClosedError, DeadlineError, PeerLostError
from asyncoll.transport import START_TIMEOUT_S
from asyncoll.transport.processes import is_gone

T = TypeVar("T")
Reason: TypeAlias = str | Callable[[], str]  # what ranks have not done yet; a function is called when a text is needed
_FIRST_WARNING_S = 5.0  # the time to each further warning doubles
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.005, 0.1
# A rank waits so much longer if it expects another rank to tell which ones are missing.
_EXTRA_TIME_S = 1.0
# A rank that gives up has this time to tell the others why.
TELLING_S = 2.0
_CLOSED = "which has closed its connection"
logger = logging.getLogger("asyncoll")


class Joining:
    """The wait of one rank for the others, with one time limit for all phases of joining.

    Several threads may use it, one after another.
    """

    def __init__(self, rank: int, size: int, limit_s: float = START_TIMEOUT_S) -> None:
        self._rank = rank
        self._size = size
        self._limit_s = limit_s
        self._began_s = _now_s()
        self._warns_at_s = self._began_s + _FIRST_WARNING_S
        self._processes: dict[int, int] = {}
        self._cancelled = False
        self._hear: Callable[[], None] | None = None
        self._tell: Callable[[BaseException], object] | None = None

    @property
    def pause_s(self) -> float:
        """The seconds to pause before the next look: a tenth of the time so far, within bounds."""
        return min(max(self._waited_s() / 10, _PAUSE_MIN_S), _PAUSE_MAX_S)

    @property
    def remaining_s(self) -> float:
        """The time left in seconds, never 0: a limit for an operation that needs one of its own."""
        return max(self._limit_s - self._waited_s(), _PAUSE_MAX_S)

    def watch(self, rank: int, pid: int) -> None:
        """Treat `rank` as lost once the process `pid` has ended."""
        self._processes[rank] = pid

    def has_ended(self, rank: int) -> bool:
        """Whether the process of `rank` is known to have ended."""
        return rank in self._processes and is_gone(self._processes[rank])

    def cancel(self) -> None:
        """Make the next `check` raise ClosedError. May be called in any thread."""
        self._cancelled = True

    def listen(self, hear: Callable[[], None] | None) -> None:
        """Have every `check` call `hear`, which raises the error that another rank has told. None: call nothing."""
        self._hear = hear

    def fails_by(self, tell: Callable[[BaseException], object]) -> None:
        """Have `fail` call `tell`, which tells the other ranks of an error by another way than by messages."""
        self._tell = tell

    async def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends joining. To be awaited before its connections end.

        Otherwise a rank that has a connection to this one, and to which this one has none, would only see that end.
        """
        if (tell := self._tell) is not None:
            await asyncio.wrap_future(in_daemon_thread(lambda: tell(error)))

    def check(self, missing: Callable[[], Sequence[int]], reason: Reason, *, is_told: bool = False) -> None:
        """Raise if joining cannot succeed any more, and log a warning now and then that names the missing ranks.

        Call this at least every `pause_s` while ranks are missing. `missing` returns these ranks. `reason` is the step
        that they have not made yet, for messages. With `is_told`, another rank will send the outcome, so this one waits
        a little longer than the limit: then the error of that rank, which knows more, comes first.

        Raises PeerLostError if a rank has died, the error of `listen`, ClosedError after `cancel`, and DeadlineError if
        the time is over. The DeadlineError names no rank if `missing` is empty by then: all ranks have come, and one of
        them has stopped.
        """
        if self._cancelled:
            raise ClosedError("joining the world was cancelled")
        if self._hear is not None:
            self._hear()
        for rank, pid in self._processes.items():
            if self.has_ended(rank):
                raise PeerLostError(rank, f"its process (pid {pid}) ended before all ranks had joined")
        if self._waited_s() >= self._limit_s + _EXTRA_TIME_S * is_told:
            ranks = missing()
            arrived = tuple(rank for rank in range(self._size) if rank not in ranks)
            raise DeadlineError(self._describe(ranks, _text(reason)), arrived, tuple(ranks))
        if _now_s() >= self._warns_at_s:
            self._warns_at_s = _now_s() + (_now_s() - self._began_s)  # doubles the total time to the next warning
            # They may have come since the caller looked.
            if ranks := missing():
                awaited, limit_s = _named(ranks), round(self._limit_s, 1)
                logger.warning(
                    "rank %d: waiting for %s (%.0f s, of at most %g s; %s)",
                    self._rank,
                    awaited,
                    self._waited_s(),
                    limit_s,
                    _text(reason),
                )

    def await_cause(self, rank: int) -> None:
        """`rank` has closed a connection. Unless it has died, it has given up, and tells the others why: raise that.

        Returns if it has not told for a short time. Blocks the thread.
        """
        ends_s = _now_s() + TELLING_S
        self.check(lambda: [rank], _CLOSED)
        while self._hear is not None and _now_s() < ends_s:
            time.sleep(self.pause_s)  # noqa: TID251 (no loop runs yet)
            self.check(lambda: [rank], _CLOSED)

    def call(self, operation: Callable[[], T], missing: Callable[[], Sequence[int]], reason: str) -> T:
        """Call `operation`, which blocks, in a thread of its own, and return its result.

        Raises the exceptions of `operation` and of `check`. If `check` raises, the thread goes on as a daemon: nothing
        can stop a blocking call.
        """
        future = in_daemon_thread(operation)
        while not wait([future], self.pause_s).done:
            self.check(missing, reason)
        return future.result()

    async def over(
        self,
        work: Coroutine[Any, Any, T],
        missing: Callable[[], Sequence[int]],
        reason: Reason,
        *,
        is_told: bool = False,
    ) -> T:
        """Await `work` and return its result. If `check` raises or this is cancelled, `work` is cancelled first."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.pause_s)
                if not task.done():
                    self.check(missing, reason, is_told=is_told)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # A second cancellation is dropped. The first one leaves this method.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])

    def _describe(self, missing: Sequence[int], reason: str) -> str:
        status = f"missing: {_named(missing)}" if missing else "all ranks have come, but one of them does not go on"
        return f"joining a world of {self._size} has taken {self._waited_s():.1f} s; {status} ({reason})"

    def _waited_s(self) -> float:
        return _now_s() - self._began_s


def in_daemon_thread(operation: Callable[[], T], name: str = "asyncoll-joining") -> Future[T]:
    """The result of `operation`, called in a thread of its own. It does not delay the end of the program."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(operation())
        except BaseException as error:
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=lambda: context.run(work), name=name, daemon=True).start()
    return future


def _text(reason: Reason) -> str:
    return reason if isinstance(reason, str) else reason()


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def process_space() -> str:
    """Identify the kernel, pid namespace and user of this process; empty if it cannot see processes.

    Two ranks with the same non-empty value can see the state of each other's processes.
    """
    with contextlib.suppress(OSError):
        # Otherwise a sandbox hides processes, or this is the /proc of another pid namespace, where numbers differ.
        if os.readlink("/proc/self") == str(os.getpid()) and not is_gone(os.getpid()):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    return ""


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 (processes join in real time, partly without a loop)
