"""Wait-avoiding allreduce: rounds that do not wait for everybody (seed 000, sections 3 and 4).

One engine for all of them; they differ in who may open a round (`Opening`). A rank stages its contribution and, if it
may, opens the round; the activation tree makes every rank join with whatever it has staged, or with nothing, whether or
not its caller is there. Contributions that came too late stay staged, add up, and enter a later round: nothing is lost
and nothing is counted twice, because taking the staged contribution is one swap.

The round is the clock. A call aims at the round after the last one its caller has seen. If that round has been executed
already, the call stages its contribution and returns the newest result at once, without opening anything: a late rank
that opened rounds would be alone in them (of 8 ranks, 1.8 instead of 6.1 stay active).
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncoll.algorithms import dense
from asyncoll.algorithms.activation import OPEN, REDUCE, Step, activation, heard, synchronous
from asyncoll.endpoint import Endpoint
from asyncoll.errors import ProtocolError
from asyncoll.group import Group, Lane
from asyncoll.schedule import Schedule
from asyncoll.tensors import Array, Combine, ReduceOp, combiner, neutral
from asyncoll.wire import digest

ARRIVED = 255  # the step of a signal that tells a round's counter "I am here"; smaller ones are edges of the tree


class Opening(enum.Enum):
    """Who may open a round."""

    SOLO = "solo"  # whoever arrives first
    MAJORITY = "majority"  # the rank that the shared seed draws for it
    QUORUM = "quorum"  # the Q-th to arrive, as counted by the drawn rank


@dataclass(frozen=True, slots=True)
class Operation:
    """What all ranks must agree on about a persistent operation."""

    name: str
    dtype: str
    count: int
    op: ReduceOp
    opening: Opening
    quorum: int = 1
    seed: int = 0
    sync_every: int = 0
    history: int = 0  # results kept for ranks that are late

    def fingerprint(self) -> int:
        return digest(str(self))

    def is_synchronous(self, number: int) -> bool:
        return self.sync_every > 0 and number % self.sync_every == 0

    def drawn(self, number: int, size: int) -> int:
        """The rank that all ranks draw for round `number`; a hash of (seed, round), so that it needs no state."""
        return digest("initiator", self.seed, number) % size

    def __str__(self) -> str:
        more = f", quorum {self.quorum}" if self.opening is Opening.QUORUM else ""
        every = f", sync_every={self.sync_every}" if self.sync_every else ""
        kept = f", history={self.history}" if self.history else ""
        return (
            f"{self.opening.value} allreduce {self.name!r} of {self.count} {self.dtype}, "
            f"{self.op.name}, seed {self.seed}{more}{every}{kept}"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """What a round produced; nobody writes into `value` any more."""

    number: int
    value: Array
    active: int
    taken: int  # how many of this rank's contributions had been taken when the round was over
    synchronous: bool


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one call returns."""

    result: Result
    included: bool
    skipped: int
    missed: tuple[Result, ...]  # what `history` has kept of the rounds before `result`, oldest first


