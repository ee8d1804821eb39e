"""Payloads in shared memory: between ranks of one host, a message may refer to a slot that contains its payload.

The sender copies a long payload into a slot, a block of its own memory, and sends the number of the slot in place of
the payload. The receiver reads the payload in the slot. The slot is free again when the receiver has dropped the last
reference to the payload. So a payload is copied twice, in and out; a socket makes at least four copies.

A control block of the sender records the owner of each slot. Only the sender takes its slots, and only the receiver of
the payload returns a slot. A sender never waits for a slot, because a receiver may hold a payload for as long as it
likes. Without a free slot, the message carries its payload, as messages to other hosts do.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.transport import (
    MAX_FRAME_BYTES,
    Arena,
    Buffer,
    ControlBlock,
    Loss,
    Receiver,
    Transport,
    check_frames,
    peers_view,
)

THRESHOLD_BYTES = 1 << 18  # payloads of at least this size use a slot; for shorter ones, slots cost more than they save
# The slots of one sender, of MAX_FRAME_BYTES each, allocated on demand. With 16 slots, a third of the payloads of a
# transfer of 100 MB to a slower rank found none free.
SLOTS = 32

# The control block of a sender has three columns of SLOTS cells: the owner of each slot, its address, and the bytes of
# the payload in it. A message contains only the number of the slot, so a forged message cannot name other memory.
_COLUMNS = 3
# The owner of a slot: _FREE; or dest + 1, from `send` until rank `dest` receives the message; or -(dest + 1), until
# rank `dest` has dropped the payload.
_FREE = 0

# A message that refers to a slot has four frames, one more than any other message: the header, the marker, the
# piggyback if there is one, and empty frames.
_FRAMES = 4
_MARKER = struct.Struct("<BB")  # the slot, and the number of frames of the original message


class SlottedTransport:
    """The `Transport` `inner`, with long payloads to the other ranks of `arena` in shared memory."""

    def __init__(self, inner: Transport, arena: Arena) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self._inner = inner
        self._arena = arena
        self._neighbours: frozenset[int] = frozenset()  # the other ranks of this host, once started

    async def start(self, receiver: Receiver) -> None:
        """Start `inner` first, and open the control blocks then.

        A rank may have died while it held their lock. With `inner` started, this rank can report that to all others.
        No rank sends a long payload before all have started, because joining the world ends with a barrier.
        """
        self._incoming = _Incoming(self.rank, self._arena, receiver)
        await self._inner.start(self._incoming)
        cells = _COLUMNS * SLOTS
        control_blocks = {rank: self._arena.control_block(digest("slots", rank), cells) for rank in self._arena.ranks}
        self._outgoing = _Outgoing(self._arena, control_blocks.pop(self.rank))
        self._incoming.control_blocks = control_blocks
        self._neighbours = frozenset(control_blocks)

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        self._incoming.give_back()
        if len(frames) > 1 and len(frames[1]) >= THRESHOLD_BYTES and dest in self._neighbours:
            check_frames(dest, self.size, frames)
            slot = self._outgoing.put(dest, frames[1])
            # Without a free slot the message carries its payload itself.
            if slot is not None:
                marker = _MARKER.pack(slot, len(frames))
                frames = [frames[0], marker, *frames[2:], *[b""] * (_FRAMES - len(frames))]
        self._inner.send(dest, frames)

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        # The slots belong to the runtime's loop.
        return max(map(len, frames)) < THRESHOLD_BYTES and self._inner.send_directly(dest, frames)

    async def drain(self, dest: int) -> None:
        """Wait for `inner` only. Payloads in slots need no back-pressure: a sender has at most SLOTS of them."""
        self._incoming.give_back()
        await self._inner.drain(dest)

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        """Go on without slots: their locks may have died with a rank. What is in some still comes."""
        self._neighbours = frozenset()
        self._incoming.receiver = receiver
        self._inner.enter(self._incoming, members, to_kill)

    async def close(self, *, flush: bool = False) -> None:
        """Close `inner`. The slots remain as long as the arena, because receivers may still read payloads in them."""
        self._neighbours = frozenset()
        await self._inner.close(flush=flush)


class _Outgoing:
    """The slots of this rank."""

    def __init__(self, arena: Arena, control_block: ControlBlock) -> None:
        self._arena = arena
        self._control_block = control_block
        self._addresses: list[int] = []  # of the slots that have been allocated so far
        self._slots_max = SLOTS
        self._free: list[int] = []  # at the last look under the lock; receivers may have returned more since

    def put(self, dest: int, payload: Buffer) -> int | None:
        """Copy `payload` into a slot for `dest`, and return the slot; None if no slot is free."""
        try:
            slot = self._claim()
            if slot is not None:
                self._fill(slot, dest, payload)
        # A receiver has died with the lock, which has reported the loss.
        except AsyncollError:
            return None
        return slot

    def _claim(self) -> int | None:
        """Return a free slot. It prefers a used one, which may still be in the processor's cache, to a new one."""
        if not self._free:
            with self._control_block:
                self._find_free()
        return self._free.pop() if self._free else self._allocate()

    def _fill(self, slot: int, dest: int, payload: Buffer) -> None:
        # The payload is written before the lock is acquired, and the receiver reads it after it has held the lock.
        address, nbytes = self._addresses[slot], len(payload)
        self._arena.view(address, nbytes)[:] = np.frombuffer(payload, np.uint8)
        with self._control_block as control_block:
            for column, value in enumerate((dest + 1, address, nbytes)):
                control_block.cells[column * SLOTS + slot] = value
            # Here, where the lock is held in any case, it needs no second critical section.
            self._find_free()

    def _find_free(self) -> None:
        """Look for free slots; the caller holds the lock.

        The lowest slot is the last in the list, and so the next to be used: few slots in use stay in the cache.
        """
        owners = self._control_block.cells[: len(self._addresses)].tolist()
        self._free = [slot for slot in reversed(range(len(owners))) if owners[slot] == _FREE]

    def _allocate(self) -> int | None:
        if len(self._addresses) == self._slots_max:
            return None
        try:
            self._addresses.append(self._arena.allocate(MAX_FRAME_BYTES))
        # The host has no memory left: messages carry their payloads from now on.
        except UsageError:
            self._slots_max = len(self._addresses)
            return None
        return len(self._addresses) - 1


