"""The dense collectives of a communicator of one rank: it has no rank to wait for, so they never wait."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, ReduceOp


class Alone:
    """Implements `seam.collectives.Collectives`. No call moves a byte to another rank, so all calls share one."""

    overlaps = False
    rank = 0
    size = 1
    traffic = Traffic()

    async def __aenter__(self) -> Alone:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No other rank waits for this one."""

    async def barrier(self) -> None:
        """Every rank has come."""

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """The reduction of one array is the array."""

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        """The reduction of one array is the array."""

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        shard[...] = chunks[0]

    async def broadcast(self, x: Array, root: int) -> None:
        """The root has its array."""

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        if blocks[0] is not mine:
            blocks[0][...] = mine

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        mine[...] = blocks[0]

    async def allgather(self, blocks: Sequence[Array]) -> None:
        """The only block is this rank's own."""

    async def alltoall(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        incoming[0][...] = outgoing[0]

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        if into is not None and mine is not None:
            into[...] = mine

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        """There are no neighbours."""
