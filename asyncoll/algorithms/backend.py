"""The seam between what users call and how the ranks of a communicator carry it out.

A `Backend` is chosen once for each communicator (`algorithms.choice`). It supplies the dense collectives, the rounds of
wait-avoiding operations, the carrier of RPC and the memory of registered tensors. Point to point goes by message under
every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.runtime.signature import Signature
from asyncoll.runtime.work import Driven
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, Reduce, ReduceOp
from asyncoll.tensors.registered import SharedMemory

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
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

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

    async def alltoall(
        self, outgoing: Sequence[Array], incoming: Sequence[Array], taken: Callable[[int], None] = ...
    ) -> None:
        """Copy `outgoing[dest]` into `incoming[rank]` of each `dest`.

        `taken(source)` is called once for each source, when its block is complete, in the same order at every call.
        """

    async def pass_on(self, mine: Array | None, dest: int, into: Array | None, source: int) -> None:
        """Send `mine` to `dest`, unless it is None, and receive `into` from `source`, unless it is None."""

    async def exchange(
        self, mine: Array, dests: Sequence[int], incoming: Sequence[Array], sources: Sequence[int]
    ) -> None:
        """Send `mine` to each of `dests`, and receive `incoming[i]` from `sources[i]`, all of the size of `mine`.

        It waits for these ranks and for no others, and it is the only collective of its call.
        """


Body = Callable[[Collectives], Coroutine[Any, Any, T]]


class Plan(NamedTuple):
    """What all short calls of one operation, dtype, length and reduction have in common."""

    fingerprint: int  # signed
    reduce: Reduce | None  # None for a barrier
    kernel: int  # of the compiled core, 0 for none: `tensors.reductions.kernel_number`
    divisor: int
    done: int  # the bytes of the result; 1 for a barrier
    reducing: Traffic  # of the rank that reduces
    receiving: Traffic  # of each other rank
    is_atomic: bool  # whether an exception of a signal handler leaves shared memory consistent


class ShortWay(Protocol):
    """A way of a backend for allreduces of short arrays, and for barriers, that uses no collectives.

    A rank that has begun a call either ends it with `look`, or finishes it with the collectives of that call.
    """

    def takes(self, x: Array) -> bool:
        """Whether an allreduce of `x` goes this way. The ranks may differ in it."""

    def now_s(self) -> float:
        """The time of `runtime.deadlines`."""

    def plan(self, call: Signature, op: ReduceOp, nbytes: int) -> Plan:
        """The plan of `call`, which begins now: a reduction of `nbytes` bytes by `op`; a barrier if there are none."""

    def begin(self, plan: Plan, number: int, x: Array | None) -> bool | None:
        """Begin call `number`. Returns whether it is over, with the result in `x`; None if the way is not free.

        In the latter case nothing has changed in shared memory. Raises DisagreementError if another rank has made
        another call with this number, and the error of a lost lock.
        """

    def look(self, plan: Plan, number: int, x: Array | None) -> bool:
        """Block for a short time. Returns whether call `number`, which has begun, is over, with the result in `x`."""

    def rejoin(self, collectives: Collectives, x: Array | None) -> None:
        """Tell the collectives of a call that it has begun: if it fails, they give `x` back. First of all."""

    async def finish(self, plan: Plan, collectives: Collectives, x: Array | None) -> None:
        """The rest of the call of these collectives, which has begun. It may sleep."""

    def work(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Driven[T]:
        """A coroutine that uses collectives of this backend, as work that a runner can drive."""


class Backend(Protocol):
    """How the ranks of one communicator carry out their calls, at one of them."""

    @property
    def operations(self) -> Directory:
        """The wait-avoiding operations that this rank knows."""

    @property
    def memory(self) -> SharedMemory | None:
        """Where registered tensors lie. None: in ordinary memory."""

    @property
    def short_way(self) -> ShortWay | None:
        """The way of short calls. None: they go like all others."""

    def collectives(self, call: Signature) -> Collectives:
        """The collectives of `call`. Called once for each call, in the order of their numbers."""

    def pair(self, call: Signature, context: int) -> Collectives:
        """The collectives of call `call.number` of `context`, a call of two ranks. It uses `pass_on` only."""

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start `work`, which uses collectives or rounds of this backend. Returns a coroutine that waits for it.

        `nbytes` is the size of this rank's contribution. `discarded` is called, as by `Runner.start`, if no caller gets
        the result. `describe` describes the work, for the report of a deadlock.
        """

    async def open(self, operation: Operation, site: str) -> Rounds:
        """Make `operation`, which `operations` does not have, and add it there; `site` is that of its first call.

        Raises MismatchError if another rank knows a different operation of that name.
        """

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        """Make the carrier of RPC between the ranks. It calls `broken` for a rank that breaks its protocol."""
