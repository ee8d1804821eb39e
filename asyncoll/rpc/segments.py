"""Messages of any length over a link that carries short ones: cut up, bounded, and put together again.

A short message is one segment. A long one begins with a segment that says how long its arrays are, which its receiver
checks before it takes memory for them; their bytes follow, a segment each, and other messages may come in between. A
window bounds what is on the way to a peer, or waits there: credit comes back as segments are put where they belong.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import ARRAYS_MAX, HEAD_BYTES, Deliver
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import SEGMENT_BYTES, Buffer

WINDOW_BYTES = 8 * SEGMENT_BYTES
MESSAGE_BYTES = 1 << 36  # the longest message
_COST = 64  # what a segment costs of the window beside its payload
_SHORT_BYTES = 1 << 17  # a message of at most so many bytes is copied together, and goes as one segment
_LONG_MAX = 4  # long messages on the way to one peer at a time

_WHOLE, _FIRST, _PART, _DROP, _CREDIT = range(5)
_TABLE = struct.Struct("<II")  # arrays, bytes of the head; then the bytes of each array


class Link(Protocol):
    """Carries segments, in order."""

    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        """Send a segment of at most SEGMENT_BYTES, soon; until then the payload must not change."""

    async def flush(self) -> None:
        """Wait until what has been posted may be changed."""


class _Peer:
    """What is on the way to one peer, and what has come from it."""

    def __init__(self) -> None:
        self.outstanding = 0
        self.earned = 0
        self.waiters: deque[asyncio.Future[None]] = deque()
        self.long = asyncio.Semaphore(_LONG_MAX)
        self.partial: dict[int, _Partial] = {}


class _Partial:
    """A long message that is being received."""

    def __init__(self, head: bytes, arrays: list[Array]) -> None:
        self.head = head
        self.arrays = arrays
        self._empty = deque(array for array in arrays if array.size)
        self._filled = 0

    def take(self, payload: Buffer) -> bool:
        """Put the next bytes where they belong; returns whether the message is complete."""
        data = np.frombuffer(payload, np.uint8)
        target = self._empty[0][self._filled : self._filled + data.size]
        if target.size != data.size or not data.size:
            raise ProtocolError(f"a segment of {data.size} bytes, {target.size} were expected")
        target[...] = data
        self._filled += data.size
        if self._filled == self._empty[0].size:
            self._empty.popleft()
            self._filled = 0
        return not self._empty


class Segments:
    """The messages to and from all peers of one carrier."""

    def __init__(self, link: Link, deliver: Deliver) -> None:
        self._link = link
        self._deliver = deliver
        self._numbers = itertools.count()
        self._peers: defaultdict[int, _Peer] = defaultdict(_Peer)

    # -- sending ----------------------------------------------------------------------------------

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array]) -> None:
        """As `Carrier.send`."""
        sizes = [array.size for array in arrays]
        first = _TABLE.pack(len(sizes), len(head)) + struct.pack(f"<{len(sizes)}Q", *sizes) + head
        peer = self._peers[dest]
        if len(first) + sum(sizes) <= _SHORT_BYTES:
            await self._post(peer, dest, _WHOLE, 0, _joined(first, arrays))
            return
        async with peer.long:
            await self._send_long(peer, dest, first, arrays)

    async def _send_long(self, peer: _Peer, dest: int, first: bytes, arrays: Sequence[Array]) -> None:
        number = next(self._numbers)
        await self._post(peer, dest, _FIRST, number, first)
        try:
            for array in arrays:
                for start in range(0, array.size, SEGMENT_BYTES):
                    await self._post(peer, dest, _PART, number, array[start : start + SEGMENT_BYTES])
        except BaseException:
            self._link.post(dest, _DROP, number, b"")
            raise
        finally:
            await _to_the_end(self._link.flush())

    async def _post(self, peer: _Peer, dest: int, kind: int, number: int, payload: Buffer) -> None:
        cost = len(payload) + _COST
        while peer.outstanding + cost > WINDOW_BYTES:
            room = asyncio.get_running_loop().create_future()
            peer.waiters.append(room)
            await room
        peer.outstanding += cost
        self._link.post(dest, kind, number, payload)

    # -- receiving --------------------------------------------------------------------------------

    def received(self, source: int, kind: int, number: int, payload: Buffer) -> None:
        """A segment has come. Raises ProtocolError if it makes no sense."""
        peer = self._peers[source]
        if kind == _CREDIT:
            self._credited(peer, number)
            return
        if kind == _WHOLE:
            self._whole(source, payload)
        elif kind == _FIRST:
            self._first(source, peer, number, payload)
        elif number not in peer.partial:
            raise ProtocolError(f"a segment of kind {kind} of no message")
        elif kind == _DROP:
            del peer.partial[number]
            return  # it costs nothing
        elif kind == _PART and peer.partial[number].take(payload):
            message = peer.partial.pop(number)
            self._deliver(source, message.head, message.arrays)
        elif kind != _PART:
            raise ProtocolError(f"a segment of the unknown kind {kind}")
        self._earn(source, peer, len(payload) + _COST)

    def forget(self, source: int) -> None:
        """The peer is gone, and nothing is sent to it any more. Who waits to send to it is cancelled by others."""
        self._peers.pop(source, None)

    def _whole(self, source: int, payload: Buffer) -> None:
        data = memoryview(payload)
        head, sizes, start = _opened(data)
        if start + sum(sizes) != len(data):
            raise ProtocolError(f"a message of {len(data)} bytes, {start + sum(sizes)} were announced")
        arrays = []
        for size in sizes:
            arrays.append(np.frombuffer(data[start : start + size], np.uint8).copy())
            start += size
        self._deliver(source, head, arrays)

    def _first(self, source: int, peer: _Peer, number: int, payload: Buffer) -> None:
        data = memoryview(payload)
        head, sizes, start = _opened(data)
        if start != len(data) or not sum(sizes) or sum(sizes) > MESSAGE_BYTES or number in peer.partial:
            raise ProtocolError(f"a long message of {sum(sizes)} bytes, at most {MESSAGE_BYTES}")
        if len(peer.partial) >= _LONG_MAX:
            raise ProtocolError(f"more than {_LONG_MAX} long messages at a time")
        try:
            arrays = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError:
            raise ProtocolError(f"a message of {sum(sizes)} bytes, which there is no memory for") from None
        peer.partial[number] = _Partial(head, arrays)

    def _earn(self, source: int, peer: _Peer, amount: int) -> None:
        """So much of what `source` sent has been taken; tell it once it is worth a segment."""
        peer.earned += amount
        if peer.earned >= WINDOW_BYTES // 4:
            self._link.post(source, _CREDIT, peer.earned, b"")
            peer.earned = 0

    def _credited(self, peer: _Peer, amount: int) -> None:
        if amount > peer.outstanding:
            raise ProtocolError(f"a credit of {amount} bytes, but only {peer.outstanding} are on the way")
        peer.outstanding -= amount
        _wake(peer)


def _joined(first: bytes, arrays: Sequence[Buffer]) -> bytes:
    return b"".join([first, *arrays]) if arrays else first


def _wake(peer: _Peer) -> None:
    waiters, peer.waiters = peer.waiters, deque()
    for room in waiters:
        if not room.done():
            room.set_result(None)


def _opened(data: memoryview) -> tuple[bytes, Sequence[int], int]:
    """The head of a message, the bytes of its arrays, and where they would begin."""
    try:
        count, length = _TABLE.unpack_from(data)
        if count > ARRAYS_MAX or length > HEAD_BYTES:
            raise ProtocolError(f"a message of {count} arrays, at most {ARRAYS_MAX}, with a head of {length} bytes")
        sizes = struct.unpack_from(f"<{count}Q", data, _TABLE.size)
    except struct.error as error:
        raise ProtocolError(f"not the beginning of a message: {error}") from None
    start = _TABLE.size + 8 * count
    if len(data) < start + length:
        raise ProtocolError("a message whose head is cut off")
    return bytes(data[start : start + length]), sizes, start + length


async def _to_the_end(work: Any) -> None:
    """Await what is over soon in any case, and be cancelled after that."""
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
