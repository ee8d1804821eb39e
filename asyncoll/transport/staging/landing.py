"""Copies whose ends are events of a device, and the thread that waits for these events."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, Protocol


class CopyEvent(Protocol):
    """A point of a stream of the device."""

    def synchronize(self) -> None:
        """Return once the stream has come there. Raises if the device has failed. Lets other threads of Python run."""


class Landing:
    """Implements `Transfer`. Its parts land in order."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.moved = 0
        self.error: BaseException | None = None
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def when_moved(self, nbytes: int, callback: Callable[[], None]) -> None:
        with self._lock:
            self._waiting.append((nbytes, callback))
        self._tell()

    def advance(self, moved: int) -> None:
        """The host has seen that the first `moved` bytes have landed."""
        # After an error a part in between may be missing.
        if self.error is None:
            self.moved = moved
        self._tell()

    def fail(self, error: BaseException) -> None:
        """No more bytes land."""
        self.error = self.error or error
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            due = [each for each in self._waiting if self.error is not None or each[0] <= self.moved]
            self._waiting = [each for each in self._waiting if each not in due]
        for _, callback in due:  # outside of the lock: a callback may ask for another
            callback()


class _Watched(NamedTuple):
    event: CopyEvent
    landed: Callable[[], None]
    failed: Callable[[BaseException], None]


class Watcher:
    """The thread that waits for the events of one device, in the order in which they are given to it.

    What the functions of an event refer to is kept alive until the host has seen the event.
    """

    def __init__(self, name: str, inside: AbstractContextManager[object]) -> None:
        """`name` is that of the device. The thread is in `inside`, which makes the device its current one."""
        self._inside = inside
        self._watched: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=f"asyncoll-{name}", daemon=True)
        self._thread.start()

    def watch(self, event: CopyEvent, landed: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """In the thread: call `landed` once the event has come, or `failed` if the device, `inside` or that fails."""
        self._watched.put(_Watched(event, landed, failed))

    def end(self) -> None:
        """Let the thread end once all events have come."""
        self._watched.put(None)

    def has_ended(self, limit_s: float) -> bool:
        """Whether it ends within `limit_s`."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        broken: BaseException | None = None
        with ExitStack() as entered:
            try:
                entered.enter_context(self._inside)
            except BaseException as error:
                broken = error
            self._see_events(broken)

    def _see_events(self, broken: BaseException | None) -> None:
        """Until the end. `broken` is why the thread is not in `inside`: then all that is watched fails."""
        while (watched := self._watched.get()) is not None:
            try:
                # Also if this thread is broken: until the event has come, the device uses the memory.
                watched.event.synchronize()
                if broken is not None:
                    raise broken
                watched.landed()
            except BaseException as error:
                watched.failed(error)
            del watched  # and what it keeps alive, before this thread waits for the next one
