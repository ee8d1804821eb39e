"""Two streams between hosts: control data is encrypted, and long payloads go unencrypted over connections of their own.

CURVE has a fourth of the bandwidth of plain tcp. So a message with a long payload to another host uses a plain
connection, which proves all of it but the payload, and every other message an encrypted one. Each stream keeps its
order. A message says how many its sender has put into the other stream before, and the receiver delivers it after
these: so it has the order of the sender.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from asyncoll.transport import Buffer, Loss, Receiver, check_frames, wire
from asyncoll.transport.messages import payload_stream
from asyncoll.transport.messages.payload_stream import Long
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.transport.messages.zeromq import ZeroMQTransport

THRESHOLD_BYTES = 1 << 16  # a payload of at least this size uses the second stream
_BEFORE = struct.Struct("<Q")  # begins an encrypted message: `Long.before`, for the other stream
# If only the stream for payloads ends, its rank is leaving or lost. A rank that leaves closes the other stream within
# this time, which gives the better cause.
_LEAVING_S = 1.0


class _Sent:
    """How many messages this rank has sent to one other in each stream."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held from a count to the end of its send: `send_directly` runs in other threads
        self.encrypted = 0
        self.long = 0


class _Came:
    """What has come from one rank in the two streams, and could not be delivered yet; and how many messages were."""

    def __init__(self) -> None:
        self.encrypted: deque[tuple[int, list[Buffer]]] = deque()
        self.long: deque[Long] = deque()
        self.encrypted_delivered = 0
        self.long_delivered = 0

    def next(self) -> list[Buffer] | None:
        """Take the message to deliver next; None if one that was sent before all that are here has not come."""
        if self.encrypted and self.encrypted[0][0] <= self.long_delivered:
            self.encrypted_delivered += 1
            return self.encrypted.popleft()[1]
        if self.long and self.long[0].before <= self.encrypted_delivered:
            self.long_delivered += 1
            return list(self.long.popleft().frames)
        return None


class SplitTransport:
    """The `Transport` `messages`, plus the connections `payloads` for long payloads to the `remote` ranks.

    `remote` are the ranks of other hosts. A payload is long from `threshold_bytes` on.
    """

    def __init__(
        self,
        messages: ZeroMQTransport,
        payloads: TcpPayloads,
        remote: Collection[int],
        threshold_bytes: int = THRESHOLD_BYTES,
    ) -> None:
        self.rank = messages.rank
        self.size = messages.size
        self._messages = messages
        self._payloads = payloads
        self._remote = frozenset(remote)
        self._threshold_bytes = threshold_bytes
        self._sent = {rank: _Sent() for rank in self._remote}
        self._reassembly = _Reassembly(self._remote, self._collect, payloads.drop)

    @property
    def peers(self) -> list[str]:
        """The addresses of the ranks, in both streams."""
        return [*self._messages.peers, *self._payloads.peers]

    async def start(self, receiver: Receiver) -> None:
        self._reassembly.receiver = receiver
        self._payloads.connect(self._reassembly.received_long, self._reassembly.lost_payloads)
        # Before the wait for payloads: a rank that gives up tells the others by message.
        self._messages.connect(self._reassembly)
        await self._payloads.connected()
        await self._messages.connected()

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        if dest not in self._remote:
            self._messages.send(dest, frames)
            return
        check_frames(dest, self.size, frames)
        sent = self._sent[dest]
        with sent.lock:
            if self._is_long(frames):
                self._payloads.send(dest, Long(sent.encrypted, frames))
                sent.long += 1
            else:
                self._messages.send(dest, _counted(sent.long, frames))
                sent.encrypted += 1

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        """Send a short message in this thread. Refuses a long one: only the loop uses the connections for payloads."""
        if dest not in self._remote:
            return self._messages.send_directly(dest, frames)
        sent = self._sent[dest]
        # Does not wait for the lock: a finalizer may call this in a thread that has it.
        if self._is_long(frames) or not sent.lock.acquire(blocking=False):
            return False
        try:
            is_sent = self._messages.send_directly(dest, _counted(sent.long, frames))
            sent.encrypted += is_sent
            return is_sent
        finally:
            sent.lock.release()

    def _is_long(self, frames: Sequence[Buffer]) -> bool:
        return payload_stream.fits(frames) and len(frames[1]) >= self._threshold_bytes

    async def drain(self, dest: int) -> None:
        if dest in self._remote:
            await self._payloads.drain(dest)
        await self._messages.drain(dest)

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        self._reassembly.receiver = receiver
        for rank in self._remote.difference(members):
            self._payloads.drop(rank)
        self._messages.enter(self._reassembly, members, to_kill)

    async def close(self, *, flush: bool = False) -> None:
        """Close the messages last: when that stream ends, peers assume that all payloads have come."""
        self._reassembly.close()
        try:
            await self._payloads.close(flush=flush)
        finally:
            await self._messages.close(flush=flush)

    def _collect(self) -> None:
        self._payloads.collect()
        self._messages.collect()


class _Reassembly:
    """A `Receiver` for the messages of both streams. It passes them on in the order of their sender."""

    receiver: Receiver

    def __init__(self, remote: frozenset[int], collect: Callable[[], None], drop: Callable[[int], None]) -> None:
        """`collect` makes both transports deliver all messages that have arrived.

        `drop` closes the connections for payloads to a rank.
        """
        self._remote = remote
        self._collect = collect
        self._drop = drop
        self._came: defaultdict[int, _Came] = defaultdict(_Came)
        self._lost: set[int] = set()

    def received(self, source: int, frames: list[Buffer]) -> None:
        if source not in self._remote:
            self.receiver.received(source, frames)
        elif source not in self._lost:
            self._came[source].encrypted.append(_uncounted(frames))
            self._deliver(source)

    def received_long(self, source: int, message: Long) -> None:
        if source not in self._lost:
            self._came[source].long.append(message)
            self._deliver(source)

    def lost_payloads(self, loss: Loss) -> None:
        loss = replace(loss, cause=f"{loss.cause} (the connection for payloads)")
        asyncio.get_running_loop().call_later(_LEAVING_S, self.lost, loss)

    def lost(self, loss: Loss) -> None:
        if loss.rank in self._lost:
            return
        if loss.rank in self._remote:
            self._collect()  # what has come completes what waits
            # After a silence the connection is still open, and what waits to be sent there would wait on.
            self._drop(loss.rank)
            self._deliver_news(loss.rank)
        self._lost.add(loss.rank)
        self.receiver.lost(loss)

    def _deliver_news(self, source: int) -> None:
        """Deliver the control messages of a lost rank that wait for a long one, which will not come whole any more.

        They may say why the rank has ended. Other messages would be out of order.
        """
        for _, frames in self._came[source].encrypted:
            if wire.is_control(frames):
                self.receiver.received(source, frames)

    def close(self) -> None:
        """Deliver nothing more."""
        self._lost.update(self._remote)

    def _deliver(self, source: int) -> None:
        came = self._came[source]
        while source not in self._lost and (frames := came.next()) is not None:
            self.receiver.received(source, frames)


def _counted(before: int, frames: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The frames of an encrypted message."""
    return (b"".join((_BEFORE.pack(before), frames[0])), *frames[1:])


def _uncounted(frames: list[Buffer]) -> tuple[int, list[Buffer]]:
    """The inverse of `_counted`. Malformed input yields frames that `wire.decode` rejects."""
    first = bytes(frames[0])
    if len(first) < _BEFORE.size:
        return 0, frames
    return _BEFORE.unpack_from(first)[0], [first[_BEFORE.size :], *frames[1:]]
