"""Messages through ZeroMQ: ipc sockets in a private folder on one host, tcp between hosts.

Every rank binds one ROUTER, which only receives, and connects one DEALER to the ROUTER of each peer, which only sends.
One callback of the loop reads the ROUTER; it never awaits, so it cannot be cancelled. The descriptors of ZeroMQ are
edge-triggered: a callback must read until nothing is left.

A rank notices the death of a peer by the end of its DEALER's connection. On one host it also watches a pidfd of the
peer's process, because a forked child of that process may keep the connection open. It notices a frozen process, or a
cut network, by the heartbeats on a second DEALER. A process of its own host that is silent and not frozen, according to
`/proc`, waits for a processor, and is not lost. One of another host has more time if answers have come late
(`Patience`). A rank monitors the heartbeats of the next two ranks of its own host
only, because ranks report the losses that they notice; it monitors all ranks of other hosts, because a network may
separate any two ranks.

The `ConnectionPolicy` authenticates peers. In addition a peer needs the routing id of its rank, which is derived from
the job's key: messages with any other routing id are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncoll import forks
from asyncoll.errors import PeerLostError
from asyncoll.transport import MAX_FRAME_BYTES, Buffer, Loss, Receiver, check_frames, settle
from asyncoll.transport.addresses import check_path, process_behind, refuses_connections
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import Key
from asyncoll.transport.meeting_folder import meeting_folder
from asyncoll.transport.messages import reach
from asyncoll.transport.messages.connection_policy import ConnectionPolicy
from asyncoll.transport.messages.monitor import Heartbeat, Monitor, bound_address, to_zeromq
from asyncoll.transport.messages.patience import Patience
from asyncoll.transport.messages.peer_reports import FREEZE_S, UnauthenticatedPeers, silence_cause
from asyncoll.transport.messages.reach import LONG
from asyncoll.transport.processes import kill

logger = logging.getLogger("asyncoll")

# A message up to this many bytes is copied into one ZeroMQ frame. Each further frame costs some microseconds of Python
# and of ZeroMQ at both ends, which is more than the copy.
_PACKED_MAX = 1 << 13
_FIRST_MAX = 255  # bytes
_PACKED = struct.Struct("<BBH")  # the number of frames of a packed message; the bytes of the first and the third frame
# Flags for the final frame of a message and for the others. They are plain integers, because `|` on the enums of pyzmq
# costs a microsecond.
_FINAL = int(zmq.NOBLOCK)
_MORE = _FINAL | int(zmq.SNDMORE)
_EVENTS_NOW, _HAS_MORE, _READABLE = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_HIGH_WATER_MARK = 64  # messages queued in ZeroMQ for one peer; further ones wait in `_PeerConnection.queue`
_BATCH = 64  # messages delivered before the loop may run other callbacks
_CURVE_BYTES = 64  # the bytes that CURVE may add to a frame
_END_S = 1.0  # the kernel ends a process within milliseconds
_FLUSH_MS = 200  # the time to send queued messages at `close`; messages to a peer that has ended take all of it
_IN_FLIGHT_S = 0.03  # the last messages of a peer may arrive this much later than the end of its other connection
# The ranks of one process freeze together, which none of them can notice. On a busy machine the threads of ZeroMQ may
# get no processor time for longer than `FREEZE_S`.
_LOCAL_FREEZE_S = 20.0
_MONITORED_NEIGHBOURS = 2  # ranks of the own host; two, because one of the two monitors of a rank may be busy


def ipc_address(folder: Path, rank: int) -> str:
    """The address of `rank` in a folder that only this user can enter. Raises UsageError if the path is too long."""
    path = folder / str(rank)
    check_path(path)
    return f"ipc://{path}"


@contextlib.contextmanager
def local_world(size: int) -> Iterator[list[ZeroMQTransport]]:
    """One transport for each rank of a world inside this process, over real sockets.

    At its end this closes the transports that were never started. The caller closes those that it has started.
    """
    transports: list[ZeroMQTransport] = []
    with meeting_folder() as folder:
        addresses = [ipc_address(folder, rank) for rank in range(size)]
        try:
            for rank, address in enumerate(addresses):
                transports.append(ZeroMQTransport(rank, size, b"local", freeze_s=_LOCAL_FREEZE_S))
                transports[rank].bind(address)
                transports[rank].peers = addresses
            yield transports
        finally:
            for transport in transports:
                if transport._receiver is None:
                    transport._close(flush=False)


class _PeerConnection:
    """The connection to one peer: the DEALER, its monitor, its heartbeat, and the messages that wait for ZeroMQ."""

    monitor: Monitor

    def __init__(self, rank: int, address: str, dealer: zmq.Socket[bytes]) -> None:
        self.rank = rank
        self.address = address
        self.dealer = dealer
        # The lock guards `dealer`, `queue` and `is_dropped`, because `send_directly` runs in other threads.
        self.lock = threading.Lock()
        self.connection = -1  # the descriptor of the newest connection; -1 before the first
        self.pid, self.process = 0, -1  # of its process, if that is on this host: the number and a pidfd
        self.is_monitored = False
        self.closing = contextlib.ExitStack()  # of the monitor, the watch on the process and the heartbeat
        self.was_connected = False  # now or earlier
        self.is_disconnected = False
        self.turns_away = False  # its address has ended a connection before the handshake was over
        self.queue: deque[list[bytes]] = deque()  # while ZeroMQ's own queue for the peer is full
        self.drained = asyncio.Event()  # set while `queue` is empty
        self.drained.set()
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_dropped = False  # lost or closed: the DEALER is closed

    def forget_process(self) -> None:
        """Close the pidfd, which names the process also after its end, when others may get its number."""
        process, self.process = self.process, -1
        if process >= 0:
            os.close(process)


class ZeroMQTransport:
    """A `Transport` over ZeroMQ. Before `start`, call `bind` and set `peers`, the addresses by rank.

    An empty address means that nothing will be sent to that rank. Set `are_bound` if all peers listened at their
    addresses before these were set: then a peer that refuses a connection has died.
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
        """`job` is the secret of this run of the job.

        With `encrypted`, traffic over tcp is encrypted; it is authenticated in any case. A peer without a sign of life
        for `freeze_s` seconds is lost, or later if it waits for a processor (`Heartbeat`); 0 means never. `joining` has
        the time limit of `start`.
        """
        key = Key(job)
        self.rank = rank
        self.size = size
        self._patience = Patience(freeze_s)
        self._joining = joining
        self.peers: Sequence[str] = ()
        self._members: Sequence[int] = range(size)
        self.are_bound = False
        self._unauthenticated = UnauthenticatedPeers(f"rank {rank}")
        self._routing_ids = [b"asyncoll" + key.derive("routing id", peer) for peer in range(size)]
        self._sources = {routing_id: peer for peer, routing_id in enumerate(self._routing_ids)}
        self._context = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _CURVE_BYTES * encrypted)
        self._policy = ConnectionPolicy(rank, size, key, self._unauthenticated, encrypted=encrypted)
        self._policy.attach(self._router)
        self._peers: dict[int, _PeerConnection] = {}
        self._receiver: Receiver | None = None
        self._closed = False
        self._listening: list[str] = []
        forks.register(self)

    def bind(self, address: str, ports: Sequence[int] = ()) -> str:
        """Listen at `address`, and return the address to connect to. Raises UsageError if that fails.

        `address` is `ipc://path`, or `tcp://ip:0` for a free port. Bind to ipc before tcp to have both. With `ports`,
        `address` is `tcp://ip`, and the first of the ports that is free is taken.
        """
        self._policy.guard(address)
        self._router.setsockopt(zmq.IPV6, "[" in address)
        reach.bind_to_one(address, ports, lambda each: self._router.bind(to_zeromq(each)))
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        self._listening.append(bound_address(self._router))
        return self._listening[-1]

    async def start(self, receiver: Receiver) -> None:
        self.connect(receiver)
        await self.connected()

    def connect(self, receiver: Receiver) -> None:
        """The first part of `start`: begin to connect to all peers. Messages may be sent from now on."""
        self._receiver = receiver
        self._loop = loop = asyncio.get_running_loop()
        loop.add_reader(self._router.fileno(), self._read)
        self._policy.start()
        for rank, address in enumerate(self.peers):
            if rank != self.rank and address:
                self._connect(rank, address)
        self._read()

    async def connected(self) -> None:
        """The second part of `start`: wait for the connections to all peers."""
        if self._peers:
            joining = self._joining or Joining(self.rank, self.size)
            await joining.over(self._all_connected(), self._unconnected, self._why_unconnected)

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        check_frames(dest, self.size, frames)
        if self._closed:
            return
        if dest == self.rank:
            assert self._receiver is not None
            self._loop.call_soon(self._deliver_own, [bytes(frame) for frame in frames])
            return
        peer = self._peers[dest]
        with peer.lock:
            # A message must not overtake those in the queue.
            if peer.is_dropped or (not peer.queue and _try_send(peer, frames)):
                return
            peer.queue.append([bytes(frame) for frame in frames])
            if len(peer.queue) > 1:
                return
        peer.drained.clear()
        self._loop.add_reader(peer.dealer.fileno(), self._flush, peer)
        # The socket may have become writable before the reader was added. ZeroMQ signals each change once.
        self._loop.call_soon(self._flush, peer)

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        check_frames(dest, self.size, frames)
        peer = self._peers.get(dest)
        if peer is None:
            return False
        # A ZeroMQ socket may be used in several threads, one after another, with a full fence between them. This does
        # not wait for the lock: a finalizer may call this in a thread that has it.
        if not peer.lock.acquire(blocking=False):
            return False
        try:
            return not peer.is_dropped and not peer.queue and _try_send(peer, frames)
        finally:
            peer.lock.release()

    async def drain(self, dest: int) -> None:
        # The loop must also read between two segments of a long array.
        await asyncio.sleep(0)
        if dest in self._peers:
            await self._peers[dest].drained.wait()

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        self._receiver, self._members = receiver, sorted(members)
        for peer in self._peers.values():
            if peer.rank not in members:
                self._drop(peer, linger_ms=_FLUSH_MS)
                if peer.rank in to_kill and peer.process >= 0 and not kill(peer.process, peer.pid, _END_S):
                    logger.warning("rank %d is lost, and its process %d has not ended", peer.rank, peer.pid)
                peer.forget_process()
        monitored = self._monitored_ranks() if self._patience.freeze_s else ()
        for peer in self._peers.values():
            if peer.rank in monitored and not (peer.is_monitored or peer.is_dropped):
                self._monitor(peer)

    async def close(self, *, flush: bool = False) -> None:
        self._close(flush=flush)

    def discard(self) -> None:
        """Close a transport that was not started, in the thread that has made it.

        Otherwise the garbage collector would wait for the end of its context, in any thread and without limit.
        """
        self._close(flush=False)

    def _close(self, *, flush: bool) -> None:
        if self._closed:
            return
        self._closed = True
        forks.unregister(self)
        if self._receiver is not None:
            self._loop.remove_reader(self._router.fileno())
        for peer in self._peers.values():
            peer.monitor.read()  # notes a loss, because queued messages to a lost peer must not delay the end
            self._drop(peer, linger_ms=_FLUSH_MS if flush and not peer.is_disconnected else 0)
            peer.forget_process()
        self._policy.close()
        # Closes the ROUTER, and any socket that was left open when `start` failed. Blocks until queued messages have
        # been sent, for _FLUSH_MS at most. The I/O threads of the peers receive them, even if the loops of the peers
        # are busy.
        self._context.destroy(linger=0)

    def abandon(self, parent: int) -> None:
        """Give up the connections in a forked child, so that peers notice the death of the parent."""
        self._closed = True
        forks.give_up_connections([*self._listening, *self.peers])

    def collect(self) -> None:
        """Deliver all messages that have arrived."""
        while self._read_batch():
            pass

    # -- receiving --------------------------------------------------------------------------------

    def _read(self) -> None:
        """Deliver a batch of messages, and call this again soon if there may be more: the descriptor would not."""
        if self._read_batch():
            self._loop.call_soon(self._read)

    def _read_batch(self) -> bool:
        """Deliver at most _BATCH messages; returns whether there may be more."""
        router, receiver = self._router, self._receiver
        assert receiver is not None
        for _ in range(_BATCH):
            # Asking first is cheaper than a `recv` that fails: an exception takes 2 us, and `recv` releases the GIL,
            # which the caller's thread may take.
            if self._closed or not int(router.getsockopt(_EVENTS_NOW)) & _READABLE:
                return False
            identity = router.recv(_FINAL)
            frames: list[Any] = [router.recv(_FINAL)]
            while router.getsockopt(_HAS_MORE):
                frames.append(router.recv(_FINAL, copy=False))
            source = self._sources.get(identity)
            if source is None:
                self._unauthenticated.log(f"dropped a message from an unauthenticated peer ({len(frames)} frames)")
                continue
            if message := _unpack(frames):
                receiver.received(source, message)
        return True

    def _deliver_own(self, frames: list[bytes]) -> None:
        if not self._closed and self._receiver is not None:
            self._receiver.received(self.rank, list(frames))

    # -- peers ------------------------------------------------------------------------------------

    async def _all_connected(self) -> None:
        """Wait for the connections to all peers.

        Raises PeerLostError for a peer that has refused its connection, and UsageError for one that gives no answer,
        or that long packets do not reach.
        """
        peers = [peer for peer in self._peers.values() if self._is_told(peer)]
        checks = [asyncio.ensure_future(self._check_answer(peer)) for peer in peers]
        try:
            await reach.all_done([*(peer.connected for peer in self._peers.values()), *checks])
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _check_answer(self, peer: _PeerConnection) -> None:
        await reach.check_answer(peer.rank, peer.address, peer.connected, lambda: peer.connection >= 0)
        await asyncio.wait([peer.connected])
        await reach.check_long_packets(peer.rank, peer.address, peer.connection)

    def _is_told(self, peer: _PeerConnection) -> bool:
        """Whether the peer is on another host, and listened before it told its address."""
        return self.are_bound and peer.address.startswith("tcp:")

    def _unconnected(self) -> list[int]:
        return [peer.rank for peer in self._peers.values() if not peer.connected.done()]

    def _why_unconnected(self) -> str:
        return reach.why_unconnected(self.peers, {rank: self._peers[rank].turns_away for rank in self._unconnected()})

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        made.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        return made

    def _connect(self, rank: int, address: str) -> None:
        dealer = self._dealer(rank, address)
        dealer.setsockopt(zmq.ROUTING_ID, self._routing_ids[self.rank])
        peer = _PeerConnection(rank, address, dealer)
        peer.monitor = Monitor(dealer, _EVENTS, partial(self._handle_event, peer))  # fails if too many files are open
        peer.closing.callback(peer.monitor.close)
        self._peers[rank] = peer
        dealer.connect(to_zeromq(address))
        if self._is_told(peer):
            dealer.send(LONG, _FINAL)
        peer.monitor.start()

    def _dealer(self, rank: int, address: str) -> zmq.Socket[bytes]:
        """Return a DEALER with the credentials to connect to `rank`, which listens at `address`."""
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        dealer.setsockopt(zmq.IPV6, "[" in address)
        self._policy.introduce(dealer, rank, address)
        return dealer

    def _handle_event(self, peer: _PeerConnection, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            peer.connection = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected(peer)
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(peer)
        else:
            self._refused(peer)

    def _connected(self, peer: _PeerConnection) -> None:
        """Begin to watch a peer whose connection has been made.

        A monitored peer counts as connected once its heartbeat runs, too. Otherwise nothing would notice a peer that
        stops before that.
        """
        if peer.was_connected:
            return
        peer.was_connected = True
        peer.pid, process = process_behind(peer.connection, peer.address)
        if process is not None:
            peer.process = process
            self._loop.add_reader(process, self._process_ended, peer, process)
            peer.closing.callback(self._loop.remove_reader, process)
        if self._patience.freeze_s and peer.rank in self._monitored_ranks():
            self._monitor(peer)
        else:
            settle(peer.connected)

    def _monitor(self, peer: _PeerConnection) -> None:
        peer.is_monitored = True
        dealer, alive = self._dealer(peer.rank, peer.address), partial(settle, peer.connected)
        heartbeat = Heartbeat(dealer, peer.address, self._patience, alive, partial(self._silent, peer), peer.pid)
        peer.closing.callback(heartbeat.close)

    def _refused(self, peer: _PeerConnection) -> None:
        """Handle a connection that could not be made. ZeroMQ does not say why, and tries again."""
        if not self.are_bound or peer.was_connected or peer.connected.done():
            return
        if refuses_connections(peer.address):
            peer.connected.set_exception(PeerLostError(peer.rank, reach.refused(peer.address)))
            peer.connected.exception()  # marks it as retrieved: the wait may have ended already

    def _monitored_ranks(self) -> set[int]:
        """The ranks whose heartbeats this rank monitors."""
        # Each rank monitors the next ranks of its host, in a ring, so each rank of the host is monitored.
        here = [rank for rank in self._members if rank == self.rank or self.peers[rank].startswith("ipc:")]
        index = here.index(self.rank)
        after = here[index + 1 :] + here[:index]
        return set(after[:_MONITORED_NEIGHBOURS]) | set(self._members).difference(here)

    def _disconnected(self, peer: _PeerConnection) -> None:
        peer.turns_away = not peer.was_connected
        if peer.was_connected and not peer.is_dropped:
            peer.is_disconnected = True
            # It must not connect again: a peer that was cut off takes all other ranks for lost, and would report that.
            with contextlib.suppress(zmq.ZMQError), peer.lock:  # an error if it is disconnected already
                peer.dealer.disconnect(to_zeromq(peer.address))
            self._loop.call_later(_IN_FLIGHT_S, self._lose, peer, "its connection closed", 0.0)

    def _process_ended(self, peer: _PeerConnection, process: int) -> None:
        """Handle the end of a peer's process. Its connections may still be open in children that C code has forked."""
        self._loop.remove_reader(process)
        self._loop.call_later(_IN_FLIGHT_S, self._lose, peer, "its process has ended", 0.0)

    def _silent(self, peer: _PeerConnection, limit_s: float) -> None:
        self._lose(peer, f"{silence_cause(limit_s)} (give it more time with ASYNCOLL_FREEZE_S)", limit_s)

    def _lose(self, peer: _PeerConnection, cause: str, last_seen_s: float) -> None:
        if self._closed or peer.is_dropped:
            return
        # A lost peer's messages come before its loss.
        self.collect()
        assert self._receiver is not None
        self._receiver.lost(Loss(peer.rank, cause, last_seen_s))
        # A silent peer may come back, and reads then what the receiver has sent it.
        self._drop(peer, linger_ms=_FLUSH_MS if last_seen_s else 0)

    def _drop(self, peer: _PeerConnection, *, linger_ms: int) -> None:
        if peer.is_dropped:
            return
        with peer.lock:
            peer.is_dropped = True
        if peer.queue:
            self._loop.remove_reader(peer.dealer.fileno())
            peer.queue.clear()
        peer.closing.close()
        peer.dealer.close(linger=linger_ms)
        peer.connected.cancel()
        peer.drained.set()

    # -- a peer that is slower than its senders ---------------------------------------------------

    def _flush(self, peer: _PeerConnection) -> None:
        if peer.is_dropped or not peer.queue:
            return
        with peer.lock:
            while peer.queue and _try_send(peer, peer.queue[0]):
                peer.queue.popleft()
            if peer.queue:
                return
        self._loop.remove_reader(peer.dealer.fileno())
        peer.drained.set()


def _try_send(peer: _PeerConnection, frames: Sequence[Buffer]) -> bool:
    """Pass one message to ZeroMQ, which copies it. Returns False, and sends nothing, if its queue is full."""
    packed = _pack(frames)
    try:
        for frame in packed[:-1]:
            peer.dealer.send(frame, _MORE)
        peer.dealer.send(packed[-1], _FINAL)
    # ZeroMQ raises this at the first frame of a message only.
    except zmq.Again:
        return False
    return True


def _pack(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    """Return the ZeroMQ frames for a message: as few as possible without copying much.

    The first ZeroMQ frame contains the lengths (_PACKED), the first frame and the third frame. The second frame, the
    payload, is at its end if it is short, and otherwise in a ZeroMQ frame of its own. A message that does not fit this
    format is sent unchanged, after an empty frame.
    """
    count = len(frames)
    if count == 2 and len(frames[0]) <= _FIRST_MAX and len(frames[1]) <= _PACKED_MAX:  # most messages
        return (b"".join((_PACKED.pack(2, len(frames[0]), 0), *frames)),)
    first, third = len(frames[0]), len(frames[2]) if count > 2 else 0
    if first > _FIRST_MAX or third > _PACKED_MAX or count > 3:
        return (b"", *frames)
    packed = (_PACKED.pack(count, first, third), frames[0], *frames[2:])
    if count > 1 and len(frames[1]) > _PACKED_MAX:
        return (b"".join(packed), frames[1])
    return (b"".join((*packed, *frames[1:2])),)


def _unpack(received: list[Any]) -> list[Buffer]:
    """Return the frames of a message, none for `LONG`. Malformed input yields frames that `wire.decode` rejects."""
    first = received[0]
    if first == LONG:
        return []
    if not first:
        return [received[1].bytes, *received[2:]] if len(received) > 1 else received
    if len(first) < _PACKED.size:
        return received
    count, length, third = _PACKED.unpack_from(first)
    packed = memoryview(first)
    middle = _PACKED.size + length
    frames: list[Buffer] = [first[_PACKED.size : middle], *received[1:]]
    if count > 1 and len(received) == 1:
        frames.append(packed[middle + third :])
    if count > 2:
        frames.append(packed[middle : middle + third])
    return frames