class _Incoming:
    """A `Receiver` that replaces references to slots of other ranks by the payloads, for the real receiver."""

    def __init__(self, rank: int, arena: Arena, receiver: Receiver) -> None:
        self._own_tag = rank + 1
        self._arena = arena
        self.control_blocks: dict[int, ControlBlock] = {}  # of the other ranks of this host, once they are open
        self.receiver = receiver
        # (source, slot) of payloads that have been dropped. The last reference may be dropped in any thread and at any
        # moment, even while this thread holds that lock. So the finalizer only appends to this deque, and `give_back`
        # does the rest.
        self._dropped: deque[tuple[int, int]] = deque()

    def received(self, source: int, frames: list[Buffer]) -> None:
        if len(frames) != _FRAMES or source not in self.control_blocks:
            self.receiver.received(source, frames)
            return
        try:
            whole = [self._resolved(source, frames)]
        # A rank has died with the lock, which has reported the loss: the message is unreadable.
        except AsyncollError:
            return
        self.receiver.received(source, whole.pop())  # `whole` must not keep the payload alive
        self.give_back()

    def lost(self, loss: Loss) -> None:
        self.receiver.lost(loss)

    def give_back(self) -> None:
        """Return the slots of dropped payloads to their senders."""
        while self._dropped:
            source, slot = self._dropped.popleft()
            with contextlib.suppress(AsyncollError), self.control_blocks[source] as control_block:
                control_block.cells[slot] = _FREE

    def _resolved(self, source: int, frames: list[Buffer]) -> list[Buffer]:
        """Return the original message, with the payload in the slot.

        A malformed message is returned unchanged: it has more frames than `wire.decode` accepts.
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
        """Return the payload in this slot of `source`; None if the slot contains no payload for this rank."""
        with self.control_blocks[source] as control_block:
            owner, address, nbytes = control_block.cells[slot::SLOTS]
            if owner != self._own_tag:
                return None
            control_block.cells[slot] = -self._own_tag
        view = peers_view(self._arena, address, nbytes) if nbytes <= MAX_FRAME_BYTES else None
        if view is None:
            return None
        # Return a memoryview of the array, because its slices keep the array itself alive. A numpy view of an array
        # would keep only the innermost array alive, and the finalizer would run too early.
        weakref.finalize(view, self._dropped.append, (source, slot))
        return view.data.toreadonly()
