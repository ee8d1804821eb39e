"""Where the ranks of a communicator meet and show memory to each other: the rendezvous area, and the rendezvous in it.

A *rendezvous* is one point of a call at which all ranks show memory, read it and leave. "Show" means: put the address
and the length of the memory into the control block. "Leave" means: read the memory of the other ranks no longer. A call
consists of one rendezvous or several, and all ranks take part in each.

Each rendezvous uses one *record*: a fixed range of cells of the control block. A record is free again when all ranks
have left its rendezvous. The memory that the ranks showed there is then free, too. In the code `turn` is the index of a
record, and a parameter `rank` is a group rank.

There are two records for each call that may be under way, and the rendezvous of a call use them in turn. So a rank that
has left a rendezvous comes to the next one while slow ranks are still at the one before. With one record, every rank
would have to wait for the slowest rank twice: until it arrives, and until it leaves. Two are enough, because no rank
leaves a rendezvous before all ranks have arrived at it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from asyncoll.algorithms.dense.meeting_cells import (
    ARRIVED,
    CANNOT_READ,
    CLAIMED,
    DIRECT,
    DONE,
    FINGERPRINT,
    FIRST,
    HAS_LEFT,
    LEFT,
    PAGE,
    PART_ADDRESS,
    PART_BITS,
    PART_BUSY,
    PART_BYTES,
    PART_CELLS,
    PATIENCE,
    PEER_CELLS,
    PRIVATE,
    RECORD_HEAD,
    SLEEPERS,
    TAG,
    WITHDRAWN,
    addresses_at,
    is_left,
    newest_at,
    peers_at,
    record_cells,
    record_index,
    tag_of,
)
from asyncoll.algorithms.dense.peers import PeerReduction, Peers
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.algorithms.seam.short_calls import Block
from asyncoll.errors import AsyncollError
from asyncoll.tensors.reductions import Array, Reduce, ReduceToAll
from asyncoll.transport import Arena, ControlBlock
from asyncoll.transport.control_block import Turn, turn_of, until
from asyncoll.transport.staging import HANDLE_BYTES

_HALF = 1 << 63  # subtracted from an unsigned fingerprint, so that it fits into a signed cell
_LEAST = 1024  # bytes of the smallest slot
_VIEWS_MAX = 1024  # combinations of record, dtype and length whose views are kept
# A very long registered array is reduced in so many claims, because one takes some 15 us in Python.
_CLAIMS = 128
_NO_CALL = -1  # in place of a number, which are from 1
RANKS_IN_CELL = 62  # whose bits are in one cell
_NOTHING: Array = np.empty(0, np.uint8)


class DisagreementError(AsyncollError):
    """Group rank `rank` has made another call with the same number."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"group rank {rank} has called something else")
        self.rank = rank


def signed(fingerprint: int) -> int:
    """The fingerprint of a call, of 64 bits, as a signed cell has it."""
    return fingerprint - _HALF


