"""One host of a job, as the launcher sees it: orders go in, news come out.

`asyncoll/launch/local.py` is this host. `asyncoll/launch/remote.py` is another one, where `asyncoll/launch/agent.py`
passes the orders to a local host, and its news back. So there is one way to start, stop and watch ranks.

Orders, as maps:

    fork: rank, environment: variables   start this rank, with these variables beside those of its host
    signal: number, ranks: [rank, …]     send a signal to the process groups of these ranks; end the host if none runs
    look: [rank, …]                      tell the states of these ranks

News:

    ready: port, address: text           the host has checked the program; a port of this address is free, and held
    refused: text                        the program cannot be started on this host
    started: rank, pid: number
    exited: rank, code: number           negative: the signal that has ended it
    rank: rank, code, traceback, summary, blames      the report of a rank that fails (asyncoll/launch/rank.py)
    output: rank, error: bool, data: bytes            from its stdout or stderr; no data: its end
    states: [[rank, letter], …]
    ended: text                          the last news; the text says why, if the host has not been told to end
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

READ_BYTES = 1 << 16
News = dict[str, Any]
Hear = Callable[[News], None]


class Host(Protocol):
    """The ranks of one host."""

    has_ended: bool

    def tell(self, order: dict[str, Any]) -> None:
        """Give an order. An order to a host that has ended does nothing."""

    def end(self) -> None:
        """Kill what is left of the ranks and their descendants. `ended` follows once all is gone and told."""


class Process(Protocol):
    """A child process: a Popen, or a fork."""

    pid: int

    def wait(self) -> int:
        """Wait for its end. Returns the exit code, negative for a signal; always the same one."""

    def kill(self) -> None:
        """Kill it; nothing happens if it has ended."""


class Sources:
    """The descriptors that a process waits for, each with the function to call when it is readable."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def unwatch(self, source: Any) -> None:
        with suppress(KeyError, ValueError):  # it is not watched, or closed
            self._selector.unregister(source)

    def wait(self, seconds: float | None) -> bool:
        """Wait until a descriptor is readable, or for so long, and call what is due. Returns whether one was."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.fd in self._selector.get_map():  # an earlier one may have closed it
                key.data()
        return bool(ready)


@contextmanager
def death_of(process: Process) -> Iterator[int]:
    """A descriptor that becomes readable at the death of `process`."""
    death = os.pidfd_open(process.pid)
    try:
        yield death
    finally:
        os.close(death)
