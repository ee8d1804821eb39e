"""The state of ZeroMQ connections, and the heartbeats on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

_BEATS_PER_FREEZE = 4  # heartbeats in the time without one after which a process counts as silent
_HANDSHAKE_MS = 5000  # for a connection that is made again; a peer that is frozen answers no handshake
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


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
    """Calls `handle(event, value)` for the events of the connections of a socket."""

    def __init__(self, socket: zmq.Socket[bytes], events: int, handle: Callable[[int, int], None]) -> None:
        """Record these `events` of `socket` from now on, to handle them after `start`."""
        self._handle = handle
        with contextlib.ExitStack() as undo:
            self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
            undo.callback(self._events.close)
            address = f"inproc://monitor-{id(socket)}"
            socket.monitor(address, events)
            undo.callback(socket.disable_monitor)
            self._events.setsockopt(zmq.LINGER, 0)
            self._events.setsockopt(zmq.RCVHWM, 0)  # no limit: at a limit, ZeroMQ's I/O thread waits for the reader
            self._events.connect(address)
            self._closing = undo.pop_all()

    def start(self) -> None:
        """Handle the events on the running loop: those that have arrived now, the others as they come."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._events.fileno(), self.read)
        self._closing.callback(loop.remove_reader, self._events.fileno())
        self.read()

    def read(self) -> None:
        """Handle all events that have arrived. ZeroMQ's descriptors are edge-triggered, so this must leave none."""
        while not self._events.closed:
            try:
                message = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._handle(int(message["event"]), int(message["value"]))

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closing.close()


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
        """Connect `dealer` to `address`, and call `alive` each time that it is connected.

        Afterwards `stopped` is called if there is no heartbeat for `freeze_s` seconds, or at once if the connection
        breaks. ZeroMQ connects again then; `stopped` is called once more for each attempt that fails.
        """
        dealer.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * freeze_s / _BEATS_PER_FREEZE))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * freeze_s))
        dealer.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.beats = False
        self.stops = 0  # how often `stopped` was called
        self.has_knocked = False  # since the last stop: the kernel has woken the process for a new connection
        self._dealer = dealer
        self._alive = alive
        self._stopped = stopped
        self._monitor = Monitor(dealer, _EVENTS, self._handle_event)
        dealer.connect(to_zeromq(address))
        self._monitor.start()

    def _handle_event(self, event: int, _: int) -> None:
        """Handle the begin or the end of a connection."""
        if event == zmq.EVENT_CONNECTED:
            self.has_knocked = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.beats = True
            self._alive()
        elif self.beats or self.stops:  # otherwise there was no heartbeat yet
            self.beats = self.has_knocked = False
            self.stops += 1
            self._stopped()

    def close(self) -> None:
        self._monitor.close()
        self._dealer.close(linger=0)
