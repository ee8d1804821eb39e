"""The sockets of a service over a unix socket: a listener, and one connection for each client.

All of it runs on the loop of the service or of the client. No thread stands between the caller and the socket, so a
call and its answer wake each end once.

Only processes of this user get in: the file has mode 0600, and both ends ask the kernel which user is at the other end.
A peer that does not begin with a hello is dropped at once. A peer that sends nothing is dropped after a time limit, or
as soon as another one needs its place, so silent peers keep no clients out. A client watches the process of the
service, which both are on this host: whether it ended, and whether it is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import select
import socket
import sys
from collections.abc import Callable
from functools import partial

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.transport.addresses import prepare, process_of, removal, user_of
from asyncoll.transport.messages import service_protocol
from asyncoll.transport.messages.peer_reports import DroppedClients, FailedAccepts, UnauthenticatedPeers, silence_cause
from asyncoll.transport.messages.segment_stream import Lookout, SegmentStream, UnreadError
from asyncoll.transport.messages.service_protocol import SocketOwner
from asyncoll.transport.processes import is_gone, is_stopped
from asyncoll.transport.wire import Buffer

_SCHEME = "ipc://"
_ACCEPTED = 64  # connections that are accepted before other callbacks of the loop run
_UNGREETED_MAX = 1024  # connections without a hello, or refused; the oldest is closed for one more
_UNGREETED_SHARE = 4  # they take at most one of so many descriptors that this process may open
# If there is no room, nothing is accepted for this time, and no connection is closed to make room.
_PAUSE_S = 0.1
# The time until the next attempt to connect to a service whose backlog is full.
_RETRY_S = 0.01
# So often a client looks at the state of the service's process in the time after which it counts as frozen.
_LOOKS = 4


class StreamServer:
    """A service at a unix socket: a `ServiceEnd`."""

    def __init__(self, owner: SocketOwner, url: str) -> None:
        """Listen at `url`, which begins with `ipc://`. Raises UsageError if that fails."""
        self.url = url
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._lookout = Lookout()
        self._numbers = itertools.count()
        self._clients: dict[int, SegmentStream] = {}  # by peer
        self._strangers: dict[SegmentStream, asyncio.TimerHandle] = {}  # without a hello, or refused; by age
        self._strangers_max = min(_UNGREETED_MAX, max(1, _descriptors() // _UNGREETED_SHARE))
        self._dropped: dict[SegmentStream, asyncio.TimerHandle] = {}  # clients until then; until their connections end
        self._unauthenticated = UnauthenticatedPeers(f"the service at {url}")
        self._dropped_clients = DroppedClients(f"the service at {url}")
        self._failed_accepts = FailedAccepts(f"the service at {url}")
        self._resume: asyncio.TimerHandle | None = None  # while no connections are accepted
        self._is_closed = False
        with contextlib.ExitStack() as undo, prepare(url, has_key=False) as self._uid:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.setblocking(False)
            try:
                self._listener.bind(url.removeprefix(_SCHEME))
                self._listener.listen(service_protocol.BACKLOG)
                self._remove_file = removal(url)
            except OSError as error:
                raise UsageError(f"cannot listen on {url}: {error}") from error
            undo.pop_all()
        forks.register(self)
        self._accept_on()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        forks.unregister(self)
        self._pause()
        # Before the socket is closed: afterwards others may listen there, and the file would be theirs.
        self._remove_file()
        self._listener.close()
        for stream, limit in (*self._strangers.items(), *self._dropped.items()):
            limit.cancel()
            stream.close()
        for stream in self._clients.values():
            stream.close()
        self._strangers.clear()
        self._dropped.clear()
        self._clients.clear()

    def has(self, peer: int) -> bool:
        return peer in self._clients

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        stream = self._clients.get(peer)
        if stream is None:
            return
        try:
            stream.send(kind, number, payload)
        except UnreadError:
            self._dropped_clients.log(f"dropped client {peer}: {service_protocol.UNREAD}")
            self.drop(peer, service_protocol.UNREAD)
            # Not now: the owner is in the middle of a call of this object.
            self._loop.call_soon(self._owner.lost, peer, service_protocol.UNREAD)

    async def flush(self, peer: int) -> None:
        stream = self._clients.get(peer)
        if stream is not None:
            await stream.flush()

    def drop(self, peer: int, reason: str) -> None:
        stream = self._clients.pop(peer, None)
        if stream is not None:
            self._dismiss(stream, reason)

    def abandon(self, parent: int) -> None:
        """Give up all connections in a forked child, so that clients notice the death of the parent."""
        self._is_closed = True
        forks.isolate(self._loop)
        streams = (*self._strangers, *self._dropped, *self._clients.values())
        forks.give_up([self._listener.fileno(), *(stream.fileno() for stream in streams)])

    # -- connections ------------------------------------------------------------------------------

    def _accept_on(self) -> None:
        self._resume = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._resume is not None:
            self._resume.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            cause = "too many connections have not said hello"
            if len(self._strangers) < self._strangers_max:
                try:
                    connection, _ = self._listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    return
                except OSError as error:  # too many open files, for instance
                    cause = str(error.strerror)
                else:
                    self._accepted(connection)
                    continue
            if not self._is_awaited():
                return
            if not self._make_room():
                self._failed_accepts.log(f"could not accept a connection: {cause}")
                self._wait()
                return

    def _is_awaited(self) -> bool:
        """Whether a connection waits to be accepted. Without descriptors `accept` fails before it looks."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        return bool(waiting.poll(0))

    def _make_room(self) -> bool:
        """End the wait for the oldest hello: close the connection, or make it a client's if the hello has come.

        Returns whether there was one that is old enough.
        """
        if not self._strangers:
            return False
        stream, limit = next(iter(self._strangers.items()))
        is_old_at_s = limit.when() - service_protocol.HANDSHAKE_S + _PAUSE_S
        if self._loop.time() < is_old_at_s:
            return False
        stream.read()
        if stream in self._strangers:
            self._unauthenticated.log("closed a connection without a hello, to accept another one")
            self._end(stream)
        return True

    def _wait(self) -> None:
        """Accept no connections for a while."""
        self._pause()
        self._resume = self._loop.call_later(_PAUSE_S, self._accept_on)

    def _accepted(self, connection: socket.socket) -> None:
        """Let a process of this user say hello."""
        try:
            connection.setblocking(False)
            is_own = user_of(connection) == self._uid
        except OSError:
            is_own = False
        if not is_own:
            connection.close()
            self._unauthenticated.log("refused a connection: it belongs to another user")
            return
        stream = SegmentStream(connection, self._lookout)
        stream.use(partial(self._greet, stream), partial(self._end, stream), partial(self._reject, stream))
        self._strangers[stream] = self._limit(stream)

    def _limit(self, stream: SegmentStream) -> asyncio.TimerHandle:
        """Close a connection after the time limit of handshakes."""
        return self._loop.call_later(service_protocol.HANDSHAKE_S, self._expire, stream)

    def _expire(self, stream: SegmentStream) -> None:
        # The hello may have come while the loop was busy.
        stream.read()
        if stream in self._strangers or stream in self._dropped:
            self._end(stream)

    def _end(self, stream: SegmentStream, _: str = "") -> None:
        """Close a connection that is not that of a client, or not any more."""
        limit = self._strangers.pop(stream, None) or self._dropped.pop(stream, None)
        if limit is not None:
            limit.cancel()
        stream.close()

    def _reject(self, stream: SegmentStream, error: ProtocolError) -> None:
        self._unauthenticated.log(f"dropped an unauthenticated peer: {error}")
        self._end(stream)

    def _greet(self, stream: SegmentStream, kind: int, version: int, payload: Buffer) -> None:
        """Answer the first segment, a hello: with a hello, or with the reason of a refusal."""
        if kind != service_protocol.HELLO or payload:
            self._reject(stream, ProtocolError("it does not begin with a hello"))
        elif len(self._clients) >= service_protocol.CLIENTS_MAX:
            self._unauthenticated.log(f"refused a client: {service_protocol.too_many()}")
            self._dismiss(stream, service_protocol.too_many())
        elif version != service_protocol.VERSION:
            # The client raises an error that names both versions.
            stream.send(service_protocol.HELLO, service_protocol.VERSION, b"")
            self._dismiss(stream, "")
        else:
            self._strangers.pop(stream).cancel()
            peer = next(self._numbers)
            self._clients[peer] = stream
            stream.use(
                partial(self._owner.received, peer),
                partial(self._ended, peer),
                partial(self._malformed, peer),
                partial(self._owner.room, peer),
            )
            self.send(peer, service_protocol.HELLO, service_protocol.VERSION, b"")

    def _ended(self, peer: int, cause: str) -> None:
        """The connection of a client has ended."""
        self._clients.pop(peer).close()
        self._owner.lost(peer, cause)

    def _malformed(self, peer: int, error: ProtocolError) -> None:
        self._dropped_clients.log(f"dropped client {peer}, which broke the protocol: {error}")
        self.drop(peer, f"it dropped this client, which broke the protocol: {error}")
        self._owner.lost(peer, str(error))

    def _dismiss(self, stream: SegmentStream, reason: str) -> None:
        """Ignore a connection from now on. The peer, which is told the reason if there is one, closes it."""
        if reason:
            with contextlib.suppress(UnreadError):
                stream.send(service_protocol.BYE, 0, reason.encode()[: service_protocol.REASON_BYTES])
        stream.use(None, partial(self._end, stream), partial(self._reject, stream))
        # No caller waits for it any more.
        stream.copy_unsent()
        # A stranger remains one, with a new limit.
        if stream in self._strangers:
            self._strangers[stream].cancel()
            self._strangers[stream] = self._limit(stream)
        else:
            self._dropped[stream] = self._limit(stream)


