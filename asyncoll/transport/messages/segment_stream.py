"""One connected unix socket that carries segments, on the loop of its owner, without another thread.

A segment is a header (the length of the payload, a kind, a number) and the payload. The length is checked before memory
is allocated for it. Each direction begins with a hello, or with the reason of a refusal; a peer that begins otherwise
does not speak this protocol.

*Sending.* The first segment of a turn of the loop is written at once, so a peer that waits is woken without delay. The
others of that turn are joined, and written in the next turn. What the kernel does not take is written when the socket
has room: `send` never waits. Long payloads are not copied; `flush` tells when they may be changed.

*Looking.* After each segment the loop looks for the next one for a short time before it sleeps: an idle core may take
longer to wake up than the other end takes for a short call. Other callbacks and tasks run between two looks.

*Receiving.* One read of the socket for each event; short segments that came together are delivered from one buffer. A
long payload is read into the memory where its owner wants it.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncoll.errors import ProtocolError
from asyncoll.transport import settle
from asyncoll.transport.messages.service_protocol import BYE, CLOSED, HELLO, REASON_BYTES
from asyncoll.transport.wire import SEGMENT_BYTES, Buffer

HEADER: Final = struct.Struct("<IBQ")  # bytes of the payload, kind, number
PAYLOAD_MAX: Final = SEGMENT_BYTES + 64  # of a segment; the owner adds a header of its own to SEGMENT_BYTES
UNSENT_MAX = 32 * SEGMENT_BYTES  # bytes that wait for room in the socket; four times the window of the owner
_BEGIN = struct.Struct("<IB")  # the first fields of a header
_BUFFER_BYTES = 1 << 14  # read at a time: about a hundred short segments, before other callbacks of the loop run
_JOINED_BYTES = 1 << 13  # a payload of at most this size is copied behind its header: two buffers cost more
_VECTOR = 64  # buffers of one write
_SOCKET_BYTES = 1 << 20  # of the socket's buffer, if the host allows as many
_LOOK_S = 60e-6  # about as long as it takes to wake an idle core
_SLICE_S = 0.001  # that another process had the core
_NO_LOOKING_S = 0.1  # after that
_GONE: Final = (errno.EPIPE, errno.ECONNRESET)  # the peer has closed the connection
_FLUSH_S = 0.05  # for a peer to read; then the payloads that it has not read are copied


Received = Callable[[int, int, Buffer], None]
Room = Callable[[int, int, int], memoryview | None]


class UnreadError(Exception):
    """The peer does not read: more than UNSENT_MAX bytes wait for it."""


class Lookout:
    """Keeps a loop from sleeping for a short time after each segment. One for all streams of a service or client."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_looking = False
        self._until_s = 0.0  # end of the looks
        self._not_before_s = 0.0

    def look(self) -> None:
        """Begin to look, or begin again."""
        now_s = time.monotonic()  # noqa: TID251 (loops have clocks of their own, which may lag by milliseconds)
        self._until_s = now_s + _LOOK_S
        if not self._is_looking and now_s >= self._not_before_s:
            self._is_looking = True
            self._loop.call_soon(self._stay)

    def _stay(self) -> None:
        """Let the loop poll its sockets once more. It does not sleep while there is a callback."""
        before_s = time.monotonic()  # noqa: TID251 (as above)
        os.sched_yield()
        now_s = time.monotonic()  # noqa: TID251 (as above)
        if now_s - before_s > _SLICE_S:
            self._not_before_s = now_s + _NO_LOOKING_S
            self._is_looking = False
        elif now_s >= self._until_s:
            self._is_looking = False
        else:
            self._loop.call_soon(self._stay)


