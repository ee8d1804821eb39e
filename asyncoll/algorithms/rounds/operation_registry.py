"""The registry of a communicator in memory: its wait-avoiding operations, and the ranks that make no more calls."""

from __future__ import annotations

import contextlib

from asyncoll.algorithms.dense.rendezvous import DisagreementError
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, ClosedError, UsageError
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.control_block import failure

MAX_OPERATIONS = 1024
_ENTRY = 4  # cells of an entry: context, fingerprint, the rank that made it, the number of cells of its control block
_HALF = 1 << 63  # subtracted from an unsigned number of 64 bits, so that it fits into a cell, which is signed


class OperationRegistry:
    """The registry, as one of the ranks sees it.

    The first cells of the registry's control block, and of each operation's, tell for each rank whether it is gone: it
    makes no more calls. The next one tells whether the communicator has failed (`Head.closed`).
    """

    def __init__(self, arena: Arena, size: int, rank: int, communicator: int) -> None:
        self._arena = arena
        self._size = size
        self._rank = rank
        self._closed = size  # the cell after those of the ranks
        self._count = size + 1  # the cell that counts the entries, which follow it
        cells = self._count + 1 + MAX_OPERATIONS * _ENTRY
        self._control_block = arena.control_block(digest(communicator, "registry"), cells)

    def enter(self, context: int, fingerprint: int, cells: int) -> ControlBlock:
        """The control block of the operation `context`, of so many cells; made here if no rank has made it.

        Raises DisagreementError if the operation is known with another fingerprint, and UsageError if the registry is
        full.
        """
        registry = self._control_block.cells
        with self._control_block:
            for entry in self._entries():
                if registry[entry] == context - _HALF:
                    if registry[entry + 1] != fingerprint - _HALF:
                        raise DisagreementError(registry[entry + 2])
                    return self._arena.control_block(context, cells)
            if registry[self._count] == MAX_OPERATIONS:
                raise UsageError(f"a communicator has at most {MAX_OPERATIONS} operations: use their names again")
            control_block = self._arena.control_block(context, cells)
            # Still under the registry's lock. `depart` marks the registry first and then the operations that it finds
            # there. So a rank that leaves now either is copied here, or finds this entry; none is forgotten.
            with control_block:
                control_block.cells[: self._count] = registry[: self._count]
            entry = self._entries().stop
            for cell, value in enumerate((context - _HALF, fingerprint - _HALF, self._rank, cells), entry):
                registry[cell] = value
            # Last: now the entry is complete, and others may read it.
            registry[self._count] += 1
            return control_block

    async def failure(self) -> None:
        """Wait for the communicator to fail."""
        await failure(self._control_block)

    def depart(self) -> None:
        """This rank makes no more calls: mark it as gone in all operations, and wake the callers that wait for it."""
        registry = self._control_block.cells
        with self._control_block:
            registry[self._rank] = 1
            known = self._known()
        # After the registry's lock is released: it is not held while this waits for the locks of up to 1024 operations.
        for context, cells in known:
            with self._arena.control_block(context, cells) as control_block:
                control_block.cells[self._rank] = 1
                control_block.wake()

    def close(self) -> None:
        """The communicator has failed: no rank opens a round any more, also one that has not heard of the failure yet.

        A lock that is lost has closed its operation by itself.
        """
        with contextlib.ExitStack() as locked:
            try:
                locked.enter_context(self._control_block).cells[self._closed] = 1
            except ClosedError:  # the communicator has ended here
                return
            except AsyncollError:  # no rank changes the registry any more
                pass
            known = self._known()
        for context, cells in known:
            with contextlib.suppress(AsyncollError), self._arena.control_block(context, cells) as control_block:
                control_block.cells[self._closed] = 1

    def _known(self) -> list[tuple[int, int]]:
        """Under the lock: the context of each operation, and the number of cells of its control block."""
        registry = self._control_block.cells
        return [(registry[entry] + _HALF, registry[entry + 3]) for entry in self._entries()]

    def _entries(self) -> range:
        """Under the lock: the first cell of each entry."""
        first = self._count + 1
        return range(first, first + self._control_block.cells[self._count] * _ENTRY, _ENTRY)
