"""Messages through ZeroMQ: ipc sockets in a private folder on one host, tcp between hosts.

Every rank binds one ROUTER, which only receives, and connects one DEALER to each peer's, which only sends. One reader
drains the ROUTER; it is never cancelled and never awaits. The file descriptors of ZeroMQ are edge-triggered: whoever
wakes up must read until nothing is left.

A peer's death is seen by the monitor of the DEALER to it, and on one host also by a pidfd of its process, because a
process that it has forked may keep its connections open. That it is frozen, or the network to it cut, is seen by its
heartbeat, a second DEALER. Ranks of one host feel the heartbeat of the next two of them only, and tell what they
notice; those of other hosts feel everybody's, since a network may part any two.

A peer shows that it belongs to the job at the `ConnectionPolicy`, and by its routing id, which follows from the job's
key and its rank. UnauthenticatedPeers are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncoll import forks
from asyncoll.errors import PeerLostError, UsageError
from asyncoll.transport import MAX_FRAME_BYTES, Buffer, Receiver, check_frames
from asyncoll.transport.addresses import check_path, refuses_connections
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import Key
from asyncoll.transport.messages.authentication import UnauthenticatedPeers
from asyncoll.transport.messages.connection_policy import ConnectionPolicy
from asyncoll.transport.messages.monitor import (
    FREEZE_S,
    Heartbeat,
    Monitor,
    ProcessWatch,
    bound_address,
    silence,
    to_zeromq,
)

_PACKED_MAX = 1 << 13  # bytes of a message that is copied into one ZeroMQ frame; several frames cost more than that
_FIRST_MAX = 255  # bytes
_PACKED = struct.Struct("<BBH")  # frames of a packed message; bytes of the first frame, and of the third
_LAST = int(zmq.NOBLOCK)  # plain numbers: every flag that pyzmq makes of two costs a microsecond
_MORE = _LAST | int(zmq.SNDMORE)
_HIGH_WATER_MARK = 64  # messages queued in ZeroMQ for one peer; the rest waits in `_Peer.queue`
_BATCH = 64  # messages handed over before the loop may do something else
_SEAL_BYTES = 64  # that CURVE may add to a frame
_FLUSH_MS = 200  # for ZeroMQ's threads to send what was said last; what is for a peer that is gone stays for so long
_LAST_WORDS_S = 0.03  # what a peer said before it closed may be on its way on the other connection for so long
_NEIGHBOURS = 2  # of one host whose heartbeat a rank feels: if the one who would notice is busy, the other does


def ipc_address(folder: Path, rank: int) -> str:
    """Where `rank` listens in a folder that only this user can enter."""
    path = folder / str(rank)
    check_path(path)
    return f"ipc://{path}"


@contextlib.contextmanager
def local_world(size: int) -> Iterator[list[ZeroMQTransport]]:
    """One transport for each rank of a world inside this process, over real sockets."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:  # made with mode 0700
        addresses = [ipc_address(Path(folder), rank) for rank in range(size)]
        transports = [ZeroMQTransport(rank, size, b"local") for rank in range(size)]
        for transport, address in zip(transports, addresses, strict=True):
            transport.bind(address)
            transport.peers = addresses
        yield transports