class WaitAvoiding:
    """A persistent operation at one rank: its rounds, its staged contribution, its results."""

    def __init__(self, endpoint: Endpoint, group: Group, operation: Operation, describe: Callable[[], str]) -> None:
        self.operation = operation
        self.describe = describe
        self._endpoint = endpoint
        self._group = group
        self._context = digest(group.communicator, "persistent", operation.name)
        self._fingerprint = operation.fingerprint()
        self._combine = combiner(operation.op, operation.dtype)
        self._turn = asyncio.Lock()
        self._staged: Array | None = None
        self._submitted = 0  # contributions staged here so far
        self._seen = 0  # the newest round that a caller here was given
        self._history: deque[Result] = deque(maxlen=operation.history)  # before the latest
        self._latest = Result(0, np.empty(0), 0, 0, False)
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._early: list[int] = []  # signals for the next round
        self._arrivals = 0
        self._announced = 0  # the newest round whose counter has been told that this rank is here
        self._schedule = self._arm()
        endpoint.on_signal(self._context, self._signalled)
        endpoint.on_depart(self._open_for_others)

    async def call(self, x: Array) -> Delivery:
        """Contribute `x` and wait for the round it aims at. `x` is read when this rank's earlier calls are done.

        Cancelling the wait leaves the contribution in: the round belongs to the runtime.
        """
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._stage(x)
            raise
        try:
            return await self._call(x)
        finally:
            self._turn.release()

    async def _call(self, x: Array) -> Delivery:
        self._endpoint.check(self._group.communicator)
        aim = self._seen + 1
        ticket = self._stage(x)
        if self._latest.number < aim or self._is_awaited():
            result = await self._take_part(self._number)
        else:
            result = self._latest
        self._seen = result.number
        missed = tuple(old for old in self._history if aim <= old.number < result.number)
        return Delivery(result, ticket <= result.taken, result.number - aim - len(missed), missed)

    def _stage(self, x: Array) -> int:
        if self._staged is None:
            self._staged = x.copy()
        else:
            self._combine(self._staged, x)
        self._submitted += 1
        return self._submitted

    async def _take_part(self, number: int) -> Result:
        with self._endpoint.watch(self._group.communicator, f"{self.describe()}: round {number}") as future:
            self._waiting[number] = future
            try:
                self._arrive(number)
                result: Result = await future
                return result
            finally:
                self._waiting.pop(number, None)

    @property
    def executed(self) -> int:
        """The newest round that has been executed here."""
        return self._latest.number

    # -- opening a round --------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The round that is armed or running here."""
        return self._latest.number + 1

    def _arm(self) -> Schedule[Step]:
        self._arrivals = 0
        plan = synchronous() if self.operation.is_synchronous(self._number) else activation(self._group.size)
        return plan.fresh()

    def _arrive(self, number: int) -> None:
        """This rank's caller is here for round `number`, which may run already: open it, or tell the rank that does."""
        if REDUCE in self._schedule.fired:
            return
        operation = self.operation
        drawn = operation.drawn(number, self._group.size)
        alone = operation.opening is Opening.SOLO or operation.is_synchronous(number)
        if alone or (operation.opening is Opening.MAJORITY and drawn == self._group.rank):
            self._fire(OPEN)
        elif self._announced < number:
            self._announced = number
            self._send(drawn, number, ARRIVED)

    def _is_awaited(self) -> bool:
        """Whether most of the others wait for this late rank, because it is drawn to open the round.

        Then its late call opens the round: to compute another step first would only keep them waiting. If fewer are
        there, the round would come too early for the rest, and the late rank goes on as any other does.
        """
        drawn = self.operation.drawn(self._number, self._group.size) == self._group.rank
        return drawn and self.operation.opening is Opening.MAJORITY and 2 * self._arrivals >= self._group.size

    def _signalled(self, source: int, number: int, step: int, fingerprint: int) -> None:
        if fingerprint != self._fingerprint:
            return  # the announcement that came before it has already failed the communicator
        if number == self._number:
            self._heed(step)
        elif number == self._number + 1:
            self._early.append(step)
        elif number > self._number:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {self._number} is open")

    def _heed(self, step: int) -> None:
        if (edge := heard(step)) in self._schedule:
            self._fire(edge)
        elif step == ARRIVED:
            self._arrivals += 1
            if self.operation.opening is Opening.QUORUM and self._arrivals == self.operation.quorum:
                self._fire(OPEN)
            elif self._endpoint.departed:
                self._open_for_others()
        else:
            raise ProtocolError(f"signal {step} has no meaning in round {self._number} of {self.operation}")

    def _open_for_others(self) -> None:
        """This rank makes no more calls. A round that only it may open is open as soon as anybody is there."""
        drawn = self.operation.drawn(self._number, self._group.size) == self._group.rank
        if drawn and self._arrivals and self.operation.opening is Opening.MAJORITY:
            self._fire(OPEN)

    def _fire(self, step: Step) -> None:
        for fired in self._schedule.fire(step):
            if fired.kind == "forward":
                self._send((self._group.rank + (1 << fired.edge)) % self._group.size, self._number, fired.edge)
            elif fired == REDUCE:
                self._endpoint.spawn(self._reduce(self._number), self._group.communicator)

    def _send(self, place: int, number: int, step: int) -> None:
        self._endpoint.signal(self._group.ranks[place], self._context, number, step, self._fingerprint)

    # -- executing it -----------------------------------------------------------------------------

    async def _reduce(self, number: int) -> None:
        operation, group = self.operation, self._group
        staged, self._staged = self._staged, None
        taken = self._submitted
        value = neutral(operation.count, operation.op, operation.dtype) if staged is None else staged
        active = np.array([staged is not None], np.int64)
        with Lane(self._endpoint, group, self._context, number, self._fingerprint, lambda: self._at(number)) as lane:
            await _counted_allreduce(lane, value, active, self._combine)
        self._publish(Result(number, value, int(active[0]), taken, operation.is_synchronous(number)))

    def _at(self, number: int) -> str:
        return f"round {number} of {self.describe()}"

    def _publish(self, result: Result) -> None:
        """Hand out the result and re-arm: a persistent schedule makes its own next round."""
        if self._latest.number:
            self._history.append(self._latest)
        self._latest = result
        self._schedule = self._arm()
        waiter = self._waiting.get(result.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)
        early, self._early = self._early, []
        for step in early:
            self._heed(step)


async def _counted_allreduce(lane: Lane, value: Array, active: Array, combine: Combine) -> None:
    """Reduce `value` and the number of contributors. For small values the count rides along as eight more bytes."""
    if value.nbytes > dense.DOUBLING_MAX_BYTES:
        await dense.allreduce(lane, value, combine)
        lane.next_phase()
        await dense.short_allreduce(lane, active, combiner(ReduceOp.SUM, "int64"))
        return
    both = np.concatenate([active.view(np.uint8), value.view(np.uint8)])
    head = active.nbytes

    def combine_both(into: Array, other: Array) -> None:
        count = into[:head].view(np.int64)
        count += other[:head].view(np.int64)
        combine(into[head:].view(value.dtype), other[head:].view(value.dtype))

    await dense.short_allreduce(lane, both, combine_both)
    active[...] = both[:head].view(np.int64)
    value[...] = both[head:].view(value.dtype)
