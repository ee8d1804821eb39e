"""Long messages between hosts: one TCP connection from each rank to each rank of another host, without ZeroMQ.

A payload of ZeroMQ is copied into a message, passes an I/O thread at either end, and arrives in fresh memory. Here the
runtime's loop writes it to the socket from where it lies, and reads it into memory that stays in the processor's cache.

A rank sends on the connections that it has made, and receives on those that it has accepted. It listens until all ranks
have come. A rank is lost when one of the two connections to it ends. Frozen ranks and cut networks are noticed by the
heartbeats of the connections for messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.transport import Loss
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import reach
from asyncoll.transport.messages.payload_handshake import introduce, welcome
from asyncoll.transport.messages.payload_stream import Long, PayloadMemory, PayloadReader, PayloadWriter
from asyncoll.transport.messages.peer_reports import FailedAccepts, UnauthenticatedPeers

# The time from the connection of a peer to the end of its handshake.
_HANDSHAKE_S = 5.0
_STRANGERS_MAX = 128  # connections in their handshake, besides two for each rank; a further one ends the oldest
# The time until the next attempt to connect, or to accept without a free descriptor.
_AGAIN_S = 0.02
_AGAIN_MAX_S = 1.0  # the time to each further attempt to connect doubles, up to this
_FLUSH_S = 0.2  # the time for payloads to leave this process at `close`
_CLOSED = "its connection closed"

Received: TypeAlias = Callable[[int, Long], None]  # source, message


class _PayloadPeer:
    """The two connections to one rank. This rank sends on the one that it has made, and only receives on the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop, key: bytes) -> None:
        """`key` is that of the messages to the rank."""
        self.writer = PayloadWriter(key)
        self.drained = asyncio.Event()  # set while nothing waits to be written
        self.drained.set()
        self.reader: PayloadReader | None = None
        self.made: asyncio.Future[None]  # done once the connection for sending is open
        self.accepted: asyncio.Future[None] = loop.create_future()  # done once the one for receiving is
        self.turns_away = False  # its address has ended a connection before the handshake was over
        self.is_lost = False
        self.cause = _CLOSED  # of its loss, if one of the connections ends

    def connections(self) -> list[socket.socket]:
        """The connections that are open."""
        ends = (self.writer.connection, self.reader.connection if self.reader is not None else None)
        return [connection for connection in ends if connection is not None]


