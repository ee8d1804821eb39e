"""The memory of devices that the ranks of a communicator read from each other, and their agreement about it.

Each rank that calls with a large tensor of a device allocates one block there, and shows its handle in cells of the
control block (`transport.staging.Exchange`). Once all ranks have done so, each tries to open the blocks of all others.
The ranks use the blocks only if all of them can open all. Otherwise the tensors go through mirrors, in this call and in
all later ones. The first rank that refuses logs the reason, once.

A rank closes the blocks of the others when it makes no more calls, and its own is freed once all others have. After a
failure that may never come: then the block stays until the process ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from asyncoll.algorithms.dense.pieces import ALIGNED
from asyncoll.algorithms.dense.staging import DEVICE_CELLS, Rendezvous, StagingArea
from asyncoll.errors import AsyncollError
from asyncoll.transport.staging import HANDLE_BYTES, Device, Exchange, RefusedError

# The state of a rank, in the first of its cells; the handle of its block is in the others.
_OFFERS, _READS, _SHUT, _REFUSES = 1, 2, 3, -1
logger = logging.getLogger("asyncoll")


class DeviceMemory:
    """The blocks of the ranks of a communicator, as seen by one of them. On the runtime's loop."""

    def __init__(self, staging: StagingArea, name: str) -> None:
        """`name` is that of this rank, for the log."""
        self._staging = staging
        self._name = name
        self._device: Device | None = None  # the first that has offered; those of others use mirrors
        self._exchange: Exchange | None = None
        self._has_agreed = False
        self._has_others = False  # devices

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    @property
    def window(self) -> int:
        """The bytes that are shown at one rendezvous, at most."""
        return max(self._staging.sizes.device_window, ALIGNED * self._staging.size)  # room for a piece of each rank

    def offset(self, turn: int) -> int:
        """Where the bytes that are shown at record `turn` begin, in each block."""
        return turn * self.window

    @property
    def is_refused(self) -> bool:
        """Whether a rank has refused, as far as this one has seen."""
        return _REFUSES in self._states()

    def offers(self, device: Any) -> bool:
        """Whether this rank can show a tensor of `device` in a block."""
        if self.is_refused:
            return False
        if self._device is None:
            self._device = device
            try:
                self._exchange = device.share(2 * self._staging.sizes.calls * self.window)
            except RefusedError as refusal:
                self._refuse(refusal)
                return False
            self._show(_OFFERS, self._exchange.handle)
        if device is not self._device and not self._has_others:
            self._has_others = True
            logger.warning(
                "%s: tensors of %s go through memory of the host, at all ranks: this communicator uses memory of %s",
                self._name,
                device.name,
                self._device.name,
            )
        return device is self._device

    async def agree(self, rendezvous: Rendezvous) -> bool:
        """Whether all ranks read all blocks. All have offered theirs, and have arrived at `rendezvous`."""
        if self._states()[self._staging.rank] == _OFFERS:
            self._open()
        rendezvous.advance(1)
        if not self._has_agreed:
            await rendezvous.reached(1)
            self._has_agreed = set(self._states()) == {_READS}
        return self._has_agreed

    def shut(self) -> None:
        """Close the blocks of the other ranks. This rank uses them no more. Without effect the second time."""
        is_open = self._exchange is not None and self._states()[self._staging.rank] == _READS
        with self._giving_back():
            if is_open and self.exchange.shut():
                self._show(_SHUT)

    def close(self) -> None:
        """`shut`, and free the block of this rank, if no other rank may still read it."""
        self.shut()
        if self._exchange is not None and _READS not in self._states():
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

    def _open(self) -> None:
        cells, handles = self._staging.control_block.cells, []
        for rank in range(self._staging.size):
            first = self._cell(rank) + 1
            handles.append(cells[first : first + HANDLE_BYTES // 8].tobytes())
        try:
            self.exchange.open(handles)
        except RefusedError as refusal:
            self._refuse(refusal)
        else:
            self._show(_READS)

    def _refuse(self, refusal: RefusedError) -> None:
        assert self._device is not None
        device, cells = self._device.name, self._staging.control_block.cells
        with self._staging.control_block:
            is_first = not self.is_refused
            cells[self._cell(self._staging.rank)] = _REFUSES
        if is_first:
            text = "%s: tensors of %s go through memory of the host, at all ranks: %s"
            logger.warning(text, self._name, device, str(refusal))  # the exception itself would keep all its frames

    def _show(self, state: int, handle: bytes = b"") -> None:
        cells, first = self._staging.control_block.cells, self._cell(self._staging.rank)
        with self._staging.control_block:
            cells[first] = state
            for index, word in enumerate(memoryview(handle).cast("q"), first + 1):
                cells[index] = word

    def _states(self) -> list[int]:
        first, size = self._cell(0), self._staging.size
        states: list[int] = self._staging.control_block.cells[first : self._cell(size) : DEVICE_CELLS].tolist()
        return states

    def _cell(self, rank: int) -> int:
        return self._staging.device_cells + DEVICE_CELLS * rank
