"""An event loop whose clock jumps: waiting costs nothing, and waiting for nothing is a deadlock.

The loop owns its selector. When nothing is ready, the clock moves to the next timer instead of sleeping; when there is
no timer either, nobody can ever wake up, and `on_deadlock` is asked for the error to raise. Never mix it with real I/O.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

from asyncoll.errors import DeadlockError


class _JumpingSelector(selectors.BaseSelector):
    """Registers what asyncio registers (its own wake-up socket) and never waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_deadlock: Callable[[], Exception] = lambda: DeadlockError("nothing is ready and no timer is set")
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, descriptor, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise self.on_deadlock()
        self.now += max(timeout, 0.0)
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

    def time(self) -> float:
        return self._jumping.now

    def set_deadlock_reporter(self, reporter: Callable[[], Exception]) -> None:
        """`reporter` makes the error to raise when everything waits and no timer is set."""
        self._jumping.on_deadlock = reporter
