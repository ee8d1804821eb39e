"""Two streams between hosts: control data is encrypted, and long payloads go unencrypted over connections of their own.

CURVE has a fourth of the bandwidth of plain tcp. So a long payload to another host uses a plain connection, which is
authenticated when it opens but not encrypted, and everything else an encrypted one. Each stream keeps its order, so the
receiver joins messages and payloads again in the order of the messages.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from asyncoll.transport import Buffer, Loss, Receiver, check_frames
from asyncoll.transport.messages.tcp_payloads import TcpPayloads
from asyncoll.transport.messages.zeromq import ZeroMQTransport

THRESHOLD_BYTES = 1 << 16  # a payload of at least this size uses the second stream
# The first frame of a message between hosts begins with one of these bytes. After _APART come the bytes of the payload,
# which is in the other stream, and then the original first frame.
_WHOLE, _APART = b"\0", b"\1"
_LENGTH = struct.Struct("<I")
# If only the stream for payloads ends, its rank is leaving or lost. A rank that leaves closes the other stream within
# this time, which gives the better cause.
_LEAVING_S = 1.0


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
        self._reassembly = _Reassembly(self._remote, self._collect, payloads.drop)

    @property
    def peers(self) -> list[str]:
        """The addresses of the ranks, in both streams."""
        return [*self._messages.peers, *self._payloads.peers]

    async def start(self, receiver: Receiver) -> None:
        self._reassembly.receiver = receiver
        self._payloads.connect(self._reassembly.received_payload, self._reassembly.lost_payloads)
        self._messages.connect(self._reassembly)  # before the wait: a rank that gives up tells the others by message
        await self._payloads.connected()
        await self._messages.connected()

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        if dest not in self._remote:
            self._messages.send(dest, frames)
            return
        check_frames(dest, self.size, frames)
        if len(frames) > 1 and len(frames[1]) >= self._threshold_bytes:
            # The receiver matches the n-th payload with the n-th message that announces one.
            first = b"".join((_APART, _LENGTH.pack(len(frames[1])), frames[0]))
            self._payloads.send(dest, frames[1])
            self._messages.send(dest, (first, *frames[2:]))
        else:
            self._messages.send(dest, (b"".join((_WHOLE, frames[0])), *frames[1:]))

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        """As `send`; refuses a message of two streams, because another thread could send one between its parts."""
        if dest not in self._remote:
            return self._messages.send_directly(dest, frames)
        if max(map(len, frames)) >= self._threshold_bytes:
            return False
        return self._messages.send_directly(dest, (b"".join((_WHOLE, frames[0])), *frames[1:]))

    async def drain(self, dest: int) -> None:
        if dest in self._remote:
            await self._payloads.drain(dest)
        await self._messages.drain(dest)

    async def close(self, *, flush: bool = False) -> None:
        """Close the messages last: when that stream ends, peers assume that all payloads have come."""
        self._reassembly.close()
        await self._payloads.close(flush=flush)
        await self._messages.close(flush=flush)

    def _collect(self) -> None:
        self._payloads.collect()
        self._messages.collect()


class _Reassembly:
    """A `Receiver` for the messages. It joins them with their payloads and passes them to the real receiver."""

    receiver: Receiver

    def __init__(self, remote: frozenset[int], collect: Callable[[], None], drop: Callable[[int], None]) -> None:
        """`collect` makes both transports deliver all messages that have arrived.

        `drop` closes the connections for payloads to a rank.
        """
        self._remote = remote
        self._collect = collect
        self._drop = drop
        self._messages: defaultdict[int, deque[list[Buffer]]] = defaultdict(deque)  # the first waits for its payload
        self._payloads: defaultdict[int, deque[Buffer]] = defaultdict(deque)
        self._lost: set[int] = set()

    def received(self, source: int, frames: list[Buffer]) -> None:
        if source not in self._remote:
            self.receiver.received(source, frames)
        elif source not in self._lost:
            self._messages[source].append(frames)
            self._join(source)

    def received_payload(self, source: int, payload: Buffer) -> None:
        if source not in self._lost:
            self._payloads[source].append(payload)
            self._join(source)

    def lost_payloads(self, loss: Loss) -> None:
        loss = replace(loss, cause=f"{loss.cause} (the connection for payloads)")
        asyncio.get_running_loop().call_later(_LEAVING_S, self.lost, loss)

    def lost(self, loss: Loss) -> None:
        if loss.rank in self._lost:
            return
        if loss.rank in self._remote:
            self._collect()  # the other stream may still hold payloads of complete messages
            self._drop(loss.rank)  # after a silence it is still open, and what waits to be sent there would wait on
        self._lost.add(loss.rank)
        self.receiver.lost(loss)

    def close(self) -> None:
        """Deliver nothing more."""
        self._lost.update(self._remote)

    def _join(self, source: int) -> None:
        messages, payloads = self._messages[source], self._payloads[source]
        while messages and source not in self._lost:
            whole = _whole(messages[0], payloads)
            if whole is None:
                return
            messages.popleft()
            self.receiver.received(source, whole)


def _whole(frames: list[Buffer], payloads: deque[Buffer]) -> list[Buffer] | None:
    """Return the message as it was sent; None if its payload has not come yet.

    Malformed input yields frames that `wire.decode` rejects.
    """
    first = bytes(frames[0])
    if first[:1] == _WHOLE:
        return [first[1:], *frames[1:]]
    start = len(_APART) + _LENGTH.size
    if first[:1] != _APART or len(first) < start:
        return frames
    if not payloads:
        return None
    payload = payloads.popleft()
    if len(payload) != _LENGTH.unpack_from(first, len(_APART))[0]:
        return frames
    return [first[start:], payload, *frames[1:]]
