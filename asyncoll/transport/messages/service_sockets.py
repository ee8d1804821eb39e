"""Sockets between a service and its clients: a ROUTER that many connect to, and a DEALER that connects to one.

Both carry segments: a kind, a number and a payload. Their owners bound what is on the way; here only the size of a
segment is bounded, and a peer that breaks the owners' rules and reads nothing is given up. Each socket has one reader,
which is called by the loop. ZeroMQ's descriptors are edge-triggered: after each send, too, somebody must look whether
anything has come.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncoll import forks
from asyncoll.errors import UsageError
from asyncoll.transport.addresses import prepare, remove_socket, user_behind
from asyncoll.transport.keys import Key
from asyncoll.transport.messages.authentication import Authenticator, UnauthenticatedPeers
from asyncoll.transport.messages.curve import authenticator, protect_client, protect_server
from asyncoll.transport.messages.monitor import FREEZE_S, Heartbeat, bound_address, silence, to_zeromq, watch
from asyncoll.transport.wire import SEGMENT_BYTES, Buffer

_FORM = struct.Struct("<BQ")  # kind, number
_OVERHEAD = 64  # bytes that the form, or encryption, adds to a frame
_PACKED_MAX = 1 << 13  # bytes of payload that are copied into one ZeroMQ frame with the form; two cost more than that
_BATCH = 64  # segments handed over before the loop may do something else
_CLIENTS_MAX = 4096
_BACKLOG = 512
_HANDSHAKE_MS = 5000  # until the other end must have answered
_NOW = int(zmq.NOBLOCK)
_MORE = _NOW | int(zmq.SNDMORE)
_DEATH_S = 0.05  # for all connections of a dead process to have ended
_UNSENT_MAX = 1 << 19  # segments; four times what a window of empty ones holds
_UNREAD = "it does not read what it is sent"
_HELLO = 255  # the first segment of both ends; its number is the version
_BYE = 254  # the last one of the service, which says why
_REASON_BYTES = 1024
VERSION = 1
_KEEPALIVE = {  # over tcp a host that vanishes is noticed after 11 s; TCP_MAXRT would end who computes for long, too
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_REFUSED = "it refused the connection: is the key the same at both ends?"
_SILENT = "it does not answer as it should: is it stopped, or has only one end a key?"
_CAUSES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): _REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): _REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): _SILENT,
}

logger = logging.getLogger("asyncoll")


class Owner(Protocol):
    """Whose socket it is; everything is called on the loop."""

    def received(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """A segment of a peer has come."""

    def lost(self, peer: int, cause: str) -> None:
        """A peer is gone. Called at most once for each."""


class _Socket(ABC):
    """What both have: a ZeroMQ socket, its monitor, and who reads them."""

    def __init__(self, kind: int, events: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT_MAX)
        self._socket.setsockopt(zmq.RCVHWM, _BATCH)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SEGMENT_BYTES + _OVERHEAD)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        self._monitor = watch(self._socket, events)
        self._will_read = False
        self._is_closed = False

    def _start(self) -> None:
        forks.register(self)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._heed)
        self._read_soon()
        self._loop.call_soon(self._heed)  # not before its owner is ready

    def close(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        forks.unregister(self)
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, to: tuple[bytes, ...], kind: int, number: int, payload: Buffer) -> None:
        for frame in to:
            self._socket.send(frame, _MORE)
        form = _FORM.pack(kind, number)
        if len(payload) <= _PACKED_MAX:
            self._socket.send(b"".join((form, payload)), _NOW)
        else:
            self._socket.send(form, _MORE)
            self._socket.send(payload, _NOW)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Hand over what has come. Runs again until nothing is left: the descriptor tells only of what is new."""
        self._will_read = False
        for _ in range(_BATCH):
            if self._is_closed or not self._read_one():
                return
        self._read_soon()

    def _read_rest(self) -> None:
        while not self._is_closed and self._read_one():
            pass

    @abstractmethod
    def abandon(self, parent: int) -> None:
        """In a forked child: the other end must see the parent's death although the child lives."""

    @abstractmethod
    def _read_one(self) -> bool:
        """Hand over a segment; returns whether there was one."""

    def _heed(self) -> None:
        """Read the monitor."""
        while not self._is_closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(_NOW))
            except zmq.Again:
                return
            self._happened(int(event["event"]), int(event["value"]))

    @abstractmethod
    def _happened(self, event: int, value: int) -> None:
        """The monitor tells this."""

    def _segment(self, first: Any) -> tuple[int, int, Buffer] | None:
        """What came in `first` and the frames after it; None if nobody sends that."""
        rest = []
        while self._socket.getsockopt(zmq.RCVMORE):
            rest.append(self._socket.recv(_NOW, copy=False))
        data = memoryview(first)
        if len(data) < _FORM.size or len(rest) > 1 or (rest and len(data) > _FORM.size):
            return None
        return *_FORM.unpack_from(data), rest[0] if rest else data[_FORM.size :]


