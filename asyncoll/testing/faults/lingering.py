"""Processes that take their time to die, as one with much memory, or with a driver of a device, does."""

from __future__ import annotations

import time
from unittest import mock

from asyncoll.transport import processes
from asyncoll.transport.memory import mutex


def linger(for_s: float) -> None:
    """From now on, let processes that end look alive to the locks of this process for `for_s` seconds more."""
    ended_s: dict[int, float] = {}  # by process id: when this process first saw that it ends

    def is_ending(number: int) -> bool:
        now_s = time.monotonic()
        return processes.is_ending(number) and now_s >= ended_s.setdefault(number, now_s) + for_s

    mock.patch.object(mutex, "is_ending", is_ending).start()