class SegmentStream:
    """Segments over one connected, non-blocking unix socket, which this object owns.

    In: `send`, `ignore`, `close`. Out: the callbacks of `use`. All run on the loop on which this object was made.
    """

    def __init__(self, connection: socket.socket, lookout: Lookout) -> None:
        """Begin to read. Call `use` before the loop runs."""
        self._lookout = lookout
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._received: Received | None = None
        self._room: Room = _no_room
        self._ended: Callable[[str], None] = _ignored
        self._malformed: Callable[[ProtocolError], None] = _ignored
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._end = 0  # of the bytes in the buffer, which begin with a header that is not delivered yet
        self._has_begun = False  # the peer has sent its first header
        self._long: _LongSegment | None = None  # a payload that the buffer does not hold
        self._unsent: deque[Buffer] = deque()  # what is to be written; a bytearray at the end may be extended
        self._unsent_bytes = 0
        self._lends = False  # payloads of callers are in there
        self._flushed: list[asyncio.Future[None]] = []  # callers that wait until there are none
        self._is_corked = False  # a segment was written in this turn of the loop, and the next ones are joined
        self._waits_for_room = False
        self._has_failed = False  # nothing can be written any more
        self._has_ended = False
        self._is_closed = False
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._loop.add_reader(connection.fileno(), self.read)

    def use(
        self,
        received: Received | None,
        ended: Callable[[str], None],
        malformed: Callable[[ProtocolError], None],
        room: Room | None = None,
    ) -> None:
        """Set the callbacks, which may call all methods.

        `received` gets kind, number and payload of each segment; the payload is valid during that call only. Without
        it, segments are ignored. `ended` is called once, after the last segment, with the cause; `malformed` for bytes
        that are no segment, after which nothing more is delivered. `room` returns the memory for a long payload, of
        which it gets kind, number and bytes; None if there is none.
        """
        self._room = room or _no_room
        self._received = received
        self._ended = ended
        self._malformed = malformed

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    def ignore(self) -> None:
        """Deliver no segment any more. The stream reads on, and reports its end."""
        self._received = None

    def close(self) -> None:
        """Close the socket at once; what is not written is dropped. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.use(None, _ignored, _ignored)  # breaks the cycles of references to this object
        self._loop.remove_reader(self._socket.fileno())
        if self._waits_for_room:
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._drop_unsent()

    # -- sending ----------------------------------------------------------------------------------

    def send(self, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment, now or later. It is dropped if the peer is gone. Raises UnreadError.

        A payload of more than 8 KiB must not change before `flush` returns.
        """
        if self._is_closed or self._has_failed:
            return
        header = HEADER.pack(len(payload), kind, number)
        parts = [header + bytes(payload)] if len(payload) <= _JOINED_BYTES else [header, payload]
        if self._is_corked or self._unsent:
            self._queue(parts, 0)
            return
        try:
            sent = self._put(parts)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail(error)
            return
        if sent < HEADER.size + len(payload):
            self._queue(parts, sent)
        self._is_corked = True
        self._loop.call_soon(self._uncork)
        self._lookout.look()

    async def flush(self) -> None:
        """Wait until the payloads of all segments may be changed: at most a short time, whatever the peer does."""
        if not self._lends:
            return
        flushed = self._loop.create_future()
        self._flushed.append(flushed)
        await asyncio.wait([flushed], timeout=_FLUSH_S)
        if not flushed.done():
            self.copy_unsent()

    def copy_unsent(self) -> None:
        """Let callers change all payloads now."""
        if self._lends:
            self._unsent = deque(bytes(part) for part in self._unsent)
            self._settle()

    def _queue(self, parts: Sequence[Buffer], sent: int) -> None:
        """Keep the segment of these parts, of which so many bytes are written, to be written later."""
        for part in parts:
            rest = memoryview(part)[sent:]
            sent = max(0, sent - len(part))
            if len(part) > _JOINED_BYTES + HEADER.size:
                self._unsent.append(rest)
                self._lends = True
            elif self._unsent and type(self._unsent[-1]) is bytearray:
                self._unsent[-1] += rest
            else:
                self._unsent.append(bytearray(rest))
            self._unsent_bytes += len(rest)
        if self._unsent_bytes > UNSENT_MAX:
            raise UnreadError
        if not self._is_corked:
            self._await_room()

    def _uncork(self) -> None:
        self._is_corked = False
        if self._unsent and not self._waits_for_room:
            self._write()

    def _write(self) -> None:
        """Write what has been queued, as far as the kernel takes it."""
        if self._is_closed:
            return
        try:
            self._written(self._put(list(itertools.islice(self._unsent, _VECTOR))))
        except BlockingIOError:
            # The rest waits for room, below.
            pass
        except OSError as error:
            self._fail(error)
            self._drop_unsent()
        if self._unsent:
            self._await_room()
            return
        self._settle()
        if self._waits_for_room:
            self._waits_for_room = False
            self._loop.remove_writer(self._socket.fileno())

    def _put(self, parts: Sequence[Buffer]) -> int:
        """Write as much as the kernel takes; returns how many bytes. Raises OSError."""
        # Without the flag, a write to a peer that is gone would kill a program that has restored SIGPIPE.
        if len(parts) == 1:
            return self._socket.send(parts[0], socket.MSG_NOSIGNAL)
        return self._socket.sendmsg(parts, (), socket.MSG_NOSIGNAL)

    def _fail(self, error: OSError) -> None:
        """Write nothing more. If the peer is gone, the reader reports it after the last segments."""
        self._has_failed = True
        if error.errno not in _GONE:
            # Not now: the owner is in the middle of a call of this object.
            self._loop.call_soon(self._stop, _cause(error))

    def _written(self, sent: int) -> None:
        self._unsent_bytes -= sent
        while self._unsent and sent >= len(self._unsent[0]):
            sent -= len(self._unsent.popleft())
        if sent:
            self._unsent[0] = memoryview(self._unsent[0])[sent:]

    def _await_room(self) -> None:
        if not self._waits_for_room and not self._is_closed:
            self._waits_for_room = True
            self._loop.add_writer(self._socket.fileno(), self._write)

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0
        self._settle()

    def _settle(self) -> None:
        """No payload of a caller is needed any more."""
        self._lends = False
        for flushed in self._flushed:
            settle(flushed)
        self._flushed.clear()

    # -- receiving --------------------------------------------------------------------------------

    def read(self) -> None:
        """Read once, and deliver the segments that are complete. The loop calls this when there is something."""
        long = self._long
        try:
            nbytes = self._socket.recv_into(self._buffer[self._end :] if long is None else long.rest())
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._stop(_cause(error))
            return
        self._lookout.look()
        if not nbytes:
            self._stop(CLOSED)
        elif long is None:
            self._deliver(self._end + nbytes)
        elif long.add(nbytes):
            self._long = None
            if self._received is not None:
                self._received(long.kind, long.number, long.payload)

    def _stop(self, cause: str) -> None:
        """The connection is over."""
        if self._has_ended or self._is_closed:
            return
        self._has_ended = True
        self._received = None
        self._loop.remove_reader(self._socket.fileno())
        self._ended(cause)

    def _deliver(self, end: int) -> None:
        """Deliver the segments in the first `end` bytes of the buffer, and move the rest to its front."""
        if not self._has_begun and not self._begins(end):
            return
        start, view = 0, self._buffer
        try:
            while end - start >= HEADER.size and self._received is not None:
                nbytes, kind, number = HEADER.unpack_from(view, start)
                first = start + HEADER.size
                if first + nbytes <= end:
                    start = first + nbytes
                    self._received(kind, number, view[first:start])
                elif nbytes > PAYLOAD_MAX:
                    self._reject(f"a segment of {nbytes} bytes, at most {PAYLOAD_MAX}")
                elif HEADER.size + nbytes > _BUFFER_BYTES:
                    payload = self._room(kind, number, nbytes) or memoryview(bytearray(nbytes))
                    self._long = _LongSegment(kind, number, payload, view[first:end])
                    start = end
                else:
                    break
        finally:
            self._end = 0 if self._received is None else end - start
            if start and self._end:
                view[: self._end] = bytes(view[start:end])

    def _begins(self, end: int) -> bool:
        """Whether the first `end` bytes may be the begin of a connection."""
        if end >= _BEGIN.size:
            self._has_begun = True
            nbytes, kind = _BEGIN.unpack_from(self._buffer)
            if kind not in (HELLO, BYE) or nbytes > REASON_BYTES:
                self._reject("it does not begin with a hello")
                return False
        return True

    def _reject(self, reason: str) -> None:
        self._received = None
        self._malformed(ProtocolError(reason))


class _LongSegment:
    """A segment that is longer than the buffer, while its payload comes."""

    def __init__(self, kind: int, number: int, payload: memoryview, begin: memoryview) -> None:
        self.kind = kind
        self.number = number
        self.payload = payload
        self.payload[: len(begin)] = begin
        self._filled = len(begin)

    def rest(self) -> memoryview:
        return self.payload[self._filled :]

    def add(self, nbytes: int) -> bool:
        """Count bytes that were read into `rest`; returns whether the payload is complete."""
        self._filled += nbytes
        return self._filled == len(self.payload)


def _no_room(kind: int, number: int, nbytes: int) -> memoryview | None:
    return None


def _ignored(_: object) -> None:
    pass


def _cause(error: OSError) -> str:
    return CLOSED if error.errno in _GONE else f"its connection failed: {error.strerror}"
