"""Wait-avoiding allreduce: rounds that do not wait for everybody (seed 000, sections 3 and 4; seed 002, section 3).

A rank stages its contribution and, if it may, opens the round; every rank takes part with whatever it has staged, or
with nothing, whether or not its caller is there. A contribution that came too late is staged for a later round: none is
lost or counted twice. Gradients add up until a round takes them; models replace each other and stay.

Here is what all forms of rounds have in common: calls, contributions and results. How a round is opened and carried out
is the matter of `activated` (by all ranks, at any size) and `coordinated` (by one rank, for short contributions).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.engine import Engine, Gathering
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.tally import OperationStatistics, Tally
from asyncoll.errors import ProtocolError
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import Array, combiner, storage
from asyncoll.transport.wire import Buffer

EARLY_MAX = 1 << 16  # rounds that others may be ahead of this rank

Parts = list[Array]  # a contribution or a result: one flat array for each entry of the operation's layout


class Contribution(Protocol):
    """What a caller gives."""

    def read(self, into: Parts) -> None:
        """Copy it into these arrays."""

    def lend(self) -> Parts | None:
        """The caller's own memory, to be reduced in place, if it has the right form."""


class Result(NamedTuple):
    """What a round produced; nobody writes into `parts` any more."""

    number: int
    parts: Parts
    active: int
    members: tuple[int, ...]  # places of the ranks that reduced together
    taken: int  # the newest of this rank's contributions when the round took what was staged
    synchronous: bool
    deserted: bool = False  # a synchronous one, and no rank makes any more calls
    lent: bool = False  # `parts` are the memory of the caller who waits for it


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one call returns."""

    result: Result
    included: bool
    skipped: int
    missed: tuple[Result, ...]  # what `history` has kept of the rounds before `result`, oldest first

    @property
    def results(self) -> tuple[Result, ...]:
        """All results that it hands out, oldest first."""
        return (*self.missed, self.result)


class WaitAvoiding(ABC):
    """A persistent operation at one rank: its calls, its staged contribution, its results."""

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self.operation = operation
        self.describe = describe
        self._port = port
        self._group = group = port.group
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._turn = asyncio.Lock()
        self._tally = Tally(group.size)
        self._staged: Parts | None = None
        self._spare: Parts | None = None  # memory that nobody uses any more
        self._submitted = 0  # contributions staged here so far
        self._engine: Engine[Result] = Engine(operation.history)
        self._history: deque[Result] = deque(maxlen=operation.history)  # before the latest
        self._latest = Result(0, [], 0, (), 0, synchronous=False)
        self._handed: Result | None = None  # to a caller who may not have read it yet
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._arm()
        port.open(self._heard, self._stand_in)
        self._stand_in()

    async def call(self, contribution: Contribution) -> Delivery:
        """Contribute when the calls before are done, and wait for the round aimed at.

        Cancelling the wait leaves the contribution in: the round belongs to the runtime. Use the results at once: their
        memory serves again when `history` has let go of them.
        """
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._stage(contribution)
            self._offer()
            raise
        try:
            return await self._call(contribution)
        finally:
            self._turn.release()

    async def _call(self, contribution: Contribution) -> Delivery:
        self._port.check()
        self._handed = None
        self._tally.came(self._port.now_s())
        call = self._engine.begin(self._latest.number, self._late_call_opens)
        if call.number:
            ticket = self._stage(contribution, may_lend=True)
            result = await self._take_part(call.number)
        else:
            ticket = self._stage(contribution)
            self._offer()
            result = self._latest
        included = rules.is_included(self.operation, ticket, result.taken)
        self._tally.count_call(result.number - call.aim, included=included, next_has_begun=self._has_begun())
        kept = [old for old in self._history if call.aim <= old.number < result.number]
        told = self._engine.deliver(result.number, kept)
        return Delivery(result, included, told.skipped, tuple(told.missed))

    def take_back(self, delivery: Delivery) -> None:
        """The caller was cancelled when its answer was ready, and does not get it: the next call tells of its rounds.

        It gives their results as `missed`, where `history` still has them, and otherwise counts them as skipped.
        """
        here = (*self._history, self._latest) if self.operation.history else ()
        kept = [result for result in delivery.results if any(result is other for other in here)]
        self._engine.take_back(kept, len(delivery.results) - len(kept) + delivery.skipped)

    def release(self, delivery: Delivery) -> None:  # noqa: B027 (they are this rank's own)
        """The results have been read."""

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        """Add to what is staged; returns the contribution's number. Memory is lent only by a caller who then waits."""
        del may_lend  # a form of rounds that reduces in place looks at it
        fresh = self._memory()
        contribution.read(fresh)
        if self._staged is None:
            self._staged = fresh
        elif self.operation.group_size:
            self._staged, self._spare = fresh, self._staged
        else:
            self._combine(self._staged, fresh)
            self._spare = fresh
        self._submitted += 1
        return self._submitted

    def _combine(self, into: Parts, other: Parts) -> None:
        for combine, mine, theirs in zip(self._combines, into, other, strict=True):
            combine(mine, theirs)

    def _memory(self) -> Parts:
        """Arrays for a contribution. Used ones, if there are any: the pages of new ones cost more than what is done."""
        spare, self._spare = self._spare, None
        return spare or [np.empty(count, storage(dtype)) for dtype, count in self.operation.layout]

    async def _take_part(self, number: int) -> Result:
        try:
            with self._wait_for(number) as future:
                self._arrive(number)
                return await future
        except asyncio.CancelledError:
            self._tally.left(self._port.now_s())
            await self._reclaim(number)
            raise

    @contextlib.contextmanager
    def _wait_for(self, number: int) -> Iterator[asyncio.Future[Result]]:
        """A future that gets the result of round `number`."""
        with self._port.watch(f"{self.describe()}: round {number}") as future:
            self._waiting[number] = future
            try:
                yield future
            finally:
                del self._waiting[number]

    def statistics(self) -> OperationStatistics:
        return self._tally.statistics()

    def _late_call_opens(self) -> bool:
        return rules.late_call_opens(self.operation, self._gathering, self._group.rank)

    def _gather(self) -> None:
        """Nobody has come to round `_number` yet, as far as this rank knows."""
        number, size = self._number, self._group.size
        self._gathering = Gathering(number, size, self.operation.drawn(number, size))

    @property
    def _number(self) -> int:
        """The round that is armed or running here."""
        return self._latest.number + 1

    def _publish(self, result: Result) -> None:
        """Hand out the result and re-arm."""
        self._retire(self._latest)
        self._latest = result
        self._arm()
        waiter = self._waiting.get(result.number)
        if waiter is not None and not waiter.done():
            self._handed = result
            waiter.set_result(result)
        self._stand_in()

    def _retire(self, result: Result) -> None:
        """A newer result is there; this one goes into history, and what falls out of it is memory to use again.

        Not if its caller has been given it and has not run since: several rounds may end in one turn of the loop.
        """
        if not result.number or result.lent:
            return
        kept = self._history
        oldest = result if not kept.maxlen else kept[0] if len(kept) == kept.maxlen else None
        kept.append(result)
        if oldest is not None and oldest is not self._handed and not self._engine.owes(oldest):
            self._spare = oldest.parts

    def _heard(self, place: int, number: int, step: int, payload: Buffer) -> None:
        if number > self._number + EARLY_MAX:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {self._number} is open")
        if number >= self._number:
            self._signalled(place, number, step, payload)

    # -- a form of rounds -------------------------------------------------------------------------

    @abstractmethod
    def _arm(self) -> None:
        """Prepare round `_number`."""

    @abstractmethod
    def _arrive(self, number: int) -> None:
        """This rank's caller waits for round `number`, which may run already; its contribution is staged."""

    def _offer(self) -> None:  # noqa: B027 (not every form does something then)
        """Something is staged, and nobody here waits for a round."""

    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether round `_number` runs, as far as this rank knows."""

    @abstractmethod
    def _stand_in(self) -> None:
        """Once this rank makes no more calls, nobody waits for one: it is always there, with what it has staged."""

    @abstractmethod
    def _signalled(self, place: int, number: int, step: int, payload: Buffer) -> None:
        """The rank at `place` says something about round `number`, this one or a later one."""

    async def _reclaim(self, number: int) -> None:  # noqa: B027
        """The caller stops waiting for round `number`: nobody must use its memory any more."""
