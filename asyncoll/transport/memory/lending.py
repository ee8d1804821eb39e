"""Blocks of memory that a rank lends to others of its host, and that come back once nobody there holds them any more.

New memory costs more than what is written into it: the kernel has to clear each page, and each process to map it. So
a block that has come back is lent again.

What has come back hangs on a cell of a control block of the lender's: the address of one block, whose first bytes hold
the address of the next. Such a list has room for all, so nobody ever waits to give something back.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from functools import partial

import numpy as np

from asyncoll import forks
from asyncoll.errors import PeerLostError, ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, ControlBlock, peers_view

KEPT_BYTES = 1 << 28  # of blocks that are not lent, in all; the rest goes back to the host
_SMALLEST = 1 << 12
_LINK = 8  # bytes of an address
logger = logging.getLogger("asyncoll")


class Lender:
    """A rank's own blocks. Everything is called in one thread."""

    def __init__(self, arena: Arena, control_block: ControlBlock, cell: int) -> None:
        """`cell` of `control_block`, 0 at first, is where borrowers give them back."""
        self._arena = arena
        self._control_block = control_block
        self._cell = cell
        self._taken: dict[int, int] = {}  # address: bytes
        self._lent: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}  # bytes: addresses; the size that was not used for longest comes first
        self._free_bytes = 0
        self._kept_bytes = KEPT_BYTES

    def take(self, nbytes: int) -> int:
        """The address of a block of at least so many bytes.

        Raises UsageError if the host has not so much left.
        """
        self._collect()
        nbytes = _rounded(nbytes)
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
        """Somebody is told of a block that was taken, now."""
        self._lent[address] = self._taken.pop(address)

    def keep_unless_lent(self, address: int) -> None:
        """A block that was taken is free, unless it has been lent."""
        if address in self._taken:
            self._keep(address, self._taken.pop(address))

    def close(self) -> None:
        """What is lent stays where it is, as long as the arena does."""
        self._kept_bytes = 0
        self._trim(0)
        self._collect()

    def _allocate(self, nbytes: int) -> int:
        try:
            return self._arena.allocate(nbytes)
        except UsageError:
            self._trim(0)  # in other sizes there may be enough
            return self._arena.allocate(nbytes)

    def _keep(self, address: int, nbytes: int) -> None:
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
        """What has come back is free. Of the list that peers wrote only what was lent is believed."""
        if not self._control_block.cells[self._cell]:  # a hint
            return
        with self._control_block as control_block:
            address = control_block.cells[self._cell]
            control_block.cells[self._cell] = 0
        while address in self._lent:
            following = _link(self._arena.view(address, _LINK))[0]
            self._keep(address, self._lent.pop(address))
            address = following
        if address:
            logger.warning("a block at %d came back that was not lent; those behind it are lost", address)


class Borrower:
    """What a rank has borrowed. `give_back` and `borrow` are called in one thread; arrays may be dropped in any."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: dict[int, weakref.ref[Array]] = {}  # by address; `weakref.finalize` takes ten times as long
        # Those that nobody holds any more: where they come back, and their addresses. The last to hold one may let go
        # of it at any moment, even while this thread holds a lock: so nothing more is done about it then.
        self._dropped: deque[tuple[ControlBlock, int, int]] = deque()

    def borrow(self, control_block: ControlBlock, cell: int, address: int, nbytes: int) -> Array:
        """The flat bytes at `address`, lent by whoever collects at `cell` of `control_block`, as long as anybody holds
        them.

        Raises ProtocolError if there can be no such block.
        """
        view = peers_view(self._arena, address, nbytes)
        if view is None or nbytes < _LINK or address % _LINK:
            raise ProtocolError(f"{nbytes} bytes at {address}, which is no place for them")
        # An array over a buffer, because views of an array over an array would only keep the memory of both alive.
        whole = np.frombuffer(view.data, np.uint8)
        forks.copy_for_children(whole)
        self._held[address] = weakref.ref(whole, partial(self._drop, control_block, cell, address))
        return whole

    def _drop(self, control_block: ControlBlock, cell: int, address: int, _: weakref.ref[Array]) -> None:
        self._held.pop(address, None)
        self._dropped.append((control_block, cell, address))

    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def give_back(self) -> None:
        while self._dropped:
            control_block, cell, address = self._dropped.popleft()
            with contextlib.suppress(PeerLostError), control_block:
                _link(self._arena.view(address, _LINK))[0] = control_block.cells[cell]
                control_block.cells[cell] = address


def _link(first: Array) -> memoryview:
    return first.data.cast("B").cast("q")


def _rounded(nbytes: int) -> int:
    """Up to an eighth more, or a fourth: there are not many sizes, and each is used again."""
    step = max(_SMALLEST, 1 << max(nbytes.bit_length() - 3, 0))
    return -(-nbytes // step) * step
