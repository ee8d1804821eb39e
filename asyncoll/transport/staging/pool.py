"""Memory for mirrors: blocks that stay pinned when they are not in use, because to pin memory takes long."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.forks import address_of
from asyncoll.tensors.reductions import Array
from asyncoll.transport.staging import Device

_SLAB = 1 << 20  # bytes that are pinned at once, and divided into smaller pieces
_SMALLEST = 256  # bytes of a piece


class Pool:
    """Blocks of a few sizes, for one device and one rank. They are pinned, unless the device has no pinned memory.

    A large one for a tensor that may need none is pinned later (`pin`), or never.

    Those that are not in use wait for the next array. A large one takes the smallest of them that has room for it, so
    that calls of different sizes do not pin memory in turn. Large ones are unpinned and freed when they would exceed
    what was in use at one time; the slabs of small ones stay until the pool closes.
    """

    def __init__(self, device: Device, pages: Callable[[int], Array]) -> None:
        """`pages(nbytes)` allocates whole pages. It raises UsageError if there are none."""
        self._device = device
        self._pages = pages
        self._lock = threading.Lock()
        self._gone = deque[Array]()  # blocks and pieces without views. Finalizers only append: any thread may run them
        self._pieces: dict[int, list[Array]] = {}  # unused ones, by size in bytes
        self._blocks: dict[
            int, list[Array]
        ] = {}  # unused ones, by size in bytes, the size that was used last at the end
        self._pinned: dict[int, Array] = {}  # by address
        self._unpinned: dict[int, Array] = {}  # by address: those that `pin` may pin
        self._is_refused = False  # the device has refused to pin memory: then it gives its own, at once
        self._used_bytes = self._most_bytes = self._unused_bytes = 0  # of blocks

    @property
    def is_pinned(self) -> bool:
        """Whether any memory is."""
        return bool(self._pinned)

    def empty(self, nbytes: int, *, is_copied: bool = True) -> Array:
        """`nbytes` bytes of undefined content. They return to the pool with their last view; a copy keeps one, too.

        Unless `is_copied`, `pin` comes before the device copies them. In any thread. Raises UsageError if there is too
        little memory.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        size = _size_for(nbytes)
        with self._lock:
            self._collect()
            memory = self._piece(size) if size < _SLAB else self._block(size, is_copied=is_copied)
        owner = np.frombuffer(memory.data, np.uint8)  # the last view of the array ends it
        weakref.finalize(owner, self._gone.append, memory)
        return owner[:nbytes]

    def pin(self, array: Array) -> None:
        """The device copies `array`, one of `empty`, from here on. Without effect if it is pinned. In any thread."""
        with self._lock:
            self._pin_late(address_of(array))

    def close(self) -> None:
        """Unpin everything. No copy is under way, and none begins. Arrays that are in use stay valid."""
        with self._lock:
            for memory in self._pinned.values():
                self._device.unpin(memory)
            for unused in (self._pinned, self._unpinned, self._pieces, self._blocks):
                unused.clear()

    def _collect(self) -> None:
        while self._gone:
            memory = self._gone.popleft()
            if memory.nbytes < _SLAB:
                self._pieces.setdefault(memory.nbytes, []).append(memory)
            else:
                self._used_bytes -= memory.nbytes
                self._unused_bytes += memory.nbytes
                self._blocks.setdefault(memory.nbytes, []).append(memory)

    def _piece(self, nbytes: int) -> Array:
        if not self._pieces.get(nbytes):
            slab = self._new(_SLAB, is_copied=True)
            self._pieces[nbytes] = [slab[start : start + nbytes] for start in range(0, _SLAB, nbytes)]
        return self._pieces[nbytes].pop()

    def _block(self, nbytes: int, *, is_copied: bool) -> Array:
        nbytes = min((size for size in self._blocks if size >= nbytes), default=nbytes)
        used_bytes = self._used_bytes + nbytes
        self._most_bytes = max(self._most_bytes, used_bytes)
        if nbytes in self._blocks:
            block = self._pop(nbytes)
            if is_copied:
                self._pin_late(address_of(block))
        else:
            while self._blocks and used_bytes + self._unused_bytes > self._most_bytes:
                self._drop()
            block = self._new(nbytes, is_copied=is_copied)
        self._used_bytes = used_bytes
        return block

    def _pop(self, nbytes: int) -> Array:
        blocks = self._blocks.pop(nbytes)
        block = blocks.pop()
        if blocks:
            self._blocks[nbytes] = blocks
        self._unused_bytes -= nbytes
        return block

    def _new(self, nbytes: int, *, is_copied: bool) -> Array:
        try:
            memory = self._pages(nbytes)
        except UsageError:
            while self._blocks:
                self._drop()
            memory = self._pages(nbytes)
        if not (is_copied or self._is_refused):
            self._unpinned[address_of(memory)] = memory
            return memory
        if self._pin(memory):
            return memory
        own = self._device.pinned(nbytes)
        if own is None:
            return memory
        self._pinned[address_of(own)] = own
        return own

    def _pin_late(self, address: int) -> None:
        memory = self._unpinned.pop(address, None)
        if memory is not None:
            self._pin(memory)

    def _pin(self, memory: Array) -> bool:
        is_pinned = self._device.pin(memory)
        if is_pinned:
            self._pinned[address_of(memory)] = memory
        self._is_refused |= not is_pinned
        return is_pinned

    def _drop(self) -> None:
        """Free the unused block whose size was not used for the longest time: first unpin it, because its pages go."""
        block = self._pop(next(iter(self._blocks)))
        self._unpinned.pop(address_of(block), None)
        if self._pinned.pop(address_of(block), None) is not None:
            self._device.unpin(block)


def _size_for(nbytes: int) -> int:
    """A power of two for small arrays, and at most a quarter more than `nbytes`, in whole pages, for large ones."""
    if nbytes <= _SLAB:
        return max(_SMALLEST, 1 << (nbytes - 1).bit_length())
    step = 1 << nbytes.bit_length() - 3
    return -(-nbytes // step) * step
