"""The injection points of calls of tensors on devices: events of the calls, which `runtime.trace` tells."""

from __future__ import annotations

from collections.abc import Callable

from asyncoll.communicator import Communicator
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.trace import Event
from asyncoll.testing.faults.injection_points import CountedPoints

BEGUN = "begun"  # the copy to the host is queued; in the thread of the caller
LANDED = "landed"  # it has arrived, or the call uses it while it arrives; in the thread of the runtime
STAGING_POINTS = {BEGUN: What.BEGIN, LANDED: What.ARRIVE}


class StagingPoint(CountedPoints):
    """Counts how often this rank passes the point of this name."""

    def __init__(self, comm: Communicator, name: str, passed: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(passed)
        self._trace = comm._core.member.trace
        self._what = STAGING_POINTS[name]

    def _watch(self) -> None:
        self._undo.enter_context(self._trace.into(self))

    def append(self, event: object) -> None:
        """Implements `trace.Sink`. The compiled core has no calls of tensors on devices."""
        if isinstance(event, Event) and event.what == self._what:
            self._pass()
