"""Operations by message: made at the first call at any rank, and announced to all others along the activation tree.

The announcement leaves on each edge before any signal of the operation does. So a rank whose program has not reached
its first call of the operation takes part in the rounds nevertheless. A signal of a rank that is no neighbour in the
tree may arrive before the announcement; the router keeps it until the operation is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from asyncoll.algorithms.rounds.activation import edges
from asyncoll.algorithms.rounds.by_coordinator import COORDINATED_MAX_BYTES, CoordinatedRounds
from asyncoll.algorithms.rounds.by_tree import ActivatedRounds
from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.operation import Layout, Opening, Operation, check_operation
from asyncoll.algorithms.rounds.policies import policy_of
from asyncoll.algorithms.seam.ways import Shape, Way, begin
from asyncoll.errors import MismatchError, ProtocolError, UsageError
from asyncoll.runtime.member import Member
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.transport.wire import Announce

# All of an operation but its epoch, which the header has.
_ANNOUNCED = [field.name for field in dataclasses.fields(Operation) if field.name != "epoch"]


class ServedRounds(Rounds, Protocol):
    """Rounds in which a rank takes part also while its program makes no call of them."""

    def serve(self) -> None:
        """From now on this rank takes part. Called once, when the operation has been announced."""


class AnnouncedOperations:
    """Makes the operations of one communicator at one rank. On the runtime's loop."""

    def __init__(self, member: Member, directory: Directory) -> None:
        self._member = member
        self._directory = directory
        self.ports: list[Port] = []  # of the operations
        member.on_control(Announce, self._announced)

    def open(self, operation: Operation, caller: int, site: str) -> Rounds:
        """Make `operation`, first called by rank `caller` at `site`, and announce it.

        Raises UsageError if this rank's host has no room for it, or this rank has no such policy. Then no rank is told
        of it.
        """
        if operation.policy:
            policy_of(operation.policy)
        text = f"{operation} (first called by rank {caller} at {site})"
        port = Port(self._member, operation.name, operation.fingerprint())
        rounds = self._make(port, operation, text.__str__)
        # A rank announces every operation that it makes, not only those that its own program calls first. The ranks on
        # its edges may be announced twice: the second announcement finds the operation known, and changes nothing.
        message = _announcement(self._member.communicator, operation, site)
        for rank in self._told(operation):
            self._member.tell(rank, message)
        self.ports.append(port)
        # After the announcement: a rank that has left already signals at once.
        rounds.serve()
        self._directory.add(rounds)
        return rounds

    def _told(self, operation: Operation) -> list[int]:
        """The ranks to which this rank announces `operation`."""
        del operation  # it goes to the same ranks as any other
        group = self._member.group
        return [(group.rank + (1 << edge)) % group.size for edge in edges(group.size)]

    def _make(self, port: Port, operation: Operation, describe: Callable[[], str]) -> ServedRounds:
        return begin(rounds_ways(self._member.group.size), Shape(operation.nbytes), port, operation, describe)

    def _announced(self, source: int, message: Announce) -> None:
        """An announcement of world rank `source` arrives. Its fields are untrusted; raises ProtocolError."""
        try:
            operation = announced_operation(message, self._member.group.epoch)
            check_operation(operation, self._member.group.size)
            caller = self._member.group.ranks.index(source)
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise ProtocolError(f"an announcement of an impossible operation: {error}") from None
        # The communicator has failed, and its members were told.
        with contextlib.suppress(MismatchError):
            if self._directory.find(operation, caller, message.site) is None:
                self._take_over(operation, caller, message.site)

    def _take_over(self, operation: Operation, caller: int, site: str) -> None:
        """Make the operation of another rank. If this one cannot, no rank can go on with it."""
        try:
            self.open(operation, caller, site)
        except UsageError as error:
            host = self._member.host
            self._member.abort(
                f"host {host} cannot take part in {operation}, called by rank {caller} at {site}: {error}"
            )


@cache
def rounds_ways(ranks: int) -> tuple[Way[ServedRounds], ...]:
    """The ways of wait-avoiding rounds by message."""
    up_to = COORDINATED_MAX_BYTES // ranks
    return (
        Way("rounds", "coordinator", _coordinated, "two messages one after another", up_to=up_to, needs="no groups"),
        Way("rounds", "activation tree", ActivatedRounds, "all ranks reduce"),
    )


def _coordinated(port: Port, operation: Operation, describe: Callable[[], str]) -> CoordinatedRounds | None:
    """Declines rounds in groups: each group would need a coordinator of its own."""
    return None if operation.group_size else CoordinatedRounds(port, operation, describe)


def _announcement(communicator: int, operation: Operation, site: str) -> Announce:
    values = {name: getattr(operation, name) for name in _ANNOUNCED}
    layout = ",".join(f"{dtype}:{count}" for dtype, count in operation.layout)
    values |= {"layout": layout, "op": operation.op.name, "opening": operation.opening.name}
    return Announce(**values, communicator=communicator, site=site)


def announced_operation(message: Announce, epoch: int) -> Operation:
    """The operation of `epoch` that `message` announces. Raises KeyError, TypeError or ValueError if it is none."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _ANNOUNCED}
    values |= {"op": ReduceOp[message.op], "opening": Opening[message.opening], "layout": _layout(message.layout)}
    return Operation(**values, epoch=epoch)


def _layout(text: str) -> Layout:
    pairs = [entry.partition(":") for entry in text.split(",")]
    return tuple((dtype, int(count)) for dtype, _, count in pairs)
