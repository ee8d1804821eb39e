"""The state of ZeroMQ connections, and the heartbeats on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll.transport.messages.patience import Patience
from asyncoll.transport.processes import Thread, is_frozen, threads

_BEATS_PER_FREEZE = 4  # heartbeats in the time without one after which a process counts as silent
_HANDSHAKE_MS = 5000  # for a connection that is made again; a peer that is frozen answers no handshake
_DEATH_S = 0.06  # all connections of a process that has died end within this time, and its last messages are read
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
            # No limit: at a limit, ZeroMQ's I/O thread waits for the reader.
            self._events.setsockopt(zmq.RCVHWM, 0)
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
    """A connection to a peer for heartbeats alone, which tells when the peer is silent.

    The I/O threads of ZeroMQ send and answer heartbeats, and need no GIL. The connection for messages would not do: if
    its reader computes, it fills up, and carries no heartbeats although the process is alive.

    ZeroMQ gives up the connection after half of the time limit, and connects again. So in the other half the peer can
    answer on a new connection, to which neither a lost packet nor a full queue of the old one matters.
    """

    def __init__(
        self,
        dealer: zmq.Socket[bytes],
        address: str,
        patience: Patience,
        alive: Callable[[], None],
        silent: Callable[[float], None],
        pid: int = 0,
    ) -> None:
        """Connect `dealer` to `address`, and call `alive` each time that it is connected.

        Afterwards `silent(limit_s)` is called if the peer has given no sign of life for `limit_s` seconds, the limit of
        `patience`. `pid` is the process of a peer that is of this host and can be seen: its limit is always
        `patience.freeze_s`, and it has more time as long as it is not frozen.
        """
        dealer.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * patience.freeze_s / _BEATS_PER_FREEZE))
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * patience.late_s))
        dealer.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._dealer = dealer
        self._patience = patience
        self._alive = alive
        self._silent = silent
        self._pid = pid
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._beats = False
        self._has_begun = False  # there was a heartbeat
        self._asked_s = self._loop.time()  # unless it beats: since when the peer has not answered
        self._stops = 0  # how often a connection has ended
        self._has_knocked = False  # since the last stop: the kernel has woken the process for a new connection
        self._monitor = Monitor(dealer, _EVENTS, self._handle_event)
        dealer.connect(to_zeromq(address))
        self._monitor.start()

    def _handle_event(self, event: int, _: int) -> None:
        """Handle the begin or the end of a connection."""
        if event == zmq.EVENT_CONNECTED:
            self._has_knocked = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._beats = self._has_begun = True
            self._patience.answered(self._loop.time() - self._asked_s, self._loop.time())
            self._alive()
        elif self._has_begun:
            self._stopped()

    def _stopped(self) -> None:
        """Handle the end of a connection: look later whether the peer has answered on a new one.

        Not before the connection for messages can tell that the process has died.
        """
        if self._beats:
            self._asked_s = self._loop.time() - self._patience.late_s
        self._beats = self._has_knocked = False
        self._stops += 1
        seen = threads(self._pid) if self._pid else {}
        self._loop.call_later(max(self._remaining_s(), _DEATH_S), self._judge, self._stops, seen)

    def _judge(self, stop: int, before: Mapping[int, Thread]) -> None:
        """Call `silent` if the peer has not answered since a stop, unless it has more time. Then look again.

        A later stop has a look of its own.
        """
        if not self._is_closed:
            # A loop that was held up runs its timers before it hears of an answer.
            self._monitor.read()
        if self._is_closed or self._beats or self._stops != stop:
            return
        if self._pid:
            is_over = is_frozen(before, threads(self._pid), woken=self._has_knocked)
            again_s = self._patience.freeze_s
        else:
            again_s = self._remaining_s()
            is_over = again_s <= 0
        if is_over:
            self._silent(self._limit_s())
        else:
            self._loop.call_later(again_s, self._judge, stop, before)

    def _remaining_s(self) -> float:
        return self._asked_s + self._limit_s() - self._loop.time()

    def _limit_s(self) -> float:
        return self._patience.freeze_s if self._pid else self._patience.limit_s(self._loop.time())

    def close(self) -> None:
        self._is_closed = True
        self._monitor.close()
        self._dealer.close(linger=0)
