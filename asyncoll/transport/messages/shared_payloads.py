"""Messages whose payload goes through shared memory, with the rest of the message as a doorbell.

A long payload for another rank of this host is copied into a slot, which is memory of the sender's own; what is sent
names the slot instead. The receiver reads the payload where it is. Once nobody there holds it any more, the slot is
free again. So a payload is copied twice, in and out, where a socket makes four or more copies of it.

Which slot is whose stands on a control block of the sender's. Only the sender takes its slots, and only whom one was
taken for gives it back. Nobody ever waits for a slot, because a receiver may hold a payload for as long as it likes: a
message that finds none goes whole, as those to other hosts do.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from asyncoll.arguments import digest
from asyncoll.errors import PeerLostError, UsageError
from asyncoll.transport import (
    MAX_FRAME_BYTES,
    Arena,
    Buffer,
    ControlBlock,
    Receiver,
    Transport,
    check_frames,
    peers_view,
)

THRESHOLD_BYTES = 1 << 18  # payloads from here on go through a slot: below, what slots cost is more than they save
SLOTS = 32  # of each sender at most, of MAX_FRAME_BYTES each; with 16, a third of 100 MB to a slower rank found none

# The control block of a sender has three cells for each of its slots: whose it is (see below), its address, and the
# bytes of the payload in it. They are not in the message, because nothing in a message is trusted.
_COLUMNS = 3
_FREE = 0  # otherwise rank + 1 while a message is on its way to `rank`, and the negative of it while `rank` reads it

# A message that names a slot has a frame more than any other: the first, the marker, the third if there is one, and
# as many empty ones as it takes.
_FRAMES = 4
_MARKER = struct.Struct("<BB")  # slot, frames of the message


class SlottedTransport:
    """The `Transport` `inner`, with a shorter way for long payloads to the other ranks of `arena`."""

    def __init__(self, inner: Transport, arena: Arena) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._arena = arena
        self._neighbours: frozenset[int] = frozenset()  # whom slots are for

    async def start(self, receiver: Receiver) -> None:
        """The control blocks last: a rank may have died with their lock, and this one can then tell all others so.

        No rank has a long payload to send before all have started: joining the world ends with a barrier.
        """
        self._incoming = _Incoming(self.rank, self._arena, receiver)
        await self._inner.start(self._incoming)
        control_blocks = {
            rank: self._arena.control_block(digest("slots", rank), _COLUMNS * SLOTS) for rank in self._arena.ranks
        }
        self._outgoing = _Outgoing(self._arena, control_blocks.pop(self.rank))
        self._incoming.control_blocks = control_blocks
        self._neighbours = frozenset(control_blocks)

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        self._incoming.give_back()
        if len(frames) > 1 and len(frames[1]) >= THRESHOLD_BYTES and dest in self._neighbours:
            frames = self._slotted(dest, frames)
        self._inner.send(dest, frames)

    async def drain(self, dest: int) -> None:
        """What lies in slots does not count: all of them hold less than the sockets may."""
        self._incoming.give_back()
        await self._inner.drain(dest)

    async def close(self, *, flush: bool = False) -> None:
        """The slots stay as long as the arena does: somebody may still read what is in them."""
        self._neighbours = frozenset()
        await self._inner.close(flush=flush)

    def _slotted(self, dest: int, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """The message with its payload in a slot; or as it is, if there is none."""
        check_frames(dest, self.size, frames)
        slot = self._outgoing.put(dest, frames[1])
        if slot is None:
            return frames
        marker = _MARKER.pack(slot, len(frames))
        return [frames[0], marker, *frames[2:], *[b""] * (_FRAMES - len(frames))]


class _Outgoing:
    """This rank's slots."""

    def __init__(self, arena: Arena, control_block: ControlBlock) -> None:
        self._arena = arena
        self._control_block = control_block
        self._addresses: list[int] = []  # of those that have been allocated
        self._most = SLOTS
        self._free: list[int] = []  # those that were, under the last lock; by now there may be more

    def put(self, dest: int, payload: Buffer) -> int | None:
        """The slot in which `payload` now is, for `dest` to find; None if there was none."""
        try:
            slot = self._claim()
            if slot is not None:
                self._fill(slot, dest, payload)
        except PeerLostError:  # it died over the control block, which the transport will tell in its own time
            return None
        return slot

    def _claim(self) -> int | None:
        """A slot that nobody uses: if possible one that has been used before, and may still be in the cache."""
        if not self._free:
            with self._control_block:
                self._find_free()
        return self._free.pop() if self._free else self._allocate()

    def _fill(self, slot: int, dest: int, payload: Buffer) -> None:
        address, nbytes = self._addresses[slot], len(payload)
        self._arena.view(address, nbytes)[:] = np.frombuffer(payload, np.uint8)
        with self._control_block as control_block:
            for column, value in enumerate((dest + 1, address, nbytes)):
                control_block.cells[column * SLOTS + slot] = value
            self._find_free()  # now, when it costs no other lock

    def _find_free(self) -> None:
        """Under the lock. The first is the last of the list, and so used first: the fewer there are, the better."""
        owners = self._control_block.cells[: len(self._addresses)].tolist()
        self._free = [slot for slot in reversed(range(len(owners))) if owners[slot] == _FREE]

    def _allocate(self) -> int | None:
        if len(self._addresses) == self._most:
            return None
        try:
            self._addresses.append(self._arena.allocate(MAX_FRAME_BYTES))
        except UsageError:  # the host has no more to spare, which is no reason to fail
            self._most = len(self._addresses)
            return None
        return len(self._addresses) - 1


