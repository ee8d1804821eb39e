"""The state of ZeroMQ connections, the heartbeats on them, and the processes at their other ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll.transport.addresses import process_behind

FREEZE_S = 0.5  # a process without a heartbeat for this time counts as frozen
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_BEATS_PER_FREEZE = 4  # heartbeats in the time without one after which a process counts as frozen


def watch(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a socket with the `events` of `socket`, in the format of `parse_monitor_message`."""
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)  # no limit: at a limit, ZeroMQ's I/O thread blocks until the events are read
    monitor.connect(address)
    return monitor


def silence_cause(freeze_s: float) -> str:
    """The cause of the loss of a peer without a heartbeat."""
    return f"it has shown no sign of life for {freeze_s:g} s: its process is stopped, or the network is cut"


def to_zeromq(address: str) -> Any:
    """Return `address` as pyzmq accepts it: as bytes if it is a path that is not UTF-8.

    The annotations of pyzmq do not allow bytes here, hence Any.
    """
    try:
        address.encode()
    except UnicodeEncodeError:
        return os.fsencode(address)
    return address


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """Return the address of the last bind of `socket`, with the port that the kernel has chosen."""
    return os.fsdecode(bytes(socket.getsockopt(zmq.LAST_ENDPOINT))).rstrip("\0")


class Monitor:
    """Calls `connected`, `disconnected` and `failed` (to connect) as the connection of a socket changes.

    Each may be called several times: ZeroMQ connects again after a loss.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        connected: Callable[[], None],
        disconnected: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = socket
        self._connected = connected
        self._disconnected = disconnected
        self._failed = failed
        self._events = watch(socket, _EVENTS)
        self.connection = -1  # the descriptor of the newest connection; -1 before the first
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._events.fileno(), self.read)

    def read(self) -> None:
        """Handle all events that have arrived. ZeroMQ's descriptors are edge-triggered, so this must leave none."""
        while not self._events.closed:
            try:
                message = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = message["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connection = int(message["value"])
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected()
            elif event == zmq.EVENT_DISCONNECTED:
                self._disconnected()
            else:
                self._failed()

    def close(self) -> None:
        if not self._events.closed:
            self._loop.remove_reader(self._events.fileno())
            self._socket.disable_monitor()
            self._events.close(linger=0)


class ProcessWatch:
    """Calls `ended` when the process at the other end of a connection within this host has ended.

    The end of the connection is not enough: a forked child of the process may keep it open.
    """

    def __init__(self, connection: int, address: str, ended: Callable[[], None]) -> None:
        """`connection` is the descriptor of a connection to `address`. Nothing is watched if the process is unknown."""
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._process = process_behind(connection, address)
        if self._process is not None:
            self._loop.add_reader(self._process, self._end)

    def _end(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._process is not None:
            self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = None


class Heartbeat:
    """A connection to a peer for heartbeats alone.

    The I/O threads of ZeroMQ send and answer heartbeats, and need no GIL. The connection for messages would not do: if
    its reader computes, it fills up, and carries no heartbeats although the process is alive.
    """

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        address: str,
        freeze_s: float,
        alive: Callable[[], None],
        stopped: Callable[[], None],
    ) -> None:
        """Connect `dealer` to `address`, and call `alive` once it is connected.

        Afterwards `stopped` is called if there is no heartbeat for `freeze_s` seconds, or at once if the connection
        breaks.
        """
        dealer.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * freeze_s / _BEATS_PER_FREEZE))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * freeze_s))
        self._dealer = dealer
        self._alive = alive
        self._stopped = stopped
        self._has_begun = False
        self._monitor = Monitor(dealer, self._begin, self._end)
        dealer.connect(to_zeromq(address))
        self._monitor.read()

    def _begin(self) -> None:
        self._has_begun = True
        self._alive()

    def _end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._stopped()

    def close(self) -> None:
        self._monitor.close()
        self._dealer.close(linger=0)
