"""A rank's inbox on a control block: a ring of bytes that every rank of the host writes messages into, and its owner
reads.

A message lies in one piece: if it does not fit between the tail and the end of the ring, that rest is skipped. Writers
move the tail and the reader the head, under the lock; what lies between them is the reader's, who needs no lock to read
it. Both are counts of bytes that only grow.

Whatever is read here was written by a peer, and is checked before it is used: ProtocolError tells what is wrong.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.transport import Arena, ControlBlock

RING_BYTES = 1 << 18
_ALIGNMENT = 64  # of messages, so that a header fits wherever one may begin
_HEADER = struct.Struct("<6q")  # bytes of the message, source, bytes of the head, arrays, bytes of the body, address
_SKIP = 0  # instead of the bytes of a message: it is not here, but at the start of the ring

_TAIL, _HEAD, _CLOSED, RETURNED = range(
    4
)  # cells of the control block; the last is for those who borrow from its owner
_RING = 4

PAYLOAD_MAX = RING_BYTES // 2 - _ALIGNMENT - _HEADER.size  # then it fits into an empty ring, wherever that begins


class InboxClosedError(AsyncollError):
    """The owner of the inbox has closed it."""


class Message(NamedTuple):
    """A head and a body of so many `arrays`, which is either in `inline` or, `nbytes` long, at `address`."""

    source: int  # the sender's local rank
    head: bytes
    arrays: int = 0
    inline: bytes | bytearray = b""
    address: int = 0
    nbytes: int = 0


class Inbox:
    """One rank's inbox, as its owner or a writer sees it."""

    def __init__(self, arena: Arena, context: int) -> None:
        """`context` is what all ranks of the host call this inbox."""
        self.control_block: ControlBlock = arena.control_block(context, _RING + RING_BYTES // 8)
        self._cells = self.control_block.cells
        self._ring = self.control_block.cells[_RING:].cast("B")
        self._ranks = arena.ranks
        self._read = 0  # the head as the owner knows it, whatever stands on the control_block

    # -- for writers ------------------------------------------------------------------------------

    def put(self, raw: bytes) -> int | None:
        """Put an encoded message; returns where it ends, or None if there is no room for it. Raises InboxClosedError.

        The caller holds the lock of the control block.
        """
        cells = self._cells
        tail, head = cells[_TAIL], cells[_HEAD]
        if not 0 <= head <= tail <= head + RING_BYTES or tail % _ALIGNMENT:
            raise ProtocolError(f"an inbox from {head} to {tail}")
        if not self.has_room(len(raw)):
            return None
        start, size = tail % RING_BYTES, _aligned(len(raw))
        if start + size > RING_BYTES:
            _HEADER.pack_into(self._ring, start, _SKIP, 0, 0, 0, 0, 0)
            tail += RING_BYTES - start
            start = 0
        self._ring[start : start + len(raw)] = raw
        cells[_TAIL] = tail + size
        self.control_block.wake()
        return tail + size

    def has_room(self, nbytes: int) -> bool:
        """Whether a message of so many bytes fits. Raises InboxClosedError."""
        cells, size = self._cells, _aligned(nbytes)
        if cells[_CLOSED]:
            raise InboxClosedError
        tail = cells[_TAIL]
        left = RING_BYTES - tail % RING_BYTES
        return tail - cells[_HEAD] + size + (left if left < size else 0) <= RING_BYTES

    def is_read(self, end: int) -> bool:
        """Whether the owner has taken the message that ends there. Raises InboxClosedError."""
        if self._cells[_CLOSED]:
            raise InboxClosedError
        return self._cells[_HEAD] >= end

    # -- for the owner ----------------------------------------------------------------------------

    def has_messages(self) -> bool:
        return self._cells[_TAIL] != self._read

    def take(self, at_most: int) -> list[Message]:
        """The next messages, which are in the inbox no more."""
        with self.control_block as control_block:
            tail = control_block.cells[_TAIL]
        if not self._read <= tail <= self._read + RING_BYTES or tail % _ALIGNMENT:
            raise ProtocolError(f"an inbox from {self._read} to {tail}")
        messages: list[Message] = []
        while self._read < tail and len(messages) < at_most:
            start = self._read % RING_BYTES
            most = min(tail - self._read, RING_BYTES - start)
            header = _HEADER.unpack_from(self._ring, start)
            if header[0] == _SKIP:
                self._read += most
            else:
                messages.append(self._message(start, most, *header))
                self._read += header[0]
        with self.control_block as control_block:
            control_block.cells[_HEAD] = self._read
            control_block.wake()
        return messages

    def _message(
        self, start: int, most: int, size: int, source: int, head: int, arrays: int, nbytes: int, address: int
    ) -> Message:
        """The message at `start`, as its header, which its writer cannot change any more, describes it."""
        if not 0 <= source < len(self._ranks):
            raise ProtocolError(f"a message from local rank {source} of {len(self._ranks)}")
        inline = 0 if address else nbytes
        if size % _ALIGNMENT or size > most or min(head, arrays, nbytes) < 0 or _HEADER.size + head + inline > size:
            text = f"a message of {size} bytes, with {head} and {inline} in it, where {most} are"
            raise ProtocolError(text, self._ranks[source])
        start += _HEADER.size
        middle = start + head
        body = bytearray(self._ring[middle : middle + inline])
        return Message(source, bytes(self._ring[start:middle]), arrays, body, address, nbytes)

    def close(self) -> None:
        """Writers hear of it."""
        with self.control_block as control_block:
            control_block.cells[_CLOSED] = 1
            control_block.wake()


def encode(message: Message) -> bytes:
    """As it lies in an inbox. Its head and its inline body together are not above PAYLOAD_MAX."""
    source, head, arrays, inline, address, nbytes = message
    assert len(head) + len(inline) <= PAYLOAD_MAX, "it would never fit"
    size = _aligned(_HEADER.size + len(head) + len(inline))
    return _HEADER.pack(size, source, len(head), arrays, nbytes or len(inline), address) + head + inline


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
