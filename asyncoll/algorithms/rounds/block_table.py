"""BlockTable: pieces of shared memory of one size that ranks hand around instead of copying.

A block is written once, by whoever has just got it, and only read from then on. It is free again when nobody keeps it:
not as a contribution, nor in a round, nor as a result, nor to read it. It may come from any rank's memory. BlockTable
count from 1, so that a cell that is 0 means none.
"""

from __future__ import annotations

from asyncoll.transport import Arena, ControlBlock

_FREE, _MADE = range(2)  # numbers of blocks
_HEAD = 2

NONE = 0


class BlockTable:
    """The blocks of one control block. All methods but `provide` are called under its lock."""

    def __init__(self, arena: Arena, control_block: ControlBlock, first_cell: int, limit: int, nbytes: int) -> None:
        self._arena = arena
        self._control_block = control_block
        self._cells = control_block.cells
        self._head = first_cell
        self._stack = first_cell + _HEAD  # of free blocks
        self._addresses = self._stack + limit - 1
        self._keepers = self._addresses + limit
        self._limit = limit
        self._nbytes = nbytes

    @staticmethod
    def cells(limit: int) -> int:
        """How many cells of a control block they need."""
        return _HEAD + 3 * limit

    def free_count(self) -> int:
        return self._cells[self._head + _FREE]

    def provide(self, count: int) -> None:
        """Make more, until `count` are free, as far as this can be seen without the lock. Not under the lock."""
        while self.free_count() < count:
            address = self._arena.allocate(self._nbytes)
            cells = self._cells
            with self._control_block:
                block = cells[self._head + _MADE] + 1
                if block > self._limit:
                    raise RuntimeError("somebody keeps blocks and never drops them")
                cells[self._head + _MADE] = block
                cells[self._addresses + block] = address
                self._push(block)

    def take(self) -> int:
        """A free block, to be kept once; NONE if there is none."""
        cells = self._cells
        free = cells[self._head + _FREE]
        if not free:
            return NONE
        cells[self._head + _FREE] = free - 1
        block = cells[self._stack + free - 1]
        cells[self._keepers + block] = 1
        return block

    def keep(self, block: int) -> None:
        if block != NONE:
            self._cells[self._keepers + block] += 1

    def drop(self, block: int) -> None:
        if block == NONE:
            return
        self._cells[self._keepers + block] -= 1
        if not self._cells[self._keepers + block]:
            self._push(block)

    def _push(self, block: int) -> None:
        cells = self._cells
        free = cells[self._head + _FREE]
        cells[self._stack + free] = block
        cells[self._head + _FREE] = free + 1

    def address(self, block: int) -> int:
        return self._cells[self._addresses + block]
