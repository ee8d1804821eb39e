"""Where the ranks of a communicator meet in shared memory: everybody shows memory, everybody looks, everybody leaves.

A call consists of one rendezvous or several. Meetings take turns in a few places on a control block: two for each call
that may be under way, so that a rank can come to the next rendezvous while others are still at the one before. A place
is free again when all have left it, and so is the memory that was shown there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.errors import AsyncollError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.control_block import Turn, turn_of, until

# Cells of a rendezvous, and of each rank's part in it.
_TAG, _ARRIVED, _DIRECT, _CLAIMED, _DONE, _LEFT, _FINGERPRINT, _FIRST, _WITHDRAWN = range(9)
_HEAD = 9
_PART = 3  # the address of what it shows, negative if it is the caller's own memory; how long it is; whether it reduces

_HALF = 1 << 63  # 64 bits without a sign, in a cell that has one
_NUMBERS = 1 << 30
_LEAST = 1024  # bytes of a slot
_VIEWS_MAX = 1024  # kinds of short arrays whose views are kept
_NOTHING: Array = np.empty(0, np.uint8)


class DisagreementError(AsyncollError):
    """The rank at `place` has called something else under the same number."""

    def __init__(self, place: int) -> None:
        super().__init__(f"the rank at place {place} has called something else")
        self.place = place


def _tag(number: int, count: int) -> int:
    """Identifies a rendezvous among those that use the same place. Never 0, and not repeated for years."""
    return (number % _NUMBERS + 1) << 32 | count


class StagingArea:
    """The rendezvous of one communicator, as one of its ranks sees them."""

    def __init__(self, arena: Arena, size: int, rank: int, context: int, sizes: Sizes) -> None:
        self.arena = arena
        self.size = size
        self.rank = rank
        self.sizes = sizes
        self._stride = _HEAD + _PART * size
        self._addresses = 2 * sizes.calls * self._stride  # cells: of each rank's short arrays
        self._begun = self._addresses + size  # cells: the newest call of each rank, of which nothing but an error tells
        self.control_block = arena.control_block(context, self._begun + size)
        self._slots: dict[int, tuple[int, Array]] = {}  # with their addresses, by turn
        self._short_arrays: dict[tuple[int, np.dtype[Any], int], list[Array | None]] = {}
        self._unfinished: set[int] = set()
        self._turns: dict[int, Turn] = {}  # by the call whose end they wait for
        self.known_free = 0  # the tag of a rendezvous whose place was seen to be free

    def begin(self, number: int) -> None:
        """Call `number` begins here."""
        self._unfinished.add(number)
        self.control_block.cells[self._begun + self.rank] = number

    def begun(self, place: int) -> int:
        """The number of the newest call of the rank at `place`, if it has been seen by now."""
        return self.control_block.cells[self._begun + place]

    def end(self, number: int) -> None:
        """Call `number` is over here."""
        self._unfinished.discard(number)
        turn = self._turns.pop(number, None)
        if turn is not None:
            turn.set()

    async def wait_for(self, number: int) -> None:
        """Wait until call `number` is over here, so that its place is free for another."""
        if self.is_over(number):
            return
        turn = self._turns[number] = Turn()
        if self.is_over(number):  # it has ended this moment, in another thread, and may not have seen the turn
            self._turns.pop(number, None)
        else:
            await turn_of(turn)

    def rendezvous(self, number: int, count: int, fingerprint: int) -> Rendezvous:
        """The rendezvous after `count` others of call `number`."""
        return Rendezvous(self, 2 * (number % self.sizes.calls) + count % 2, number, count, fingerprint)

    def look_ahead(self, number: int) -> None:
        """Under the lock: note whether the place of the first rendezvous of call `number` is free."""
        cells, base, tag = self.control_block.cells, self.base(2 * (number % self.sizes.calls)), _tag(number, 0)
        is_left = cells[base + _LEFT] == self.size or cells[base + _TAG] in (0, tag)
        if is_left and self.is_over(number - self.sizes.calls):  # which may come back to it otherwise
            self.known_free = tag

    def base(self, turn: int) -> int:
        return turn * self._stride

    def is_over(self, number: int) -> bool:
        """Whether call `number` is over here."""
        return number not in self._unfinished

    def slot(self, turn: int, nbytes: int) -> tuple[int, Array]:
        """This rank's own memory for what it shows at that turn, and its address."""
        address, slot = self._slots.get(turn) or (0, _NOTHING)
        if slot.size < max(nbytes, 1):
            if slot.size:
                self.arena.free(address)
            room = max(nbytes, _LEAST)
            address = self.arena.allocate(room)
            slot = self.arena.view(address, room)
            self._slots[turn] = address, slot
        return address, slot[:nbytes]

    def short_array(self, place: int, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        """What the rank at `place` shows at that turn if it is short: always the same memory."""
        key = turn, dtype, count
        arrays = self._short_arrays.get(key)
        if arrays is None:
            if len(self._short_arrays) == _VIEWS_MAX:
                self._short_arrays.clear()
            arrays = self._short_arrays[key] = [None] * self.size
        array = arrays[place]
        if array is None:
            address = self._short_address(place) + turn * self.sizes.short
            array = arrays[place] = self.arena.view(address, count * dtype.itemsize).view(dtype)
        return array

    def _short_address(self, place: int) -> int:
        """Where that rank's short arrays lie: it says so before it first comes to a rendezvous with one."""
        cell = self._addresses + place
        with self.control_block as control_block:
            if not control_block.cells[cell]:
                assert place == self.rank
                control_block.cells[cell] = self.arena.allocate(2 * self.sizes.calls * self.sizes.short)
            return control_block.cells[cell]


class Rendezvous:
    """All ranks at one point of one call. Every rank that takes part calls `free`, `arrive`, `everybody`, `leave`."""

    __slots__ = ("_base", "_cells", "_fingerprint", "_number", "_staging", "tag", "turn")

    def __init__(self, staging: StagingArea, turn: int, number: int, count: int, fingerprint: int) -> None:
        self._staging = staging
        self._cells = staging.control_block.cells
        self._base = staging.base(turn)
        self._fingerprint = fingerprint - _HALF
        self._number = number
        self.turn = turn
        self.tag = _tag(number, count)

    @property
    def control_block(self) -> ControlBlock:
        return self._staging.control_block

    async def free(self) -> None:
        """Wait until all have left the rendezvous before it in the same place. My memory for it is then free, too."""
        cells, base, tag, size = self._cells, self._base, self.tag, self._staging.size
        if self._staging.known_free != tag:
            await until(self.control_block, lambda: cells[base + _TAG] in (0, tag) or cells[base + _LEFT] == size)

    def arrive_shortly(self) -> bool:
        """Show one's short array. Returns whether all the others have; then they wait for this rank to reduce it."""
        arrived = self._base + _ARRIVED
        with self._staging.control_block:
            self._enter()
            self._cells[arrived] += 1
            return self._cells[arrived] == self._staging.size

    def arrive(self, address: int, nbytes: int, *, direct: bool = False, helpers: int = sys.maxsize) -> None:
        """Show memory: `direct` if it is the caller's own. The last to come wakes so many of those who wait for that.

        Raises DisagreementError if others have come for another call.
        """
        cells, base = self._cells, self._base
        with self.control_block as control_block:
            self._enter()
            part = base + _HEAD + _PART * self._staging.rank
            cells[part] = -address if direct else address
            cells[part + 1] = nbytes
            cells[part + 2] = 0
            cells[base + _DIRECT] += direct
            cells[base + _ARRIVED] += 1
            if cells[base + _ARRIVED] == self._staging.size:
                control_block.wake(helpers)

    def _enter(self) -> None:
        """Under the lock. Whoever comes first opens the rendezvous."""
        cells, base = self._cells, self._base
        if cells[base + _TAG] == self.tag:
            if cells[base + _FINGERPRINT] != self._fingerprint:
                raise DisagreementError(cells[base + _FIRST])
            return
        for cell in range(base, base + _HEAD):
            cells[cell] = 0
        cells[base + _TAG] = self.tag
        cells[base + _FINGERPRINT] = self._fingerprint
        cells[base + _FIRST] = self._staging.rank

    async def everybody(self) -> None:
        """Wait until all ranks are here."""
        cells, arrived, size = self._cells, self._base + _ARRIVED, self._staging.size
        await until(self.control_block, lambda: cells[arrived] == size)

    # -- what is shown: once everybody is here ----------------------------------------------------

    def shown(self) -> list[tuple[int, int, bool]]:
        """By rank: the address of what it shows, its length, and whether that is its caller's own memory."""
        first = self._base + _HEAD
        cells = self._cells[first : first + _PART * self._staging.size].tolist()
        return [(abs(cells[i]), cells[i + 1], cells[i] < 0) for i in range(0, len(cells), _PART)]

    def is_direct(self) -> bool:
        """Whether all ranks show their callers' own memory."""
        return self._cells[self._base + _DIRECT] == self._staging.size

    # -- reducing together ------------------------------------------------------------------------

    def claim(self, chunk: int, total: int) -> int | None:
        """The first byte of a chunk for this rank to reduce; None if all of `total` bytes are claimed."""
        cells, claimed = self._cells, self._base + _CLAIMED
        with self._staging.control_block:
            first = cells[claimed]
            if first >= total:
                return None
            cells[claimed] = first + chunk
            cells[self._base + _HEAD + _PART * self._staging.rank + 2] = 1
        return first

    def done(self, nbytes: int, total: int) -> None:
        """This rank has reduced so many bytes."""
        cells, done = self._cells, self._base + _DONE
        with self._staging.control_block as control_block:
            cells[done] += nbytes
            cells[self._base + _HEAD + _PART * self._staging.rank + 2] = 0
            if cells[done] == total or cells[self._base + _CLAIMED] == total:
                control_block.wake()

    async def reduced(self, total: int) -> None:
        """Wait until all of `total` bytes are."""
        cells, done = self._cells, self._base + _DONE
        await until(self.control_block, lambda: cells[done] == total)

    async def withdraw(self, total: int, is_lost: Callable[[int], bool]) -> None:
        """After a failure: nobody claims any more, and who has read what this rank showed cannot rely on it.

        Wait until those who have claimed are done, or gone.
        """
        cells, first = self._cells, self._base + _HEAD + 2
        with self.control_block:
            if cells[self._base + _TAG] != self.tag:
                return
            cells[self._base + _WITHDRAWN] = 1
            cells[self._base + _CLAIMED] = total
            cells[first + _PART * self._staging.rank] = 0

        def is_busy(place: int) -> bool:
            return cells[self._base + _TAG] == self.tag and cells[first + _PART * place] > 0 and not is_lost(place)

        await until(self.control_block, lambda: not any(map(is_busy, range(self._staging.size))))

    # -- leaving ----------------------------------------------------------------------------------

    def leave(self, reduced: int = 0) -> bool:
        """Look at nothing any more. With `reduced`: so many bytes, which are all, have been reduced by this rank.

        Returns whether what was seen can be relied on.
        """
        staging, cells, left = self._staging, self._cells, self._base + _LEFT
        with staging.control_block as control_block:
            cells[left] += 1
            if reduced:
                cells[self._base + _DONE] = reduced
                control_block.wake()
            elif cells[left] == staging.size:
                control_block.wake()
            staging.look_ahead(self._number + 1)
            return not cells[self._base + _WITHDRAWN]

    async def everybody_left(self) -> None:
        """Wait until nobody looks at what this rank has shown."""
        cells, base = self._cells, self._base
        await until(
            self.control_block, lambda: cells[base + _TAG] != self.tag or cells[base + _LEFT] == self._staging.size
        )
