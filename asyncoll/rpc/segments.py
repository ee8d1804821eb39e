"""Carriers that send messages of any length as segments of at most 1 MiB.

A short message is one segment. A long message begins with a segment that announces the lengths of its arrays; the
receiver checks them before it allocates memory. The bytes of the arrays follow in segments, between which segments of
other messages may come. A window bounds the bytes under way to a peer: the receiver returns credit when it has consumed
a segment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import ARRAYS_MAX, HEAD_BYTES, Deliver
from asyncoll.tensors.reductions import Array
from asyncoll.transport import settle
from asyncoll.transport.wire import SEGMENT_BYTES, Buffer

WINDOW_BYTES = 8 * SEGMENT_BYTES
MESSAGE_BYTES = 1 << 36  # the longest message
_COST = 64  # bytes that a segment takes of the window beside its payload: bounds empty segments, too
_SHORT_BYTES = 1 << 17  # a message of at most this size is copied into one segment
_LONG_MAX = 4  # long messages under way to one peer at a time

_WHOLE, _FIRST, _PART, _DROP, _CREDIT = range(5)
_TABLE = struct.Struct("<II")  # number of arrays, bytes of the head; then the bytes of each array
_SIZE = 8  # bytes of an entry of the table


class _SegmentPeer:
    """The flow control of one peer, in both directions, and the long messages that are being received from it."""

    def __init__(self) -> None:
        self.outstanding = 0  # bytes sent, and not credited yet
        self.earned = 0  # bytes received and consumed, and not credited yet
        self.waiters: deque[asyncio.Future[None]] = deque()  # senders that wait for credit
        self.long = asyncio.Semaphore(_LONG_MAX)
        self.partial: dict[int, _Partial] = {}  # by number
        self.is_gone = False

    def wake(self) -> None:
        """Let all senders that wait for credit look again."""
        waiters, self.waiters = self.waiters, deque()
        for room in waiters:
            settle(room)


class _Partial:
    """A long message that is being received."""

    def __init__(self, head: bytes, arrays: list[Array]) -> None:
        self.head = head
        self.arrays = arrays
        self._empty = deque([array for array in arrays if array.size])  # that are not full yet
        self._filled = 0  # bytes of the first of them

    def room(self, nbytes: int) -> memoryview | None:
        """Where the next `nbytes` bytes belong; None if they do not fit."""
        target = self._empty[0][self._filled : self._filled + nbytes]
        return target.data if target.size == nbytes else None

    def take(self, payload: Buffer) -> bool:
        """Consume the next segment; return whether the message is complete. Raises ProtocolError if it does not fit."""
        data = np.frombuffer(payload, np.uint8)
        target = self._empty[0][self._filled : self._filled + data.size]
        if target.size != data.size or not data.size:
            raise ProtocolError(f"a segment of {data.size} bytes; {target.size} were expected")
        # If the addresses are equal, the socket has received it there already (`room`).
        if target.ctypes.data != data.ctypes.data:
            target[...] = data
        self._filled += data.size
        if self._filled == self._empty[0].size:
            self._empty.popleft()
            self._filled = 0
        return not self._empty


class SegmentCarrier(ABC):
    """A `Carrier` whose subclasses carry segments, in order for each peer. All of it runs on the carrier's loop.

    In: `send` (tasks of this rank) and `received` (segments of peers). Out: `post`, and `deliver` for each message.
    """

    sends_in_any_thread = False

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._peers: defaultdict[int, _SegmentPeer] = defaultdict(_SegmentPeer)

    def open(self, deliver: Deliver) -> None:
        self._deliver = deliver

    @abstractmethod
    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment of at most SEGMENT_BYTES, now or soon. The payload must not change before `flush` returns."""

    @abstractmethod
    async def flush(self, dest: int) -> None:
        """Wait until the payloads of all segments that were posted to `dest` may be changed."""

    # -- sending ----------------------------------------------------------------------------------

    def send_nowait(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> bool:
        """Send a message if it is short and the window of `dest` has room for it; returns whether it was done."""
        peer, first = self._peers[dest], _begin(head, arrays)
        nbytes = sum([len(first), *[array.size for array in arrays]])
        if nbytes > _SHORT_BYTES or peer.outstanding + nbytes + _COST > WINDOW_BYTES:
            return False
        peer.outstanding += nbytes + _COST
        self.post(dest, _WHOLE, 0, _joined(first, arrays))
        return True

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send a message in segments, as the window of `dest` has room. The caller may change `arrays` afterwards."""
        peer, first = self._peers[dest], _begin(head, arrays)
        if sum([len(first), *[array.size for array in arrays]]) <= _SHORT_BYTES:
            await self._post(peer, dest, _WHOLE, 0, _joined(first, arrays))
            return
        # The receiver allocates the whole message at its first segment, so it allows few of them at a time.
        async with peer.long:
            number = next(self._numbers)
            await self._post(peer, dest, _FIRST, number, first)
            try:
                for array in arrays:
                    for start in range(0, array.size, SEGMENT_BYTES):
                        await self._post(peer, dest, _PART, number, array[start : start + SEGMENT_BYTES])
            except BaseException:
                self.post(dest, _DROP, number, b"")  # the receiver frees the memory of the message
                raise
            finally:
                # Also if this is cancelled: the caller may change its arrays as soon as this returns.
                await _to_the_end(self.flush(dest))

    async def _post(self, peer: _SegmentPeer, dest: int, kind: int, number: int, payload: Buffer) -> None:
        cost = len(payload) + _COST
        while not peer.is_gone and peer.outstanding + cost > WINDOW_BYTES:  # again: credit wakes all waiters at once
            room = asyncio.get_running_loop().create_future()
            peer.waiters.append(room)
            await room
        if not peer.is_gone:
            peer.outstanding += cost
            self.post(dest, kind, number, payload)

    # -- receiving --------------------------------------------------------------------------------

    def received(self, source: int, kind: int, number: int, payload: Buffer) -> None:
        """A segment has arrived. Raises ProtocolError if it violates the protocol."""
        peer = self._peers[source]
        if kind == _CREDIT:
            self._credited(peer, number)
            return
        if kind == _WHOLE:
            self._whole(source, payload)
        elif kind == _FIRST:
            self._first(source, peer, number, payload)
        elif number not in peer.partial:
            raise ProtocolError(f"a segment of kind {kind} for an unknown message")
        elif kind == _DROP:
            del peer.partial[number]
            return  # its sender posts it without credit
        elif kind == _PART and peer.partial[number].take(payload):
            message = peer.partial.pop(number)
            self._deliver(source, message.head, message.arrays)
        elif kind != _PART:
            raise ProtocolError(f"a segment of the unknown kind {kind}")
        peer.earned += len(payload) + _COST
        # The segment is consumed; credit goes out in batches.
        if peer.earned >= WINDOW_BYTES // 4:
            self.post(source, _CREDIT, peer.earned, b"")
            peer.earned = 0

    def room(self, source: int, kind: int, number: int, nbytes: int) -> memoryview | None:
        """The memory for the payload of a segment, if it can be received there; it is `received` then."""
        peer = self._peers.get(source)
        partial = peer.partial.get(number) if peer is not None and kind == _PART else None
        return None if partial is None else partial.room(nbytes)

    def forget(self, source: int) -> None:
        """Drop the state of a peer that is gone, and what waits to be sent to it: those sends return."""
        peer = self._peers.pop(source, None)
        if peer is not None:
            peer.is_gone = True
            peer.wake()

    def _whole(self, source: int, payload: Buffer) -> None:
        data = memoryview(payload)
        head, sizes, start = _opened(data)
        if not sizes and start == len(data):
            self._deliver(source, head, ())
            return
        if start + sum(sizes) != len(data):
            raise ProtocolError(f"a message of {len(data)} bytes; {start + sum(sizes)} were announced")
        arrays = []
        for size in sizes:
            arrays.append(np.frombuffer(data[start : start + size], np.uint8).copy())
            start += size
        self._deliver(source, head, arrays)

    def _first(self, source: int, peer: _SegmentPeer, number: int, payload: Buffer) -> None:
        data = memoryview(payload)
        head, sizes, start = _opened(data)
        if start != len(data) or not sum(sizes) or sum(sizes) > MESSAGE_BYTES or number in peer.partial:
            raise ProtocolError(f"a long message of {sum(sizes)} bytes, at most {MESSAGE_BYTES}")
        if len(peer.partial) >= _LONG_MAX:
            raise ProtocolError(f"more than {_LONG_MAX} long messages at a time")
        try:
            arrays = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError:
            raise ProtocolError(f"a message of {sum(sizes)} bytes, for which there is not enough memory") from None
        peer.partial[number] = _Partial(head, arrays)

    def _credited(self, peer: _SegmentPeer, amount: int) -> None:
        if amount > peer.outstanding:
            raise ProtocolError(f"a credit of {amount} bytes, but only {peer.outstanding} are on the way")
        peer.outstanding -= amount
        peer.wake()


def _begin(head: bytes, arrays: Sequence[Array]) -> bytes:
    """The begin of a message: the number and the sizes of its arrays, and its head."""
    if not arrays:
        return _TABLE.pack(0, len(head)) + head
    return _TABLE.pack(len(arrays), len(head)) + struct.pack(f"<{len(arrays)}Q", *[a.size for a in arrays]) + head


def _joined(first: bytes, arrays: Sequence[Array]) -> bytes:
    parts: list[Buffer] = [first, *arrays]
    return b"".join(parts)


def _opened(data: memoryview) -> tuple[bytes, Sequence[int], int]:
    """The head of a message, the sizes of its arrays, and the offset of the first. Raises ProtocolError."""
    try:
        count, length = _TABLE.unpack_from(data)
        if count > ARRAYS_MAX or length > HEAD_BYTES:
            raise ProtocolError(f"a message of {count} arrays, at most {ARRAYS_MAX}, with a head of {length} bytes")
        sizes = struct.unpack_from(f"<{count}Q", data, _TABLE.size)
    except struct.error as error:
        raise ProtocolError(f"not the beginning of a message: {error}") from None
    start = _TABLE.size + _SIZE * count
    if len(data) < start + length:
        raise ProtocolError("a message whose head is cut off")
    return bytes(data[start : start + length]), sizes, start + length


async def _to_the_end(work: Any) -> None:
    """Await `work`, which ends soon in any case. A cancellation takes effect after its end."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
            continue
        cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()
