"""One host of a job, as the launcher sees it: orders go in, news come out.

`asyncoll/launch/local.py` is this host. `asyncoll/launch/remote.py` is another one, where
`asyncoll/launch/host_agent.py` passes the orders to a local host, and its news back. So there is one way to start, stop
and watch ranks.

Orders, as maps:

    fork: rank, environment: variables   start this rank, with these variables beside those of its host
    signal: number, ranks: [rank, …]     send a signal to the process groups of these ranks; end the host if none runs
    look: [rank, …]                      tell the states of these ranks
    answered: number, answer: data       of the launcher's store, to another host

News:

    ready: port, address: text           the host has checked the program; a port of this address is free, and held
    refused: text                        the program cannot be started on this host
    started: rank, pid: number
    exited: rank, code: number           negative: the signal that has ended it
    rank: rank, code, traceback, summary, blames      the report of a rank that fails (asyncoll/launch/rank.py)
    output: rank, error: bool, data: bytes            from its stdout or stderr; no data: its end
    states: [[rank, letter], …]
    asked: number, question: data        to the launcher's store, from another host
    ended: text                          the last news; the text says why, if the host has not been told to end
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

READ_BYTES = 1 << 16
News = dict[str, Any]
Hear = Callable[[News], None]


class LaunchedHost(Protocol):
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
        # The descriptor may not be watched, or be closed.
        with suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def wait(self, seconds: float | None) -> bool:
        """Wait until a descriptor is readable, or for so long, and call what is due. Returns whether one was."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            # An earlier one may have closed it.
            if key.fd in self._selector.get_map():
                key.data()
        return bool(ready)


@contextmanager
def death_of(process: Process) -> Iterator[socket.socket]:
    """A socket that becomes readable at the death of `process`.

    It is no pidfd, which older containers and sandboxes refuse.
    """
    death, teller = socket.socketpair()
    with death, ExitStack() as ours:
        ours.enter_context(teller)
        # The thread ends with the process, which may outlive this context.
        threading.Thread(target=_tell_death, args=(process.pid, teller), name="asyncoll-death", daemon=True).start()
        ours.pop_all()  # it is the thread's
        yield death


def _tell_death(pid: int, teller: socket.socket) -> None:
    with teller, suppress(OSError):  # nobody listens any more
        # Its code has been read already.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # leaves the code to `Process.wait`
        # The end of the socket alone would not do: a fork of this process may keep it open.
        teller.send(b"0", socket.MSG_NOSIGNAL)
