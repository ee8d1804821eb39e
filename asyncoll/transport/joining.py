"""Waiting until all ranks of a world have joined: how long, what is said meanwhile, and which ranks have died.

A rank that has not joined has no connection whose end could be noticed. Ranks of one kernel therefore tell each other
their process ids as soon as they can, and whoever waits looks at those processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from asyncoll.errors import ClosedError, DeadlineError, PeerLostError
from asyncoll.transport import START_TIMEOUT_S
from asyncoll.transport.processes import is_gone

T = TypeVar("T")
_SPEAK_S = 5.0  # of silence, and then twice as long each time
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.005, 0.1
_PATIENCE_S = 1.0  # longer than its own limit waits a rank that another one will tell which ranks are missing
logger = logging.getLogger("asyncoll")


class Joining:
    """One rank's wait for the others, through all phases of joining. May be used from several threads in turn."""

    def __init__(self, rank: int, size: int, limit_s: float = START_TIMEOUT_S) -> None:
        self._rank = rank
        self._size = size
        self._limit_s = limit_s
        self._began_s = _now_s()
        self._speaks_at_s = self._began_s + _SPEAK_S
        self._processes: dict[int, int] = {}
        self._cancelled = False

    @property
    def pause_s(self) -> float:
        """How long to wait before looking again: the longer it has taken already, the longer."""
        return min(max(self._waited_s() / 10, _PAUSE_MIN_S), _PAUSE_MAX_S)

    @property
    def remaining_s(self) -> float:
        """At least a little, for an operation that needs a limit of its own."""
        return max(self._limit_s - self._waited_s(), _PAUSE_MAX_S)

    def watch(self, rank: int, pid: int) -> None:
        """From now on, `rank` is lost as soon as the process `pid` has ended."""
        self._processes[rank] = pid

    def cancel(self) -> None:
        """The next `check` raises ClosedError. From any thread."""
        self._cancelled = True

    def check(self, missing: Callable[[], Sequence[int]], what: str, *, is_told: bool = False) -> None:
        """Call this at least every `pause_s` while ranks are missing. `what` says what they have not done yet.

        Raises PeerLostError if a rank has died, and DeadlineError if the time is up: it names no rank if one has
        stopped just after all others have heard of it. Says from time to time which
        ranks are missing. With `is_told`, another rank will send
        the outcome, so this one waits a little longer than its limit.
        """
        if self._cancelled:
            raise ClosedError("joining the world was cancelled")
        for rank, pid in self._processes.items():
            if is_gone(pid):
                raise PeerLostError(rank, f"its process (pid {pid}) ended before all ranks had joined")
        if self._waited_s() >= self._limit_s + _PATIENCE_S * is_told:
            raise self._overdue(missing(), what)
        if _now_s() >= self._speaks_at_s:
            self._speaks_at_s = _now_s() + (_now_s() - self._began_s)
            if ranks := missing():  # they may have come in this moment
                logger.warning("rank %d: %s", self._rank, self._describe(ranks, what))

    def call(self, operation: Callable[[], T], missing: Callable[[], Sequence[int]], what: str) -> T:
        """The result of `operation`, which blocks; where it blocks for too long, its thread is left behind."""
        results: list[T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                results.append(operation())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="asyncoll-joining", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(self.pause_s)
            if thread.is_alive():
                self.check(missing, what)
        if errors:
            raise errors[0]
        return results[0]

    async def over(self, work: Coroutine[Any, Any, T], missing: Callable[[], Sequence[int]], what: str) -> T:
        """The result of `work`. It is cancelled if this, or a `check`, raises."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.pause_s)
                if not task.done():
                    self.check(missing, what)
            return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait([task])

    def _overdue(self, missing: Sequence[int], what: str) -> DeadlineError:
        arrived = tuple(rank for rank in range(self._size) if rank not in missing)
        return DeadlineError(self._describe(missing, what), arrived, tuple(missing))

    def _describe(self, missing: Sequence[int], what: str) -> str:
        ranks = f"missing: rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
        who = ranks if missing else "all ranks have come, but one of them does not go on"
        return f"joining a world of {self._size} has taken {self._waited_s():.1f} s; {who} ({what})"

    def _waited_s(self) -> float:
        return _now_s() - self._began_s


def process_space() -> str:
    """Equal for two ranks that can look at each other's processes: one kernel, pid namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        if not is_gone(os.getpid()):  # a sandbox may hide processes, or all of /proc
            return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"
    return ""


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 (processes join in real time, partly without a loop)
