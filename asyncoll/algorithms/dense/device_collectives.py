"""The dense collectives of one call whose tensors are all on devices, and whose ranks read each other's device memory.

Tensors pass in windows, as in memory of the host: a rank shows a window in its block (`GroupMemory`), at the place of
the rendezvous's record, and the others read it there. So a window is overwritten once all ranks have left its
rendezvous. Two windows are under way at a time: a rank copies the next one in before it reduces the one before.

In an allreduce each rank reduces one share of each window from the blocks of all ranks, in the order of ranks, into its
own block, whose share nobody else reads before. Then it copies all shares into its tensor. So ranks write to their own
blocks and tensors only. A rank that is stopped, and goes on when the others have given it up, spoils nothing.

The host sees the end of each copy before it tells other ranks, and before it leaves a rendezvous. No rank reads the
tensors themselves, so a call that fails returns its tensor at once: what this rank has queued comes first on its
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncoll.algorithms.dense.group_memory import GroupMemory
from asyncoll.algorithms.dense.meeting_cells import ALIGNED
from asyncoll.algorithms.dense.pieces import share
from asyncoll.algorithms.dense.rendezvous import Rendezvous
from asyncoll.algorithms.dense.shared_call import SharedCall
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.tensors.staged import Staged
from asyncoll.transport.control_block import Turn, turn_of
from asyncoll.transport.staging import BlockPart, Mark, Transfer


class DeviceCollectives:
    """The collectives of `call`, of one tensor at each rank."""

    def __init__(self, call: SharedCall, memory: GroupMemory, staged: Staged) -> None:
        self._call = call
        self._memory = memory
        self._staged = staged
        self._total: int = staged.mark.nbytes
        self._window = memory.window

    async def allreduce(self, op: ReduceOp, dtype: str) -> None:
        rank, size = self._call.rank, self._call.size

        async def reduce(rendezvous: Rendezvous, start: int, nbytes: int) -> None:
            await self._reduce(rendezvous, op, dtype, share(rank, size, nbytes))
            # The second meeting of this rendezvous: a share is read only once its rank has reduced it.
            rendezvous.advance(1)
            await rendezvous.reached(1)
            shares = ((other, *share(other, size, nbytes)) for other in range(size))
            parts = [self._part(rendezvous, other, first, last, start + first) for other, first, last in shares]
            await self._read(self._staged.mark, parts)

        await self._show_all(reduce)
        self._staged.got_result()

    async def broadcast(self, root: int) -> None:
        if self._call.rank == root:
            await self._show_all(_do_nothing)
            return
        for start in range(0, self._total, self._window):
            rendezvous = await self._call.come()
            rendezvous.arrive(0, 0)
            await rendezvous.all_arrived()
            await self._read(self._staged.mark, [self._part(rendezvous, root, 0, self._nbytes(start), start)])
            await self._call.leave(rendezvous)
        self._staged.got_result()

    async def allgather(self) -> None:
        total, ranks = self._total, range(self._call.size)
        result = self._staged.result(total * len(ranks))

        async def collect(rendezvous: Rendezvous, start: int, nbytes: int) -> None:
            parts = [self._part(rendezvous, rank, 0, nbytes, total * rank + start) for rank in ranks]
            await self._read(result, parts)

        await self._show_all(collect)

    async def reduce_scatter(self, chunks: Sequence[int], op: ReduceOp, dtype: str) -> None:
        """`chunks` are the bytes of the chunk of each rank. A window has a piece of each chunk."""
        rank, apart = self._call.rank, self._window // self._call.size // ALIGNED * ALIGNED
        result = self._staged.result(chunks[rank])
        for start in range(0, max(chunks), apart):
            rendezvous = await self._call.come()
            pieces = [max(0, min(apart, chunk - start)) for chunk in chunks]
            await self._over(self._deal(rendezvous, chunks, pieces, start, apart))
            rendezvous.arrive(0, 0)
            await rendezvous.all_arrived()
            first, last = rank * apart, rank * apart + pieces[rank]
            await self._reduce(rendezvous, op, dtype, (first, last))
            await self._read(result, [self._part(rendezvous, rank, first, last, start)])
            await self._call.leave(rendezvous)

    async def _show_all(self, use: Callable[[Rendezvous, int, int], Coroutine[Any, Any, None]]) -> None:
        """Show the tensor window by window. `use` uses the one from a byte on, of so many bytes, of all ranks."""
        rendezvous, shown = await self._show(0)
        for start in range(0, self._total, self._window):
            await self._over(shown)
            rendezvous.arrive(0, 0)
            here, end = rendezvous, start + self._window
            # The next window is copied to its place while the other ranks still come to this one, and use it.
            if end < self._total:
                rendezvous, shown = await self._show(end)
            await here.all_arrived()
            await use(here, start, self._nbytes(start))
            await self._call.leave(here)

    async def _show(self, start: int) -> tuple[Rendezvous, Transfer]:
        """The next rendezvous, and the copy of the window from byte `start` to its place in this rank's block."""
        rendezvous, nbytes = await self._call.come(), self._nbytes(start)
        self._call.traffic.sent(nbytes)
        part = self._part(rendezvous, self._call.rank, 0, nbytes, start)
        return rendezvous, self._memory.exchange.write(self._staged.mark, [part])

    def _deal(
        self, rendezvous: Rendezvous, chunks: Sequence[int], pieces: Sequence[int], start: int, apart: int
    ) -> Transfer:
        """Copy the pieces from byte `start` of all chunks to their places, `apart` bytes each, in this rank's block."""
        me, parts, begin = self._call.rank, [], 0
        for rank, nbytes in enumerate(pieces):
            parts.append(self._part(rendezvous, me, rank * apart, rank * apart + nbytes, begin + start))
            begin += chunks[rank]
        self._call.traffic.sent(sum(pieces) - pieces[me])
        return self._memory.exchange.write(self._staged.mark, [part for part in parts if part.nbytes])

    async def _reduce(self, rendezvous: Rendezvous, op: ReduceOp, dtype: str, part: tuple[int, int]) -> None:
        """Reduce a part of the window of all ranks into that of this rank, whose part is read by no other rank yet."""
        first, last = part
        if first < last:
            offset = self._memory.offset(rendezvous.turn) + first
            await self._over(self._memory.exchange.reduce(op, dtype, offset, last - first))
            self._call.traffic.received((last - first) * (self._call.size - 1))

    async def _read(self, mark: Mark, parts: Sequence[BlockPart]) -> None:
        """Copy the parts from the blocks into the tensor."""
        self._call.traffic.received(sum(part.nbytes for part in parts if part.rank != self._call.rank))
        await self._over(self._memory.exchange.read(mark, [part for part in parts if part.nbytes]))

    def _part(self, rendezvous: Rendezvous, rank: int, first: int, last: int, start: int) -> BlockPart:
        """Bytes `first` to `last` of the window that `rank` shows, and those of a tensor from `start` on."""
        return BlockPart(rank, self._memory.offset(rendezvous.turn) + first, start, last - first)

    def _nbytes(self, start: int) -> int:
        """The bytes of the window from byte `start`."""
        return min(self._window, self._total - start)

    async def _over(self, transfer: Transfer) -> None:
        """Return once it is over. Raises DeviceError, and the failure of the communicator."""
        self._staged.waits_for(transfer)
        # A turn and no future: the call belongs to no loop, and any may drive it.
        turn = Turn()
        transfer.when_moved(transfer.nbytes, turn.set)
        await turn_of(turn)
        if transfer.moved < transfer.nbytes and transfer.error is not None:
            raise self._staged.failure(transfer.error)


async def _do_nothing(rendezvous: Rendezvous, start: int, nbytes: int) -> None:
    del rendezvous, start, nbytes
