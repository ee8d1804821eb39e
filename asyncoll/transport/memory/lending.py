"""Blocks of memory that a rank lends to other ranks of its host, and that they return when they no longer use them.

Returned blocks are lent again. New memory costs more than the data that is written into it: the kernel clears each
page, and each process maps it.

Returned blocks form a linked list. A cell of a control block of the lender contains the address of the first one, and
the first 8 bytes of each block contain the address of the next, or 0. Such a list has no limit, so a borrower never
waits to return a block.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from functools import partial

import numpy as np

from asyncoll import forks
from asyncoll.errors import AsyncollError, ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, ControlBlock, peers_view

KEPT_BYTES = 1 << 28  # the free blocks of a lender that it keeps, in total; the host gets the others back
_SMALLEST = 1 << 12  # bytes of a block
_LINK = 8  # bytes of an address
logger = logging.getLogger("asyncoll")


class Lender:
    """The blocks of one rank. A block is free, taken or lent. All methods are called in one thread."""

    def __init__(self, arena: Arena, control_block: ControlBlock, cell: int) -> None:
        """Borrowers return blocks at `cell` of `control_block`, which is initially 0."""
        self._arena = arena
        self._control_block = control_block
        self._cell = cell
        self._taken: dict[int, int] = {}  # bytes by address
        self._lent: dict[int, int] = {}  # bytes by address
        self._free: dict[int, list[int]] = {}  # addresses by bytes; the least recently used size comes first
        self._free_bytes = 0
        self._kept_bytes = KEPT_BYTES

    def take(self, nbytes: int) -> int:
        """Take a block of at least `nbytes` bytes, and return its address.

        Raises UsageError if the host has too little memory left.
        """
        self._collect()
        # Rounded up, by less than a fourth or to _SMALLEST: the fewer the sizes, the more blocks fit again.
        step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 3, 0))
        nbytes = -(-nbytes // step) * step
        addresses = self._free.pop(nbytes, [])
        if addresses:
            address = addresses.pop()
            self._free_bytes -= nbytes
        else:
            address = self._allocate(nbytes)
        if addresses:
            self._free[nbytes] = addresses
        self._taken[address] = nbytes
        return address

    def lend(self, address: int) -> None:
        """Mark a taken block as lent, now that a message about it is in the inbox of the borrower."""
        self._lent[address] = self._taken.pop(address)

    def keep_unless_lent(self, address: int) -> None:
        """Free a taken block; does nothing if it has been lent."""
        if address in self._taken:
            self._keep(address, self._taken.pop(address))

    def close(self) -> None:
        """Give the free blocks back to the host. Lent blocks remain valid as long as the arena."""
        self._kept_bytes = 0
        self._trim(0)
        self._collect()

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._arena.allocate(nbytes)
        except UsageError:
            # The free blocks of other sizes may be enough.
            self._trim(0)
            return self._arena.allocate(nbytes)

    def _keep(self, address: int, nbytes: int) -> None:
        # Insert the size again at the end of the dict, whose first entry so is the least recently used size.
        addresses = self._free.pop(nbytes, [])
        addresses.append(address)
        self._free[nbytes] = addresses
        self._free_bytes += nbytes
        self._trim(self._kept_bytes)

    def _trim(self, most: int) -> None:
        while self._free_bytes > most:
            nbytes, addresses = next(iter(self._free.items()))
            self._arena.free(addresses.pop())
            self._free_bytes -= nbytes
            if not addresses:
                del self._free[nbytes]

    def _collect(self) -> None:
        """Free the returned blocks. Peers write the list, so this follows it through lent blocks only."""
        # Without the lock this is a hint.
        if not self._control_block.cells[self._cell]:
            return
        with self._control_block as control_block:
            address = control_block.cells[self._cell]
            control_block.cells[self._cell] = 0
        # Each step removes the block from `_lent`, so a list with a cycle ends, too.
        while address in self._lent:
            following = _link(self._arena.view(address, _LINK))[0]
            self._keep(address, self._lent.pop(address))
            address = following
        if address:
            logger.warning("a block at %d was returned that was not lent; the blocks behind it are lost", address)


class Borrower:
    """The blocks that one rank has borrowed, from any lender.

    `borrow` and `give_back` are called in one thread. The arrays may be dropped in any thread.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: dict[int, weakref.ref[Array]] = {}  # by address; `weakref.finalize` takes ten times as long
        # The blocks to return: control block and cell of the lender, and address. The last reference to an array may be
        # dropped at any moment, even while this thread holds that lock. So the callback only appends to this deque, and
        # `give_back` does the rest.
        self.dropped: deque[tuple[ControlBlock, int, int]] = deque()

    def borrow(self, control_block: ControlBlock, cell: int, address: int, nbytes: int) -> Array:
        """Return the block at `address` as a flat uint8 array of `nbytes` bytes.

        The lender collects returned blocks at `cell` of `control_block`. The block stays borrowed as long as the array,
        or a view of it, exists.

        Raises ProtocolError if no such block can exist: a peer has supplied `address` and `nbytes`.
        """
        view = peers_view(self._arena, address, nbytes)
        if view is None or nbytes < _LINK or address % _LINK:
            raise ProtocolError(f"{nbytes} bytes at {address}, which is no block of shared memory")
        # numpy lets a view of a view refer to the innermost array only, so a view of `view` would not keep `view`
        # alive. An array over a buffer is the innermost one: it lives as long as its views do.
        whole = np.frombuffer(view.data, np.uint8)
        forks.copy_for_children(whole)
        self._held[address] = weakref.ref(whole, partial(self._drop, control_block, cell, address))
        return whole

    def _drop(self, control_block: ControlBlock, cell: int, address: int, _: weakref.ref[Array]) -> None:
        self._held.pop(address, None)
        self.dropped.append((control_block, cell, address))

    def give_back(self) -> None:
        """Return the blocks whose arrays no longer exist. A lender that is lost gets nothing."""
        while self.dropped:
            control_block, cell, address = self.dropped.popleft()
            # The lock has reported the loss.
            with contextlib.suppress(AsyncollError), control_block:
                _link(self._arena.view(address, _LINK))[0] = control_block.cells[cell]
                control_block.cells[cell] = address


def _link(first: Array) -> memoryview:
    return first.data.cast("B").cast("q")
