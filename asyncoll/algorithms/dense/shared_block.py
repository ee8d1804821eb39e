"""One block of device memory of each rank of a communicator, as one rank uses them: its own, and those that it opens.

A rank shows the handle of its block (`transport.staging.Exchange`) in cells of the control block. The others count
themselves by a bit of other cells, and then open it. When a rank makes no more calls, or the communicator has failed,
it closes what it has opened as soon as no copy of it is under way. When it leaves, it withdraws its handle, and frees
its block once nobody counts. So no rank opens a block that is freed, or has one open that is freed, wherever it stops:

| a rank is stopped | its bit | when it goes on, its call has failed, and |
|---|---|---|
| before it counts | 0: the block may be freed | it finds no handle, and refuses |
| after that, until it has closed it | 1: the block stays until the process ends | it reads what nobody writes |

A process that has ended reads nothing, so its bit does not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

from asyncoll.algorithms.dense.rendezvous import RANKS_IN_CELL, RendezvousArea
from asyncoll.errors import AsyncollError
from asyncoll.runtime.member import Member
from asyncoll.transport.staging import HANDLE_BYTES, Exchange, RefusedError, arrived

_NO_HANDLE = bytes(HANDLE_BYTES)
# When a rank leaves, it waits so long for the copies under way, of itself and of others.
_PATIENCE_S = 5.0
_AGAIN_S = 0.002  # between two looks whether others have closed the block
logger = logging.getLogger("asyncoll")


class SharedBlock:
    """On the runtime's loop, but for `takes`."""

    def __init__(self, area: RendezvousArea, member: Member, number: int, nbytes: int, calls: str) -> None:
        """The blocks with this `number`, 0 or 1, have `nbytes` bytes. `calls` are those that use them, for the log."""
        # The device of the first tensor. A block is on one device: tensors of others use mirrors.
        self.device: Any = None
        self._area = area
        self._first = area.device_cells + 1 + area.block_cells * number
        self._nbytes = nbytes
        self._member = member
        self._name = f"rank {member.group.ranks[area.rank]}"
        self._calls = calls
        self._exchange: Exchange | None = None
        self._opened: set[int] = set()  # other ranks, whose blocks are open here
        self._is_shut = False
        self._has_others = False  # devices

    @property
    def exchange(self) -> Exchange:
        """For the next copy. Raises the error of the communicator, after which the blocks are closed."""
        self._member.check()
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
        with self._area.control_block:
            self._show(self._exchange.handle)

    def open(self, ranks: Collection[int]) -> None:
        """Open the blocks of `ranks`, which have offered them. Raises RefusedError; then none of them is open."""
        exchange, others, handles = self.exchange, set(ranks) - {self._area.rank}, {}
        cells = self._area.control_block.cells
        # In one critical section: an owner that withdraws its handle afterwards finds this rank among its readers.
        with self._area.control_block:
            for rank in ranks:
                first = self._handle_cell(rank)
                handles[rank] = cells[first : first + HANDLE_BYTES // 8].tobytes()
            self._count(others, is_reader=True)
        try:
            if _NO_HANDLE in handles.values():
                raise RefusedError("a rank has ended its calls")
            exchange.open(handles)
        except RefusedError:
            # None is open, so nothing may keep the owners from freeing their blocks.
            with self._area.control_block:
                self._count(others, is_reader=False)
            raise
        self._opened |= others

    def is_idle(self, wake: Callable[[], None]) -> bool:
        """Whether no copy of this rank is under way; otherwise `wake` is called, in any thread, when one has ended."""
        copies = [] if self._exchange is None else self._exchange.under_way()
        for copy in copies:
            copy.when_moved(copy.nbytes, wake)
        return not copies

    def shut(self) -> None:
        """Close the blocks of the other ranks, and offer that of this one no more. This rank uses none any more.

        Without effect the second time, and while a copy of this rank is under way.
        """
        self._close_opened()
        # Only then: a rank that still copies has not ended its calls, and its block is needed for them.
        if self._exchange is not None and self._is_shut:
            with self._giving_back(), self._area.control_block:
                self._show(_NO_HANDLE)

    def close_when_failed(self) -> None:
        """Close the blocks of the other ranks as soon as the copies of this rank are over. No call goes on.

        Ranks that have not heard of the failure may still open the block of this one.
        """
        if self.is_idle(lambda: self._member.post(self.close_when_failed)):
            self._close_opened()

    def _close_opened(self) -> None:
        if self._exchange is None or self._is_shut:
            return
        with self._giving_back():
            self._is_shut = self._exchange.shut()
            # While a copy is under way nothing is closed, and the owners must not free what it reads.
            if self._is_shut:
                with self._area.control_block:
                    self._count(self._opened, is_reader=False)

    def close(self) -> None:
        """`shut`, and free the block of this rank, unless another rank may have it open."""
        self.shut()
        if self._exchange is not None and self._is_shut and not self._readers():
            with self._giving_back():
                self._exchange.free()
            self._exchange = None

    async def end(self) -> None:
        """`close`, once no copy is under way: of this rank, and of others in its block. A few seconds at most."""
        if self._exchange is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await asyncio.gather(*map(arrived, self._exchange.under_way()), return_exceptions=True)
                self.shut()
                while self._readers():
                    await asyncio.sleep(_AGAIN_S)
        self.close()

    @contextlib.contextmanager
    def _giving_back(self) -> Iterator[None]:
        """What cannot be given back stays until the process ends."""
        try:
            yield
        # A rank has died in a critical section: the world has failed, and the memory ends with the process.
        except AsyncollError:
            pass
        except RefusedError as refusal:
            logger.warning("%s keeps memory of its device until it ends: %s", self._name, str(refusal))
            self._exchange = None

    def _count(self, owners: Collection[int], *, is_reader: bool) -> None:
        """Count this rank among those that have the blocks of `owners` open, or no more. Under the lock."""
        cells = self._area.control_block.cells
        cell, bit = divmod(self._area.rank, RANKS_IN_CELL)
        for owner in owners:
            first = self._cell(owner)
            cells[first + cell] = cells[first + cell] & ~(1 << bit) | is_reader << bit

    def _readers(self) -> set[int]:
        """The ranks that may have the block of this one open, because their processes have not ended."""
        cells, first = self._area.control_block.cells, self._cell(self._area.rank)
        places = (divmod(rank, RANKS_IN_CELL) for rank in range(self._area.size))
        readers = {rank for rank, (cell, bit) in enumerate(places) if cells[first + cell] >> bit & 1}
        return {rank for rank in readers if not self._member.is_gone(rank)}

    def _show(self, handle: bytes) -> None:
        """Show the handle of this rank's block. Under the lock."""
        cells, first = self._area.control_block.cells, self._handle_cell(self._area.rank)
        for index, word in enumerate(memoryview(handle).cast("q"), first):
            cells[index] = word

    def _handle_cell(self, rank: int) -> int:
        """Where the handle of the block of `rank` is."""
        return self._cell(rank) + self._area.block_cells - HANDLE_BYTES // 8

    def _cell(self, rank: int) -> int:
        """Where the bits of the ranks are that have the block of `rank` open."""
        return self._first + self._area.rank_cells * rank
