"""Textbook collectives in shared memory, as coroutines that await nothing but rendezvous.

A short array is copied into a slot, shown, and read by those who want it. A long one passes in windows, through two
slots in turn, so that it is still in the cache when it is read; registered ones are read, and written, where they are.

An allreduce is cut into chunks, and whoever is there claims them. Each is reduced once, in the order of ranks, into the
memory of rank 0, and copied from there. So all ranks get the same bits, and nobody waits for a rank that has shown its
array but is not awake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.dense.staging import Rendezvous, StagingArea
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, Reduce, ReduceOp, reducer
from asyncoll.transport.control_block import checkpoint, failure

Take = Callable[[int, int, Array], None]  # source, where its piece starts in the whole, the bytes


class _Reduction(NamedTuple):
    """What is reduced."""

    raw: Array  # bytes of this rank's array
    dtype: np.dtype[np.generic]
    reduce: Reduce
    divisor: int
    is_wanted: bool  # here: the result goes back into `raw`


class SharedCall:
    """One collective call at one rank. Arrays are flat; those that are returned into must not overlap others."""

    def __init__(self, staging: StagingArea, number: int, fingerprint: int) -> None:
        self.rank = staging.rank
        self.size = staging.size
        self.traffic = Traffic()
        self._staging = staging
        self._number = number
        self._fingerprint = fingerprint
        self._count = 0  # rendezvous so far
        # Where peers use the caller's memory, and how many bytes they write: of the last two rendezvous.
        self._lent: deque[tuple[Rendezvous, int]] = deque(maxlen=2)

    async def retreat(self, is_lost: Callable[[int], bool]) -> None:
        """After a failure: nobody who is left uses the caller's memory, or relies on what it has read there."""
        for rendezvous, total in self._lent:
            await rendezvous.withdraw(total, is_lost)

    async def _leave(self, rendezvous: Rendezvous) -> None:
        """Look at nothing any more. If somebody gave up whose memory this rank has read, wait for the failure."""
        if not rendezvous.leave():
            await failure(rendezvous.control_block)

    async def barrier(self) -> None:
        rendezvous = await self._next()
        if rendezvous.arrive_shortly():
            rendezvous.leave(reduced=1)
        else:
            await rendezvous.reduced(1)
            rendezvous.leave()

    # -- reductions -------------------------------------------------------------------------------

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `x` over all ranks, in place."""
        if 0 < x.nbytes <= self._staging.sizes.short:
            await self._allreduce_shortly(x, op, dtype)
            return
        what = self._reduction(x, op, dtype)
        total, address = x.nbytes, self._staging.arena.locate(x)
        if total > self._staging.sizes.window:
            rendezvous = await self._next()
            if address is not None:
                self.traffic.sent(total)
            rendezvous.arrive(address or 0, total, direct=address is not None)
            self._lend(rendezvous, address, total)  # whoever comes last may write at once
            await rendezvous.everybody()
            if not rendezvous.is_direct():
                self._lent.clear()
                rendezvous.leave()
                await self._in_windows(what)
                return
        else:
            rendezvous = await self._come(what, 0, total, address)
            self._lend(rendezvous, address, total)
        await self._take_part(rendezvous, what, 0, total, direct=address is not None)

    def _lend(self, rendezvous: Rendezvous, address: int | None, total: int) -> None:
        """The memory at `address`, the caller's own if there is one, is shown at this rendezvous, to be reduced."""
        if address is not None:
            self._lent.append((rendezvous, total))

    async def _allreduce_shortly(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """The last to come reduces for all. Registered or not: a copy costs less than finding out."""
        staging, rendezvous = self._staging, await self._next()
        staging.short_array(self.rank, rendezvous.turn, x.dtype, x.size)[...] = x
        self.traffic.sent(x.nbytes)
        if rendezvous.arrive_shortly():
            arrays = [staging.short_array(place, rendezvous.turn, x.dtype, x.size) for place in range(self.size)]
            reducer(op, dtype)(arrays[0], arrays, self.size if op is ReduceOp.AVG else 1)
            x[...] = arrays[0]
            self.traffic.received(x.nbytes * (self.size - 1))
            rendezvous.leave(reduced=x.nbytes)
        else:
            await rendezvous.reduced(x.nbytes)
            x[...] = staging.short_array(0, rendezvous.turn, x.dtype, x.size)
            self.traffic.received(x.nbytes)
            rendezvous.leave()

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        """Reduce into the root's `x`; the others' stay as they are."""
        await self._in_windows(self._reduction(x, op, dtype, is_wanted=self.rank == root))

    def _reduction(self, x: Array, op: ReduceOp, dtype: str, *, is_wanted: bool = True) -> _Reduction:
        divisor = self.size if op is ReduceOp.AVG else 1
        return _Reduction(x.view(np.uint8), x.dtype, reducer(op, dtype), divisor, is_wanted)

    async def _in_windows(self, what: _Reduction) -> None:
        """Copy one window in while others are still at the one before."""
        window, total = self._staging.sizes.window, what.raw.size
        behind: tuple[Rendezvous, int, int] | None = None
        for start in range(0, max(total, 1), window):
            end = min(start + window, total)
            rendezvous = await self._come(what, start, end)
            if behind is not None:
                await self._take_part(behind[0], what, behind[1], behind[2], direct=False)
            behind = rendezvous, start, end
        if behind is not None:
            await self._take_part(behind[0], what, behind[1], behind[2], direct=False)

    async def _come(self, what: _Reduction, start: int, end: int, address: int | None = None) -> Rendezvous:
        """Show a part of the array: a copy, unless it lies at an address."""
        rendezvous = await self._next()
        self.traffic.sent(end - start)
        if address is not None:
            rendezvous.arrive(address, end - start, direct=True, helpers=self._helpers(end - start))
            return rendezvous
        address, slot = self._staging.slot(rendezvous.turn, end - start)
        slot[...] = what.raw[start:end]
        rendezvous.arrive(address, end - start, helpers=self._helpers(end - start))
        return rendezvous

    def _helpers(self, total: int) -> int:
        """How many more ranks than the last to come can reduce so many bytes at once. The others may sleep."""
        chunks = max(1, -(-total // self._staging.sizes.chunk))
        return min(chunks, self._staging.arena.cores) - 1 if total else self.size

    async def _take_part(self, rendezvous: Rendezvous, what: _Reduction, start: int, end: int, *, direct: bool) -> None:
        """Reduce bytes `start` to `end` together, and get the result."""
        await rendezvous.everybody()
        shown = rendezvous.shown()
        await self._reduce_chunks(rendezvous, what, shown, end - start)
        await rendezvous.reduced(end - start)
        if what.is_wanted and not direct:
            await checkpoint(rendezvous.control_block)
            what.raw[start:end] = self._staging.arena.view(shown[0][0], end - start)
            if self.rank:
                self.traffic.received(end - start)
        await self._leave(rendezvous)
        if direct and self.rank == 0 and not rendezvous.is_direct():
            await rendezvous.everybody_left()  # others read the result in the caller's memory

    async def _reduce_chunks(
        self, rendezvous: Rendezvous, what: _Reduction, shown: list[tuple[int, int, bool]], total: int
    ) -> None:
        view, chunk = self._staging.arena.view, self._staging.sizes.chunk
        others = [place for place, (_, _, direct) in enumerate(shown) if direct and place]
        interrupted: BaseException | None = None
        while (first := rendezvous.claim(chunk, total)) is not None:
            length = min(chunk, total - first)
            try:
                await checkpoint(rendezvous.control_block)
            except BaseException as error:  # who claims a chunk reduces it: others wait for it
                interrupted = error
            arrays = [view(address + first, length).view(what.dtype) for address, _, _ in shown]
            reduced = 0
            try:
                what.reduce(arrays[0], arrays, what.divisor)
                for place in others:
                    arrays[place][...] = arrays[0]
                reduced = length
                self.traffic.received(length * (self.size - 1))
            finally:
                rendezvous.done(reduced, total)
        if interrupted is not None:
            raise interrupted

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `chunks[place]` of all ranks into the `shard` of each place; chunks are only read."""
        what = self._reduction(shard, op, dtype)
        parts: list[Array] = []

        def take(source: int, start: int, piece: Array) -> None:
            parts.append(piece.view(shard.dtype))
            if len(parts) == self.size:
                what.reduce(what.raw[start : start + piece.size].view(what.dtype), parts, what.divisor)
                parts.clear()

        await self._deal(_bytes(chunks), take, dict.fromkeys(range(self.size), shard.nbytes))

    # -- one rank to all, and back ----------------------------------------------------------------

    async def broadcast(self, x: Array, root: int) -> None:
        """Copy the root's `x` into every rank's."""
        raw = x.view(np.uint8)
        if self.rank == root:
            await self._show(raw, _keep_nothing, {})
        else:
            await self._show(None, _into([raw] * self.size), {root: raw.size})

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        """Collect every rank's `mine` in the root's `blocks`; elsewhere `blocks` is not touched."""
        if self.rank != root:
            await self._show(mine.view(np.uint8), _keep_nothing, {})
            return
        if blocks[root] is not mine:
            blocks[root][...] = mine
        raws = _bytes(blocks)
        await self._show(None, _into(raws), _sizes(raws, but=root))

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        """Give the root's `blocks[place]` to `mine` of each place; elsewhere `blocks` is not read."""
        if self.rank == root:
            mine[...] = blocks[root]
            await self._deal(_bytes(blocks), _keep_nothing, {})
        else:
            await self._deal([], _into([mine.view(np.uint8)] * self.size), {root: mine.nbytes})

    # -- every rank a part ------------------------------------------------------------------------

    async def allgather(self, blocks: Sequence[Array]) -> None:
        """Fill `blocks`, of any sizes, with every rank's block, given mine."""
        raws = _bytes(blocks)
        await self._show(raws[self.rank], _into(raws), _sizes(raws, but=self.rank))

    async def alltoall(
        self, outgoing: Sequence[Array], incoming: Sequence[Array], taken: Callable[[int], None] = lambda place: None
    ) -> None:
        """Give `outgoing[place]` to each place and get `incoming[place]` from it. Then `taken`, by `dense.alltoall`."""
        incoming[self.rank][...] = outgoing[self.rank]
        raws = _bytes(incoming)
        await self._deal(_bytes(outgoing), _into(raws), _sizes(raws, but=self.rank))
        for step in range(self.size):
            taken((self.rank - step) % self.size)

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Every rank gives `mine` to one other, or None, and takes from one, or not."""
        del dest  # comes to take it
        wanted = {source: into.nbytes} if into is not None else {}
        take = _into([into.view(np.uint8)] * self.size) if into is not None else _keep_nothing
        await self._show(mine.view(np.uint8) if mine is not None else None, take, wanted)

    async def _show(self, mine: Array | None, take: Take, wanted: dict[int, int]) -> None:
        """Show `mine` to everybody, and take what each rank in `wanted` shows: its number of bytes is known."""
        window, shown = self._staging.sizes.window, mine.size if mine is not None else 0
        address = self._staging.arena.locate(mine) if mine is not None and shown > window else None
        start, longest = 0, 1
        while start < longest:
            rendezvous = await self._next()
            if address is None:
                self._show_piece(rendezvous, mine, start)
            else:
                self.traffic.sent(max(0, min(window, shown - start)))
                rendezvous.arrive(address + start, shown, direct=True)
                self._lend(rendezvous, address, 0)
            await rendezvous.everybody()
            table = rendezvous.shown()
            longest = max(length for _, length, _ in table)
            for source, size in wanted.items():
                await self._take(rendezvous, take, source, table[source][0], start, min(start + window, size))
            await self._leave(rendezvous)
            start += window
        if address is not None:
            await self._quiet(rendezvous)

    def _show_piece(self, rendezvous: Rendezvous, mine: Array | None, start: int) -> None:
        shown = mine.size if mine is not None else 0
        address, slot = self._staging.slot(rendezvous.turn, max(0, min(self._staging.sizes.window, shown - start)))
        if mine is not None:
            slot[...] = mine[start : start + slot.size]
            self.traffic.sent(slot.size)
        rendezvous.arrive(address, shown)

    async def _deal(self, blocks: Sequence[Array], take: Take, wanted: dict[int, int]) -> None:
        """Show `blocks[place]` to each place, and take mine of each rank in `wanted`: its number of bytes is known."""
        window = max(64, self._staging.sizes.window // self.size // 64 * 64)
        shown = max((block.size for block in blocks), default=0)
        start, longest = 0, 1
        while start < longest:
            rendezvous = await self._next()
            apart = max(0, min(window, shown - start))
            address, slot = self._staging.slot(rendezvous.turn, apart * self.size)
            for place, block in enumerate(blocks):
                piece = block[start : start + apart]
                slot[place * apart : place * apart + piece.size] = piece
                if place != self.rank:
                    self.traffic.sent(piece.size)
            rendezvous.arrive(address, shown)
            await rendezvous.everybody()
            table = rendezvous.shown()
            longest = max(length for _, length, _ in table)
            for source, size in wanted.items():
                address, length, _ = table[source]
                mine = address + self.rank * max(0, min(window, length - start))
                await self._take(rendezvous, take, source, mine, start, min(start + window, size))
            rendezvous.leave()
            start += window

    async def _take(self, rendezvous: Rendezvous, take: Take, source: int, address: int, start: int, end: int) -> None:
        if start < end:
            await checkpoint(rendezvous.control_block)
            take(source, start, self._staging.arena.view(address, end - start))
            if source != self.rank:
                self.traffic.received(end - start)

    async def _quiet(self, last: Rendezvous) -> None:
        """Nobody looks at what this call has shown any more."""
        await last.everybody_left()
        if self._count > 1:
            before = self._staging.rendezvous(self._number, self._count - 2, self._fingerprint)
            await before.everybody_left()

    async def _next(self) -> Rendezvous:
        """The next rendezvous of the call, once there is room for it."""
        staging = self._staging
        if not self._count:
            await staging.wait_for(self._number - staging.sizes.calls)  # it had its rendezvous in the same place
        rendezvous = staging.rendezvous(self._number, self._count, self._fingerprint)
        self._count += 1
        await rendezvous.free()
        return rendezvous


def _bytes(arrays: Sequence[Array]) -> list[Array]:
    return [array.view(np.uint8) for array in arrays]


def _sizes(raws: Sequence[Array], but: int) -> dict[int, int]:
    return {place: raw.size for place, raw in enumerate(raws) if place != but}


def _into(raws: Sequence[Array]) -> Take:
    def take(source: int, start: int, piece: Array) -> None:
        raws[source][start : start + piece.size] = piece

    return take


def _keep_nothing(source: int, start: int, piece: Array) -> None:
    del source, start, piece
