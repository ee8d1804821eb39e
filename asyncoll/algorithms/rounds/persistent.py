"""The persistent operations of one communicator: made at the first call of their name anywhere, and told to everybody.

Their calls are not numbered, as a rank that is late for one must not be in the way of the others' next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncoll.algorithms.dense.staging import DisagreementError
from asyncoll.algorithms.rounds import by_coordinator
from asyncoll.algorithms.rounds.activation import edges
from asyncoll.algorithms.rounds.by_tree import ActivatedRounds
from asyncoll.algorithms.rounds.in_memory import OneSidedRounds
from asyncoll.algorithms.rounds.operation import Layout, Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Delivery, Result, WaitAvoiding
from asyncoll.arguments import digest
from asyncoll.errors import MismatchError, ProtocolError, UsageError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.group import Group
from asyncoll.tensors import reductions
from asyncoll.tensors.bundle import Bundle
from asyncoll.tensors.reductions import HOST_BYTES, ReduceOp
from asyncoll.transport.wire import Announce, Dispute

Rounds = WaitAvoiding | OneSidedRounds
_MAX_NAME = 200
_ROUNDS_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a wait-avoiding allreduce did. Its result is in `x`."""

    round: int  # the round that x now holds the result of; rounds count from 1
    active: int  # ranks whose contribution, fresh or stale, is in it
    included: bool  # this call's contribution is in it; otherwise it is staged for a later round
    skipped: int  # rounds between the caller's last one and this one whose results it will never see
    synchronous: bool  # a `sync_every` round: every rank was there
    missed: tuple[Any, ...] = ()  # with `history`: results of the rounds between, oldest first, tensors like x
    group: tuple[int, ...] = ()  # the ranks that took part, with or without a contribution


class Receipt:
    """What one call was given, in case that it cannot be handed to its caller any more.

    `sign` and `take_back` may be called in two threads at the same time, and in any order.
    """

    def __init__(self) -> None:
        self._given: list[tuple[Rounds, Delivery]] = []
        self._is_unwanted = False

    def sign(self, operation: Rounds, delivery: Delivery) -> None:
        self._given.append((operation, delivery))
        if self._is_unwanted:
            self.take_back()

    def take_back(self) -> None:
        """Nobody gets what the call was given, or will be."""
        self._is_unwanted = True
        with contextlib.suppress(IndexError):  # nothing has been given, or the other thread takes it back
            operation, delivery = self._given.pop()
            operation.take_back(delivery)


