"""What ZeroMQ tells of a connection: that it stands, that it is gone, and that nobody breathes at its other end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll.transport.addresses import process_behind

FREEZE_S = 0.5  # a process that shows no sign of life for so long counts as frozen
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_BEATS = 4  # in the time without a beat after which a process counts as frozen


def watch(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Where `socket` tells of such events, for `parse_monitor_message`."""
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)  # or the thread of ZeroMQ stands still until somebody has read what it tells
    monitor.connect(address)
    return monitor


def silence(freeze_s: float) -> str:
    """Why a peer without a heartbeat is lost."""
    return f"it has shown no sign of life for {freeze_s:g} s: its process is stopped, or the network is cut"


def to_zeromq(address: str) -> Any:
    """`address` as ZeroMQ takes it: a path that is no UTF-8 only in bytes. Its annotations do not say so."""
    try:
        address.encode()
    except UnicodeEncodeError:
        return os.fsencode(address)
    return address


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """Where `socket` listens: the last address it was bound to, with the port that it was given."""
    return os.fsdecode(bytes(socket.getsockopt(zmq.LAST_ENDPOINT))).rstrip("\0")


class Monitor:
    """Calls back when the connection of a socket stands, each time that it is gone, and when it cannot be made."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        stands: Callable[[], None],
        gone: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._stands = stands
        self._gone = gone
        self._failed = failed
        self._events = watch(socket, _EVENTS)
        self.connection = -1  # the descriptor of the newest one
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._events.fileno(), self.look)

    def look(self) -> None:
        """Its descriptor tells only of what is new, so all that has come is read."""
        while not self._events.closed:
            try:
                message = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = message["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connection = int(message["value"])
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stands()
            elif event == zmq.EVENT_DISCONNECTED:
                self._gone()
            else:
                self._failed()

    def close(self) -> None:
        if not self._events.closed:
            self._loop.remove_reader(self._events.fileno())
            self._socket.disable_monitor()
            self._events.close(linger=0)


class ProcessWatch:
    """Calls back when the process at the other end of a connection within this host has ended.

    Its connections may outlast it: a process that it has forked may have them too.
    """

    def __init__(self, connection: int, address: str, ended: Callable[[], None]) -> None:
        """`connection` is the descriptor of a connection to `address`. Does nothing if the process is not known."""
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._process = process_behind(connection, address)
        if self._process is not None:
            self._loop.add_reader(self._process, self._end)

    def _end(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = None


class Heartbeat:
    """A connection to a peer on which nothing passes but heartbeats.

    The threads of ZeroMQ send and answer them, whoever has the GIL at either end. They are not sent where messages are:
    if the reader of those computes, the connection fills up, and is silent although its process lives.
    """

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        address: str,
        freeze_s: float,
        felt: Callable[[], None],
        stopped: Callable[[], None],
    ) -> None:
        """`dealer` is not connected yet. `felt` is called once it is.

        `stopped` is called when there was no beat for `freeze_s`, or at once if the connection breaks.
        """
        dealer.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * freeze_s / _BEATS))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * freeze_s))
        self._dealer = dealer
        self._felt = felt
        self._stopped = stopped
        self._has_begun = False
        self._monitor = Monitor(dealer, self._begin, self._end)
        dealer.connect(to_zeromq(address))
        self._monitor.look()

    def _begin(self) -> None:
        self._has_begun = True
        self._felt()

    def _end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._stopped()

    def close(self) -> None:
        self._monitor.close()
        self._dealer.close(linger=0)
