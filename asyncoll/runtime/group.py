"""Ordered ranks, and a lane: one execution of one operation among them, which is all that an algorithm sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from asyncoll.runtime.executions import Executions, Identity
from asyncoll.runtime.matching import Receive
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, Combine


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks of the world in an order, seen from one of them. A value: a round may have a group of its own."""

    ranks: tuple[int, ...]  # ranks of the world
    rank: int  # my place among them
    communicator: int  # the context that all executions in it derive theirs from; its failures are its own

    @property
    def size(self) -> int:
        return len(self.ranks)

    def subset(self, places: tuple[int, ...]) -> Group:
        """The ranks at `places`, mine among them, in that order."""
        if len(places) == self.size:
            return self
        return Group(tuple(self.ranks[place] for place in places), places.index(self.rank), self.communicator)


class Lane:
    """A group narrowed to one execution: messages between its ranks, told apart by step.

    Ranks here are places in the group. Use it as a context manager around the whole execution. An array that is being
    received into must not be read, and one that is being sent must not be written, until the call that says so is done.
    A short `piggyback` goes along with every message and becomes, element by element, the maximum of what has come:
    that of all ranks, once an algorithm is done in which every rank's result depends on every rank's data. Steps are
    below 2^24 and used once in a phase.
    """

    __slots__ = ("_execution", "_executions", "_identity", "_phase", "_piggyback", "_world", "rank", "size", "traffic")

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
        self.traffic = Traffic()
        self._phase = 0
        self._world = group.ranks
        self._piggyback = piggyback
        self._executions = executions
        self._identity = Identity(group.communicator, group.ranks, context, number, fingerprint, describe)

    def __enter__(self) -> Lane:
        self._execution = self._executions.open(self._identity, self._piggyback)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executions.end(self._execution, completed=kind is None)

    def next_phase(self) -> None:
        """What follows has steps of its own. Every rank of the execution turns to the same phases in the same order."""
        self._phase += 1 << 24

    def post(self, source: int, step: int, into: Array, combine: Combine | None = None) -> Receive:
        """Ask for an array of `into`'s size from `source`, to be copied or combined into `into` as it arrives."""
        receive = Receive(into, combine)
        self.traffic.received(into.nbytes)
        self._executions.post(self._execution, self._world[source], self._phase + step, receive)
        return receive

    async def wait(self, receive: Receive) -> None:
        """Wait for what was posted."""
        if not receive.complete:
            await self._executions.wait(self._execution, receive)

    async def send(self, dest: int, step: int, data: Array) -> None:
        """Send `data`. Returns when it may be reused, which for a long array is after `dest` has posted its receive."""
        self.traffic.sent(data.nbytes)
        peer, step = self._world[dest], self._phase + step
        if not self._executions.send_nowait(self._execution, peer, step, data):
            await self._executions.send(self._execution, peer, step, data)

    async def recv(self, source: int, step: int, into: Array, combine: Combine | None = None) -> None:
        """Post and wait."""
        receive = self.post(source, step, into, combine)
        if not receive.complete:
            await self._executions.wait(self._execution, receive)

    async def exchange(
        self, dest: int, data: Array, source: int, into: Array, step: int, combine: Combine | None = None
    ) -> None:
        """Send `data` to `dest` while receiving `into` from `source`; the two must not overlap."""
        receive = self.post(source, step, into, combine)
        self.traffic.sent(data.nbytes)
        peer, step = self._world[dest], self._phase + step
        if not self._executions.send_nowait(self._execution, peer, step, data):
            await self._executions.send(self._execution, peer, step, data)
        if not receive.complete:
            await self._executions.wait(self._execution, receive)