class TcpPayloads:
    """The payloads of one rank. Before `connect`, call `bind` and set `peers`, the addresses by rank.

    Payloads from one rank to another arrive in order. An empty address means that nothing will be sent to that rank,
    nor received from it. All ranks must listen at their addresses before these are set, so one that refuses a
    connection has died. All runs on the loop that calls `connect`.
    """

    def __init__(self, rank: int, size: int, job: bytes, *, joining: Joining | None = None) -> None:
        """`job` is the secret of this run of the job. `joining` has the time limit of `connected`."""
        self.rank = rank
        self.size = size
        self.peers: Sequence[str] = ()
        self._key = Key(job)
        self._joining = joining
        self._unauthenticated = UnauthenticatedPeers(f"rank {rank}")
        self._failed_accepts = FailedAccepts(f"rank {rank}")
        self._memory = PayloadMemory()
        self._listener: socket.socket | None = None
        self._address = ""
        self._peers: dict[int, _PayloadPeer] = {}
        self._strangers: dict[socket.socket, asyncio.Task[bool]] = {}  # in their handshake, the oldest first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        forks.register(self)

    def bind(self, address: str, ports: Sequence[int] = ()) -> str:
        """Listen at `address`, and return the address to connect to. Raises UsageError if that fails.

        `address` is `tcp://ip:0` for a free port. With `ports` it is `tcp://ip`, and the first of the ports that is
        free is taken.
        """
        listen = partial(_listening, backlog=_STRANGERS_MAX + 2 * self.size)
        bound, listener = reach.bind_to_one(address, ports, listen)
        self._listener = listener
        self._address = f"{bound.rpartition(':')[0]}:{listener.getsockname()[1]}"
        return self._address

    def connect(self, received: Received, lost: Callable[[Loss], None]) -> None:
        """Begin to connect to all peers. Messages may be sent from now on.

        `received` is called for each message: its frames are read-only, and the receiver may keep them. `lost` is
        called at most once for each rank, after its last message. Neither may block.
        """
        self._received, self._lost = received, lost
        self._loop = loop = asyncio.get_running_loop()
        for rank, address in enumerate(self.peers):
            if rank != self.rank and address:
                self._peers[rank] = peer = _PayloadPeer(loop, self._key_of(self.rank, rank))
                peer.made = loop.create_task(self._open(rank, address, peer))
        self._listen()

    async def connected(self) -> None:
        """Wait for the connections from and to all peers.

        Raises PeerLostError if a peer is known to have ended, UsageError if its host gives no answer, and DeadlineError
        if one does not come in time.
        """
        if self._peers:
            joining = self._joining or Joining(self.rank, self.size)
            made = [peer.made for peer in self._peers.values()]
            await joining.over(reach.all_done(made), self._unanswered, self._why_unconnected)
            # A rank that gets no answer from this one tells more than that it has not come.
            accepted = [peer.accepted for peer in self._peers.values()]
            await joining.over(
                reach.all_done(accepted), self._unaccepted, "not connected for payloads yet", is_told=True
            )
        self._stop_listening()

    def send(self, dest: int, message: Long) -> None:
        """Send one message, whose frames may be changed when this returns. Never waits.

        A message to a lost or closed rank is dropped.
        """
        peer = self._peers.get(dest)
        if peer is None or peer.is_lost or self._closed:
            return
        try:
            peer.writer.send(message)
        except OSError as error:
            self._cannot_write(peer, error)
            return
        if peer.writer.waiting and peer.drained.is_set():
            peer.drained.clear()
            self._await_room(peer)

    async def drain(self, dest: int) -> None:
        """Wait until the kernel has taken all payloads to `dest`, or it is lost."""
        if dest in self._peers:
            await self._peers[dest].drained.wait()

    def collect(self) -> None:
        """Deliver all payloads that have arrived."""
        for rank in list(self._peers):
            self._read_all(rank)

    def drop(self, rank: int) -> None:
        """Close the connections to a rank that is known to be lost: `drain` returns. Reports nothing. Idempotent."""
        peer = self._peers.get(rank)
        if peer is not None and not peer.is_lost and not self._closed:
            peer.is_lost = True
            self._drop(peer)

    async def close(self, *, flush: bool = False) -> None:
        """Stop at once. With `flush`, payloads first get a short time to leave. Idempotent."""
        try:
            if flush and not self._closed:
                await self._drain_all()
        finally:
            made = [peer.made for peer in self._peers.values()]
            tasks: list[asyncio.Future[Any]] = [*self._strangers.values(), *made]
            self.discard()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain_all(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                for rank in list(self._peers):
                    await self.drain(rank)

    def discard(self) -> None:
        """Close all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        forks.unregister(self)
        self._stop_listening()
        for peer in self._peers.values():
            self._drop(peer)

    def abandon(self, parent: int) -> None:
        """Give up the connections in a forked child, so that peers notice the death of the parent."""
        self._closed = True
        forks.give_up_connections([self._address, *self.peers])

    # -- joining ----------------------------------------------------------------------------------

    async def _open(self, rank: int, address: str, peer: _PayloadPeer) -> None:
        """Make the connection to `rank`.

        Raises PeerLostError if it refuses, and UsageError if it gives no answer, or not that of this rank.
        """
        peer.writer.connection = connection = await self._introduced(rank, address, peer)
        asyncio.get_running_loop().add_reader(connection, self._watch, rank, connection)
        if peer.writer.waiting:
            self._await_room(peer)

    async def _introduced(self, rank: int, address: str, peer: _PayloadPeer) -> socket.socket:
        """A connection to `rank` whose handshake is over."""
        loop = asyncio.get_running_loop()
        began_s, pause_s = loop.time(), _AGAIN_S
        while True:
            with contextlib.ExitStack() as undo:
                try:
                    connection = undo.enter_context(await reach.reach_rank(rank, address))
                    await introduce(connection, self._key, self.rank, rank)
                    undo.pop_all()
                    return connection
                except (OSError, ProtocolError) as error:  # too many open files, for instance
                    peer.turns_away = isinstance(error, ConnectionError | ProtocolError)
                    if peer.turns_away and loop.time() - began_s > reach.ANSWER_S:
                        raise UsageError(reach.another_answers(address, rank)) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_MAX_S)

    def _listen(self) -> None:
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in self._strangers.values():
            task.cancel()

    def _accept(self, listener: socket.socket) -> None:
        assert self._loop is not None
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many open files: the connection waits in the kernel's queue
            self._failed_accepts.log(f"could not accept a connection for payloads: {error}")
            self._loop.remove_reader(listener)
            self._loop.call_later(_AGAIN_S, self._listen)
            return
        connection.setblocking(False)
        if len(self._strangers) >= _STRANGERS_MAX + 2 * self.size:
            self._end_oldest_handshake()
        self._strangers[connection] = task = self._loop.create_task(self._welcome(connection, address[0]))
        task.add_done_callback(partial(self._welcomed, connection))

    async def _welcome(self, connection: socket.socket, host: str) -> bool:
        """Authenticate a peer, and begin to read its payloads; returns whether it is one."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                rank = await welcome(connection, self._key, self.rank)
        except TimeoutError:
            self._unauthenticated.log(f"rejected a connection from {host}: it has not authenticated in time")
            return False
        except (OSError, ProtocolError) as error:
            self._unauthenticated.log(f"rejected a connection from {host}: {error}")
            return False
        peer = self._peers.get(rank)
        if peer is None or peer.accepted.done():
            why = "sends no payloads to this one" if peer is None else "has connected before"
            self._unauthenticated.log(f"rejected a connection from {host}: rank {rank} {why}")
            return False
        peer.reader = PayloadReader(connection, self._memory, self._key_of(rank, self.rank))
        peer.accepted.set_result(None)
        asyncio.get_running_loop().add_reader(connection, self._read_once, rank)
        return True

    def _welcomed(self, connection: socket.socket, task: asyncio.Task[bool]) -> None:
        """Handle the end of a handshake; a task that was cancelled may never have begun."""
        self._strangers.pop(connection, None)
        if task.cancelled() or not task.result():
            connection.close()

    def _end_oldest_handshake(self) -> None:
        """Close the connection at once: a cancelled task ends only after some turns, in which more connections come."""
        connection, task = next(iter(self._strangers.items()))
        del self._strangers[connection]
        # Otherwise the handshake is over already.
        if task.cancel():
            self._close_connection(connection)

    def _key_of(self, source: int, dest: int) -> bytes:
        """The key of the messages from one rank to another. One connection of this run carries them."""
        return self._key.derive("payload stream", source, dest)

    def _unanswered(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if not peer.made.done()]

    def _unaccepted(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if not peer.accepted.done()]

    def _why_unconnected(self) -> str:
        return reach.why_unconnected(self.peers, {rank: self._peers[rank].turns_away for rank in self._unanswered()})

    # -- sending ----------------------------------------------------------------------------------

    def _await_room(self, peer: _PayloadPeer) -> None:
        if peer.writer.connection is not None:
            assert self._loop is not None
            self._loop.add_writer(peer.writer.connection, self._flush, peer)

    def _flush(self, peer: _PayloadPeer) -> None:
        assert self._loop is not None
        assert peer.writer.connection is not None
        try:
            peer.writer.flush()
        except OSError as error:
            self._cannot_write(peer, error)
        if not peer.writer.waiting:
            self._loop.remove_writer(peer.writer.connection)
            peer.drained.set()

    def _cannot_write(self, peer: _PayloadPeer, error: OSError) -> None:
        """Drop what waits, and end the connection: the peer would take a later payload for the one that is missing.

        The loss is reported where this rank reads, after the last payloads of the peer.
        """
        assert peer.writer.connection is not None
        # The connection has not ended yet.
        if not isinstance(error, ConnectionError):
            peer.cause = f"a payload could not be sent to it: {error}"
        # The connection may have ended already.
        with contextlib.suppress(OSError):
            peer.writer.connection.shutdown(socket.SHUT_RDWR)
        self._drop_unsent(peer)

    def _drop_unsent(self, peer: _PayloadPeer) -> None:
        peer.writer.waiting.clear()
        peer.drained.set()

    def _watch(self, rank: int, connection: socket.socket) -> None:
        """Handle the end of the connection for sending; nothing else comes on it."""
        try:
            if connection.recv(1):
                self._lose(rank, "it has sent bytes where it only receives")
                return
        except BlockingIOError:
            return
        except OSError:
            pass  # it has ended by a reset, which is no other loss than an end in good order
        self._lose(rank, self._peers[rank].cause)

    # -- receiving --------------------------------------------------------------------------------

    def _read_once(self, rank: int) -> bool:
        """Read once from `rank`, and deliver a message that is complete; returns whether there may be more."""
        reader = self._peers[rank].reader
        if reader is None or self._closed:
            return False
        try:
            message = reader.read()
        except BlockingIOError:
            return False
        except OSError:
            self._lose(rank, self._peers[rank].cause)
            return False
        except ProtocolError as error:
            self._lose(rank, f"it has broken the protocol: {error}")
            return False
        if message is not None:
            self._received(rank, message)
        return True

    def _read_all(self, rank: int) -> None:
        while self._read_once(rank):
            pass

    # -- the end ----------------------------------------------------------------------------------

    def _lose(self, rank: int, cause: str) -> None:
        peer = self._peers[rank]
        if peer.is_lost or self._closed:
            return
        peer.is_lost = True
        # A lost rank's payloads come before its loss.
        self._read_all(rank)
        self._drop(peer)
        if not self._closed:
            self._lost(Loss(rank, cause))

    def _drop(self, peer: _PayloadPeer) -> None:
        peer.made.cancel()
        peer.accepted.cancel()
        for connection in peer.connections():
            self._close_connection(connection)
        peer.reader = peer.writer.connection = None
        self._drop_unsent(peer)

    def _close_connection(self, connection: socket.socket) -> None:
        assert self._loop is not None
        self._loop.remove_reader(connection)
        self._loop.remove_writer(connection)
        connection.close()


def _listening(address: str, backlog: int) -> socket.socket:
    """A socket that listens at `address`. Raises OSError if that fails, and UsageError for no address."""
    family, where = reach.resolved(address)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(family))
        # The connections of a world that has ended keep its ports for a minute. Two listeners still exclude each other.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(backlog)
        listener.setblocking(False)
        undo.pop_all()
        return listener