class _Incoming:
    """A `Receiver` before the real one: it finds the payloads that lie in slots of other ranks."""

    def __init__(self, rank: int, arena: Arena, receiver: Receiver) -> None:
        self._mine = rank + 1
        self._arena = arena
        self.control_blocks: dict[
            int, ControlBlock
        ] = {}  # of the other ranks of this host, by rank, once they are open
        self._receiver = receiver
        self._lost: set[int] = set()
        # (source, slot) of payloads that nobody holds any more. The last to hold one may let go of it in any thread, at
        # any moment, even while this one holds a lock: so nothing more is done about it then.
        self._dropped: deque[tuple[int, int]] = deque()

    def received(self, source: int, frames: list[Buffer]) -> None:
        if len(frames) != _FRAMES or source not in self.control_blocks:
            self._receiver.received(source, frames)
            return
        try:
            whole = [self._whole(source, frames)]
        except PeerLostError as error:  # it died over the control block: this message can never be read
            self.lost(error.rank, error.cause, error.last_seen_s)
            return
        self._receiver.received(source, whole.pop())  # and keep no reference
        self.give_back()

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        if source not in self._lost:
            self._lost.add(source)
            self._receiver.lost(source, cause, last_seen_s)

    def give_back(self) -> None:
        """Let the senders have the slots that are not needed here any more."""
        while self._dropped:
            source, slot = self._dropped.popleft()
            with contextlib.suppress(PeerLostError), self.control_blocks[source] as control_block:
                control_block.cells[slot] = _FREE

    def _whole(self, source: int, frames: list[Buffer]) -> list[Buffer]:
        """The message as it was before its payload was put into a slot.

        If that is not what it is, it stays as it is: no message has so many frames, so its receiver will refuse it.
        """
        try:
            slot, count = _MARKER.unpack(frames[1])
        except struct.error:
            return frames
        if slot >= SLOTS or not 2 <= count < _FRAMES:
            return frames
        payload = self._payload(source, slot)
        return frames if payload is None else [frames[0], payload, *frames[2:count]]

    def _payload(self, source: int, slot: int) -> Buffer | None:
        """What is in this slot of `source`, if it is for us."""
        with self.control_blocks[source] as control_block:
            owner, address, nbytes = control_block.cells[slot::SLOTS]
            if owner != self._mine:
                return None
            control_block.cells[slot] = -self._mine
        view = peers_view(self._arena, address, nbytes) if nbytes <= MAX_FRAME_BYTES else None
        if view is None:
            return None
        # Not the array itself: views of an array do not keep it alive, only its memory, but views of a buffer do.
        weakref.finalize(view, self._dropped.append, (source, slot))
        return view.data.toreadonly()
