"""The two ends of a stream of payloads over one connected socket: each payload follows its length. No loop, no clock.

Sending copies only what the kernel has no room for. Received payloads are in memory that is used again once their
receiver has dropped them: fresh memory costs a page fault for every 4 KiB, which is more than the copy into it.
"""

from __future__ import annotations

import itertools
import socket
import struct
import weakref
from collections import deque
from typing import Any, Final, TypeAlias

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.transport.wire import MAX_FRAME_BYTES, Buffer

_LENGTH: Final = struct.Struct("<I")
Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_VECTOR = 64  # buffers of one write
# So much of a payload arrives before the reader's loop wakes, unless the rest is shorter: not each packet of a slow
# network wakes it. It leaves TCP a window in which the sender goes on meanwhile.
_WAKE_BYTES = 1 << 18
_BLOCKS = 4  # of MAX_FRAME_BYTES that are kept for the next payloads
_WORTH_A_BLOCK = MAX_FRAME_BYTES // 2  # a shorter payload that is kept for long must not occupy a whole block


class PayloadWriter:
    """The sending end."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None  # none yet: payloads wait
        self._waiting: deque[Buffer] = deque()  # copies of what the kernel had no room for

    @property
    def waits(self) -> bool:
        """Whether something is left to be written."""
        return bool(self._waiting)

    def send(self, payload: Buffer) -> None:
        """Write as much as the kernel takes, and keep a copy of the rest. Raises OSError if the connection is over."""
        parts = [_LENGTH.pack(len(payload)), memoryview(payload)]
        sent = self._write(parts) if not self._waiting else 0
        for part in parts:
            if sent < len(part):
                self._waiting.append(memoryview(bytes(part[sent:])))
            sent = max(0, sent - len(part))

    def flush(self) -> None:
        """Write more of what waits. Raises OSError if the connection is over."""
        waiting = self._waiting
        sent = self._write(list(itertools.islice(waiting, _VECTOR)))
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.popleft())
        if sent:
            waiting[0] = waiting[0][sent:]

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def _write(self, parts: list[Buffer]) -> int:
        if self.connection is None:
            return 0
        try:
            # Without the flag, a write to a peer that is gone would kill a program that has restored SIGPIPE.
            return self.connection.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0


class PayloadReader:
    """The receiving end."""

    def __init__(self, connection: socket.socket, memory: PayloadMemory) -> None:
        self.connection = connection
        self._memory = memory
        self._length = memoryview(bytearray(_LENGTH.size))
        self._length_filled = 0
        self._payload: Array | None = None  # while it comes
        self._filled = 0
        self._awaited = 1  # bytes that arrive before the loop wakes

    def read(self) -> Buffer | None:
        """Read once, also the length of the next payload; returns the payload that is complete now, or None.

        Raises BlockingIOError if nothing has come, OSError if the connection is over, and ProtocolError if a payload is
        longer than MAX_FRAME_BYTES.
        """
        if self._length_filled == _LENGTH.size:
            self._begin(*_LENGTH.unpack(self._length))
        rest = [] if self._payload is None else [self._payload.data[self._filled :]]
        count = self.connection.recvmsg_into([*rest, self._length[self._length_filled :]])[0]
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        complete = None
        if self._payload is not None:
            taken = min(count, self._payload.size - self._filled)
            self._filled += taken
            count -= taken
            if self._filled == self._payload.size:
                complete, self._payload = self._payload.data.toreadonly(), None
        self._length_filled += count
        self._await(min(self._rest(), _WAKE_BYTES))
        return complete

    def _rest(self) -> int:
        """The bytes until the payload that comes, or the next one, is complete; 1 as long as its length is unknown."""
        if self._payload is not None:
            return self._payload.size - self._filled
        return int(_LENGTH.unpack(self._length)[0]) if self._length_filled == _LENGTH.size else 1

    def _await(self, nbytes: int) -> None:
        """Let the kernel report the connection as readable once so many bytes have come, or it has ended."""
        if nbytes != self._awaited:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._awaited = nbytes

    def _begin(self, nbytes: int) -> None:
        if not 0 < nbytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"a payload of {nbytes} bytes; 1 to {MAX_FRAME_BYTES} are allowed")
        self._length_filled = self._filled = 0
        self._payload = self._memory.take(nbytes)


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
