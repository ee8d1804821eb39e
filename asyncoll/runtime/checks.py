"""Checks of long waits: is the rank that an execution waits for in the same call?

Every message carries the fingerprint of its sender's call, so ranks in different calls notice that as soon as one sends
to the other. Two ranks that wait for each other send nothing, for instance in broadcasts of different roots. So an
execution that has waited for a while sends its fingerprint, once to each rank that it waits for (message CHECK). A rank
that has not come yet keeps it until it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

CHECK_S = 0.1  # far more than a message takes: calls of ranks that are all there send none


class Waiting(Protocol):
    """An execution, as far as checks go."""

    serial: int  # in the order in which executions became known
    checked: set[int]  # the world ranks that were sent a CHECK

    def awaited(self) -> set[int]:
        """The world ranks that it waits for now."""


W = TypeVar("W", bound=Waiting)


class Checks:
    """The checks of one rank, on the runtime's loop. In: `waits`. Out: `check`."""

    def __init__(self, executions: Callable[[], Iterable[W]], check: Callable[[W, int], None]) -> None:
        """`executions` gives those of this rank, in order, and `check(execution, rank)` sends a CHECK to `rank`."""
        self._executions = executions
        self._check = check
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0  # the newest execution at the last look

    def waits(self) -> None:
        """An execution begins to wait."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._look)

    def _look(self) -> None:
        """Check for the executions that were there at the last look, and look again if any is left to be checked."""
        self._timer = None
        last = self._last
        for execution in self._executions():
            self._last = max(self._last, execution.serial)
            for rank in execution.awaited() - execution.checked:
                if execution.serial > last:
                    # It may have become known just now: it is asked about at the next check.
                    self.waits()
                else:
                    execution.checked.add(rank)
                    self._check(execution, rank)
