"""The sockets of a service over tcp, or with a key: a ROUTER for the service, and a DEALER for each client.

Each socket has one reader, a callback of the loop. ZeroMQ's descriptors are edge-triggered, and a send may consume the
event of a message that has arrived, so the reader runs after each send, too.

With a key, connections are encrypted by CURVE. The key pairs of both ends derive from the key: the service has one, and
all clients have the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from asyncoll import forks
from asyncoll.errors import UsageError
from asyncoll.transport.addresses import prepare, removal, user_behind
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import authentication, service_protocol
from asyncoll.transport.messages.monitor import Heartbeat, Monitor, bound_address, to_zeromq
from asyncoll.transport.messages.patience import Patience
from asyncoll.transport.messages.peer_reports import DroppedClients, UnauthenticatedPeers, silence_cause
from asyncoll.transport.messages.service_protocol import SocketOwner
from asyncoll.transport.wire import SEGMENT_BYTES, Buffer

_FORM = struct.Struct("<BQ")  # kind, number
_OVERHEAD_BYTES = 64  # that the header, or encryption, adds to a frame
_PACKED_MAX = 1 << 13  # bytes of a payload that is copied into one ZeroMQ frame with the header: two frames cost more
_BATCH = 64  # segments delivered before the loop may run other callbacks
_REMEDIES = {
    errno.EADDRINUSE: "give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "give an address of this host",
    errno.ENODEV: "give an address of this host",
}
_NOW = int(zmq.NOBLOCK)
_MORE = _NOW | int(zmq.SNDMORE)
_UNSENT_MAX = 1 << 19  # segments queued for one peer; four times the number of empty segments in a window
# Detects over tcp within 11 s that the other host has vanished. TCP_MAXRT would also end connections to peers that
# compute for long.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
# Without reconnection, ZeroMQ drops what it has received and the program has not read. So a client would connect again,
# but after the longest time that there is: 25 days.
_RECONNECT_MS = 2**31 - 1
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_CAUSES = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): service_protocol.REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): service_protocol.REFUSED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): service_protocol.SILENT,
}
_Segment = tuple[int, int, Buffer]  # kind, number, payload


class _Socket(ABC):
    """The common part of both: a ZeroMQ socket, its monitor, and their readers."""

    def __init__(self, kind: int, url: str, events: int, handle_event: Callable[[int, int], None]) -> None:
        self.url = url
        self._loop = asyncio.get_running_loop()
        self._closing = contextlib.ExitStack()
        self._context = zmq.Context()
        self._closing.callback(self._context.term)
        self._socket = self._context.socket(kind)
        self._closing.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT_MAX)
        self._socket.setsockopt(zmq.RCVHWM, _BATCH)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SEGMENT_BYTES + _OVERHEAD_BYTES)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * service_protocol.HANDSHAKE_S))
        self._socket.setsockopt(zmq.BACKLOG, service_protocol.BACKLOG)
        for option, value in _KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        self._monitor = Monitor(self._socket, events, handle_event)
        self._closing.callback(self._monitor.close)
        self._will_read = False
        self._is_closed = False

    def _start(self) -> None:
        forks.register(self)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._read_soon()
        # Not now: the owner is not ready before this has returned.
        self._loop.call_soon(self._watch)

    def _watch(self) -> None:
        if not self._is_closed:
            self._monitor.start()

    def close(self) -> None:
        """Close the socket at once; segments that are queued are dropped. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        forks.unregister(self)
        self._loop.remove_reader(self._socket.fileno())
        self._closing.close()

    async def flush(self, peer: int) -> None:  # noqa: B027 (not abstract: it is complete)
        """Nothing to wait for: ZeroMQ has copied all payloads."""

    def _send(self, to: tuple[bytes, ...], kind: int, number: int, payload: Buffer) -> None:
        for frame in to:
            self._socket.send(frame, _MORE)
        header = _FORM.pack(kind, number)
        if len(payload) <= _PACKED_MAX:
            self._socket.send(b"".join((header, payload)), _NOW)
        else:
            self._socket.send(header, _MORE)
            self._socket.send(payload, _NOW)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Deliver a batch of segments, and call this again soon if there may be more: the descriptor would not."""
        self._will_read = False
        for _ in range(_BATCH):
            if self._is_closed or not self._read_one():
                return
        self._read_soon()

    def _read_rest(self) -> None:
        while not self._is_closed and self._read_one():
            pass

    def abandon(self, parent: int) -> None:
        """Give up the connection in a forked child, so that the other end notices the death of the parent."""
        self._is_closed = True
        forks.isolate(self._loop)
        forks.give_up_connections([self.url])

    @abstractmethod
    def _read_one(self) -> bool:
        """Read and handle one segment; returns whether there was one."""

    def _further(self) -> list[Any]:
        """Return the further frames of the message whose first ones were read: as many as the peer has sent.

        Read all of them before anything is done with one of them, as a frame that remains would count as the first one
        of the next message.
        """
        frames = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frames.append(self._socket.recv(_NOW, copy=False))
        return frames


class ServerSocket(_Socket):
    """The socket of a service. Peers are the clients, numbered in the order of their arrival."""

    def __init__(self, owner: SocketOwner, url: str, key: Key | None) -> None:
        """Listen at `url`. Raises UsageError if that fails, or if it would admit peers without authentication."""
        super().__init__(zmq.ROUTER, "", zmq.EVENT_DISCONNECTED, self._disconnected)
        self._owner = owner
        self._clients: dict[bytes, int] = {}  # clients by routing id; -1 for one that is not served, or not any more
        self._names: dict[int, bytes] = {}  # the routing ids of the clients that are served
        self._descriptors: dict[int, bytes] = {}  # routing ids by the descriptor of the connection
        self._numbers = itertools.count()
        self._unauthenticated = UnauthenticatedPeers(f"the service at {url}")
        self._dropped_clients = DroppedClients(f"the service at {url}")
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with prepare(url, has_key=key is not None) as uid:
                if uid is not None:
                    self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
                if key is not None:
                    self._authenticate(key)
                try:
                    self._socket.bind(to_zeromq(url))
                except zmq.ZMQError as error:
                    number = error.errno or 0
                    cause = "; ".join(filter(None, [zmq.strerror(number), _REMEDIES.get(number)]))
                    raise UsageError(f"cannot listen on {url}: {cause}") from error
            self.url = bound_address(self._socket)
            self._closing.callback(removal(self.url))
            self._start()
            undo.pop_all()

    def _authenticate(self, key: Key) -> None:
        """Accept only clients that have the key."""
        client = authentication.on_the_wire(_pair(key, "client")[0])

        def is_client(mechanism: bytes, credentials: list[bytes]) -> bool:
            return mechanism == b"CURVE" and hmac.compare_digest(credentials[0], client)

        def rejected(address: str) -> None:
            self._unauthenticated.log(f"refused a client from {address}: it does not have the key")

        authenticator = authentication.Authenticator(self._context, is_client, rejected)
        self._closing.callback(authenticator.close)
        authenticator.guard(self._socket)
        authenticator.start()
        authentication.encrypt_server(self._socket, _pair(key, "server"))

    def has(self, peer: int) -> bool:
        """Whether client `peer` is connected."""
        return peer in self._names

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment to a client. ZeroMQ copies it. It is dropped if the client is lost."""
        name = self._names.get(peer)
        if name is None or self._is_closed:
            return
        try:
            self._send((name,), kind, number, payload)
        except zmq.Again:
            self._dropped_clients.log(f"dropped client {peer}: {service_protocol.UNREAD}")
            self.drop(peer, service_protocol.UNREAD)
            # Not now: the owner is in the middle of a call of this object.
            self._loop.call_soon(self._owner.lost, peer, service_protocol.UNREAD)
        # The client is gone; the monitor reports it.
        except zmq.ZMQError:
            return

    def drop(self, peer: int, reason: str) -> None:
        """Disconnect a client: it loses the service for that reason, and its segments are ignored."""
        name = self._names.pop(peer, None)
        if name is not None and not self._is_closed:
            # The entry remains until the connection ends, or the next segment would count as that of a new peer.
            self._clients[name] = -1
            self._try_send(name, service_protocol.BYE, 0, reason.encode()[: service_protocol.REASON_BYTES])

    def _try_send(self, name: bytes, kind: int, number: int, payload: bytes = b"") -> None:
        # The client is gone, or does not read.
        with contextlib.suppress(zmq.ZMQError):
            self._send((name,), kind, number, payload)

    def _read_one(self) -> bool:
        try:
            name = self._socket.recv(_NOW)
        except zmq.Again:
            return False
        peer = self._clients.get(name)
        first = self._socket.recv(_NOW, copy=peer is not None)
        segment = _segment(first, self._further())
        if peer is None:
            self._greet(name, _descriptor(first), segment)
        elif peer >= 0 and segment is not None:
            self._owner.received(peer, *segment)
        return True

    def _greet(self, name: bytes, descriptor: int | None, segment: _Segment | None) -> None:
        """Accept a client by its first segment, and answer it once: with a hello, or with the reason of a refusal."""
        if descriptor is None or segment is None or segment[0] != service_protocol.HELLO:
            self._unauthenticated.log("dropped a message from an unauthenticated peer")
            return
        # An earlier client may have had the same descriptor, and its end is in the monitor.
        self._monitor.read()
        self._clients[name] = -1
        self._descriptors[descriptor] = name
        if len(self._names) >= service_protocol.CLIENTS_MAX:
            self._unauthenticated.log(f"refused a client: {service_protocol.too_many()}")
            self._try_send(name, service_protocol.BYE, 0, service_protocol.too_many().encode())
            return
        if segment[1] == service_protocol.VERSION:
            peer = self._clients[name] = next(self._numbers)
            self._names[peer] = name
        self._try_send(name, service_protocol.HELLO, service_protocol.VERSION)

    def _disconnected(self, _: int, descriptor: int) -> None:
        name = self._descriptors.pop(descriptor, None)
        if name is None:
            return
        if self._clients[name] >= 0:
            # Its last segments come before its loss.
            self._read_rest()
        peer = self._clients.pop(name)
        if self._names.pop(peer, None) is not None:
            self._owner.lost(peer, service_protocol.CLOSED)