class _Peer:
    """The connection to one peer: a DEALER, its monitor, its heartbeat, and what ZeroMQ would not take yet."""

    def __init__(
        self,
        rank: int,
        dealer: zmq.Socket[bytes],
        stands: Callable[[], None],
        gone: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.dealer = dealer
        self.monitor = Monitor(dealer, stands, gone, failed)
        self.heartbeat: Heartbeat | None = None
        self.process: ProcessWatch | None = None
        self.stands = False  # now, or once
        self.ended = False
        self.queue: deque[list[bytes]] = deque()
        self.drained: list[asyncio.Future[None]] = []
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = False


class ZeroMQTransport:
    """A `Transport` over ZeroMQ. `bind` and set `peers`, the addresses by rank, before `start`.

    An empty address is that of a rank to which nothing will be sent. `are_bound` says that all peers listened at their
    addresses when these were set: then a peer that refuses a connection has died.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        job: bytes,
        *,
        encrypted: bool = False,
        freeze_s: float = FREEZE_S,
        joining: Joining | None = None,
    ) -> None:
        """`job` is a secret of this run of the job. `encrypted` is what goes over tcp; it is authentic in any case.

        `freeze_s` is how long a peer may show no sign of life; 0 if for ever. `joining` bounds the time to `start`.
        """
        key = Key(job)
        self.rank = rank
        self.size = size
        self._freeze_s = freeze_s
        self._joining = joining
        self.peers: Sequence[str] = ()
        self.are_bound = False
        self._unauthenticated = UnauthenticatedPeers(f"rank {rank}")
        self._routing_ids = [b"asyncoll" + key.derive("routing id", peer) for peer in range(size)]
        self._sources = {routing_id: peer for peer, routing_id in enumerate(self._routing_ids)}
        self._context = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _SEAL_BYTES * encrypted)
        self._policy = ConnectionPolicy(rank, size, key, self._unauthenticated, encrypted=encrypted)
        self._policy.attach(self._router)
        self._peers: dict[int, _Peer] = {}
        self._receiver: Receiver | None = None
        self._closed = False
        self._listening: list[str] = []
        forks.register(self)

    def bind(self, address: str) -> str:
        """Listen on `ipc://path`, and then perhaps on `tcp://ip:0`, a free port; returns the address to connect to."""
        self._policy.guard(address)
        try:
            self._router.bind(to_zeromq(address))
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {address}: {error}") from error
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        self._listening.append(bound_address(self._router))
        return self._listening[-1]

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop = loop = asyncio.get_running_loop()
        loop.add_reader(self._router.fileno(), self._read)
        self._policy.open(loop)
        for rank, address in enumerate(self.peers):
            if rank != self.rank and address:
                self._connect(rank, address)
        self._read()
        if self._peers:
            joining = self._joining or Joining(self.rank, self.size)
            await joining.over(self._all_connected(), self._unconnected, "not connected yet")

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        check_frames(dest, self.size, frames)
        if self._closed:
            return
        if dest == self.rank:
            assert self._receiver is not None
            self._loop.call_soon(self._receive_own, [bytes(frame) for frame in frames])
            return
        peer = self._peers[dest]
        if peer.gone:
            return
        if peer.queue or not _try_send(peer, frames):
            peer.queue.append([bytes(frame) for frame in frames])
            if len(peer.queue) == 1:
                self._flush_when_writable(peer)

    async def drain(self, dest: int) -> None:
        await asyncio.sleep(0)  # let the reader in between two segments
        peer = self._peers.get(dest)
        if peer is not None and peer.queue:
            future = self._loop.create_future()
            peer.drained.append(future)
            await future

    async def close(self, *, flush: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        forks.unregister(self)
        if self._receiver is not None:
            self._loop.remove_reader(self._router.fileno())
        for peer in self._peers.values():
            peer.monitor.look()  # nobody waits for what is for those who are gone
            self._drop(peer, linger_ms=_FLUSH_MS if flush and not peer.ended else 0)
        self._policy.close(opened=self._receiver is not None)
        self._router.close(linger=0)
        # Waits for what lingers: the peers' I/O threads take it whatever their loops are doing.
        self._context.term()

    def abandon(self, parent: int) -> None:
        """In a forked child: peers must see the parent's death although the child lives."""
        self._closed = True
        forks.give_up_connections([*self._listening, *self.peers])

    def collect(self) -> None:
        """Hand over all that has come."""
        while self._read_batch():
            pass

    # -- receiving --------------------------------------------------------------------------------

    def _read(self) -> None:
        """Hand over what has come. Runs again until nothing is left: the descriptor tells only of what is new."""
        if self._read_batch():
            self._loop.call_soon(self._read)

    def _read_batch(self) -> bool:
        """Hand over some messages; returns whether there may be more."""
        for _ in range(_BATCH):
            if self._closed:
                return False
            try:
                identity = self._router.recv(_LAST)
            except zmq.Again:
                return False
            frames: list[Any] = [self._router.recv(_LAST)]
            while self._router.getsockopt(zmq.RCVMORE):
                frames.append(self._router.recv(_LAST, copy=False))
            self._deliver(identity, frames)
        return True

    def _deliver(self, identity: bytes, frames: list[Any]) -> None:
        source = self._sources.get(identity)
        if source is None:
            self._unauthenticated.tell(f"dropped a message from a stranger ({len(frames)} frames)")
            return
        assert self._receiver is not None
        self._receiver.received(source, _unpack(frames))

    def _receive_own(self, frames: list[bytes]) -> None:
        if not self._closed and self._receiver is not None:
            self._receiver.received(self.rank, list(frames))

    # -- peers ------------------------------------------------------------------------------------

    async def _all_connected(self) -> None:
        """Raises PeerLostError for a peer that has refused its connection."""
        await asyncio.wait([peer.connected for peer in self._peers.values()], return_when=asyncio.FIRST_EXCEPTION)
        for peer in self._peers.values():
            if peer.connected.done() and not peer.connected.cancelled():
                peer.connected.result()

    def _unconnected(self) -> list[int]:
        return [peer.rank for peer in self._peers.values() if not peer.connected.done()]

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        return socket

    def _connect(self, rank: int, address: str) -> None:
        dealer = self._dealer(rank, address)
        dealer.setsockopt(zmq.ROUTING_ID, self._routing_ids[self.rank])
        peer = self._peers[rank] = _Peer(
            rank,
            dealer,
            partial(self._connected, rank),
            partial(self._disconnected, rank),
            partial(self._refused, rank, address),
        )
        dealer.connect(to_zeromq(address))
        peer.monitor.look()

    def _dealer(self, rank: int, address: str) -> zmq.Socket[bytes]:
        """One that may connect to `rank`, which listens at `address`."""
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        self._policy.introduce(dealer, rank, address)
        return dealer

    def _connected(self, rank: int) -> None:
        """With its heartbeat, if that is felt, or a peer that stops in this moment would never be missed."""
        peer = self._peers[rank]
        if peer.stands:
            return
        peer.stands = True
        peer.process = ProcessWatch(peer.monitor.connection, self.peers[rank], partial(self._ended, peer))
        if self._freeze_s and rank in self._felt():
            address, dealer = self.peers[rank], self._dealer(rank, self.peers[rank])
            lose = partial(self._silent, peer)
            peer.heartbeat = Heartbeat(dealer, address, self._freeze_s, partial(_set, peer.connected), lose)
        else:
            _set(peer.connected)

    def _refused(self, rank: int, address: str) -> None:
        """A connection could not be made. ZeroMQ does not say why, and tries again."""
        peer = self._peers[rank]
        if self.are_bound and not peer.stands and not peer.connected.done() and refuses_connections(address):
            peer.connected.set_exception(PeerLostError(rank, f"its process has ended: {address} refuses connections"))
            peer.connected.exception()  # mark it as seen: whoever waits may have given up

    def _felt(self) -> set[int]:
        """The ranks whose heartbeat this one feels."""
        here = [rank for rank, address in enumerate(self.peers) if rank == self.rank or address.startswith("ipc:")]
        place = here.index(self.rank)
        after = here[place + 1 :] + here[:place]
        return set(after[:_NEIGHBOURS]) | set(range(self.size)).difference(here)

    def _disconnected(self, rank: int) -> None:
        peer = self._peers[rank]
        if peer.stands and not peer.gone:
            peer.ended = True
            # It must not connect again: who has been cut off takes all others for lost, and would tell them.
            with contextlib.suppress(zmq.ZMQError):  # this may be the second time
                peer.dealer.disconnect(to_zeromq(self.peers[rank]))
            self._loop.call_later(_LAST_WORDS_S, self._lose, peer, "its connection closed", 0.0)

    def _ended(self, peer: _Peer) -> None:
        """Its process has. Processes that it has forked in C code may still have its connections open."""
        self._loop.call_later(_LAST_WORDS_S, self._lose, peer, "its process has ended", 0.0)

    def _silent(self, peer: _Peer) -> None:
        """If its process has died, the other connection tells so, now or soon."""
        self._loop.call_later(2 * _LAST_WORDS_S, self._lose, peer, silence(self._freeze_s), self._freeze_s)

    def _lose(self, peer: _Peer, cause: str, last_seen_s: float) -> None:
        if self._closed or peer.gone:
            return
        self.collect()
        self._drop(peer, linger_ms=0)
        assert self._receiver is not None
        self._receiver.lost(peer.rank, cause, last_seen_s)

    def _drop(self, peer: _Peer, *, linger_ms: int) -> None:
        if peer.gone:
            return
        peer.gone = True
        loop = self._loop
        if peer.queue:
            loop.remove_reader(peer.dealer.fileno())
            peer.queue.clear()
        peer.monitor.close()
        if peer.process is not None:
            peer.process.close()
        if peer.heartbeat is not None:
            peer.heartbeat.close()
        peer.dealer.close(linger=linger_ms)
        peer.connected.cancel()
        self._release(peer)

    # -- a peer that is slower than its senders ---------------------------------------------------

    def _flush_when_writable(self, peer: _Peer) -> None:
        loop = self._loop
        loop.add_reader(peer.dealer.fileno(), self._flush, peer)
        loop.call_soon(self._flush, peer)  # it may have become writable before anybody watched

    def _flush(self, peer: _Peer) -> None:
        if peer.gone or not peer.queue:
            return
        while peer.queue:
            if not _try_send(peer, peer.queue[0]):
                return
            peer.queue.popleft()
        self._loop.remove_reader(peer.dealer.fileno())
        self._release(peer)

    def _release(self, peer: _Peer) -> None:
        waiters, peer.drained = peer.drained, []
        for future in waiters:
            if not future.done():
                future.set_result(None)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _try_send(peer: _Peer, frames: Sequence[Buffer]) -> bool:
    """Give one message to ZeroMQ, which copies it; False if its queue for the peer is full."""
    packed = _pack(frames)
    try:
        for frame in packed[:-1]:
            peer.dealer.send(frame, _MORE)
        peer.dealer.send(packed[-1], _LAST)
    except zmq.Again:  # from the first frame or from none
        return False
    return True


def _pack(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """The ZeroMQ frames of a message: as few as possible without copying much.

    The first says how long the frames are, and holds the first and the third. The second, the payload, follows in it
    or, if it is longer, after it. What does not fit that form goes as it is, after an empty frame.
    """
    count = len(frames)
    first, third = len(frames[0]), len(frames[2]) if count > 2 else 0
    if first > _FIRST_MAX or third > _PACKED_MAX or count > 3:
        return (b"", *frames)
    packed = (_PACKED.pack(count, first, third), frames[0], *frames[2:])
    if count > 1 and len(frames[1]) > _PACKED_MAX:
        return (b"".join(packed), frames[1])
    return (b"".join((*packed, *frames[1:2])),)


def _unpack(received: list[Any]) -> list[Buffer]:
    """The frames of a message; for what `_pack` did not make, whatever, which its receiver will not take for one."""
    first = received[0]
    if not first:
        return [received[1].bytes, *received[2:]] if len(received) > 1 else received
    if len(first) < _PACKED.size:
        return received
    count, length, riding = _PACKED.unpack_from(first)
    packed = memoryview(first)
    middle = _PACKED.size + length
    frames: list[Buffer] = [first[_PACKED.size : middle], *received[1:]]
    if count > 1 and len(received) == 1:
        frames.append(packed[middle + riding :])
    if count > 2:
        frames.append(packed[middle : middle + riding])
    return frames
