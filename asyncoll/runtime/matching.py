"""Posted receives meet arrived messages.

One `Mailbox` belongs to one execution of one operation. Arrays come in segments that one sender sends in order; a
segment is copied or combined into the posted array the moment it arrives, or kept until the receive is posted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.tensors.reductions import Array, Combine
from asyncoll.transport.wire import Buffer

Key = tuple[int, int]  # (source rank in the world, step)


class Receive:
    """A posted receive into the flat array `into`.

    Nobody else may touch `into` until `complete`; `on_complete` is then called once.
    """

    __slots__ = ("combine", "complete", "filled", "into", "on_complete")

    def __init__(self, into: Array, combine: Combine | None = None) -> None:
        self.into = into
        self.combine = combine
        self.filled = 0
        self.complete = False
        self.on_complete: Callable[[], object] | None = None

    def take(self, payload: Buffer) -> None:
        """Consume one segment. Raises ProtocolError if it does not fit."""
        into = self.into
        data = _as_array(payload, into)
        target = into[self.filled : self.filled + data.size]
        if target.size != data.size or (into.size and not data.size):
            raise ProtocolError(f"a segment of {data.size} elements; {into.size - self.filled} were expected")
        if self.combine is None:
            target[...] = data
        else:
            try:
                self.combine(target, data)
            except ValueError as error:  # a piece that the reduction cannot take apart
                raise ProtocolError(f"a segment of {data.size} elements: {error}") from None
        self.filled += data.size
        if self.filled == into.size:
            self.complete = True
            if self.on_complete is not None:
                self.on_complete()


def _as_array(payload: Buffer, like: Array) -> Array:
    raw = np.frombuffer(payload, np.uint8)
    if raw.size % like.itemsize:
        raise ProtocolError(f"a segment of {raw.size} bytes, not a multiple of the {like.itemsize} of an element")
    return raw.view(like.dtype)


class Mailbox:
    """Receives posted and segments arrived for one execution, by (source, step)."""

    __slots__ = ("_arrived", "posted")

    def __init__(self) -> None:
        self.posted: dict[Key, Receive] = {}
        self._arrived: dict[Key, list[Buffer]] = {}

    def post(self, key: Key, receive: Receive) -> list[Buffer]:
        """Post `receive`; returns the early segments that it consumed."""
        assert key not in self.posted, f"two receives for {key}"
        early = self._arrived.pop(key, [])
        for payload in early:
            receive.take(payload)
        if not receive.complete:
            self.posted[key] = receive
        return early

    def arrive(self, key: Key, payload: Buffer) -> bool:
        """Take one segment; returns whether a posted receive consumed it at once."""
        receive = self.posted.get(key)
        if receive is None:
            self._arrived.setdefault(key, []).append(payload)
            return False
        receive.take(payload)
        if receive.complete:
            del self.posted[key]
        return True

    def forget(self, source: int) -> None:
        """Drop the early segments of `source`."""
        for key in [key for key in self._arrived if key[0] == source]:
            del self._arrived[key]

    def waiting_for(self) -> list[Key]:
        """What is posted and has not come."""
        return list(self.posted)
