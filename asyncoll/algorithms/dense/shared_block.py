"""One block of device memory of each rank of a communicator, as one rank uses them: its own, and those that it opens.

A rank shows the handle of its block (`transport.staging.Exchange`) in cells of the control block. The others count
themselves in another cell, and then open it. When a rank makes no more calls, it closes what it has opened, and
withdraws its handle. It frees its block once nobody counts. So no rank opens a block that is freed, or has one open
that is freed, wherever it stops:

| a rank is stopped | its count | when it goes on, its call has failed, and |
|---|---|---|
| before it counts | 0: the block may be freed | it finds no handle, and refuses |
| after that, until it has closed it | 1: the block stays until the process ends | it reads what nobody writes |
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from typing import Any

from asyncoll.algorithms.dense.staging import BLOCK_CELLS, DEVICE_CELLS, StagingArea
from asyncoll.errors import AsyncollError
from asyncoll.transport.staging import HANDLE_BYTES, Exchange, RefusedError

_NO_HANDLE = bytes(HANDLE_BYTES)
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
        with self._staging.control_block:
            self._show(self._exchange.handle)

    def open(self, ranks: Collection[int]) -> None:
        """Open the blocks of `ranks`, which have offered them. Raises RefusedError; then none of them is open."""
        cells, others, handles = self._staging.control_block.cells, set(ranks) - {self._staging.rank}, {}
        with self._staging.control_block:
            for rank in ranks:
                first = self._cell(rank) + 1
                handles[rank] = cells[first : first + HANDLE_BYTES // 8].tobytes()
            self._count(others, 1)
        try:
            if _NO_HANDLE in handles.values():
                raise RefusedError("a rank has ended its calls")
            self.exchange.open(handles)
        except RefusedError:
            with self._staging.control_block:
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
                with self._staging.control_block:
                    self._show(_NO_HANDLE)
                    self._count(self._opened, -1)

    def close(self) -> None:
        """`shut`, and free the block of this rank, unless another rank may have it open."""
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
        """Count this rank among those that have the blocks of `owners` open, or no more. Under the lock."""
        cells = self._staging.control_block.cells
        for rank in owners:
            cells[self._cell(rank)] += change

    def _show(self, handle: bytes) -> None:
        """Show the handle of this rank's block. Under the lock."""
        cells, first = self._staging.control_block.cells, self._cell(self._staging.rank) + 1
        for index, word in enumerate(memoryview(handle).cast("q"), first):
            cells[index] = word

    def _cell(self, rank: int) -> int:
        """Where the number of ranks is that have the block of `rank` open. The cells of its handle follow."""
        return self._first + DEVICE_CELLS * rank
