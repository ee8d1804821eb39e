"""An event loop in virtual time: it never sleeps, and it reports deadlocks.

The loop has a selector of its own. When no task is ready, the selector moves the clock to the next event or timer. When
there is neither, no task can ever run again, and the selector raises the error of the deadlock reporter. A timer at
infinity counts as none. Real I/O does not work on such a loop.

Events are the deliveries of a simulated network: plain calls, ordered by time. A timer of asyncio costs a handle, a
context and an iteration of the loop in addition. A thousand ranks send half a million messages, so deliveries take most
of the time of a simulation; with events instead of timers it runs a third faster.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Callable, Mapping
from typing import Any

from asyncoll.errors import DeadlockError
from asyncoll.transport import settle


class _JumpingSelector(selectors.BaseSelector):
    """Never waits for files. asyncio registers only its own wake-up socket, and this ignores it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_deadlock: Callable[[], Exception] = lambda: DeadlockError("nothing is ready and no timer is set")
        self.loop: Any = None  # whose queue of callbacks that can run now, and whose timers it looks at
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events, loop = self.events, self.loop
        timers = loop._scheduled  # asyncio makes a new list when many of them were cancelled, but not meanwhile
        count = len(timers)
        # asyncio waits for at most a day at a time, and would wait for a timer in a million years every day.
        until = self.now if timeout == 0 else timers[0].when() if timers else math.inf
        while events and events[0][0] <= until:
            when, _, callback, args = heapq.heappop(events)
            self.now = max(when, self.now)
            callback(*args)
            # A new timer may come before `until`.
            if loop._ready or len(timers) > count:
                return []
        # A late time: to asyncio a timer of exactly this time is not yet due.
        if until == until + loop._clock_resolution:
            until = math.nextafter(until, math.inf)
        if until == math.inf:
            raise self.on_deadlock()
        self.now = max(until, self.now)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._keys.clear()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual seconds, from 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # Debug mode measures real time, and makes a simulation several times slower.
        self.set_debug(False)
        self._jumping.loop = self
        self._events = self._jumping.events
        self._count = itertools.count()  # events of equal time run in the order of their creation

    def happen_at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        """Call `callback(*args)` on the loop at virtual time `when`, in seconds. Its exceptions end the loop."""
        heapq.heappush(self._events, (when, next(self._count), callback, args))

    def sleep(self, delay_s: float) -> asyncio.Future[None]:
        """Done after `delay_s` virtual seconds, by an event: half of the work of `asyncio.sleep`, which is a timer."""
        future = self.create_future()
        self.happen_at(self.time() + delay_s, settle, future)
        return future

    def time(self) -> float:
        return self._jumping.now

    def set_deadlock_reporter(self, reporter: Callable[[], Exception]) -> None:
        """Raise the error that `reporter` returns when all tasks wait and there is no event and no timer."""
        self._jumping.on_deadlock = reporter