class ServerSocket(_Socket):
    """Listens. Clients are numbered in the order in which they come."""

    def __init__(self, owner: Owner, url: str, key: Key | None) -> None:
        """Raises UsageError if `url` cannot be listened on, or would let anybody in."""
        super().__init__(zmq.ROUTER, zmq.EVENT_DISCONNECTED)
        self._owner = owner
        self._clients: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._descriptors: dict[int, bytes] = {}  # of the connections
        self._numbers = itertools.count()
        self._authenticator: Authenticator | None = None
        self._unauthenticated = UnauthenticatedPeers(f"the service at {url}")
        self.url = ""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._bind(url, key)
        except BaseException:
            self.close()
            raise
        self._start()

    def _bind(self, url: str, key: Key | None) -> None:
        with prepare(url, has_key=key is not None) as uid:
            if uid is not None:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
            if key is not None:
                self._authenticator = authenticator(self._context, key, self._refused)
                self._authenticator.guard(self._socket)
                self._loop.add_reader(self._authenticator.fileno(), self._authenticator.read)
                protect_server(self._socket, key)
            try:
                self._socket.bind(to_zeromq(url))
            except zmq.ZMQError as error:
                raise UsageError(f"cannot listen on {url}: {error}") from error
        self.url = bound_address(self._socket)

    def has(self, peer: int) -> bool:
        """Whether it is there."""
        return peer in self._names

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment, which may be changed afterwards. To who is gone it is dropped."""
        name = self._names.get(peer)
        if name is None or self._is_closed:
            return
        try:
            self._send((name,), kind, number, payload)
        except zmq.Again:
            logger.warning("%s dropped client %d: %s", self.url, peer, _UNREAD)
            self.drop(peer, _UNREAD)
            self._loop.call_soon(self._owner.lost, peer, _UNREAD)  # its owner is busy sending
        except zmq.ZMQError:  # it is gone; the monitor tells
            return

    def drop(self, peer: int, reason: str) -> None:
        """Hear nothing more of a client, which loses the service for that reason."""
        name = self._names.pop(peer, None)
        if name is not None and not self._is_closed:
            self._clients[name] = -1
            self._tell(name, _BYE, 0, reason.encode()[:_REASON_BYTES])

    def _tell(self, name: bytes, kind: int, number: int, payload: bytes = b"") -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or reads nothing
            self._send((name,), kind, number, payload)

    def close(self) -> None:
        if self._authenticator is not None and not self._is_closed:
            self._loop.remove_reader(self._authenticator.fileno())
            self._authenticator.close()
        if self.url and not self._is_closed:
            remove_socket(self.url)
        super().close()

    def abandon(self, parent: int) -> None:
        self._is_closed = True
        forks.isolate(self._loop)
        forks.give_up_connections([self.url])

    def _refused(self, address: str) -> None:
        self._unauthenticated.tell(f"refused a client from {address}: it has not the key")

    def _read_one(self) -> bool:
        try:
            name = self._socket.recv(_NOW)
        except zmq.Again:
            return False
        peer = self._clients.get(name)
        if peer is None:
            self._greet(name, self._socket.recv(_NOW, copy=False))
            return True
        segment = self._segment(self._socket.recv(_NOW))
        if peer >= 0 and segment is not None:
            self._owner.received(peer, *segment)
        return True

    def _greet(self, name: bytes, frame: Any) -> None:
        """Let a client in whose first segment says that it is one. It is answered once, whatever the answer."""
        descriptor = frame.get(zmq.SRCFD)
        segment = self._segment(frame)
        if segment is None or segment[0] != _HELLO:
            self._unauthenticated.tell("dropped a message from a stranger")
            return
        self._heed()  # that descriptor may have been another client's, whose end has not been read
        self._clients[name] = -1
        self._descriptors[descriptor] = name
        if len(self._names) >= _CLIENTS_MAX:
            self._unauthenticated.tell(f"refused a client: there are {_CLIENTS_MAX} already")
            self._tell(name, _BYE, 0, f"it has {_CLIENTS_MAX} clients already".encode())
            return
        if segment[1] == VERSION:
            peer = self._clients[name] = next(self._numbers)
            self._names[peer] = name
        self._tell(name, _HELLO, VERSION)

    def _happened(self, event: int, value: int) -> None:
        name = self._descriptors.pop(value, None)
        if name is None:
            return
        if self._clients[name] >= 0:
            self._read_rest()  # what it said before
        peer = self._clients.pop(name)
        if self._names.pop(peer, None) is not None:
            self._owner.lost(peer, "its connection closed")


class ClientSocket(_Socket):
    """Connects to a service, which is peer 0. Once it is lost it stays so."""

    def __init__(self, owner: Owner, url: str, key: Key | None, connected: Callable[[int], None]) -> None:
        """`connected` is told the version of the other end, once its heartbeat is felt, too.

        Raises UsageError if `url` is none, is another user's, or would let anybody listen.
        """
        super().__init__(zmq.DEALER, zmq.EVENT_CONNECTED | _ENDS | sum(_CAUSES))
        self._owner = owner
        self._connected = connected
        self._url = url
        self._key = key
        self._heartbeat: Heartbeat | None = None
        self._is_lost = False
        self._uid: int | None = None  # whose service it must be
        self._introduce(self._socket)
        try:
            with prepare(url, has_key=key is not None, listens=False) as self._uid:
                self._socket.connect(to_zeromq(url))
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot connect to {url}: {error}") from error
        except BaseException:
            self.close()
            raise
        self._start()
        self.send(0, _HELLO, VERSION, b"")

    def _introduce(self, dealer: zmq.Socket[bytes]) -> None:
        """Before it connects."""
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        if self._key is not None:
            protect_client(dealer, self._key)

    def has(self, peer: int) -> bool:
        """Whether it is there."""
        return not self._is_lost

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment, which may be changed afterwards. It is dropped if the service is lost."""
        if self._is_closed or self._is_lost:
            return
        try:
            self._send((), kind, number, payload)
        except zmq.Again:
            self._loop.call_soon(self._give_up)  # its owner is busy sending

    def _read_one(self) -> bool:
        try:
            first = self._socket.recv(_NOW)
        except zmq.Again:
            return False
        segment = self._segment(first)
        if segment is None:
            return True
        if segment[0] == _HELLO:
            self._heed()  # whose service it is
            if not self._is_lost and not self._is_closed:
                self._feel(partial(self._connected, segment[1]))
        elif segment[0] == _BYE:
            self._end(bytes(segment[2])[:_REASON_BYTES].decode(errors="replace"))
        else:
            self._owner.received(0, *segment)
        return True

    def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        super().close()

    def abandon(self, parent: int) -> None:
        self._end(f"this is a forked child of process {parent}, whose connection it is: connect here, too")
        self._is_closed = True
        forks.isolate(self._loop)
        forks.give_up_connections([self._url])

    def _feel(self, felt: Callable[[], None]) -> None:
        """From `felt` on, whether the service is frozen."""
        if self._heartbeat is None:
            dealer = self._context.socket(zmq.DEALER)
            self._introduce(dealer)
            self._heartbeat = Heartbeat(dealer, self._url, FREEZE_S, felt, self._silent)

    def _silent(self) -> None:
        """If its process has died, the other connection tells so, now or soon."""
        self._loop.call_later(_DEATH_S, self._lose, silence(FREEZE_S))

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            if self._uid is not None and user_behind(value) not in (self._uid, None):
                self._end("it is another user's")
            return
        self._lose(_CAUSES.get(event, "its connection closed"))

    def _give_up(self) -> None:
        """Nothing more can be sent: the connection is gone, or full."""
        self._heed()
        self._lose(_UNREAD)

    def _lose(self, cause: str) -> None:
        """It is lost, for that cause if it has not said another itself."""
        if not self._is_lost:
            self._read_rest()
        self._end(cause)

    def _end(self, cause: str) -> None:
        if not self._is_lost and not self._is_closed:
            self._is_lost = True
            self._owner.lost(0, cause)
