"""Injection points: numbered moments inside a call, at which a fault can strike.

A rank passes an injection point when it sends a message, when it receives one, immediately before it takes a lock of
shared memory, and immediately after it has taken it; in Python also when it has not signed the lock yet, for which the
compiled core has a point of its own. `InjectionPoints` counts them by wrapping methods of `Transport`, `Receiver` and
`Arena` and the lock in Python for the time of a block, and by `ControlBlock.passing`, which the core calls, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar
from unittest import mock

from asyncoll.communicator import Communicator
from asyncoll.transport import ControlBlock
from asyncoll.transport.memory import mutex

R = TypeVar("R")


class CountedPoints:
    """A context manager that counts in `count` how often points are passed, on all threads.

    It calls `passed(number)` at each passing, with numbers from 1, in the thread that passes.
    """

    def __init__(self, passed: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        self._passed = passed
        # The loop, the progress thread, service threads and signal handlers all pass points.
        self._counting = threading.RLock()
        self._is_over = False
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        with self._counting:  # a thread that is inside a wrapper now must not count, or strike, after the block
            self._is_over = True

    def _watch(self) -> None:
        """Have `_pass` called at each passing until `_undo`."""

    def _pass(self) -> None:
        with self._counting:
            if self._is_over:
                return
            self.count = number = self.count + 1
        self._passed(number)


class InjectionPoints(CountedPoints):
    """Counts the injection points of this rank."""

    def __init__(self, comm: Communicator, passed: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(passed)
        self._endpoint = comm._core.member.endpoint

    def _watch(self) -> None:
        endpoint, enter = self._endpoint, self._undo.enter_context
        for send in ("send", "send_directly"):
            enter(mock.patch.object(endpoint.transport, send, self._passing(getattr(endpoint.transport, send))))
        enter(mock.patch.object(endpoint, "received", self._passing(endpoint.received)))
        if (arena := endpoint.arena) is not None:
            enter(mock.patch.object(mutex, "_try_lock", self._taking(mutex._try_lock)))
            make = arena.control_block  # the control blocks that are made inside the block are watched, too
            enter(mock.patch.object(arena, "control_block", lambda *args: self._watch_lock(make(*args))))
            for control_block in list(arena._control_blocks.values()):  # type: ignore[attr-defined]
                self._watch_lock(control_block)

    def _passing(self, method: Callable[..., R]) -> Callable[..., R]:
        def passing(*args: Any) -> R:
            self._pass()
            return method(*args)

        return passing

    def _taking(self, try_lock: Callable[..., int]) -> Callable[..., int]:
        def taking(lock: Any) -> int:
            failure = try_lock(lock)
            if not failure:
                self._pass()
            return failure

        return taking

    def _watch_lock(self, control_block: ControlBlock) -> ControlBlock:
        before = control_block.passing

        def passing() -> None:
            if before is not None:
                before()
            self._pass()

        control_block.passing = passing
        self._undo.callback(setattr, control_block, "passing", before)
        return control_block