class Operations:
    """The wait-avoiding operations of one communicator, by name, at one rank."""

    def __init__(self, endpoint: Endpoint, group: Group, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` calls on the runtime's loop, soon."""
        self._endpoint = endpoint
        self._group = group
        self._post = post
        self._operations: dict[str, Rounds] = {}
        self._registry: OperationRegistry | None = None
        self.arena = endpoint.shared_by(group.ranks)
        if self.arena is not None:
            self._registry = OperationRegistry(self.arena, group.size, group.rank, group.communicator)
            endpoint.on_depart(self._registry.depart)
        else:
            endpoint.router.on_control(Announce, group.communicator, self._announced)

    async def contribute(self, spec: Operation, bundle: Bundle, site: str, receipt: Receipt) -> Reduction:
        """One call: `bundle` is the contribution, and gets the result."""
        self._endpoint.failures.check(self._group.communicator)
        operation = await self._get_in_memory(spec, site) if self._registry else self._get(spec, self._group.rank, site)
        delivery = await operation.call(bundle)
        receipt.sign(operation, delivery)
        try:
            return self._hand_over(spec, delivery, bundle)
        finally:
            operation.release(delivery)

    def _hand_over(self, spec: Operation, delivery: Delivery, bundle: Bundle) -> Reduction:
        result = delivery.result
        if result.active:
            bundle.write(result.parts, self._divisor(spec, result))
        missed = tuple(bundle.like(old.parts, self._divisor(spec, old)) for old in delivery.missed)
        return Reduction(
            round=result.number,
            active=result.active,
            included=delivery.included,
            skipped=delivery.skipped,
            synchronous=result.synchronous,
            missed=missed,
            group=result.members,
        )

    def statistics(self) -> dict[str, OperationStatistics]:
        operations = list(self._operations.items())  # at once: this may be another thread than the runtime's
        return {name: operation.statistics() for name, operation in operations}

    def _divisor(self, spec: Operation, result: Result) -> int:
        """What AVG divides by: in groups the models that are there, otherwise all ranks, as the paper does."""
        if spec.op is not ReduceOp.AVG:
            return 1
        return result.active if spec.group_size else self._group.size

    async def _get_in_memory(self, spec: Operation, site: str) -> Rounds:
        """The operation `spec.name`. Ranks of a host need not be told of it: they find it when they come."""
        known = self._known(spec, self._group.rank, site)
        if known is not None:
            return known
        assert self.arena is not None
        assert self._registry is not None
        group, context = self._group, digest(self._group.communicator, "persistent", spec.name)
        text = f"{spec} at {site}"
        self._endpoint.executions.on_dispute(context, lambda _: (group.ranks, text))
        try:
            has_lost = lambda: bool(self._endpoint.membership.lost)  # noqa: E731
            operation = OneSidedRounds(self.arena, self._registry, group, spec, lambda: text, has_lost)
        except DisagreementError as disagreement:
            peer = group.ranks[disagreement.place]
            question = Dispute(group.communicator, context, 1, text)
            self._post(lambda: self._endpoint.router.tell(peer, question))
            await self._registry.failure()
            raise
        self._operations[spec.name] = operation
        return operation

    def _known(self, spec: Operation, caller: int, site: str) -> Rounds | None:
        """The operation of that name, if there is one here. Raises MismatchError if it is another."""
        known = self._operations.get(spec.name)
        if known is not None and known.operation is not spec and known.operation != spec:
            text = f"rank {caller} called {spec} at {site}, but it exists as {known.describe()}"
            self._post(lambda: self._endpoint.failures.mismatch(self._group.communicator, self._group.ranks, text))
            raise MismatchError(text)
        return known

    def _get(self, spec: Operation, caller: int, site: str) -> Rounds:
        """The operation `spec.name`, made and announced along the activation tree if it is new here.

        The announcement goes out on each edge before any signal does, so a rank whose program has not come to its
        first call yet can take part all the same.
        """
        known = self._known(spec, caller, site)
        if known is not None:
            return known
        text = f"{spec} (first called by rank {caller} at {site})"
        message = _announcement(self._group.communicator, spec, site)
        size = self._group.size
        for edge in edges(size):
            self._endpoint.router.tell(self._group.ranks[(self._group.rank + (1 << edge)) % size], message)
        form = by_coordinator.CoordinatedRounds if by_coordinator.suits(spec, size) else ActivatedRounds
        operation = self._operations[spec.name] = form(self._endpoint, self._group, spec, lambda: text)
        return operation

    def _announced(self, source: int, message: Announce) -> None:
        try:
            spec = _announced_operation(message)
            check(spec, self._group.size)
            caller = self._group.ranks.index(source)
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise ProtocolError(f"an announcement of an impossible operation: {error}") from None
        with contextlib.suppress(MismatchError):  # the communicator has failed, and its members were told
            self._get(spec, caller, message.site)


def check(spec: Operation, size: int) -> None:
    """Raise UsageError unless `size` ranks can carry out `spec`."""
    if not isinstance(spec.name, str) or len(spec.name) > _MAX_NAME:
        raise UsageError(f"name must be a string of at most {_MAX_NAME} characters, got {str(spec.name)[:50]!r}")
    for dtype, count in spec.layout:
        reductions.check_reduction(spec.op, dtype)
        if dtype not in reductions.DTYPES or count < 0:
            raise UsageError(f"{count} elements of {dtype}")
    if not isinstance(spec.buckets, str) or len(spec.buckets) > _MAX_NAME:
        raise UsageError(f"boundaries of tensors must be a short string, got {str(spec.buckets)[:50]!r}")
    if spec.nbytes > HOST_BYTES:
        raise UsageError(f"{spec} is of {spec.nbytes} bytes, and this host has {HOST_BYTES}")
    if not 0 <= spec.sync_every < _ROUNDS_MAX or not 0 <= spec.history < _ROUNDS_MAX:
        raise UsageError(f"sync_every and history are numbers of rounds, or 0 for none: {spec}")
    _check_ranks("quorum", spec.quorum, size)
    _check_ranks("candidates", spec.candidates, size)
    if spec.group_size:
        _check_ranks("group_size", spec.group_size, size)


def _check_ranks(what: str, number: int, size: int) -> None:
    if not 1 <= number <= size:
        raise UsageError(f"{what} {number} is not between 1 and the number of ranks, {size}")


def _announcement(communicator: int, spec: Operation, site: str) -> Announce:
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    layout = ",".join(f"{dtype}:{count}" for dtype, count in spec.layout)
    values |= {"layout": layout, "op": spec.op.name, "opening": spec.opening.name}
    return Announce(**values, communicator=communicator, site=site)


def _announced_operation(message: Announce) -> Operation:
    """What `_announcement` was made from. Raises KeyError, TypeError or ValueError if it was made from nothing."""
    values = {field.name: getattr(message, field.name) for field in dataclasses.fields(Operation)}
    values |= {"op": ReduceOp[message.op], "opening": Opening[message.opening], "layout": _layout(message.layout)}
    return Operation(**values)


def _layout(text: str) -> Layout:
    pairs = [entry.partition(":") for entry in text.split(",")]
    return tuple((dtype, int(count)) for dtype, _, count in pairs)
