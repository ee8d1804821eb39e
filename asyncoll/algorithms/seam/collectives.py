"""The dense collectives of one call at one rank, however they are carried out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, ReduceOp

T = TypeVar("T")


class Collectives(Protocol):
    """The dense collectives of one call at one rank, and the call as an asynchronous context.

    Several may follow each other in one call, in the same order at every rank. Arrays are flat, contiguous and of the
    native byte order. Arrays that results are put into must not overlap others. `dtype` names what the bits mean
    (`tensors.reductions`). Ranks are those of the communicator.

    An exception or a cancellation that leaves the context ends the communicator at all ranks. When the context has
    ended, the call uses no memory of its caller any more.
    """

    async def __aenter__(self) -> Collectives: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def rank(self) -> int:
        """This rank, in the communicator."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    overlaps: bool  # whether they use a tensor of a device while it arrives, and wait for what they use

    @property
    def traffic(self) -> Traffic:
        """Of this call so far."""

    async def barrier(self) -> None:
        """Return once every rank has come."""

    async def allreduce(self, x: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `x` over all ranks, in place. Every rank gets the same bits."""

    async def reduce(self, x: Array, op: ReduceOp, dtype: str, root: int) -> None:
        """Reduce into the root's `x`; elsewhere `x` keeps its value."""

    async def reduce_scatter(self, chunks: Sequence[Array], shard: Array, op: ReduceOp, dtype: str) -> None:
        """Reduce `chunks[rank]` of all ranks into the `shard` of each rank; `chunks` are only read."""

    async def broadcast(self, x: Array, root: int) -> None:
        """Copy the root's `x` into every rank's."""

    async def gather(self, mine: Array, blocks: Sequence[Array], root: int) -> None:
        """Collect every rank's `mine` in the root's `blocks`; elsewhere `blocks` is not used."""

    async def scatter(self, blocks: Sequence[Array], mine: Array, root: int) -> None:
        """Copy the root's `blocks[rank]` into `mine` of each rank; elsewhere `blocks` is not used."""

    async def allgather(self, blocks: Sequence[Array]) -> None:
        """Fill `blocks`, one for each rank and of any sizes, given this rank's own."""

    async def alltoall(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
        """Copy `outgoing[dest]` into `incoming[rank]` of each `dest`."""

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Send `mine` to `dest`, unless it is None, and receive `into` from `source`, unless it is None."""

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        """Send `mine` to each of `dests`, and receive `incoming[i]` from `sources[i]`, all of the size of `mine`.

        It waits for these ranks and for no others, and it is the only collective of its call.
        """


Body = Callable[[Collectives], Coroutine[Any, Any, T]]
