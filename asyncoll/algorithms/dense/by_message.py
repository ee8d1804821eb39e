"""The collectives of `dense`, as one object for each call, with the same methods as `shared.Call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncoll.algorithms.dense import on_lane
from asyncoll.runtime.group import Lane
from asyncoll.tensors import reductions
from asyncoll.tensors.reductions import Array, Combine, ReduceOp


class MessageCall:
    """One collective call at one rank, by messages. Several collectives of one call are told apart by phase."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.rank = lane.rank
        self.size = lane.size
        self.traffic = lane.traffic

    async def barrier(self) -> None:
        await on_lane.barrier(self._lane)

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        total, combine = self._accumulator(x, op, dtype)
        await on_lane.allreduce(self._lane, total, combine)
        self._finish(x, total, op, dtype)

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        total, combine = self._accumulator(x, op, dtype)
        await on_lane.reduce(self._lane, total, combine, root)
        if self._lane.rank == root:
            self._finish(x, total, op, dtype)

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        shard[...] = chunks[self._lane.rank]
        total, combine = self._accumulator(shard, op, dtype)
        own = [self._accumulator(chunk, op, dtype)[0] for chunk in chunks]
        own[self._lane.rank] = total
        await on_lane.reduce_scatter(self._lane, own, total, combine)
        self._finish(shard, total, op, dtype)

    async def broadcast(self, x: Array, root: int) -> None:
        await on_lane.broadcast(self._lane, x, root)
        self._lane.next_phase()

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        await on_lane.gather(self._lane, mine, blocks, root)
        self._lane.next_phase()

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        await on_lane.scatter(self._lane, blocks, mine, root)
        self._lane.next_phase()

    async def allgather(self, blocks: Sequence[Array]) -> None:
        await on_lane.allgather(self._lane, blocks)
        self._lane.next_phase()

    async def alltoall(
        self, outgoing: Sequence[Array], incoming: Sequence[Array], taken: Callable[[int], None] = lambda place: None
    ) -> None:
        await on_lane.alltoall(self._lane, outgoing, incoming, taken)
        self._lane.next_phase()

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Every rank sends `mine` to one other, or None, and receives from one, or not."""
        receive = self._lane.post(source, 0, into) if into is not None else None
        if mine is not None:
            await self._lane.send(dest, 0, mine)
        if receive is not None:
            await self._lane.wait(receive)
        self._lane.next_phase()

    def _accumulator(self, x: Array, op: ReduceOp, dtype: str) -> tuple[Array, Combine]:
        """What is reduced in place, `x` or a wider copy of it, and how."""
        carried = reductions.accumulator(op, dtype)
        return (x if carried == dtype else reductions.widened(x, dtype)), reductions.combiner(op, carried)

    def _finish(self, x: Array, total: Array, op: ReduceOp, dtype: str) -> None:
        """Put the result into `x`."""
        if op is not ReduceOp.AVG:
            return
        if total is x:
            reductions.divide(x, dtype, self._lane.size)
        else:
            reductions.put(x, dtype, total, self._lane.size)
