"""The seam between what users call and how the ranks of a communicator carry it out.

A `Backend` is chosen once for each communicator (`algorithms.choice`). It supplies the dense collectives, the rounds of
wait-avoiding operations, the carrier of RPC and the memory of registered tensors. Point to point goes by message under
every backend, but for long tensors on devices whose memory both ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence, Sized
from types import CodeType, TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.device_route import DeviceRoute
from asyncoll.runtime.lifetime import Part
from asyncoll.runtime.signature import Signature, Site
from asyncoll.statistics import Ledger, Traffic
from asyncoll.tensors.reductions import Array, Reduce, ReduceOp
from asyncoll.tensors.registered import SharedMemory
from asyncoll.tensors.staged import Staged

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


class BegunCall(Collectives, Protocol):
    """The collectives of an allreduce, or of a barrier, that this rank has begun already."""

    def rejoin(self, x: Array | None) -> None:
        """First of all: this rank has begun with `x`."""

    async def finish_shortly(self, x: Array | None, plan: Plan) -> None:
        """The rest of the call."""


class Plan(NamedTuple):
    """What all short calls of one operation, dtype, length and reduction have in common."""

    kind: tuple[str, str, int, str]  # operation, dtype, elements and detail of `Signature`
    fingerprint: int  # signed
    reduce: Reduce | None  # None for a barrier
    kernel: int  # of the compiled core, 0 for none: `tensors.reductions.kernel_number`
    divisor: int
    done: int  # the bytes of the result; 1 for a barrier
    reducing: Traffic  # of the rank that reduces
    receiving: Traffic  # of each other rank


# A call of `ShortCalls`: its plan and number; the code and the instruction of its `Site`.
Entry = tuple[Plan, int, CodeType, int]


def signature_of(entry: Entry) -> Signature:
    """The call that is described there."""
    plan, number, code, instruction = entry
    operation, dtype, elements, detail = plan.kind
    return Signature(operation, number, dtype, elements, detail, Site(code, instruction))


class Host(Protocol):
    """What the short calls of a communicator need of it."""

    unstarted: Signature | None  # a call that is numbered and not yet started: no other call may begin
    unused: Sized  # registered memory to give back before the next call, unless it is empty
    ledger: Ledger

    def resume(
        self, call: Signature, collectives: Collectives, body: Body[T], since_s: float, expires_s: float | None
    ) -> Coroutine[Any, Any, T]:
        """The rest of `call`, which has begun: `body` with its `collectives`. It has a record for deadlines.

        It began at `since_s`, and is overdue at `expires_s`. It has failed at once if `since_s` is 0.
        """

    def collect(self) -> None:
        """Enter the calls that `ShortCalls.counts` tells."""


class BegunShortCall(Protocol):
    """A call that `ShortCalls` has begun."""

    @property
    def entry(self) -> Entry: ...

    @property
    def array(self) -> Array | None: ...

    @property
    def result(self) -> Any:
        """What the caller gets."""

    @property
    def since_s(self) -> float:
        """When it began, as a time of `runtime.deadlines`; 0 if it has failed at once."""

    @property
    def expires_s(self) -> float | None:
        """The end of its deadline."""


class ShortCalls(Protocol):
    """Starts calls of usual arguments and in usual circumstances, at the least cost. It leaves all others alone.

    A call is left alone if it returns None: it has no number then, nothing has changed, and it is to be started in the
    general way, which raises all errors. The other calls keep what that promises: see `Communicator`. Each method must
    be called by a public method of the communicator, directly.
    """

    last: int  # the number of the last call that was numbered, here or in the general way
    libraries: tuple[str, ...]  # what the names of files begin with whose lines no report names; empty at first

    def counts(self) -> list[tuple[Plan, int, int]]:
        """The calls that have ended here since the last time: how many this rank, and another one, has reduced."""

    def latest(self) -> tuple[Entry, float] | None:
        """The newest call that was numbered here, and when one last ended. None before the first call."""

    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None:
        """Start an allreduce of `x`, if it is a numpy array. The coroutine returns `x`, which has the result."""

    def allreduce_view(self, x: Any, op: object, array: Array, key: str, /) -> Coroutine[Any, Any, Any] | None:
        """The same for a tensor `x` of dtype `key`, whose elements `array` shows; `key` is interned."""

    def barrier(self) -> Coroutine[Any, Any, None] | None:
        """Start a barrier."""


class Backend(Part, Protocol):
    """How the ranks of one communicator carry out their calls, at one of them."""

    @property
    def operations(self) -> Directory:
        """The wait-avoiding operations that this rank knows."""

    @property
    def memory(self) -> SharedMemory | None:
        """Where registered tensors lie. None: in ordinary memory."""

    @property
    def device_route(self) -> DeviceRoute | None:
        """How results of RPC go from device to device. None: through the host."""

    def short_calls(self, host: Host) -> ShortCalls | None:
        """Make what starts usual calls for `host`. None: all calls go the general way."""

    def collectives(self, call: Signature) -> Collectives:
        """The collectives of `call`. Called once for each call, in the order of their numbers."""

    def overlapped(self, call: Signature, staged: Staged) -> Collectives | None:
        """The collectives of `call`: an allreduce, reduce, broadcast, allgather or reduce_scatter of `staged`.

        They use the mirror while it arrives, and copy it back while they use the rest; `Staged.put` follows. None: the
        call waits until the mirror has arrived, and uses `collectives`; else `staged` is deferred. The ranks may differ
        in it.
        """

    def pair(self, call: Signature, context: int) -> Collectives:
        """The collectives of call `call.number` of `context`, a call of two ranks. It uses `pass_on` only."""

    def direct_pair(self, call: Signature, context: int, peer: int, staged: Staged) -> Collectives | None:
        """The same, of the tensor `staged`, which the rank sends to group rank `peer` or receives from there.

        They need no mirror if the two ranks read each other's device memory, and otherwise fetch it. None: the call
        waits until the mirror has arrived, and uses `pair`. The two ranks may differ in it.
        """

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start `work`, which uses collectives or rounds of this backend. Returns a coroutine that waits for it.

        `nbytes` is the size of this rank's contribution. `discarded` is called, as by `Runner.start`, if no caller gets
        the result. `describe` describes the work, for the report of a deadlock.
        """

    def here(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Coroutine[Any, Any, T]:
        """A coroutine for a task of the runtime's loop, which runs `work`, as of `start`, from its beginning on."""

    async def open(self, operation: Operation, site: str) -> Rounds:
        """Make `operation`, which `operations` does not have, and add it there; `site` is that of its first call.

        Raises MismatchError if another rank knows a different operation of that name. Raises UsageError if this host
        has no room for it: then nothing has been made or sent, and the communicator can be used. If another host has no
        room, a rank of that host aborts the communicator.
        """

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        """Make the carrier of RPC between the ranks. It calls `broken` for a rank that breaks its protocol."""
