"""One block of device memory of each rank of a communicator, as one rank uses them: its own, and those that it opens.

A rank shows the handle of its block (`transport.staging.Exchange`) in cells of the control block. The others open it
when they need it, and count themselves in another cell. They close what they have opened when they make no more calls,
and the owner frees its block then, if nobody has it open. A rank that is lost stays counted: then the block stays until
the process ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any

from asyncoll.algorithms.dense.staging import BLOCK_CELLS, DEVICE_CELLS, StagingArea
from asyncoll.errors import AsyncollError
from asyncoll.transport.staging import HANDLE_BYTES, Exchange, RefusedError

logger = logging.getLogger("asyncoll")


class SharedBlock:
    """On the runtime's loop, but for `takes`."""

    def __init__(self, staging: StagingArea, number: int, nbytes: int, name: str, calls: str) -> None:
        """The blocks with this `number`, 0 or 1, have `nbytes` bytes.

        `name` is that of this rank, and `calls` are those that use the block, for the log.
        """
        self.device: Any = None  # that of the first tensor; tensors of others use mirrors
        self._staging = staging
        self._first = staging.device_cells + 1 + BLOCK_CELLS * number
        self._nbytes = nbytes
        self._name = name
        self._calls = calls
        self._exchange: Exchange | None = None
        self._opened: set[int] = set()  # other ranks, whose blocks are open here
        self._is_shut = False
        self._has_others = False  # devices

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def takes(self, device: Any) -> bool:
        """Whether tensors of `device` can pass through this block. Logs once if it is of another one."""
        if self.device is None:
            self.device = device
        if self.device is device:
            return True
        if not self._has_others:
            self._has_others = True
            self.log(device, self._calls, f"this communicator uses memory of {self.device.name}")
        return False

    def log(self, device: Any, calls: str, reason: str) -> None:
        """Log why these calls of tensors of `device` use mirrors."""
        logger.warning(
            "%s: tensors of %s go through memory of the host, %s: %s", self._name, device.name, calls, reason
        )

    def offer(self) -> None:
        """Allocate the block of this rank, on the device that it `takes`, and show it. Raises RefusedError."""
        self._exchange = self.device.share(self._nbytes)
        cells, first = self._staging.control_block.cells, self._cell(self._staging.rank) + 1
        with self._staging.control_block:
            for index, word in enumerate(memoryview(self._exchange.handle).cast("q"), first):
                cells[index] = word

    def open(self, ranks: Collection[int]) -> None:
        """Open the blocks of `ranks`, which have offered them. Raises RefusedError; then none of them is open."""
        cells, others = self._staging.control_block.cells, set(ranks) - {self._staging.rank}
        handles = {}
        with self._staging.control_block:
            for rank in ranks:
                first = self._cell(rank) + 1
                handles[rank] = cells[first : first + HANDLE_BYTES // 8].tobytes()
        self._count(others, 1)  # before they are opened: nobody frees them meanwhile
        try:
            self.exchange.open(handles)
        except RefusedError:
            self._count(others, -1)
            raise
        self._opened |= others

    def shut(self) -> None:
        """Close the blocks of the other ranks. This rank uses them no more. Without effect the second time."""
        if self._exchange is None or self._is_shut:
            return
        with self._giving_back():
            self._is_shut = self._exchange.shut()
            if self._is_shut:
                self._count(self._opened, -1)

    def close(self) -> None:
        """`shut`, and free the block of this rank, unless another rank may still read it."""
        self.shut()
        has_readers = self._staging.control_block.cells[self._cell(self._staging.rank)]
        if self._exchange is not None and self._is_shut and not has_readers:
            with self._giving_back():
                self._exchange.free()
            self._exchange = None

    @contextlib.contextmanager
    def _giving_back(self) -> Iterator[None]:
        """What cannot be given back stays until the process ends."""
        try:
            yield
        except AsyncollError:
            pass  # a rank has died in a critical section: the world has failed
        except RefusedError as refusal:
            logger.warning("%s keeps memory of its device until it ends: %s", self._name, str(refusal))
            self._exchange = None

    def _count(self, owners: Collection[int], change: int) -> None:
        """Count this rank among those that have the blocks of `owners` open, or no more."""
        with self._staging.control_block as control_block:
            for rank in owners:
                control_block.cells[self._cell(rank)] += change

    def _cell(self, rank: int) -> int:
        """Where the number of ranks is that have the block of `rank` open. The cells of its handle follow."""
        return self._first + DEVICE_CELLS * rank