class ClientSocket(_Socket):
    """The socket of a client. Its only peer is the service, with number 0. It does not connect again after a loss."""

    def __init__(self, owner: SocketOwner, url: str, key: Key | None, connected: Callable[[int], None]) -> None:
        """Connect to the service at `url`.

        `connected` is called with the protocol version of the service, once the service has answered and its heartbeat
        runs.

        Raises UsageError if `url` is malformed, belongs to another user, or is not safe.
        """
        super().__init__(zmq.DEALER, url, zmq.EVENT_CONNECTED | _ENDS | sum(_CAUSES), self._handle_event)
        self._owner = owner
        self._connected = connected
        self._key = key
        self._heartbeat: Heartbeat | None = None
        self._is_lost = False
        self._uid: int | None = None  # the user who must own the service
        self._prepare_dealer(self._socket)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with prepare(url, has_key=key is not None, listens=False) as self._uid:
                try:
                    self._socket.connect(to_zeromq(url))
                except zmq.ZMQError as error:
                    raise UsageError(f"cannot connect to {url}: {error}") from error
            self._start()
            undo.pop_all()
        self.send(0, service_protocol.HELLO, service_protocol.VERSION, b"")

    def _prepare_dealer(self, dealer: zmq.Socket[bytes]) -> None:
        """Set the options of a DEALER to the service, before it connects."""
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if self._key is not None:
            server = _pair(self._key, "server")[0]
            authentication.encrypt_client(dealer, _pair(self._key, "client"), server)

    def has(self, peer: int) -> bool:
        """Whether the service is not lost."""
        return not self._is_lost

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment to the service. ZeroMQ copies it. It is dropped if the service is lost."""
        if self._is_closed or self._is_lost:
            return
        try:
            self._send((), kind, number, payload)
        except zmq.Again:
            # Not now: the owner is in the middle of a call of this object.
            self._loop.call_soon(self._stop_sending)

    def _read_one(self) -> bool:
        try:
            first = self._socket.recv(_NOW)
        except zmq.Again:
            return False
        segment = _segment(first, self._further())
        if segment is None:
            return True
        if segment[0] == service_protocol.HELLO:
            self._monitor.read()  # checks the user of the service first
            if self._heartbeat is None and not self._is_lost and not self._is_closed:
                dealer = self._context.socket(zmq.DEALER)
                self._prepare_dealer(dealer)
                alive = partial(self._connected, segment[1])  # the service is connected once its heartbeat runs
                self._heartbeat = Heartbeat(dealer, self.url, Patience(service_protocol.FREEZE_S), alive, self._silent)
                self._closing.callback(self._heartbeat.close)
        elif segment[0] == service_protocol.BYE:
            self._report_loss(bytes(segment[2])[: service_protocol.REASON_BYTES].decode(errors="replace"))
        else:
            self._owner.received(0, *segment)
        return True

    def abandon(self, parent: int) -> None:
        self._report_loss(service_protocol.forked(parent))
        super().abandon(parent)

    def _silent(self, limit_s: float) -> None:
        self._lose(silence_cause(limit_s))

    def _handle_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            if self._uid is not None and user_behind(value) not in (self._uid, None):
                self._report_loss(service_protocol.FOREIGN_USER)
            return
        self._lose(_CAUSES.get(event, service_protocol.CLOSED))

    def _stop_sending(self) -> None:
        """Lose the service because no segment can be sent: the connection is gone, or its queue is full."""
        if not self._is_closed:
            self._monitor.read()
            self._lose(service_protocol.UNREAD)

    def _lose(self, cause: str) -> None:
        """Lose the service, after its last segments. If they contain its own reason, that counts, and not `cause`."""
        if not self._is_lost:
            self._read_rest()
        self._report_loss(cause)

    def _report_loss(self, cause: str) -> None:
        if not self._is_lost and not self._is_closed:
            self._is_lost = True
            self._owner.lost(0, cause)


def _segment(first: Any, further: list[Any]) -> _Segment | None:
    """Return the segment in the frames of a message; None if it is malformed."""
    data = memoryview(first)
    if len(data) < _FORM.size or len(further) > 1 or (further and len(data) > _FORM.size):
        return None
    return *_FORM.unpack_from(data), further[0] if further else data[_FORM.size :]


def _descriptor(frame: Any) -> int | None:
    """Return the descriptor of the connection of a frame; None if its peer speaks ZMTP 1 or 2, as no client does."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _pair(key: Key, end: str) -> tuple[bytes, bytes]:
    """The public and the secret CURVE key of one end, "server" or "client"."""
    return authentication.key_pair(key.derive("service", end))
