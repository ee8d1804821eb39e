"""The memory of devices that all ranks of a communicator read from each other, and their agreement about it.

Each rank that calls with a large tensor of a device offers one block there (`SharedBlock`). Once all ranks have done
so, each tries to open the blocks of all others. The ranks use the blocks only if all of them can open all. Otherwise
the tensors go through mirrors, in this call and in all later ones. The first rank that refuses logs the reason, once.
"""

from __future__ import annotations

from typing import Any

from asyncoll.algorithms.dense.meeting_cells import ALIGNED
from asyncoll.algorithms.dense.rendezvous import Rendezvous, RendezvousArea
from asyncoll.algorithms.dense.shared_block import SharedBlock
from asyncoll.runtime.member import Member
from asyncoll.transport.staging import Exchange, RefusedError

_OFFERS, _READS, _REFUSES = 1, 2, -1  # the state of a rank, in its cell
_CALLS = "at all ranks"


class GroupMemory:
    """The blocks of the ranks of a communicator, as seen by one of them. On the runtime's loop."""

    def __init__(self, area: RendezvousArea, member: Member) -> None:
        self._area = area
        self.window = max(area.sizes.device_window, ALIGNED * area.size)  # bytes; room for a piece of each rank
        self.block = SharedBlock(area, member, 0, 2 * area.sizes.calls * self.window, _CALLS)
        self._has_agreed = False

    @property
    def exchange(self) -> Exchange:
        return self.block.exchange

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
            self.block.close()  # what can be given back now, as other ranks have closed it
            return False
        if not self.block.takes(device):
            return False
        if self._states()[self._area.rank] == 0:
            try:
                self.block.offer()
            except RefusedError as refusal:
                self._refuse(refusal)
                return False
            self._note(_OFFERS)
        return True

    async def agree(self, rendezvous: Rendezvous) -> bool:
        """Whether all ranks read all blocks. All have offered theirs, and have arrived at `rendezvous`."""
        if self._states()[self._area.rank] == _OFFERS:
            try:
                self.block.open(range(self._area.size))
            except RefusedError as refusal:
                self._refuse(refusal)
            else:
                self._note(_READS)
        rendezvous.advance(1)
        if not self._has_agreed:
            await rendezvous.reached(1)
            self._has_agreed = set(self._states()) == {_READS}
        return self._has_agreed

    def _refuse(self, refusal: RefusedError) -> None:
        is_first = self._note(_REFUSES)
        if is_first:
            self.block.log(self.block.device, _CALLS, str(refusal))

    def _note(self, state: int) -> bool:
        """Show the state of this rank. Returns whether no rank has refused before."""
        with self._area.control_block as control_block:
            has_refused = self.is_refused
            control_block.cells[self._area.device_cells + self._area.rank_cells * self._area.rank] = state
        return not has_refused

    def _states(self) -> list[int]:
        first, each = self._area.device_cells, self._area.rank_cells
        cells = self._area.control_block.cells
        states: list[int] = cells[first : first + each * self._area.size : each].tolist()
        return states
