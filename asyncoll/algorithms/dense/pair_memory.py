"""The memory of devices through which the ranks of a communicator send tensors to each other, two at a time.

A rank offers one block (`SharedBlock`) at its first message through it, and another rank opens that at the first one
that it gets from there. So two ranks agree, and no other takes part. A rank that cannot offer its block uses mirrors
from then on, and one that cannot open another's uses them with that rank. It logs the reason, once.

The block has some places of two windows. A message keeps one place from its first window to the last, so messages do
not wait for each other's windows in a circle. It takes the place once no work of the program is in its way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from asyncoll.algorithms.dense.rendezvous import RendezvousArea
from asyncoll.algorithms.dense.shared_block import SharedBlock
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.runtime.member import Member
from asyncoll.transport.staging import Exchange, RefusedError
from asyncoll.transport.wire import SEGMENT_BYTES

_PLACES = 4  # messages under way at a time
_CALLS = "in its messages and RPC"


def least_in_blocks(sizes: Sizes) -> int:
    """The bytes of the longest tensor that is too short for blocks.

    Messages of up to SEGMENT_BYTES are on their way before their receive is posted, which memory of a device would have
    to wait for.
    """
    return max(sizes.device, SEGMENT_BYTES)


class PairMemory:
    """The blocks of the ranks of a communicator, as seen by one of them. On the runtime's loop, but for `takes`."""

    def __init__(self, area: RendezvousArea, member: Member) -> None:
        self.window = area.sizes.device_window
        self.nbytes = 2 * _PLACES * self.window
        self.least = least_in_blocks(area.sizes)
        self._rank = area.rank
        self._member = member
        self.block = SharedBlock(area, member, 1, self.nbytes, _CALLS)
        self._has_offered = False
        self._is_refused = False  # the block of this rank
        # Ranks that have refused that of this one, or whose block is refused here; and this rank, which needs none.
        self._refused = {area.rank}
        self._readers: set[int] = set()  # ranks that have read the block of this one
        self._read: set[int] = set()  # ranks whose block is open here
        self._free = deque(range(_PLACES))
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a place

    @property
    def exchange(self) -> Exchange:
        return self.block.exchange

    def takes(self, nbytes: int, device: Any, peer: int) -> bool:
        """Whether a message of so many bytes of `device`, to or from `peer`, may pass through blocks."""
        if nbytes <= self.least or self._is_refused or peer in self._refused:
            return False
        return self.block.takes(device)

    def may_take(self, device: Any, peer: int) -> bool:
        """Whether it takes any message of `device`, as far as is known: the first that it takes decides."""
        return not self._is_refused and peer not in self._refused and self.block.device in (None, device)

    def offers(self, device: Any) -> bool:
        """Whether this rank can show a tensor of `device` in its block."""
        if not self.block.takes(device):
            return False
        if not self._has_offered:
            self._has_offered = True
            try:
                self.block.offer()
                self.block.open([self._rank])
            except RefusedError as refusal:
                self._is_refused = True
                self.block.log(device, _CALLS, str(refusal))
        return not self._is_refused

    def opens(self, source: int, device: Any) -> bool:
        """Whether this rank can copy from the block of `source` to a tensor of `device`."""
        if source in self._refused or not self.offers(device):
            return False
        if source not in self._read:
            try:
                self.block.open([source])
            except RefusedError as refusal:
                self._refused.add(source)
                sender = self._member.group.ranks[source]
                self.block.log(device, f"in messages and RPC from rank {sender}", str(refusal))
                return False
            self._read.add(source)
        return True

    def is_read_by(self, dest: int) -> bool:
        """Whether `dest` has read the block of this rank before."""
        return dest in self._readers

    def answered(self, dest: int, *, has_read: bool) -> None:
        """`dest` has read the block of this rank, or has refused that."""
        (self._readers if has_read else self._refused).add(dest)

    async def place(self) -> int:
        """Wait for a place of the block of this rank. Returns where it begins; `give_back` follows.

        Raises the error of the communicator.
        """
        while not self._free:
            with self._member.watch("a place in device memory") as turn:
                self._waiting.append(turn)
                await turn
        return self._free.popleft() * 2 * self.window

    def give_back(self, place: int) -> None:
        """No rank reads the place any more. Not after a failure: a rank that knows nothing of it may still read."""
        self._free.append(place // 2 // self.window)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
