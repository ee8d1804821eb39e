"""The dense collectives of one call by message: `seam.collectives.Collectives` over the functions of `on_lane`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from asyncoll.algorithms.dense import by_size, on_lane
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.tensors import reductions
from asyncoll.tensors.reductions import Array, Combine, ReduceOp


class MessageCall:
    """The `Collectives` of one call at one rank, by message.

    Its lane is open for the whole call. If a call has several collectives, they follow each other in that lane, at all
    ranks alike.

    The methods raise the failure of the communicator, and ProtocolError if a peer sends an array of another size.
    Cancelling one stops the wait only. The context then ends the communicator, because peers still expect messages.
    """

    overlaps = False

    def __init__(self, member: Member, call: Signature, context: int) -> None:
        """`call` is execution `call.number` of `context`."""
        self._member = member
        self._call = call
        self._lane = member.lane(call, context)
        self.rank = self._lane.rank
        self.size = self._lane.size
        self.traffic = self._lane.traffic

    async def __aenter__(self) -> MessageCall:
        self._lane.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lane.__exit__(kind, error, trace)
        if isinstance(error, Exception | asyncio.CancelledError):
            self._member.failed(self._call, error)

    async def barrier(self) -> None:
        await on_lane.barrier(self._lane)

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str, whole: int = 0) -> None:
        """`whole`, here and in other collectives: see `by_size.allreduce`."""
        total, combine = self._accumulator(x, op, dtype)
        await by_size.allreduce(self._lane, total, combine, whole)
        self._finish(x, total, op, dtype)

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int, whole: int = 0) -> None:
        total, combine = self._accumulator(x, op, dtype)
        await by_size.reduce(self._lane, total, combine, root, whole)
        if self._lane.rank == root:
            self._finish(x, total, op, dtype)

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        # `on_lane.reduce_scatter` reduces in place. `chunks` must keep their values, so it works in `shard`.
        shard[...] = chunks[self._lane.rank]
        total, combine = self._accumulator(shard, op, dtype)
        own = [self._accumulator(chunk, op, dtype)[0] for chunk in chunks]
        own[self._lane.rank] = total
        await on_lane.reduce_scatter(self._lane, own, total, combine)
        self._finish(shard, total, op, dtype)

    async def broadcast(self, x: Array, root: int, whole: int = 0) -> None:
        await by_size.broadcast(self._lane, x, root, whole)

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        await on_lane.gather(self._lane, mine, blocks, root)

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        await on_lane.scatter(self._lane, blocks, mine, root)

    async def allgather(self, blocks: Sequence[Array]) -> None:
        await by_size.allgather(self._lane, blocks)

    async def alltoall(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        await on_lane.alltoall(self._lane, outgoing, incoming)

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Send `mine` to `dest`, unless it is None, and receive `into` from `source`, unless it is None."""
        # The receive is posted first. A long array stays at its sender until the receive is posted; if all ranks of a
        # ring sent first, all would wait.
        receive = self._lane.post(source, 0, into) if into is not None else None
        if mine is not None:
            await self._lane.send(dest, 0, mine, offers=True)
        if receive is not None:
            await self._lane.wait(receive)

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        """Send `mine` to each of `dests`, and receive `incoming[i]` from `sources[i]`."""
        lane = self._lane
        receives = [lane.post(source, 0, into) for source, into in zip(sources, incoming, strict=True)]
        # At the same time: a long array waits for its receiver, which must not hold up the other receivers.
        await asyncio.gather(*(lane.send(dest, 0, mine) for dest in dests))
        for receive in receives:
            await lane.wait(receive)

    def _accumulator(self, x: Array, op: ReduceOp, dtype: str) -> tuple[Array, Combine]:
        """The array to reduce in place, and its combiner: `x`, or a copy of `x` in float32.

        AVG of a half type is carried in float32, so that the quotient is rounded once.
        """
        carried = reductions.accumulator(op, dtype)
        return (x if carried == dtype else reductions.widened(x, dtype)), reductions.combiner(op, carried)

    def _finish(self, x: Array, total: Array, op: ReduceOp, dtype: str) -> None:
        """Write the result into `x`, divided by the number of ranks for AVG."""
        if op is not ReduceOp.AVG:
            return
        if total is x:
            reductions.divide(x, dtype, self._lane.size)
        else:
            reductions.put(x, dtype, total, self._lane.size)
