"""An event loop whose clock jumps: waiting costs nothing, and waiting for nothing is a deadlock.

The loop owns its selector. When nothing is ready, the clock moves to the next event or timer instead of sleeping; when
there is neither, nobody can ever wake up, and the deadlock reporter's error is raised. Never mix it with real I/O.

Events are what a simulated network does: plain calls in order of time, without the handle, the context and the turn of
the loop that a timer costs. A thousand ranks send half a million messages, so this is most of a simulation's time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Callable, Mapping, Sized
from typing import Any

from asyncoll.errors import DeadlockError


class _JumpingSelector(selectors.BaseSelector):
    """Registers what asyncio registers (its own wake-up socket) and never waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_deadlock: Callable[[], Exception] = lambda: DeadlockError("nothing is ready and no timer is set")
        self.ready: Sized = ()  # what the loop could run now
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events, ready = self.events, self.ready
        until = math.inf if timeout is None else self.now + timeout
        while events and events[0][0] <= until:
            when, _, what, args = heapq.heappop(events)
            self.now = max(when, self.now)
            what(*args)
            if ready:
                return []
        if timeout is None:
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
        self.set_debug(False)  # what debug mode times is real; and it makes a simulation several times longer
        self._jumping.ready = self._ready  # type: ignore[attr-defined]
        self._events = self._jumping.events
        self._count = itertools.count()  # events of equal time happen in the order in which they were made

    def happen_at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what(*args)` at time `when`, on the loop. It must not block; its errors end the loop."""
        heapq.heappush(self._events, (when, next(self._count), what, args))

    def time(self) -> float:
        return self._jumping.now

    def set_deadlock_reporter(self, reporter: Callable[[], Exception]) -> None:
        """`reporter` makes the error to raise when everything waits and no timer is set."""
        self._jumping.on_deadlock = reporter
