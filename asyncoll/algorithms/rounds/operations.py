"""Calls of wait-avoiding operations: contributions, results, and answers that did not reach their callers.

These calls are not numbered: a rank that is late for one must not hold up the others' next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from asyncoll.algorithms.backend import Backend
from asyncoll.algorithms.rounds.directory import Rounds
from asyncoll.algorithms.rounds.operation import Operation, RoundCall
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Delivery, Result
from asyncoll.errors import PeerLostError, UsageError
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.signature import Site
from asyncoll.tensors.bundle import Bundle, Single
from asyncoll.tensors.reductions import ReduceOp


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which round a call of a wait-avoiding allreduce was given. The result of the round is in the caller's `x`.

    Ranks are those of the communicator. All ranks that are given the same round, and group, have the same bits in `x`.
    """

    round: int
    """The round whose result is in `x`. Rounds of one `name` count from 1."""

    active: int
    """The number of ranks whose contribution, new or staged before, is in the result."""

    included: bool
    """Whether the contribution of this call is in the result. Otherwise it is staged for a later round."""

    skipped: int
    """The number of rounds since this rank's last one whose results it will never be given."""

    synchronous: bool
    """Whether it is a `sync_every` round, which has waited for every rank."""

    missed: tuple[Any, ...] = ()
    """With `history`: the results of rounds since this rank's last one, oldest first, as new tensors like `x`."""

    group: tuple[int, ...] = ()
    """The ranks that were reduced over, with or without a contribution: all, or this rank's group in the round."""


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
    """The wait-avoiding operations of one communicator at one rank."""

    def __init__(self, member: Member, backend: Backend, pending: PendingCalls) -> None:
        self._member = member
        self._backend = backend
        self._pending = pending

    def start(self, spec: Operation, bundle: Bundle | Single, site: Site) -> Coroutine[Any, Any, Reduction]:
        """Start a call of the operation `spec`: `bundle` is the contribution, and gets the result."""
        self._member.check_caller()
        call, receipt = RoundCall(spec, site), Receipt()
        pending = self._pending.enter(call)
        try:
            work = self.contribute(call, bundle, receipt, pending)
            return self._backend.start_round(work, call.__str__, spec.nbytes, receipt.take_back)
        except BaseException:
            self._pending.leave(pending)
            raise

    async def contribute(
        self, call: RoundCall, bundle: Bundle | Single, receipt: Receipt, pending: PendingCall
    ) -> Reduction:
        """The whole call, wherever it is driven. The answer is signed for in `receipt` before it is handed over."""
        spec = call.operation
        try:
            self._member.check()
            rounds = self._backend.operations.known.get(spec.name)
            if rounds is None or rounds.operation is not spec:
                rounds = await self._find_or_open(spec, str(call.site))
            delivery = await rounds.call(bundle)
            receipt.sign(rounds, delivery)
            try:
                return self._hand_over(spec, delivery, bundle)
            finally:
                rounds.release(delivery)
        except PeerLostError as error:
            raise self._member.noticed(error) from None
        except UsageError:  # a host without room for this contribution: the other ranks' rounds do not wait for it
            raise
        except Exception as error:
            self._member.failed(call, error)
            raise
        finally:
            self._pending.leave(pending)

    async def _find_or_open(self, spec: Operation, site: str) -> Rounds:
        """Not at once: the name may stand for another operation here, or for none yet."""
        rounds = self._backend.operations.find(spec, self._member.group.rank, site)
        return rounds if rounds is not None else await self._backend.open(spec, site)

    def _hand_over(self, spec: Operation, delivery: Delivery, bundle: Bundle | Single) -> Reduction:
        result = delivery.result
        if result.active:
            bundle.write(result.parts, self._divisor(spec, result))
        missed = (
            [bundle.like(old.parts, self._divisor(spec, old)) for old in delivery.missed] if delivery.missed else ()
        )
        return Reduction(
            round=result.number,
            active=result.active,
            included=delivery.included,
            skipped=delivery.skipped,
            synchronous=result.synchronous,
            missed=tuple(missed),
            group=result.members,
        )

    def statistics(self) -> dict[str, OperationStatistics]:
        return {rounds.operation.name: rounds.statistics() for rounds in self._backend.operations}

    def _divisor(self, spec: Operation, result: Result) -> int:
        """What AVG divides by: in groups the models that are there, otherwise all ranks, as the paper does."""
        if spec.op is not ReduceOp.AVG:
            return 1
        return result.active if spec.group_size else self._member.group.size
