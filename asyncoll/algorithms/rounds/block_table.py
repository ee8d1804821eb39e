"""BlockTable: pieces of shared memory of one size that ranks pass to each other instead of copying.

A rank takes a free block, writes it once, and from then on every rank only reads it. A block has a count of its
keepers: it may be kept as a contribution, as a source of a running round, as a result, and by a reader. It is free
again when the count is 0. Its memory may have been allocated by any rank. Blocks are numbered from 1.
"""

from __future__ import annotations

from asyncoll.algorithms.rounds.round_cells import (
    BITMAP_BITS,
    FREE,
    MADE,
    NONE,
    bitmap_words,
    bitmaps_at,
    block_addresses_at,
    keepers_at,
    stack_at,
    weights_at,
)
from asyncoll.transport import Arena, ControlBlock


class BlockTable:
    """The blocks of one control block. All methods but `provide` are called under its lock."""

    # The memory is allocated on demand, because most operations use a few blocks of the many that they may need. Each
    # of the five tables has `limit` entries, because control blocks have a fixed number of cells.

    def __init__(
        self, arena: Arena, control_block: ControlBlock, first_cell: int, limit: int, nbytes: int, size: int
    ) -> None:
        self._arena = arena
        self._control_block = control_block
        self._cells = control_block.cells
        self._reals = self._cells.cast("B").cast("d")  # the same cells as float64
        self._head = first_cell
        self._stack = stack_at(first_cell)  # of free blocks
        self._addresses = block_addresses_at(first_cell, limit)
        self._keepers = keepers_at(first_cell, limit)
        self._words = bitmap_words(size)
        self._weights = weights_at(first_cell, limit)
        self._bitmaps = bitmaps_at(first_cell, limit, size)
        self.limit = limit
        self._nbytes = nbytes

    def free_count(self) -> int:
        """The number of free blocks."""
        return self._cells[self._head + FREE]

    def provide(self, count: int) -> None:
        """Allocate blocks until `count` are free. Not under the lock; raises RuntimeError if the table is full.

        Another rank may take the blocks before the caller locks: a caller checks again and repeats.
        """
        # Allocates outside the lock: the kernel takes milliseconds to clear the pages of a large block.
        while self.free_count() < count:
            address = self._arena.allocate(self._nbytes)
            cells = self._cells
            with self._control_block:
                block = cells[self._head + MADE] + 1
                if block > self.limit:
                    raise RuntimeError(f"all {self.limit} blocks of an operation are in use")
                cells[self._head + MADE] = block
                cells[self._addresses + block] = address
                self._push(block)

    def take(self) -> int:
        """A free block, with the caller as its one keeper; NONE if no block is free."""
        cells = self._cells
        free = cells[self._head + FREE]
        if not free:
            return NONE
        cells[self._head + FREE] = free - 1
        block = cells[self._stack + free - 1]
        cells[self._keepers + block] = 1
        return block

    def keep(self, block: int) -> None:
        """Add a keeper. Without effect for NONE and LENT."""
        if block > NONE:
            self._cells[self._keepers + block] += 1

    def drop(self, block: int) -> None:
        """Remove a keeper; without the last one the block is free. Without effect for NONE and LENT."""
        if block > NONE:
            self._cells[self._keepers + block] -= 1
            if not self._cells[self._keepers + block]:
                self._push(block)

    def _push(self, block: int) -> None:
        cells = self._cells
        free = cells[self._head + FREE]
        cells[self._stack + free] = block
        cells[self._head + FREE] = free + 1

    def address(self, block: int) -> int:
        """Where `block` lies in the arena. It never moves."""
        return self._cells[self._addresses + block]

    def sign(self, block: int, ranks: int, weight: float) -> None:
        """`block` is a result with the contributions of `ranks`, a bitmap with bit r for rank r, of so much weight.

        Without effect for NONE.
        """
        if block:
            self._reals[self._weights + block] = weight
        at = self._bitmaps + block * self._words
        for word in range(self._words if block else 0):
            self._cells[at + word] = ranks >> word * BITMAP_BITS & (1 << BITMAP_BITS) - 1

    def contributors(self, block: int) -> int:
        """The bitmap of the ranks whose contributions are in the result `block`. Keepers need no lock."""
        at = self._bitmaps + block * self._words
        if self._words == 1:
            return self._cells[at]
        return sum([self._cells[at + word] << word * BITMAP_BITS for word in range(self._words)])

    def weight(self, block: int) -> float:
        """The weight of all contributions in the result `block`. Keepers need no lock."""
        return self._reals[self._weights + block]