class RendezvousArea:
    """The records of one communicator and the memory that is shown there, as seen by one of its ranks.

    All ranks of the communicator construct it, with equal `size`, `context` and `sizes`. `rank` is the group rank.
    """

    def __init__(self, arena: Arena, size: int, rank: int, context: int, sizes: Sizes) -> None:
        self.arena = arena
        self.size = size
        self.rank = rank
        self.sizes = sizes
        self.shown = min(sizes.shown, sizes.short)  # longer arrays than short ones are always shown
        self._stride = record_cells(size)
        self._addresses = addresses_at(size, sizes.calls)
        self._begun = newest_at(size, sizes.calls)
        first = peers_at(size, sizes.calls)
        # Of each rank, for one block of `shared_block`: the bits of its readers, and its handle.
        self.block_cells = -(-size // RANKS_IN_CELL) + HANDLE_BYTES // 8
        # Of each rank: the state of `group_memory`, the cells of its block, and those of the one of `pair_memory`.
        self.rank_cells = 1 + 2 * self.block_cells
        self.device_cells = first + PEER_CELLS * size  # the first of `rank_cells` for each rank
        self.control_block = arena.control_block(context, self.device_cells + self.rank_cells * size)
        self.peers = Peers(arena.native, self.control_block, first, size, rank)
        self._slots: dict[int, tuple[int, Array]] = {}  # by record: address and memory
        self.blocks: list[Block] = []  # that no call uses; the compiled core takes some, and brings them back
        self._short_arrays: dict[tuple[int, np.dtype[Any], int], list[Array | None]] = {}
        self._unfinished: set[int] = set()
        self._ended_early: set[int] = set()  # of these: over, but an earlier call is still using their records
        self._turns: dict[int, Turn] = {}  # by the number of the call whose end a later call waits for
        self._on_idle: Callable[[], None] | None = None
        # The tag of a rendezvous whose record is known to be free. A rank finds it out while it holds the lock to leave
        # the previous call. This saves each short call one acquisition of the lock, in `Rendezvous.free`.
        self.known_free = 0

    def begin(self, number: int) -> None:
        """Note that call `number` begins at this rank, here and for `begun`."""
        self._unfinished.add(number)
        self.control_block.cells[self._begun + self.rank] = number

    def begun(self, rank: int) -> int:
        """The number of the newest call of group rank `rank`. Read without the lock: it may be out of date."""
        return self.control_block.cells[self._begun + rank]

    def end(self, number: int) -> None:
        """Note that call `number` is over at this rank, and resume a call that waits for its records.

        Its records are free only once the call that had them before is over at this rank, too. A call that uses none,
        because it goes by message between hosts, has not waited for that one.
        """
        first, before = number, number - self.sizes.calls
        if not self.is_over(before):
            self._ended_early.add(number)
            # The dict is not empty, so the compiled core calls `end`, too.
            self._turns.setdefault(before, Turn())
            if not self.is_over(before):
                return
            # It has ended in another thread between the two checks, perhaps without seeing this call.
            first = before
        after = first
        while after == first or after in self._ended_early:
            self._pass_on(after)
            after += self.sizes.calls
        # Last: after an exception of a signal handler this is called again.
        self._ended_early.difference_update(range(first, after, self.sizes.calls))

    def _pass_on(self, number: int) -> None:
        """The records of call `number` are free: resume a call that waits for them."""
        self._unfinished.discard(number)
        turn = self._turns.get(number)
        if turn is not None:
            turn.set()
        if self._on_idle is not None and not self._unfinished:
            self._on_idle()
        self._turns.pop(number, None)  # last, for the same reason

    def is_idle(self, wake: Callable[[], None]) -> bool:
        """Whether no call is under way at this rank; otherwise `wake` is called, in any thread, when none is."""
        self._on_idle = wake
        self._turns[_NO_CALL] = Turn()  # the dict is not empty any more, so the compiled core calls `end`, too
        return not self._unfinished

    async def wait_for(self, number: int) -> None:
        """Wait until call `number` is over at this rank, so that a later call may use its records.

        It is not enough that all ranks have left a record: a call that is under way may come back to it.
        """
        if self.is_over(number):
            return
        turn = self._turns[number] = Turn()
        # The call may have ended in another thread between the two checks, without seeing the turn.
        if self.is_over(number):
            self._turns.pop(number, None)
        else:
            await turn_of(turn)

    def is_alone(self, number: int) -> bool:
        """Whether no call but `number` is under way at this rank."""
        return self._unfinished <= {number}

    @property
    def under_way(self) -> tuple[set[int], dict[int, Turn]]:
        """The numbers of the calls under way at this rank, and of those whose end another call waits for.

        For the compiled core, which changes the set, and calls `end` if the dict is not empty.
        """
        return self._unfinished, self._turns

    def turn(self, number: int, count: int = 0) -> int:
        """The record of rendezvous number `count`, from 0, of call `number`."""
        return record_index(number, count, self.sizes.calls)

    def rendezvous(self, number: int, count: int, fingerprint: int) -> Rendezvous:
        """The rendezvous number `count`, from 0, of call `number`, whose signed fingerprint is `fingerprint`."""
        return Rendezvous(self, self.turn(number, count), number, count, fingerprint)

    def look_ahead(self, number: int) -> None:
        """Note in `known_free` whether the first record of call `number` is free. The caller holds the lock."""
        cells, base, tag = self.control_block.cells, self.base(self.turn(number)), tag_of(number, 0)
        is_free = is_left(cells[base + TAG], tag, cells[base + LEFT], self.size)
        # Call `number - calls` used the record before, and may come back to it while it is under way. If `end` has said
        # that it is over at this rank, neither it nor an earlier call has a further rendezvous at the record, because
        # this rank would have to take part.
        if is_free and self.is_over(number - self.sizes.calls):
            self.known_free = tag

    def base(self, turn: int) -> int:
        """The first cell of record `turn`."""
        return turn * self._stride

    def is_over(self, number: int) -> bool:
        """Whether call `number` is over at this rank."""
        return number not in self._unfinished

    def slot(self, turn: int, nbytes: int) -> tuple[int, Array]:
        """The address and the memory, `nbytes` long, of this rank's slot for record `turn`.

        Call it only after `Rendezvous.free`: no other rank reads the slot then, and one that is too small is replaced.
        """
        address, slot = self._slots.get(turn) or (0, _NOTHING)
        if slot.size < max(nbytes, 1):
            if slot.size:
                self.arena.free(address)
            room = max(nbytes, _LEAST)
            address = self.arena.allocate(room)
            slot = self.arena.view(address, room)
            self._slots[turn] = address, slot
        return address, slot[:nbytes]

    def block(self, nbytes: int) -> Block:
        """A block of at least `nbytes` bytes, for a long array of one call.

        The last one that was given back, if it is long enough: page faults of a new one take longer than the copy.
        """
        # `pop`, without a look at the length before: calls run in several threads.
        with contextlib.suppress(IndexError):
            block = self.blocks.pop()
            if block.memory.size >= nbytes:
                return block
            self.arena.free(block.address)
        address = self.arena.allocate(nbytes)
        return Block(address, self.arena.view(address, nbytes))

    def give_back(self, block: Block) -> None:
        """Keep this block, which no rank reads any more, for a later call, or free it if there is another one."""
        if self.blocks:
            self.arena.free(block.address)
        else:
            self.blocks.append(block)

    def short_array(self, rank: int, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        """The memory in which group rank `rank` shows a short array at record `turn` of the control block.

        A one-dimensional array of `count` elements. It is always the same memory, so a rendezvous of short arrays needs
        no addresses and lengths in the control block, and the views of it are kept.
        """
        key = turn, dtype, count
        arrays = self._short_arrays.get(key)
        if arrays is None:
            if len(self._short_arrays) == _VIEWS_MAX:
                self._short_arrays.clear()
            arrays = self._short_arrays[key] = [None] * self.size
        array = arrays[rank]
        if array is None:
            address = self.short_address(rank, turn)
            array = arrays[rank] = self.arena.view(address, count * dtype.itemsize).view(dtype)
        return array

    def address_of_short(self, x: Array) -> int:
        """The address of the short array `x`, if it is registered and long enough to be shown where it is; else 0."""
        return self.arena.locate(x) or 0 if x.nbytes >= self.shown else 0

    def short_address(self, rank: int, turn: int) -> int:
        """The address of the short array of group rank `rank` at record `turn`.

        Each rank allocates its own and writes the address before it first arrives with a short array. So the address is
        there when the last rank to arrive, or a rank that has seen the result, asks for it.
        """
        cell = self._addresses + rank
        with self.control_block as control_block:
            if not control_block.cells[cell]:
                assert rank == self.rank
                control_block.cells[cell] = self.arena.allocate(2 * self.sizes.calls * self.sizes.short)
            return control_block.cells[cell] + turn * self.sizes.short


class Rendezvous:
    """One rendezvous (see the module), as seen by one rank.

    Each rank awaits `free` (unless `RendezvousArea.known_free` is `tag`), writes the memory that it shows, calls
    `arrive`, awaits `all_arrived`, reads, and calls `leave`. With short arrays `arrive_shortly` replaces `arrive`, and
    `reduced` replaces `all_arrived`. Between `all_arrived` and `leave` the ranks may reduce together: each calls
    `claim` and `done` for one chunk after another.

    The waits raise the failure of the communicator. Cancelling a wait changes nothing in the control block; the caller
    must then end the communicator, because the other ranks wait for this one, and call `withdraw`, and `given_back` if
    it has shown its caller's own memory.
    """

    __slots__ = ("_area", "_base", "_cells", "_fingerprint", "_number", "tag", "turn")

    def __init__(self, area: RendezvousArea, turn: int, number: int, count: int, fingerprint: int) -> None:
        self._area = area
        self._cells = area.control_block.cells
        self._base = area.base(turn)
        self._fingerprint = fingerprint
        self._number = number
        self.turn = turn
        self.tag = tag_of(number, count)

    @property
    def control_block(self) -> ControlBlock:
        return self._area.control_block

    async def free(self) -> None:
        """Wait until all ranks have left the previous rendezvous of this record. Then the slot of this rank is free."""
        await until(self.control_block, self.is_free)

    def is_free(self) -> bool:
        """Whether all ranks have left the previous rendezvous of this record. Under the lock."""
        cells, base = self._cells, self._base
        return is_left(cells[base + TAG], self.tag, cells[base + LEFT], self._area.size)

    def arrive(
        self,
        address: int,
        nbytes: int,
        *,
        direct: bool = False,
        private: bool = False,
        windows: bool = False,
        helpers: int = sys.maxsize,
    ) -> None:
        """Show `nbytes` bytes of memory at `address`.

        It is the memory of the caller if it is `direct`, which is registered, or `private`, which is not; otherwise it
        is a slot. With `windows` this rank shows nothing, and all ranks go on in windows; it offers memory of its
        device, unless `nbytes` is 0. The last rank to arrive wakes at most `helpers` of the waiting ranks if all are
        registered, and otherwise all.

        Raises DisagreementError if another rank has made another call with the same number.
        """
        area, cells, base = self._area, self._cells, self._base
        with self.control_block as control_block:
            self._enter()
            part = base + RECORD_HEAD + PART_CELLS * area.rank
            cells[part + PART_ADDRESS] = -address if direct else address
            cells[part + PART_BYTES] = nbytes
            cells[part + PART_BUSY] = 0
            cells[part + PART_BITS] = 0
            cells[base + DIRECT] += area.size + 1 if windows else direct
            cells[base + PRIVATE] += private
            cells[base + ARRIVED] += 1
            is_last = cells[base + ARRIVED] == area.size
            if is_last:
                control_block.wake(helpers if self.is_direct() else sys.maxsize)
        if is_last:
            self._wake_in_futex()

    def _wake_in_futex(self, cell: int = DONE) -> None:
        """Wake the ranks that sleep in a futex at `cell`. They count themselves under the lock, so none is missed."""
        if self._cells[self._base + SLEEPERS]:
            self.control_block.wake_futex(self._base + cell)

    def _enter(self) -> None:
        """Enter the rendezvous. The first rank opens it: it clears the cells. The caller holds the lock."""
        cells, base = self._cells, self._base
        if cells[base + TAG] == self.tag:
            if cells[base + FINGERPRINT] != self._fingerprint:
                raise DisagreementError(cells[base + FIRST])
            return
        for cell in range(base, base + RECORD_HEAD):
            cells[cell] = 0
        # No rank is busy: an earlier rendezvous may have counted something here.
        for rank in range(self._area.size):
            cells[self._part(rank) + PART_BUSY] = 0
        cells[base + TAG] = self.tag
        cells[base + FINGERPRINT] = self._fingerprint
        cells[base + FIRST] = self._area.rank

    async def all_arrived(self, patience: int = 1) -> None:
        """Wait until all ranks have arrived. If one of them has withdrawn, the wait ends with the failure alone.

        `patience`: how many times as long as usual this rank polls before it sleeps.
        """
        cells, arrived, size = self._cells, self._base + ARRIVED, self._area.size
        withdrawn = self._base + WITHDRAWN
        await until(self.control_block, lambda: cells[arrived] == size and not cells[withdrawn], patience)

    # -- short arrays (`meetings`) --------------------------------------------------------------------

    def arrive_shortly(self, x: Array | None, address: int = 0) -> bool:
        """Show a copy of `x`, or `x` itself if it is registered at `address`; nothing for None, in a barrier.

        Returns True at the last rank to arrive, which reduces. It returns False there, too, if a rank has withdrawn:
        the communicator has failed.

        Raises DisagreementError if another rank has made another call with the same number.
        """
        area, cells = self._area, self._cells
        if x is not None and not address:
            area.short_array(area.rank, self.turn, x.dtype, x.size)[...] = x
        shown = 0
        if x is not None and self.is_shown(x.nbytes):
            shown = -address or area.short_address(area.rank, self.turn)
        with area.control_block:
            self._enter()
            part = self._part(area.rank)
            if x is not None and shown:
                cells[part + PART_ADDRESS], cells[part + PART_BYTES], cells[part + PART_BUSY] = shown, x.nbytes, 0
                cells[self._base + DIRECT] += address != 0
            cells[self._base + ARRIVED] += 1
            is_last = cells[self._base + ARRIVED] == area.size and not cells[self._base + WITHDRAWN]
        if is_last and shown:
            self._wake_in_futex()
        return is_last

    def is_shown(self, nbytes: int) -> bool:
        """Whether the ranks say where their arrays are. Shorter ones are always in the memory for short arrays."""
        return nbytes >= self._area.shown

    def is_lent(self, x: Array) -> bool:
        """Whether this rank shows the memory of `x` itself, which is registered."""
        return self.is_shown(x.nbytes) and self._cells[self._part(self._area.rank) + PART_ADDRESS] < 0

    def reduce_copies(self, x: Array, reduce: Reduce, divisor: int) -> None:
        """Reduce the copies that all ranks have shown, into `x` and where the others look for the result."""
        area = self._area
        copies = [area.short_array(rank, self.turn, x.dtype, x.size) for rank in range(area.size)]
        reduce(copies[0], copies, divisor)
        x[...] = copies[0]

    def receive_shortly(self, x: Array) -> None:
        """Copy the result, which there is, into `x`, unless it is there already."""
        if not self.is_lent(x):
            source = self._area.rank if self.is_shown(x.nbytes) else 0
            x[...] = self._area.short_array(source, self.turn, x.dtype, x.size)

    # -- neighbours: no rank waits for all ------------------------------------------------------------

    def arrive_for_neighbors(self, address: int, nbytes: int) -> None:
        """Show `nbytes` bytes of memory at `address`. Ranks that wait for this rank wake, whoever else is missing.

        Raises DisagreementError if another rank has made another call with the same number.
        """
        cells, part = self._cells, self._part(self._area.rank)
        with self.control_block as control_block:
            self._enter()
            cells[part + PART_ADDRESS] = address
            cells[part + PART_BYTES] = nbytes
            cells[part + PART_BUSY] = 0
            cells[part + PART_BITS] = self.tag
            control_block.wake()

    async def shown_by(self, ranks: Collection[int]) -> list[int]:
        """Wait until one of `ranks` has arrived. Returns those that have."""
        cells, tag, marks = self._cells, self.tag, {rank: self._part(rank) + PART_BITS for rank in ranks}
        await until(self.control_block, lambda: any(cells[mark] == tag for mark in marks.values()))
        return [rank for rank, mark in marks.items() if cells[mark] == tag]

    def address_of(self, rank: int) -> int:
        """The address of the memory that `rank`, which has arrived, shows."""
        return self._cells[self._part(rank) + PART_ADDRESS]

    def read(self, rank: int) -> None:
        """Note that this rank has read the memory of `rank`, which may wait for that."""
        with self.control_block as control_block:
            self._cells[self._part(rank) + PART_BUSY] += 1
            control_block.wake()

    async def read_by(self, count: int) -> None:
        """Wait until `count` ranks have read the memory of this rank, which has left."""
        cells, tag, base, mine = self._cells, self.tag, self._base, self._part(self._area.rank) + PART_BUSY
        # Another tag: all ranks have left, and a later rendezvous uses the record.
        await until(self.control_block, lambda: cells[base + TAG] != tag or cells[mine] == count)

    def _part(self, rank: int) -> int:
        """The first cell of the part of `rank`."""
        return self._base + RECORD_HEAD + PART_CELLS * rank

    # -- the memory that the ranks show, once all have arrived ------------------------------------

    def shown(self) -> list[tuple[int, int, bool]]:
        """For each rank: the address and the bytes of the memory that it shows, and whether it is its caller's own."""
        # No lock: `all_arrived` has acquired it after the last of these cells was written.
        first = self._base + RECORD_HEAD
        cells = self._cells[first : first + PART_CELLS * self._area.size].tolist()
        parts = [cells[i : i + PART_CELLS] for i in range(0, len(cells), PART_CELLS)]
        return [(abs(part[PART_ADDRESS]), part[PART_BYTES], part[PART_ADDRESS] < 0) for part in parts]

    def is_direct(self) -> bool:
        """Whether all ranks show their callers' own memory, which is registered."""
        return self._cells[self._base + DIRECT] == self._area.size

    def is_private(self) -> bool:
        """Whether all ranks show private memory."""
        return self._cells[self._base + PRIVATE] == self._area.size

    def is_partly_own(self) -> bool:
        """Whether at least one rank shows its caller's own memory, or asks for windows."""
        return self._cells[self._base + DIRECT] > 0 or self._cells[self._base + PRIVATE] > 0

    def is_in_windows(self) -> bool:
        """Whether at least one rank asks for windows, or offers memory of its device."""
        return self._cells[self._base + DIRECT] > self._area.size

    def is_on_devices(self) -> bool:
        """Whether all ranks offer memory of their devices."""
        size = self._area.size
        is_in_windows = self._cells[self._base + DIRECT] == size * (size + 1)
        return is_in_windows and all(nbytes for _, nbytes, _ in self.shown())

    # -- a reduction by pieces: each rank counts its steps --------------------------------------------

    def step_cells(self) -> tuple[int, int]:
        """The cell of the steps of rank 0, and the distance to the cell of the next rank."""
        return self._part(0) + PART_BUSY, PART_CELLS

    async def reached(self, steps: int) -> None:
        """Wait until each rank has done at least `steps` steps."""
        await until(self.control_block, lambda: self._least_steps() >= steps)

    def advance(self, steps: int) -> None:
        """Note that this rank has done `steps` steps, one more than before."""
        with self.control_block as control_block:
            self._cells[self._part(self._area.rank) + PART_BUSY] = steps
            # Otherwise those that wait for this rank wait for another one, too.
            if self._least_steps() == steps:
                control_block.wake()

    def _least_steps(self) -> int:
        first = self._part(0) + PART_BUSY
        return min(self._cells[first : first + PART_CELLS * (self._area.size - 1) + 1 : PART_CELLS].tolist())

    # -- reducing together ------------------------------------------------------------------------

    def claim(self, total: int, chunk: int = 0) -> slice | None:
        """Claim a chunk for this rank to reduce. Returns its bytes, or None if all `total` bytes are claimed.

        It has `chunk` bytes, by default `Sizes.chunk`, or more of a very long array.
        """
        cells, claimed = self._cells, self._base + CLAIMED
        chunk = chunk or max(self._area.sizes.chunk, total // _CLAIMS // PAGE * PAGE)
        with self._area.control_block:
            first = cells[claimed]
            if first >= total:
                return None
            cells[claimed] = first + chunk
            cells[self._base + RECORD_HEAD + PART_CELLS * self._area.rank + PART_BUSY] = 1
        return slice(first, min(first + chunk, total))

    def done(self, nbytes: int, total: int, bit: int = 0) -> None:
        """Note that this rank has reduced `nbytes` bytes of the chunk that it claimed: 0 if it failed.

        `bit` is that of the chunk, if the result is in the private memory of this rank.
        """
        cells, done = self._cells, self._base + DONE
        with self._area.control_block as control_block:
            cells[done] += nbytes
            if bit:
                cells[self._part(self._area.rank) + PART_BITS] |= bit
            cells[self._base + RECORD_HEAD + PART_CELLS * self._area.rank + PART_BUSY] = 0
            # A withdrawal waits for this rank. DONE may never become `total` then.
            is_over = cells[done] == total or cells[self._base + WITHDRAWN]
            if is_over:
                control_block.wake()
        if is_over:
            self._wake_in_futex()

    def reduce_chunk(self, chunk: slice, shown: Sequence[Array], reduce: ReduceToAll, divisor: int) -> None:
        """Reduce a chunk that this rank has claimed. `shown` are the whole arrays of all ranks."""
        item, reduced = shown[0].itemsize, 0
        try:
            reduce([array[chunk.start // item : chunk.stop // item] for array in shown], divisor)
            reduced = chunk.stop - chunk.start
        finally:
            self.done(reduced, shown[0].nbytes)

    def reduce_private_chunk(self, chunk: slice, each: int, own: Array, reduction: PeerReduction) -> None:
        """Reduce a chunk that this rank has claimed into `own`, its private array. Chunks have `each` bytes."""
        reduced = 0
        try:
            self._area.peers.reduce(reduction, own, chunk)
            reduced = chunk.stop - chunk.start
        finally:
            self.done(reduced, own.size, 1 << chunk.start // each if reduced else 0)

    def reduced_by(self, rank: int, each: int, total: int) -> list[slice]:
        """The bytes that are reduced in the private memory of `rank`, once all are. Chunks have `each` bytes."""
        bits, parts = self._cells[self._part(rank) + PART_BITS], []
        for start in range(0, total, each):
            if bits >> start // each & 1:
                parts.append(slice(start, min(start + each, total)))
        return parts

    def has_left(self) -> bool:
        """Whether this rank has left a rendezvous with private memory, in the compiled core."""
        with self.control_block:
            is_reused = self._cells[self._base + TAG] != self.tag
            return is_reused or self._cells[self._part(self._area.rank) + PART_BUSY] == HAS_LEFT

    def could_not_read(self) -> bool:
        """Whether this rank could not read private memory, in the compiled core."""
        return self._cells[self._part(self._area.rank) + PART_BUSY] == CANNOT_READ

    def is_withdrawn(self) -> bool:
        """Whether a rank has withdrawn."""
        with self.control_block:
            return self._cells[self._base + WITHDRAWN] != 0

    def arrays(self, nbytes: int, dtype: np.dtype[Any]) -> list[Array]:
        """What all ranks show, as arrays of `nbytes` bytes."""
        view = self._area.arena.view
        return [view(address, nbytes).view(dtype) for address, _, _ in self.shown()]

    async def reduced(self, total: int, patience: int = 1) -> None:
        """Wait until all `total` bytes are reduced. `patience`: how many times as long as usual this rank polls."""
        await until(self.control_block, lambda: self.is_reduced(total), patience)

    def is_reduced(self, total: int) -> bool:
        """Whether all `total` bytes are reduced. Under the lock; without it a hint."""
        return self._cells[self._base + DONE] == total

    def withdraw(self) -> None:
        """Withdraw, after a failure.

        From now on no rank claims a chunk, `leave` returns False at the ranks that have read the memory which this rank
        showed, and no rank goes on that arrives later.
        """
        cells = self._cells
        with self.control_block:
            if cells[self._base + TAG] == self.tag:  # otherwise all have left, and a later rendezvous uses the record
                cells[self._base + WITHDRAWN] = 1
                cells[self._base + CLAIMED] = sys.maxsize

    async def given_back(self, is_lost: Callable[[int], bool]) -> None:
        """After `withdraw`, wait until the memory that this rank showed is its caller's again.

        Each rank that has claimed a chunk is then done with it, or is lost, as `is_lost` says of a group rank.
        """
        cells, first = self._cells, self._base + RECORD_HEAD + PART_BUSY
        with self.control_block:
            if cells[self._base + TAG] == self.tag:
                cells[first + PART_CELLS * self._area.rank] = 0

        def is_busy(rank: int) -> bool:
            return cells[self._base + TAG] == self.tag and cells[first + PART_CELLS * rank] > 0 and not is_lost(rank)

        await until(self.control_block, lambda: not any(map(is_busy, range(self._area.size))))

    # -- leaving ----------------------------------------------------------------------------------

    def leave(self, reduced: int = 0) -> bool:
        """Leave: this rank reads the memory of the others no longer.

        A rank that has reduced a short array for all gives its number of bytes as `reduced`: to report the result and
        to leave then take the lock once. Returns False if a rank has withdrawn. The data that was read may then be
        wrong, because its owner may have overwritten it meanwhile.
        """
        area, cells, left = self._area, self._cells, self._base + LEFT
        with area.control_block as control_block:
            cells[left] += 1
            have_all_left = cells[left] == area.size
            if reduced:
                cells[self._base + DONE] = reduced
            if reduced or have_all_left:
                control_block.wake()
            area.look_ahead(self._number + 1)
            is_valid = not cells[self._base + WITHDRAWN]
        if reduced:
            self._wake_in_futex()
        elif have_all_left:
            self._wake_in_futex(LEFT)
        return is_valid

    async def all_left(self) -> None:
        """Wait until no rank reads the memory that this rank has shown."""
        cells, base = self._cells, self._base
        await until(
            self.control_block,
            lambda: cells[base + TAG] != self.tag or cells[base + LEFT] == self._area.size,
            PATIENCE,
        )
