"""The inbox of a rank: a ring buffer in a control block, which all ranks of the host write and its owner reads.

A message is contiguous. If it does not fit between the tail and the end of the ring, the writer skips the rest of the
ring. Under the lock, writers advance the tail and the owner advances the head; both are counts of bytes that only grow.
The owner reads the bytes between head and tail without the lock, because no writer touches them.

Peers write everything that the owner reads, so it is checked before use: ProtocolError says what is wrong.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.wire import Buffer

RING_BYTES = 1 << 18
_ALIGNMENT = 64  # bytes; a header is shorter, so it fits between any message start and the end of the ring
_HEADER = struct.Struct("<6q")  # bytes of the message, source, bytes of the head, arrays, bytes of the body, address
_BATCH = 64  # messages that are taken at a time
_SHORT_BYTES = _ALIGNMENT * _BATCH  # so many bytes are copied under the lock; they are at most a batch
_SKIP = 0  # in place of the bytes of a message: the next message is at the start of the ring

# Cells of the control block. RETURNED is for the borrowers of its owner: see `lending`. ANNOUNCED counts the long
# messages whose writers are about to finish the copy of their arrays.
_TAIL, _HEAD, _CLOSED, RETURNED, _ANNOUNCED = range(5)
_RING = 8  # the first cell of the ring

# Bytes of head and inline body. At half the ring a message always fits into an empty ring, wherever the tail is.
PAYLOAD_MAX = RING_BYTES // 2 - _ALIGNMENT - _HEADER.size


class InboxClosedError(AsyncollError):
    """The owner of the inbox has closed it."""


class RingMessage(NamedTuple):
    """A head, and a body of `arrays` arrays, which is in `inline`, or has `nbytes` bytes at `address` in the arena."""

    source: int  # the sender's local rank
    head: bytes
    arrays: int = 0
    inline: bytes | bytearray = b""
    address: int = 0
    nbytes: int = 0


class Inbox:
    """The inbox of one rank, for its owner and for writers."""

    def __init__(self, arena: Arena, context: int) -> None:
        """`context` identifies the inbox at all ranks of the host."""
        self.control_block: ControlBlock = arena.control_block(context, _RING + RING_BYTES // 8)
        self._cells = self.control_block.cells
        self._ring = self.control_block.cells[_RING:].cast("B")
        self._ranks = arena.ranks
        self._read = 0  # the owner's own copy of the head, which peers cannot change
        self._heard = 0  # announcements that the owner knows

    # -- for writers ------------------------------------------------------------------------------

    def put(self, raw: bytes) -> int | None:
        """Write an encoded message. Returns the count of bytes at its end, for `is_read`; None if there is no room.

        The caller holds the lock of the control block. Raises InboxClosedError, and ProtocolError if the head and the
        tail are corrupt.
        """
        cells, nbytes = self._cells, len(raw)
        tail, head = cells[_TAIL], cells[_HEAD]
        if not 0 <= head <= tail <= head + RING_BYTES or tail % _ALIGNMENT:
            raise ProtocolError(f"the inbox is corrupt: its head is {head} and its tail {tail}")
        if cells[_CLOSED]:
            raise InboxClosedError
        start, size = tail % RING_BYTES, nbytes + _ALIGNMENT - 1 & -_ALIGNMENT
        skipped = RING_BYTES - start if start + size > RING_BYTES else 0
        if tail - head + skipped + size > RING_BYTES:
            return None
        if skipped:
            _HEADER.pack_into(self._ring, start, _SKIP, 0, 0, 0, 0, 0)
            tail += skipped
            start = 0
        self._ring[start : start + nbytes] = raw
        cells[_TAIL] = end = tail + size
        self.control_block.wake()
        return end

    def announce(self) -> None:
        """Wake the owner: a message will come within microseconds. Then it polls as the message comes."""
        with self.control_block as control_block:
            self._cells[_ANNOUNCED] += 1
            control_block.wake()

    def has_room(self, nbytes: int) -> bool:
        """Whether an encoded message of `nbytes` bytes fits. Raises InboxClosedError."""
        cells, size = self._cells, nbytes + _ALIGNMENT - 1 & -_ALIGNMENT
        if cells[_CLOSED]:
            raise InboxClosedError
        tail = cells[_TAIL]
        left = RING_BYTES - tail % RING_BYTES
        return tail - cells[_HEAD] + size + (left if left < size else 0) <= RING_BYTES

    def is_read(self, end: int) -> bool:
        """Whether the owner has taken the message for which `put` has returned `end`. Raises InboxClosedError."""
        if self._cells[_CLOSED]:
            raise InboxClosedError
        return self._cells[_HEAD] >= end

    # -- for the owner ----------------------------------------------------------------------------

    def has_messages(self) -> bool:
        return self._cells[_TAIL] != self._read

    def has_announcements(self) -> bool:
        """Whether `announce` was called since `hear`."""
        return self._cells[_ANNOUNCED] != self._heard

    def hear(self) -> None:
        """Note the announcements that have come."""
        self._heard = self._cells[_ANNOUNCED]

    def take(self) -> list[RingMessage]:
        """Remove and return the next messages, at most _BATCH. Raises ProtocolError for a malformed one."""
        control_block, cells, read = self.control_block, self._cells, self._read
        with control_block:
            tail = cells[_TAIL]
            if not read <= tail <= read + RING_BYTES or tail % _ALIGNMENT:
                raise ProtocolError(f"the inbox is corrupt: its head is {read} and its tail {tail}")
            start = read % RING_BYTES
            raw = self._ring[start : start + min(tail - read, RING_BYTES - start)]
            # To copy a few bytes takes less time than to lock once more.
            if is_short := len(raw) <= _SHORT_BYTES:
                copy = bytes(raw)
                self._read = cells[_HEAD] = read + len(copy)
                control_block.wake()
        if is_short:
            return self._messages(copy)[0]
        messages, nbytes = self._messages(raw)
        # The head moves only now, after the messages have been copied: writers may overwrite the bytes before it.
        with control_block:
            self._read = cells[_HEAD] = read + nbytes
            control_block.wake()
        return messages

    def _messages(self, raw: Buffer) -> tuple[list[RingMessage], int]:
        """Copies of the first messages in `raw`, and the bytes that they take there."""
        messages: list[RingMessage] = []
        start = 0
        local_size, left = len(self._ranks), len(raw)
        while left and len(messages) < _BATCH:
            # A copy of the header: a malicious writer may still change it in the ring after these checks.
            size, source, head, arrays, nbytes, address = _HEADER.unpack_from(raw, start)
            if size == _SKIP:
                return messages, len(raw)
            if not 0 <= source < local_size:
                raise ProtocolError(f"a message names sender {source}, and this host has {local_size} ranks")
            inline = 0 if address else nbytes
            middle = start + _HEADER.size + head
            if (
                not 0 < size <= left
                or size % _ALIGNMENT
                or min(head, arrays, nbytes) < 0
                or middle + inline > start + size
            ):
                text = f"a message of {size} bytes has a head of {head} and a body of {inline}, and {left} bytes remain"
                raise ProtocolError(text, self._ranks[source])
            body = bytearray(raw[middle : middle + inline]) if inline else b""
            messages.append(
                RingMessage(source, bytes(raw[start + _HEADER.size : middle]), arrays, body, address, nbytes)
            )
            start += size
            left -= size
        return messages, start

    def close(self) -> None:
        """Close the inbox. Writers get InboxClosedError."""
        with self.control_block as control_block:
            control_block.cells[_CLOSED] = 1
            control_block.wake()


def encode_head(source: int, head: bytes) -> bytes:
    """The bytes of a message without arrays."""
    nbytes = len(head)
    return _HEADER.pack(_HEADER.size + nbytes + _ALIGNMENT - 1 & -_ALIGNMENT, source, nbytes, 0, 0, 0) + head


def encode(message: RingMessage) -> bytes:
    """The bytes of a message in an inbox. Its head and inline body together have at most PAYLOAD_MAX bytes."""
    source, head, arrays, inline, address, nbytes = message
    assert len(head) + len(inline) <= PAYLOAD_MAX, "it would never fit"
    size = _HEADER.size + len(head) + len(inline) + _ALIGNMENT - 1 & -_ALIGNMENT
    return _HEADER.pack(size, source, len(head), arrays, nbytes or len(inline), address) + head + inline