class StreamClient:
    """A client of a service at a unix socket: a `ClientEnd`."""

    def __init__(self, owner: SocketOwner, url: str, connected: Callable[[int], None]) -> None:
        """Connect to the service at `url`, which begins with `ipc://`.

        `connected` is called with the protocol version of the service, once the service has answered. Its process is
        watched from the connection on. The owner limits the time until the answer.

        Raises UsageError if `url` is malformed, or belongs to another user.
        """
        self.url = url
        self._owner = owner
        self._connected = connected
        self._loop = asyncio.get_running_loop()
        self._stream: SegmentStream | None = None
        self._is_lost = False
        self._is_closed = False
        self._next: asyncio.Handle | None = None  # the next attempt to connect, or look at the process
        self._process = 0  # of the service; 0 if it is unknown, or this one
        self._stopped = 0  # looks that have found it stopped, one after another
        with contextlib.ExitStack() as undo, prepare(url, has_key=False, listens=False) as self._uid:
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._socket.setblocking(False)
            self._connect()
            undo.pop_all()
        forks.register(self)

    def has(self, peer: int) -> bool:
        return not self._is_lost

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment to the service. Nothing is sent before it is connected, or after its loss."""
        if self._stream is None or self._is_lost:
            return
        try:
            self._stream.send(kind, number, payload)
        except UnreadError:
            # Not now: the owner is in the middle of a call of this object.
            self._loop.call_soon(self._report_loss, service_protocol.UNREAD)

    async def flush(self, peer: int) -> None:
        if self._stream is not None:
            await self._stream.flush()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        forks.unregister(self)
        self._stop_timer()
        if self._stream is not None:
            self._stream.close()
        self._socket.close()

    def abandon(self, parent: int) -> None:
        """Give up the connection in a forked child, so that the service notices the death of the parent."""
        self._report_loss(service_protocol.forked(parent))
        self._is_closed = True
        forks.isolate(self._loop)
        forks.give_up([self._socket.fileno()])

    # -- the connection ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect, or try again later if the backlog of the service is full."""
        try:
            self._socket.connect(self.url.removeprefix(_SCHEME))
        except BlockingIOError:
            self._next = self._loop.call_later(_RETRY_S, self._connect)
            return
        except OSError as error:
            # No call of the kernel has failed: the path is too long.
            if error.errno is None:
                raise UsageError(f"cannot connect to {self.url}: {error}") from error
            self._loop.call_soon(self._report_loss, f"it cannot be reached ({error.strerror})")
            return
        if user_of(self._socket) != self._uid:
            self._loop.call_soon(self._report_loss, service_protocol.FOREIGN_USER)
            return
        process = process_of(self._socket)
        self._process = 0 if process == os.getpid() or is_gone(process) else process
        # Not now: the owner is not ready before this has returned.
        self._next = self._loop.call_soon(self._watch)
        self._stream = SegmentStream(self._socket, Lookout())
        self._stream.use(self._greeted, self._report_loss, lambda error: self._report_loss(service_protocol.SILENT))
        self.send(0, service_protocol.HELLO, service_protocol.VERSION, b"")

    def _greeted(self, kind: int, version: int, payload: Buffer) -> None:
        """The service has answered."""
        assert self._stream is not None
        self._stream.use(self._received, self._report_loss, self._malformed, partial(self._owner.room, 0))
        if kind == service_protocol.HELLO:
            self._connected(version)
        else:
            self._received(kind, version, payload)

    def _received(self, kind: int, number: int, payload: Buffer) -> None:
        if kind == service_protocol.BYE:
            self._report_loss(bytes(payload)[: service_protocol.REASON_BYTES].decode(errors="replace"))
        elif kind != service_protocol.HELLO:
            self._owner.received(0, kind, number, payload)

    def _malformed(self, error: ProtocolError) -> None:
        self._report_loss(f"it broke the protocol: {error}")

    def _watch(self) -> None:
        """Look at the process of the service, which may be stopped, or have ended while a child keeps its sockets."""
        if not self._process:
            return
        if is_gone(self._process):
            self._report_loss("its process has ended")
            return
        self._stopped = self._stopped + 1 if is_stopped(self._process) else 0
        if self._stopped > _LOOKS:
            self._report_loss(silence_cause(service_protocol.FREEZE_S))
            return
        self._next = self._loop.call_later(service_protocol.FREEZE_S / _LOOKS, self._watch)

    def _report_loss(self, cause: str) -> None:
        if not self._is_lost and not self._is_closed:
            self._is_lost = True
            self._stop_timer()
            if self._stream is not None:
                self._stream.ignore()
            self._owner.lost(0, cause)

    def _stop_timer(self) -> None:
        if self._next is not None:
            self._next.cancel()


def _descriptors() -> int:
    """How many descriptors this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
