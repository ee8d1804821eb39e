"""The dense collectives of one call in shared memory, as coroutines that await only its rendezvous.

A rank copies a short array into a slot of the rendezvous area, from which the other ranks read it. A long array passes
in windows through two slots in turn, so that a window is still in the cache when the others read it. A registered array
is read and written where it is, without a copy.

In an allreduce of registered arrays each rank claims chunks and reduces them. Each chunk is reduced once, in the order
of ranks, and written to all arrays. So all ranks get the same bits. A rank that has shown its array and then has no
core to run on delays no other rank: the others claim the chunks. Other long arrays are reduced in `pieces`.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from asyncoll.algorithms.dense import pieces
from asyncoll.algorithms.dense.arriving import arrived
from asyncoll.algorithms.dense.meeting_cells import (
    BY_MEETING,
    IN_A_COPY,
    IN_PLACE,
    IN_PRIVATE_MEMORY,
    PATIENCE,
    private_chunk,
)
from asyncoll.algorithms.dense.pieces import Summand
from asyncoll.algorithms.dense.rendezvous import Rendezvous, RendezvousArea, signed
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.algorithms.seam.short_calls import Block, Plan
from asyncoll.algorithms.seam.ways import Shape, Way, begin
from asyncoll.errors import UsageError
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, ReduceOp, into_all, kernel_number, reducer
from asyncoll.tensors.staged import Staged
from asyncoll.transport.control_block import checkpoint, failure

Take = Callable[[int, int, Array], None]  # source, first byte of the piece in the whole array, the bytes of the piece


class SharedCall:
    """The `Collectives` of one call at one rank, in memory.

    All ranks of the communicator call the same methods in the same order. Arrays are flat and contiguous. An array that
    gets a result must not overlap another one.

    The methods raise the failure of the communicator, and DisagreementError if another rank has made another call with
    the same number. After an exception or a cancellation, the caller must await `retreat` before it returns the memory
    of its arrays to the user, and end the communicator.
    """

    overlaps = False

    def __init__(self, area: RendezvousArea, number: int, fingerprint: int) -> None:
        self.rank = area.rank
        self.size = area.size
        self.traffic = Traffic()
        self._area = area
        self.number = number
        self._fingerprint = signed(fingerprint)
        self._count = 0  # the number of rendezvous so far
        # The last two are enough: a rendezvous begins when all have left the one two before, whose record it uses.
        self._rendezvous: deque[Rendezvous] = deque(maxlen=2)
        self._lent: deque[Rendezvous] = deque(maxlen=2)  # those at which other ranks use the caller's memory

    async def retreat(self, is_lost: Callable[[int], bool]) -> None:
        """After a failure, wait until no living rank uses the caller's memory, and invalidate what others have read.

        A rank that comes later does not complete the call without this one: it waits for the failure. `is_lost` says of
        a group rank whether it is lost.
        """
        for rendezvous in self._rendezvous:
            rendezvous.withdraw()
        for rendezvous in self._lent:
            await rendezvous.given_back(is_lost)

    async def leave(self, rendezvous: Rendezvous) -> None:
        """Leave the rendezvous. If a rank has withdrawn from it, wait for the failure, which is raised.

        The data that this rank has read may be wrong then, and that rank ends the communicator.
        """
        if not rendezvous.leave():
            await failure(rendezvous.control_block)

    async def barrier(self) -> None:
        rendezvous = await self.come()  # that of a short allreduce, without an array
        if rendezvous.arrive_shortly(None):
            rendezvous.leave(reduced=1)
        else:
            await self._receive_shortly(rendezvous, None, 1)

    # -- reductions -------------------------------------------------------------------------------

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `x` over all ranks, in place. A long `x` that is registered at all ranks is not copied."""
        await begin(allreduce_ways(self._area.sizes), Shape(x.nbytes, dtype), self, x, op, dtype)

    def reduce_registered(self, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None] | None:
        """Allreduce of `x` where it is. Declines unless `x` lies in shared memory."""
        address = self._area.arena.locate(x)
        return None if address is None else self._reduce_at(address, self._reduction(x, op, dtype))

    def reduce_copy(self, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None] | None:
        """Allreduce of a copy in shared memory, as of a registered array. Declines if that has no room."""
        try:
            block = self._area.block(x.nbytes)
        except UsageError:
            return None
        return self._reduce_and_return(block, self._reduction(x, op, dtype))

    def reduce_private(self, x: Array, op: ReduceOp, dtype: str) -> Coroutine[Any, Any, None] | None:
        """Allreduce of `x` where it is, in private memory. Declines if the ranks cannot read or reduce each other's."""
        what = self._reduction(x, op, dtype)
        return self._show_privately(x, what) if what.kernel > 0 and self._area.peers.can_read() else None

    async def reduce_through_slots(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """Allreduce of `x` in pieces, which pass through slots."""
        what = self._reduction(x, op, dtype)
        await self._reduce_shown(await self._come_with_slot(what), what)

    async def _reduce_at(self, address: int, what: Summand) -> None:
        await self._reduce_shown(await self._come_directly(address, what.raw.size), what)

    async def _reduce_and_return(self, block: Block, what: Summand) -> None:
        copy = block.memory[: what.raw.size]
        copy[...] = what.raw
        await self._reduce_at(block.address, what._replace(raw=copy))
        what.raw[...] = copy
        # Not after a failure: other ranks may still write into the block, so its memory is never used again.
        self._area.give_back(block)

    async def _show_privately(self, x: Array, what: Summand) -> None:
        rendezvous = await self.come()
        self.traffic.sent(x.nbytes)
        rendezvous.arrive(x.ctypes.data, x.nbytes, private=True)
        self._lent.append(rendezvous)
        await self._reduce_shown(rendezvous, what)

    async def _come_directly(self, address: int, total: int) -> Rendezvous:
        """Arrive at the next rendezvous with an array in shared memory, at `address`."""
        rendezvous = await self.come()
        self.traffic.sent(total)
        rendezvous.arrive(address, total, direct=True, helpers=self._helpers(total))
        self._lent.append(rendezvous)  # if all ranks have arrived, they may write into it from now on
        return rendezvous

    async def _reduce_shown(self, rendezvous: Rendezvous, what: Summand) -> None:
        """The rest of an allreduce of a long array: this rank has arrived with it, or with a slot."""
        await rendezvous.all_arrived()
        if rendezvous.is_direct():
            await self._reduce_together(rendezvous, what)
            return
        if rendezvous.is_private():
            await self._reduce_privately(rendezvous, what)
            return
        if rendezvous.is_partly_own():
            self._lent.clear()  # no rank has used the memory that was shown
            is_in_windows = rendezvous.is_in_windows()
            rendezvous.leave()
            if is_in_windows:
                await self._reduce_in_windows(what)
                return
            rendezvous = await self._come_with_slot(what)
            await rendezvous.all_arrived()
        await self._reduce_in_pieces(rendezvous, what)

    async def _reduce_in_windows(self, what: Summand) -> None:
        """Allreduce window by window, as of registered arrays: those of some ranks are arriving from devices."""
        area, window, staged = self._area, self._area.sizes.staged, what.staged
        own = area.arena.locate(what.raw)
        block = area.block(window) if own is None else None
        for start in range(0, what.raw.size, window):
            part = what.raw[start : start + window]
            if staged is not None:
                await arrived(staged, start + part.size)
            if block is not None:
                shown = block.memory[: part.size]
                shown[...] = part
                await self._reduce_window(what._replace(raw=shown), block.address)
                part[...] = shown
            elif own is not None:
                await self._reduce_window(what._replace(raw=part), own + start)
            if staged is not None:
                staged.put(start + part.size)
        if block is not None:
            area.give_back(block)

    async def _reduce_window(self, what: Summand, address: int) -> None:
        rendezvous = await self._come_directly(address, what.raw.size)
        await rendezvous.all_arrived(PATIENCE)  # the others end the window before
        await self._reduce_together(rendezvous, what)

    async def reduce_shortly(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """Allreduce of a short array, which the last rank to come reduces for all (`meetings`)."""
        rendezvous = await self.come()
        what = self._reduction(x, op, dtype)
        is_last = rendezvous.arrive_shortly(x, self._area.address_of_short(x))
        if rendezvous.is_lent(x):
            self._lent.append(rendezvous)
        if is_last and not rendezvous.is_shown(x.nbytes):
            rendezvous.reduce_copies(x, what.reduce, what.divisor)
            self.traffic.sent(x.nbytes)
            self.traffic.received(x.nbytes * (self.size - 1))
            rendezvous.leave(reduced=x.nbytes)
            return
        if is_last:
            await self._reduce_chunks(rendezvous, what)
        await self._receive_shortly(rendezvous, x, x.nbytes)

    def rejoin(self, x: Array | None, plan: Plan) -> None:
        """This rank has arrived at the rendezvous of an allreduce of `x`, or of a barrier, in the compiled core."""
        rendezvous = self._area.rendezvous(self.number, 0, self._fingerprint)
        self._rendezvous.append(rendezvous)
        self._count = 1
        if x is not None and (plan.is_long or rendezvous.is_lent(x)):
            self._lent.append(rendezvous)

    async def finish_shortly(self, x: Array | None, plan: Plan) -> None:
        """The rest of that call, at a rank that was not the last."""
        rendezvous = self._rendezvous[-1]
        if x is None or plan.reduce is None or not plan.is_long:
            await self._receive_shortly(rendezvous, x, plan.done)
        else:
            self.traffic.sent(x.nbytes)
            what = Summand(x.view(np.uint8), x.dtype, plan.reduce, plan.divisor, plan.kernel, is_wanted=True)
            if rendezvous.has_left():
                await rendezvous.all_left()
            else:
                await self._reduce_shown(rendezvous, what)

    async def _receive_shortly(self, rendezvous: Rendezvous, x: Array | None, done: int) -> None:
        await rendezvous.reduced(done)
        if x is not None:
            rendezvous.receive_shortly(x)
            self.traffic.sent(x.nbytes)
            self.traffic.received(x.nbytes)
        rendezvous.leave()

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        """Reduce into the root's `x`; elsewhere `x` keeps its value."""
        what = self._reduction(x, op, dtype, is_wanted=self.rank == root)
        rendezvous = await self._come_with_slot(what)
        await rendezvous.all_arrived()
        await self._reduce_in_pieces(rendezvous, what)

    def _reduction(self, x: Array, op: ReduceOp, dtype: str, *, is_wanted: bool = True) -> Summand:
        divisor = self.size if op is ReduceOp.AVG else 1
        native = self._area.arena.native
        reduce, kernel = reducer(op, dtype, native), kernel_number(op, dtype, native)
        return Summand(x.view(np.uint8), x.dtype, reduce, divisor, kernel, is_wanted)

    async def _come_with_slot(self, what: Summand) -> Rendezvous:
        """Arrive at the next rendezvous with the first piece of the array in a slot."""
        area, rendezvous = self._area, await self.come()
        piece = area.sizes.piece
        address, slot = area.slot(rendezvous.turn, pieces.slot_bytes(what.raw.size, piece))
        pieces.put_first(what, slot, self.rank, self.size, piece)
        rendezvous.arrive(address, slot.size)
        return rendezvous

    async def _reduce_in_pieces(self, rendezvous: Rendezvous, what: Summand) -> None:
        area = self._area
        await pieces.reduce_in_pieces(area, rendezvous, what)
        total, piece = what.raw.size, area.sizes.piece
        sent, received = pieces.traffic(total, piece, self.rank, self.size, is_wanted=what.is_wanted)
        self.traffic.sent(sent)
        self.traffic.received(received)
        await self.leave(rendezvous)

    def _helpers(self, total: int) -> int:
        """How many ranks the last one to arrive wakes to reduce `total` bytes with it.

        At most as many as there are chunks and cores, less itself. Further ranks would find nothing to reduce or no
        core, and would go back to sleep; they wake when the result is there. If there is nothing to reduce, all wake.
        """
        chunks = max(1, -(-total // self._area.sizes.chunk))
        return min(chunks, self._area.arena.cores) - 1 if total else self.size

    async def _reduce_together(self, rendezvous: Rendezvous, what: Summand) -> None:
        """Reduce arrays that all ranks show where they are: the rank that reduces a chunk writes it to all of them."""
        mine = await self._reduce_chunks(rendezvous, what)
        await rendezvous.reduced(what.raw.size, PATIENCE)
        self.traffic.received(what.raw.size - mine)  # others have written it into this rank's array
        await self.leave(rendezvous)

    async def _reduce_chunks(self, rendezvous: Rendezvous, what: Summand) -> int:
        """Claim and reduce chunks of what all ranks show, until all are claimed. Returns how many bytes."""
        mine = 0
        arrays: list[Array] | None = None
        reduce = into_all(what.reduce, what.kernel, self._area.arena.native)
        interrupted: BaseException | None = None
        while chunk := rendezvous.claim(what.raw.size):
            # Not before: once all chunks are reduced, the others may have given back the memory that they have shown.
            arrays = arrays or rendezvous.arrays(what.raw.size, what.dtype)
            try:
                await checkpoint(rendezvous.control_block)
            except BaseException as error:
                interrupted = error  # raised after the last chunk: other ranks wait for each chunk that is claimed
            rendezvous.reduce_chunk(chunk, arrays, reduce, what.divisor)
            mine += chunk.stop - chunk.start
        self.traffic.received(mine * (self.size - 1))
        if interrupted is not None:
            raise interrupted
        return mine

    async def _reduce_privately(self, rendezvous: Rendezvous, what: Summand) -> None:
        """Reduce arrays in private memory (`peers`). Each rank claims chunks, and reduces them into its own array.

        Once all are reduced, it copies the other chunks from the ranks that have reduced them. A rank that has reduced
        chunks waits until all ranks have copied them.
        """
        area, total, own = self._area, what.raw.size, what.raw
        each = private_chunk(total)
        addresses = [address for address, _, _ in rendezvous.shown()]
        reduction = area.peers.reduction(addresses, what.kernel, what.divisor)
        try:
            if rendezvous.could_not_read():
                raise OSError(errno.EFAULT, "the memory of another rank cannot be read")
            while chunk := rendezvous.claim(total, each):
                rendezvous.reduce_private_chunk(chunk, each, own, reduction)
                self.traffic.received((chunk.stop - chunk.start) * (self.size - 1))
                await checkpoint(rendezvous.control_block)
            await rendezvous.reduced(total, PATIENCE)
            for step in range(1, self.size):
                rank = (self.rank + step) % self.size  # each rank begins with another one's
                for chunk in rendezvous.reduced_by(rank, each, total):
                    area.peers.read(reduction, rank, own, chunk)
                    self.traffic.received(chunk.stop - chunk.start)
        except OSError as error:
            # The rank whose memory could not be read has ended, or runs another program, or has failed and returned its
            # array to its caller.
            is_lost = isinstance(error, ProcessLookupError) or not area.peers.has_read_all()
            if not is_lost and not rendezvous.is_withdrawn():
                raise
            await failure(rendezvous.control_block)
        await self.leave(rendezvous)
        if rendezvous.reduced_by(self.rank, each, total):
            await rendezvous.all_left()

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `chunks[rank]` of all ranks into the `shard` of each rank; `chunks` are only read.

        `shard` may be this rank's own chunk itself, which is then the first operand.
        """
        what = self._reduction(shard, op, dtype)
        first = self.rank if np.may_share_memory(shard, chunks[self.rank]) else 0
        parts: list[Array] = []

        def take(source: int, start: int, piece: Array) -> None:
            # `_deal` takes the pieces in this order of ranks, so that the reduction has it.
            parts.append(piece.view(shard.dtype))
            if len(parts) == self.size:
                what.reduce(what.raw[start : start + piece.size].view(what.dtype), parts, what.divisor)
                parts.clear()

        order = [*range(first, self.size), *range(first)]
        await self._deal(_bytes(chunks), take, dict.fromkeys(order, shard.nbytes))

    # -- one rank to all, and back ----------------------------------------------------------------

    async def broadcast(self, x: Array, root: int) -> None:
        """Copy the root's `x` into every rank's."""
        raw = x.view(np.uint8)
        if self.rank == root:
            await self._show(raw, keep_nothing, {})
        else:
            await self._show(None, _into([raw] * self.size), {root: raw.size})

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        """Collect every rank's `mine` in the root's `blocks`; elsewhere `blocks` is not used."""
        if self.rank != root:
            await self._show(mine.view(np.uint8), keep_nothing, {})
            return
        if blocks[root] is not mine:
            blocks[root][...] = mine
        raws = _bytes(blocks)
        await self._show(None, _into(raws), _sizes(raws, but=root))

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        """Copy the root's `blocks[rank]` into `mine` of each rank; elsewhere `blocks` is not used."""
        if self.rank == root:
            mine[...] = blocks[root]
            await self._deal(_bytes(blocks), keep_nothing, {})
        else:
            await self._deal([], _into([mine.view(np.uint8)] * self.size), {root: mine.nbytes})

    # -- every rank a part ------------------------------------------------------------------------

    async def allgather(self, blocks: Sequence[Array]) -> None:
        """Fill `blocks`, one for each rank and of any sizes, given this rank's own."""
        raws = _bytes(blocks)
        await self._show(raws[self.rank], _into(raws), _sizes(raws, but=self.rank))

    async def alltoall(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        """Copy `outgoing[dest]` into `incoming[rank]` of each `dest`."""
        incoming[self.rank][...] = outgoing[self.rank]
        raws = _bytes(incoming)
        await self._deal(_bytes(outgoing), _into(raws), _sizes(raws, but=self.rank))

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Send `mine` to `dest`, unless it is None, and receive `into` from `source`, unless it is None."""
        del dest  # all ranks see `mine`, and `dest` reads it
        wanted = {source: into.nbytes} if into is not None else {}
        take = _into([into.view(np.uint8)] * self.size) if into is not None else keep_nothing
        await self._show(mine.view(np.uint8) if mine is not None else None, take, wanted)

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        """Show a copy of `mine` to all ranks, and read those of `sources`. Other ranks may come later.

        A short copy is in a slot. A long one is in a block of its own, which is free when all `dests` have read it.
        """
        rendezvous = await self.come()
        self._rendezvous.pop()  # not to withdraw from: the others wait only for those whose arrays they read
        area, total = self._area, mine.nbytes
        block = area.block(total) if total > area.sizes.window else None
        address, room = block or area.slot(rendezvous.turn, total)
        room[:total] = mine.view(np.uint8)
        self.traffic.sent(total)
        rendezvous.arrive_for_neighbors(address, total)
        # In the order in which they come: a rank with a long array waits until it has been read.
        awaited = dict(zip(sources, _bytes(incoming), strict=True))
        while awaited:
            for source in await rendezvous.shown_by(awaited):
                theirs, take = rendezvous.address_of(source), _into([awaited.pop(source)] * self.size)
                for start in range(0, total, area.sizes.window):
                    end = min(start + area.sizes.window, total)
                    await self._take(rendezvous, take, source, theirs + start, start, end)
                if block is not None:
                    rendezvous.read(source)
        rendezvous.leave()
        if block is not None:
            await rendezvous.read_by(len(dests))
            area.give_back(block)

    async def _show(self, mine: Array | None, take: Take, wanted: dict[int, int], staged: Staged | None = None) -> None:
        """Show `mine` to all ranks in windows, and pass the bytes that the ranks in `wanted` show to `take`.

        `wanted` maps a group rank to the number of bytes that it shows. `mine` may be arriving from a device.
        """
        window, shown = self._area.sizes.window, mine.size if mine is not None else 0
        # An array of one window is copied into a slot, even if it is registered. So the call ends without waiting until
        # all ranks have read it.
        address = self._area.arena.locate(mine) if mine is not None and shown > window else None
        # All ranks make the same number of rendezvous: at least one, and as many as the longest array that any rank
        # shows has windows. A rank learns that length at the first.
        start, longest = 0, 1
        while start < longest:
            if staged is not None:
                await arrived(staged, min(start + window, shown))
            rendezvous = await self.come()
            if address is None:
                self._show_piece(rendezvous, mine, start)
            else:
                self.traffic.sent(max(0, min(window, shown - start)))
                rendezvous.arrive(address + start, shown, direct=True)
                self._lent.append(rendezvous)
            await rendezvous.all_arrived()
            if not start and rendezvous.is_in_windows():
                await self.leave(rendezvous)  # a rank has offered memory of its device instead of its array
                continue
            table = rendezvous.shown()
            longest = max(length for _, length, _ in table)
            for source, size in wanted.items():
                await self._take(rendezvous, take, source, table[source][0], start, min(start + window, size))
            await self.leave(rendezvous)
            start += window
        if address is not None:
            await self._quiet()

    def _show_piece(self, rendezvous: Rendezvous, mine: Array | None, start: int) -> None:
        """Copy the window of `mine` from byte `start` into a slot, and arrive with the slot."""
        shown = mine.size if mine is not None else 0
        address, slot = self._area.slot(rendezvous.turn, max(0, min(self._area.sizes.window, shown - start)))
        if mine is not None:
            slot[...] = mine[start : start + slot.size]
            self.traffic.sent(slot.size)
        rendezvous.arrive(address, shown)

    async def _deal(self, blocks: Sequence[Array], take: Take, wanted: dict[int, int]) -> None:
        """Show `blocks[rank]` to each rank, and pass this rank's block of each rank in `wanted` to `take`, by pieces.

        `wanted` maps a group rank to the number of bytes of that block, in the order in which `take` gets the pieces.
        """
        # The slot holds a piece for each rank. Pieces are multiples of 64 bytes, so that no element is cut in two.
        window = max(64, self._area.sizes.window // self.size // 64 * 64)
        shown = max((block.size for block in blocks), default=0)
        start, longest = 0, 1
        while start < longest:
            rendezvous = await self.come()
            apart = max(0, min(window, shown - start))
            address, slot = self._area.slot(rendezvous.turn, apart * self.size)
            for rank, block in enumerate(blocks):
                if rank != self.rank:
                    piece = block[start : start + apart]
                    slot[rank * apart : rank * apart + piece.size] = piece
                    self.traffic.sent(piece.size)
            rendezvous.arrive(address, shown)
            await rendezvous.all_arrived()
            if not start and rendezvous.is_in_windows():
                await self.leave(rendezvous)  # as in `_show`
                continue
            table = rendezvous.shown()
            longest = max(length for _, length, _ in table)
            for source, size in wanted.items():
                end = min(start + window, size)
                address, length, _ = table[source]
                mine = address + self.rank * max(0, min(window, length - start))  # `apart` of `source`
                own = blocks[source] if source == self.rank else None
                await self._take(rendezvous, take, source, mine, start, end, own)
            await self.leave(rendezvous)
            start += window

    async def _take(
        self,
        rendezvous: Rendezvous,
        take: Take,
        source: int,
        address: int,
        start: int,
        end: int,
        own: Array | None = None,
    ) -> None:
        """Pass bytes `start` to `end` of `source`, which are at `address` or in `own`, to `take`."""
        if start < end:
            await checkpoint(rendezvous.control_block)
            if own is None:
                take(source, start, self._area.arena.view(address, end - start))
                self.traffic.received(end - start)
            else:
                take(source, start, own[start:end])

    async def _quiet(self) -> None:
        """Wait until no rank reads the memory that this call has shown."""
        for rendezvous in self._rendezvous:
            await rendezvous.all_left()

    async def come(self) -> Rendezvous:
        """The next rendezvous of the call. Waits until its record is free."""
        area = self._area
        rendezvous = area.rendezvous(self.number, self._count, self._fingerprint)
        self._count += 1
        if area.known_free != rendezvous.tag:
            if self._count == 1:
                await area.wait_for(self.number - area.sizes.calls)  # that call uses the same records
            await rendezvous.free()
        self._rendezvous.append(rendezvous)
        return rendezvous


def _bytes(arrays: Sequence[Array]) -> list[Array]:
    return [array.view(np.uint8) for array in arrays]


def _sizes(raws: Sequence[Array], but: int) -> dict[int, int]:
    return {rank: raw.size for rank, raw in enumerate(raws) if rank != but}


def _into(raws: Sequence[Array]) -> Take:
    """A `Take` that copies the pieces of rank i into `raws[i]`."""

    def take(source: int, start: int, piece: Array) -> None:
        raws[source][start : start + piece.size] = piece

    return take


def keep_nothing(source: int, start: int, piece: Array) -> None:
    del source, start, piece


@cache
def allreduce_ways(sizes: Sizes) -> tuple[Way[Coroutine[Any, Any, None]], ...]:
    """Ranks may take different ways: those of long arrays see at the first rendezvous what the others show."""
    way, short = partial(Way[Coroutine[Any, Any, None]], "allreduce"), sizes.short
    ways = (
        way("meeting", SharedCall.reduce_shortly, "one step for all", over=0, up_to=short, compiled=BY_MEETING),
        way("in place", SharedCall.reduce_registered, "no copy", short, needs="registered memory", compiled=IN_PLACE),
        way(
            "whole copy",
            SharedCall.reduce_copy,
            "no rank waits for each piece",
            over=short,
            up_to=sizes.whole,
            needs="room in shared memory",
            compiled=IN_A_COPY,
        ),
        way(
            "private memory",
            SharedCall.reduce_private,
            "each byte is copied twice, not three times",
            over=max(sizes.whole, short),
            up_to=sizes.private_max,
            needs="a kernel in the core, and leave to read the others",
            by_core=True,
            compiled=IN_PRIVATE_MEMORY,
        ),
        way("slots", SharedCall.reduce_through_slots, "pieces stay in the cache"),
    )
    return tuple(each for each in ways if each.over < each.up_to)  # private memory suits few ranks only
