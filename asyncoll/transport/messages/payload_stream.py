"""The two ends of a stream of long messages over one connected socket. No loop, no clock.

A message is a head, its payload and its third frame, if it has one. The head has lengths, the first frame, and a proof
over all but the payload: keyed BLAKE2b, with the number of the message. So who can change packets can change payloads,
but cannot insert, repeat or reorder messages, nor say of a payload that it is another one.

Sending copies only what the kernel has no room for. Received payloads are in memory that is used again once their
receiver has dropped them: fresh memory costs a page fault for every 4 KiB, which is more than the copy into it.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import socket
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.transport.wire import HEADER_BYTES, MAX_FRAME_BYTES, Buffer

# The bytes of the payload, and of the third frame and 1 (0 without one); `Long.before`; the bytes of the first frame,
# and the frame. The proof follows.
_FIELDS: Final = struct.Struct(f"<IIQB{HEADER_BYTES}s")
_PROOF_BYTES: Final = 16
HEAD_BYTES: Final = _FIELDS.size + _PROOF_BYTES
_NUMBER: Final = struct.Struct("<Q")
Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_VECTOR = 64  # buffers of one write
# So much of a payload arrives before the reader's loop wakes, unless the rest is shorter: not each packet of a slow
# network wakes it. It leaves TCP a window in which the sender goes on meanwhile.
_WAKE_BYTES = 1 << 18
_BLOCKS = 4  # of MAX_FRAME_BYTES that are kept for the next payloads
_WORTH_A_BLOCK = MAX_FRAME_BYTES // 2  # a shorter payload that is kept for long must not occupy a whole block


class Long(NamedTuple):
    """A message of two or three frames. The first has at most HEADER_BYTES; the second, its payload, is not empty."""

    before: int  # what its receiver must have of another stream first: see `split`
    frames: Sequence[Buffer]


def fits(frames: Sequence[Buffer]) -> bool:
    """Whether a message has the form of `Long`."""
    return 1 < len(frames) < 4 and len(frames[0]) <= HEADER_BYTES and len(frames[1]) > 0


class _Proofs:
    """The proofs of the messages of one stream, in their order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=_PROOF_BYTES, person=b"asyncoll")
        self._number = 0

    def next(self, fields: Buffer, third: Buffer = b"") -> bytes:
        """The proof of the next message, with these fields. What comes before the third frame has a fixed length."""
        proof = self._keyed.copy()
        proof.update(_NUMBER.pack(self._number))
        proof.update(fields)
        proof.update(third)
        self._number += 1
        return proof.digest()


class PayloadWriter:
    """The sending end."""

    def __init__(self, key: bytes) -> None:
        """`key` is that of the reader, and of no other stream."""
        self.connection: socket.socket | None = None  # none yet: messages wait
        self._proofs = _Proofs(key)
        self.waiting: deque[Buffer] = deque()  # copies of what the kernel had no room for

    def send(self, message: Long) -> None:
        """Write as much as the kernel takes, and keep a copy of the rest. Raises OSError if the connection is over."""
        first, payload, *thirds = message.frames
        third = len(thirds[0]) + 1 if thirds else 0
        fields = _FIELDS.pack(len(payload), third, message.before, len(first), bytes(first))
        parts: list[Buffer] = [fields + self._proofs.next(fields, *thirds), memoryview(payload), *thirds]
        sent = self._write(parts) if not self.waiting else 0
        for part in parts:
            if sent < len(part):
                self.waiting.append(memoryview(bytes(part[sent:])))
            sent = max(0, sent - len(part))

    def flush(self) -> None:
        """Write more of what waits. Raises OSError if the connection is over."""
        waiting = self.waiting
        sent = self._write(list(itertools.islice(waiting, _VECTOR)))
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.popleft())
        if sent:
            waiting[0] = waiting[0][sent:]

    def _write(self, parts: list[Buffer]) -> int:
        if self.connection is None:
            return 0
        try:
            # Without the flag, a write to a peer that is gone would kill a program that has restored SIGPIPE.
            return self.connection.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0


