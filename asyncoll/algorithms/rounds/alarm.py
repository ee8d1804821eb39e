"""An alarm that rings after longer and longer times, as long as a round lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# Long for a process that runs, even if it waits for a processor, and short beside the time after which a stopped one
# counts as lost.
PATIENCE_S = 0.05
# With a limit for each round, a world in which nothing happens any more comes to rest.
TIMES_MAX = 16


class Alarm:
    """The alarm of one rank for one purpose. On the runtime's loop."""

    def __init__(self, ring_after: Callable[[float, int], asyncio.TimerHandle]) -> None:
        """`ring_after(delay_s, serial)` has its owner call `rings(serial)` after that time."""
        self._ring_after = ring_after
        self._handle: asyncio.TimerHandle | None = None
        self._serial = 0
        self._delay_s = 0.0
        self.number = 0  # the round that it is set for; 0: it is off
        self.times = 0  # how often it has rung in that round

    def set(self, number: int, delay_s: float = PATIENCE_S) -> None:
        """Ring for round `number` after `delay_s`, after that time once more, and then after 2, 4, 8 ... times it."""
        self.off()
        self.number, self.times, self._delay_s = number, 0, delay_s
        self._wait()

    def off(self) -> None:
        """Ring no more."""
        self.number = 0
        # The alarm may be ringing already: then it finds another serial number, and has no effect.
        self._serial += 1
        if self._handle is not None:
            self._handle.cancel()

    def rings(self, serial: int) -> bool:
        """Whether the alarm rings, and has not been set anew meanwhile. Then it will ring again."""
        if serial != self._serial or not self.number:
            return False
        self.times += 1
        self._serial += 1
        if self.times < TIMES_MAX:
            self._wait()
        return True

    def _wait(self) -> None:
        self._handle = self._ring_after(self._delay_s * max(1, 1 << self.times >> 1), self._serial)
