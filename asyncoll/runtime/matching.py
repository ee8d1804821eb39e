"""Matching of posted receives with arriving segments. Pure: no loop, no thread, no clock.

One `Mailbox` belongs to one execution of one operation. A sender cuts an array into segments and sends them in order,
and the arrays of one key one after another. The mailbox copies or combines a segment into the posted array at its
arrival, or keeps it until the receive is posted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.tensors.reductions import Array, Combine
from asyncoll.transport.wire import Buffer

Key = tuple[int, int]  # (world rank of the source, step)


class Receive:
    """A posted receive into the flat array `into`.

    Other code must not read or write `into` until `complete` is true. `on_complete` is called once, at that moment.
    """

    __slots__ = ("combine", "complete", "filled", "into", "on_complete")

    def __init__(self, into: Array, combine: Combine | None = None) -> None:
        self.into = into
        self.combine = combine
        self.filled = 0  # elements
        self.complete = False
        self.on_complete: Callable[[], object] | None = None

    def take(self, payload: Buffer) -> None:
        """Consume the next segment. Raises ProtocolError if it does not fit the rest of the array."""
        into = self.into
        raw = np.frombuffer(payload, np.uint8)
        if raw.size % into.itemsize:
            raise ProtocolError(f"a segment of {raw.size} bytes, not a multiple of the {into.itemsize} of an element")
        data = raw.view(into.dtype)
        target = into[self.filled : self.filled + data.size]
        # An empty segment would never end the array.
        if target.size != data.size or (into.size and not data.size):
            raise ProtocolError(f"a segment of {data.size} elements; {into.size - self.filled} were expected")
        if self.combine is None:
            target[...] = data
        else:
            try:
                self.combine(target, data)
            except ValueError as error:  # a reduction over records of several elements got a part of a record
                raise ProtocolError(f"a segment of {data.size} elements: {error}") from None
        self.filled += data.size
        if self.filled == into.size:
            self.complete = True
            if self.on_complete is not None:
                self.on_complete()


class Mailbox:
    """The posted receives and the early segments of one execution, by (source, step).

    In: `post` (this rank's algorithm) and `arrive` (messages of peers). Out: `Receive.on_complete`.
    """

    __slots__ = ("_arrived", "posted")

    def __init__(self) -> None:
        self.posted: dict[Key, Receive] = {}
        self._arrived: dict[Key, list[Buffer]] = {}

    def post(self, key: Key, receive: Receive) -> list[Buffer]:
        """Post `receive`; returns the early segments that it consumed. Raises ProtocolError if one does not fit.

        The segments after these belong to the next array of this key.
        """
        assert key not in self.posted, f"two receives for {key}"
        early, consumed = self._arrived.pop(key, []), 0
        while consumed < len(early) and not receive.complete:
            receive.take(early[consumed])
            consumed += 1
        if not receive.complete:
            self.posted[key] = receive
        elif consumed < len(early):
            self._arrived[key] = early[consumed:]
        return early[:consumed]

    def arrive(self, key: Key, payload: Buffer) -> Receive | None:
        """Take one segment; returns the posted receive that has consumed it, or None if the segment waits for one.

        Raises ProtocolError if the segment does not fit the receive.
        """
        receive = self.posted.get(key)
        if receive is None:
            self._arrived.setdefault(key, []).append(payload)
            return None
        receive.take(payload)
        if receive.complete:
            del self.posted[key]
        return receive

    def undo(self, key: Key, receive: Receive) -> None:
        """Undo `post`: what `receive` has consumed is early again. `receive.into` is not used any more."""
        self.posted.pop(key, None)
        if receive.filled or receive.complete:
            self._arrived[key] = [receive.into[: receive.filled].tobytes()]

    def early(self) -> list[tuple[int, Buffer]]:
        """The early segments, and their sources."""
        return [(source, payload) for (source, _), payloads in self._arrived.items() for payload in payloads]

    def forget(self, source: int) -> None:
        """Drop the early segments of `source`."""
        for key in [key for key in self._arrived if key[0] == source]:
            del self._arrived[key]

    def waiting_for(self) -> list[Key]:
        """The keys of the receives that are posted and not complete."""
        return list(self.posted)
