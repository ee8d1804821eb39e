"""The injection points of calls of tensors on devices: events of the calls, which `runtime.trace` tells."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

from asyncoll.communicator import Communicator
from asyncoll.runtime.trace import Event, What

BEGUN = "begun"  # the copy to the host is queued; in the thread of the caller
LANDED = "landed"  # it has arrived, or the call uses it while it arrives; in the thread of the runtime
STAGING_POINTS = {BEGUN: What.BEGIN, LANDED: What.ARRIVE}


class StagingPoint:
    """A context manager that counts in `count` how often this rank passes the point of this name, on all threads.

    It calls `passed(number)` at each passing, with numbers from 1, in the thread that passes.
    """

    def __init__(self, comm: Communicator, name: str, passed: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        self._trace = comm._core.member.trace
        self._what = STAGING_POINTS[name]
        self._passed = passed
        self._numbers = itertools.count(1)  # `next` of it is atomic
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StagingPoint:
        self._undo.enter_context(self._trace.into(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def append(self, event: object) -> None:
        """Implements `trace.Sink`. The compiled core has no calls of tensors on devices."""
        if isinstance(event, Event) and event.what == self._what:
            self.count = number = next(self._numbers)
            self._passed(number)
