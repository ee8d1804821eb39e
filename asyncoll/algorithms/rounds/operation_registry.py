"""The registry of a communicator in memory: its wait-avoiding operations, and the ranks that make no more calls."""

from __future__ import annotations

from asyncoll.algorithms.dense.staging import DisagreementError
from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.control_block import failure

MAX_OPERATIONS = 1024
_ENTRY = 4  # context, fingerprint, the rank that made it, cells of its control_block
_HALF = 1 << 63  # what makes a number of 64 bits fit into a cell with a sign


class OperationRegistry:
    """As one of the ranks sees it. The first cells of each operation's control block say which ranks are gone."""

    def __init__(self, arena: Arena, size: int, rank: int, communicator: int) -> None:
        self._arena = arena
        self._size = size
        self._rank = rank
        self._count = size  # the cell that counts the entries; before it, who is gone
        self._control_block = arena.control_block(digest(communicator, "registry"), size + 1 + MAX_OPERATIONS * _ENTRY)

    def enter(self, context: int, fingerprint: int, cells: int) -> ControlBlock:
        """The control block of an operation. Raises DisagreementError if it is known, but as something else."""
        registry = self._control_block.cells
        with self._control_block:
            entry = self._find(context - _HALF)
            if entry is not None:
                if registry[entry + 1] != fingerprint - _HALF:
                    raise DisagreementError(registry[entry + 2])
                return self._arena.control_block(context, cells)
            entry = self._count + 1 + registry[self._count] * _ENTRY
            if registry[self._count] == MAX_OPERATIONS:
                raise UsageError(f"a communicator has at most {MAX_OPERATIONS} operations: use their names again")
            control_block = self._arena.control_block(context, cells)
            with control_block:
                control_block.cells[: self._size] = registry[: self._size]
            for place, value in enumerate((context - _HALF, fingerprint - _HALF, self._rank, cells)):
                registry[entry + place] = value
            registry[self._count] += 1
            return control_block

    async def failure(self) -> None:
        """Wait for the communicator to fail."""
        await failure(self._control_block)

    def depart(self) -> None:
        """This rank makes no more calls: whoever waits for it need not."""
        registry = self._control_block.cells
        with self._control_block:
            registry[self._rank] = 1
            first = self._count + 1
            entries = [first + number * _ENTRY for number in range(registry[self._count])]
            known = [(registry[entry] + _HALF, registry[entry + 3]) for entry in entries]
        for context, cells in known:
            with self._arena.control_block(context, cells) as control_block:
                control_block.cells[self._rank] = 1
                control_block.wake()

    def _find(self, context: int) -> int | None:
        first = self._count + 1
        for number in range(self._control_block.cells[self._count]):
            if self._control_block.cells[first + number * _ENTRY] == context:
                return first + number * _ENTRY
        return None
