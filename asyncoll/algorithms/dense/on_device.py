"""The dense collectives of one call whose tensors are all on devices, and whose ranks read each other's device memory.

Tensors pass in windows, as in memory of the host: a rank shows a window in its block (`DeviceMemory`), at the place of
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

from asyncoll.algorithms.dense.device_memory import DeviceMemory
from asyncoll.algorithms.dense.in_memory import SharedCall
from asyncoll.algorithms.dense.pieces import share
from asyncoll.algorithms.dense.staging import Rendezvous
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.tensors.staged import Staged
from asyncoll.transport.control_block import Turn, turn_of
from asyncoll.transport.staging import Transfer


class OnDevice:
    """The collectives of `call`, of one tensor at each rank."""

    def __init__(self, call: SharedCall, memory: DeviceMemory, staged: Staged) -> None:
        self._call = call
        self._memory = memory
        self._exchange = memory.exchange
        self._staged = staged
        self._total: int = staged.mark.nbytes
        self._window = memory.window

    async def allreduce(self, op: ReduceOp, dtype: str) -> None:
        rendezvous, shown = await self._show(0)
        for start in range(0, self._total, self._window):
            await self._over(shown)
            rendezvous.arrive(0, 0)
            here, end = rendezvous, start + self._window
            if end < self._total:
                rendezvous, shown = await self._show(end)
            await here.all_arrived()
            await self._reduce(here, op, dtype, self._nbytes(start))
            await self._collect(here, start)
            await self._call.leave(here)
        self._staged.has_result()

    async def broadcast(self, root: int) -> None:
        if self._call.rank == root:
            for start in range(0, self._total, self._window):
                rendezvous, shown = await self._show(start)
                await self._over(shown)
                rendezvous.arrive(0, 0)
                await rendezvous.all_arrived()
                await self._call.leave(rendezvous)
            return
        for start in range(0, self._total, self._window):
            rendezvous = await self._call.come()
            rendezvous.arrive(0, 0)
            await rendezvous.all_arrived()
            await self._over(self._read(rendezvous, root, (0, self._nbytes(start)), start))
            await self._call.leave(rendezvous)
        self._staged.has_result()

    async def _show(self, start: int) -> tuple[Rendezvous, Transfer]:
        """The next rendezvous, and the copy of the window from byte `start` to its place in this rank's block."""
        rendezvous, nbytes = await self._call.come(), self._nbytes(start)
        self._call.traffic.sent(nbytes)
        offset = self._memory.offset(rendezvous.turn)
        return rendezvous, self._exchange.write(self._staged.mark, start, nbytes, offset)

    async def _reduce(self, rendezvous: Rendezvous, op: ReduceOp, dtype: str, nbytes: int) -> None:
        """Reduce the share of this rank of a window of `nbytes` bytes. Returns once all ranks have reduced theirs."""
        first, last = share(self._call.rank, self._call.size, nbytes)
        if first < last:
            offset = self._memory.offset(rendezvous.turn) + first
            await self._over(self._exchange.reduce(op, dtype, offset, last - first))
            self._call.traffic.received((last - first) * (self._call.size - 1))
        rendezvous.advance(1)
        await rendezvous.reached(1)

    async def _collect(self, rendezvous: Rendezvous, start: int) -> None:
        """Copy all shares of the window from byte `start` into the tensor."""
        size, nbytes = self._call.size, self._nbytes(start)
        await self._over(*(self._read(rendezvous, rank, share(rank, size, nbytes), start) for rank in range(size)))

    def _read(self, rendezvous: Rendezvous, rank: int, part: tuple[int, int], start: int) -> Transfer:
        """Copy the part of the window from byte `start` that is in the block of `rank` into the tensor."""
        (first, last), offset = part, self._memory.offset(rendezvous.turn)
        if rank != self._call.rank:
            self._call.traffic.received(last - first)
        return self._exchange.read(rank, offset + first, self._staged.mark, start + first, last - first)

    def _nbytes(self, start: int) -> int:
        """The bytes of the window from byte `start`."""
        return min(self._window, self._total - start)

    async def _over(self, *transfers: Transfer) -> None:
        """Return once they are over. Raises DeviceError, and the failure of the communicator."""
        for transfer in transfers:
            turn = Turn()
            transfer.when_moved(transfer.nbytes, turn.set)
            await turn_of(turn)
            if transfer.moved < transfer.nbytes and transfer.error is not None:
                raise self._staged.failure(transfer.error)