class _ArrivingMessage:
    """A message while it comes."""

    def __init__(self, head: bytes, memory: PayloadMemory) -> None:
        """Raises ProtocolError if a frame is too long, or the payload is empty."""
        self.fields, self.proof = head[: _FIELDS.size], head[_FIELDS.size :]
        nbytes, third, self.before, first, padded = _FIELDS.unpack(self.fields)
        if not 0 < nbytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"a payload of {nbytes} bytes; 1 to {MAX_FRAME_BYTES} are allowed")
        if third > MAX_FRAME_BYTES + 1:
            raise ProtocolError(f"a third frame of {third - 1} bytes; at most {MAX_FRAME_BYTES} are allowed")
        self._first = padded[:first]
        self._payload = memory.take(nbytes)
        self.third = bytearray(third - 1) if third else None
        self.parts = [self._payload.data, *([memoryview(self.third)] if self.third else [])]

    def message(self) -> Long:
        """The message, once its parts are filled."""
        thirds = [] if self.third is None else [memoryview(self.third).toreadonly()]
        return Long(self.before, [self._first, self._payload.data.toreadonly(), *thirds])


class PayloadReader:
    """The receiving end."""

    def __init__(self, connection: socket.socket, memory: PayloadMemory, key: bytes) -> None:
        """`key` is that of the writer."""
        self.connection = connection
        self._memory = memory
        self._proofs = _Proofs(key)
        self._head = bytearray(HEAD_BYTES)  # of the next message
        self._arriving: _ArrivingMessage | None = None
        self._rest: list[memoryview] = [memoryview(self._head)]  # what is not filled: of this message, and the head
        self._awaited = 1  # bytes that arrive before the loop wakes

    def read(self) -> Long | None:
        """Read once, also the head of the next message; returns the message that is complete now, or None.

        Raises BlockingIOError if nothing has come, OSError if the connection is over, and ProtocolError if what has
        come is not from the writer.
        """
        if not self._rest:
            self._arriving = _ArrivingMessage(bytes(self._head), self._memory)
            self._rest = [*self._arriving.parts, memoryview(self._head)]
        count = self.connection.recvmsg_into(self._rest)[0]
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        while self._rest and count >= len(self._rest[0]):
            count -= len(self._rest.pop(0))
        if count:
            self._rest[0] = self._rest[0][count:]
        complete = None
        if self._arriving is not None and len(self._rest) < 2:
            complete, self._arriving = self._proved(self._arriving), None
        self._await(min(self._outstanding(), _WAKE_BYTES))
        return complete

    def _proved(self, arrived: _ArrivingMessage) -> Long:
        proof = self._proofs.next(arrived.fields, arrived.third or b"")
        if not hmac.compare_digest(proof, arrived.proof):
            raise ProtocolError("a message that it has not sent")
        return arrived.message()

    def _outstanding(self) -> int:
        """The bytes until the message that comes, or the next one, is complete; 1 as long as its length is unknown."""
        if self._arriving is not None:
            return sum(map(len, self._rest[:-1]))
        return int(_FIELDS.unpack_from(self._head)[0]) or 1 if not self._rest else 1

    def _await(self, nbytes: int) -> None:
        """Let the kernel report the connection as readable once so many bytes have come, or it has ended."""
        if nbytes != self._awaited:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._awaited = nbytes


class PayloadMemory:
    """Memory for the payloads that one rank receives."""

    def __init__(self) -> None:
        # Blocks come back in any thread and at any moment, where the last reference to a payload is dropped.
        self._blocks: deque[Array] = deque(maxlen=_BLOCKS)

    def take(self, nbytes: int) -> Array:
        """A flat array of `nbytes` bytes, with arbitrary content. Its memory is used again once it is gone."""
        if nbytes < _WORTH_A_BLOCK:
            return np.empty(nbytes, np.uint8)
        try:
            block = self._blocks.pop()
        except IndexError:
            block = np.empty(MAX_FRAME_BYTES, np.uint8)
        # Pass on `data` of this view only: numpy views of it would keep the block alive, and not the view.
        view = block[:nbytes]
        weakref.finalize(view, self._blocks.append, block).atexit = False
        return view
