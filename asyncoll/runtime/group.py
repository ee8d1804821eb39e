"""Groups of ranks, and lanes: the interface that an algorithm uses to exchange arrays inside one execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from asyncoll.runtime.executions import Executions, Identity
from asyncoll.runtime.matching import Receive
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, Combine


@dataclass(frozen=True, slots=True)
class Group:
    """An ordered set of world ranks, seen from one of them. Immutable; each round may have a group of its own.

    A group rank is an index into `ranks`.
    """

    ranks: tuple[int, ...]  # world ranks, by group rank
    rank: int  # the group rank of this process
    communicator: int  # its context: the contexts of operations derive from it, and failures belong to it
    members: tuple[int, ...] = ()  # the world ranks of the communicator, which hear of its failures; by default `ranks`
    epoch: int = 1  # the membership of the world that its ranks are of (`Membership`)
    size: int = field(init=False)  # the number of ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        object.__setattr__(self, "members", self.members or self.ranks)

    def subset(self, group_ranks: tuple[int, ...]) -> Group:
        """The group of these group ranks, in this order; the rank of this process must be one of them."""
        if len(group_ranks) == self.size:
            return self
        ranks = tuple(self.ranks[group_rank] for group_rank in group_ranks)
        return Group(ranks, group_ranks.index(self.rank), self.communicator, self.members, self.epoch)


class Lane:
    """One execution of one operation in a group: arrays that its ranks send to each other, identified by step.

    Use it as a context manager around the whole execution, on the runtime's loop. Ranks are group ranks. Arrays are
    flat and contiguous. Do not read an array while it is received into, nor write an array while it is sent, until the
    method returns. Arrays of one step, 0 to 2^32 - 1, from one rank arrive in the order in which they were sent: post
    the receive of the next one when that of the one before is complete. All methods raise the error of the communicator
    if it fails, and ProtocolError if a peer sends an array of another size.

    Cancelling a method stops the wait only; the peers still expect the messages. So the caller must end the execution
    with the exception and abort the communicator (`Member.failed`).

    `piggyback` is a short array that every message carries. It becomes, in place and element by element, the maximum of
    all arrays that arrive. After an algorithm in which the result of every rank depends on the data of every rank, it
    is the maximum over all ranks.

    In: the algorithm's calls. Out: `Executions` of this rank, with world ranks in place of group ranks.
    """

    __slots__ = ("_execution", "_executions", "_identity", "_piggyback", "_world", "rank", "size", "traffic")

    def __init__(
        self,
        executions: Executions,
        group: Group,
        context: int,
        number: int,
        fingerprint: int,
        describe: Callable[[], str],
        piggyback: Array | None = None,
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self.traffic = Traffic()  # of this execution
        self._world = group.ranks
        self._piggyback = piggyback
        self._executions = executions
        self._identity = Identity(
            group.communicator, group.members, group.epoch, context, number, fingerprint, describe
        )

    def __enter__(self) -> Lane:
        self._execution = self._executions.open(self._identity, self._piggyback)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executions.end(self._execution, completed=kind is None)

    def post(self, source: int, step: int, into: Array, combine: Combine | None = None) -> Receive:
        """Post a receive of an array like `into` from `source`; returns at once, and `wait` waits for it.

        The data is copied to `into`, or combined with it by `combine`, as it arrives.
        """
        receive = Receive(into, combine)
        self.traffic.received(into.nbytes)
        self._executions.post(self._execution, self._world[source], step, receive)
        return receive

    def undo(self, source: int, step: int, receive: Receive) -> None:
        """Undo this execution, of which `receive` is the only part of this rank, also after its end.

        The array of `source` goes to the next execution of this number.
        """
        self._executions.undo(self._identity, self._world[source], step, receive)

    async def wait(self, receive: Receive) -> None:
        """Wait until a receive that `post` returned is complete."""
        if not receive.complete:
            await self._executions.wait(self._execution, receive)

    async def wait_for_one(self, *receives: Receive) -> None:
        """Wait until one of these receives is complete."""
        if not any(receive.complete for receive in receives):
            await self._executions.wait(self._execution, *receives)

    def grant(self, source: int, step: int) -> None:
        """Tell `source` that this rank takes `step`. Before a long array is posted, so that its sender knows then."""
        self._executions.grant(self._execution, self._world[source], step)

    def is_granted(self, dest: int, step: int) -> bool:
        """Whether `dest` has said, by `grant`, that it takes `step`."""
        return (self._world[dest], step) in self._execution.granted

    async def offer(self, dest: int, step: int) -> None:
        """Announce an array above wire.SEGMENT_BYTES, and return once `dest` has posted its receive: `send` follows."""
        await self._executions.offer(self._execution, self._world[dest], step)

    async def send(self, dest: int, step: int, data: Array, *, offers: bool = False) -> None:
        """Send `data` to `dest`; returns when `data` may be reused.

        An array above wire.SEGMENT_BYTES waits until `dest` has posted its receive. A shorter one waits for credit
        only. With `offers` a long array is announced to `dest` first.
        """
        self.traffic.sent(data.nbytes)
        peer = self._world[dest]
        if not self._executions.send_nowait(self._execution, peer, step, data):
            await self._executions.send(self._execution, peer, step, data, offers=offers)

    async def recv(self, source: int, step: int, into: Array, combine: Combine | None = None) -> None:
        """Receive an array from `source` into `into`: `post` and `wait`."""
        receive = self.post(source, step, into, combine)
        if not receive.complete:
            await self._executions.wait(self._execution, receive)

    async def exchange(
        self, dest: int, data: Array, source: int, into: Array, step: int, combine: Combine | None = None
    ) -> None:
        """Send `data` to `dest` while receiving `into` from `source`. `data` and `into` must not overlap in memory."""
        # The receive comes first: two ranks that exchange long arrays need both grants.
        receive = self.post(source, step, into, combine)
        self.traffic.sent(data.nbytes)
        peer = self._world[dest]
        if not self._executions.send_nowait(self._execution, peer, step, data):
            await self._executions.send(self._execution, peer, step, data)
        if not receive.complete:
            await self._executions.wait(self._execution, receive)
