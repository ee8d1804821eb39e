"""Wait-avoiding allreduce: rounds that do not wait for everybody (seed 000, sections 3 and 4; seed 002, section 3).

One engine for all of them. They differ in who may open a round (`Opening`), in who reduces with whom (everybody, or the
round's group), and in what a contribution is: gradients add up until a round takes them, models replace each other and
stay. A rank stages its contribution and, if it may, opens the round; the activation tree makes every rank join with
whatever it has staged, or with nothing, whether or not its caller is there. A contribution that came too late is staged
for a later round: none is lost or counted twice, because taking what is staged is one step of this loop.

The round is the clock. A call aims at the round after the last one its caller has seen. If that round has been executed
already, the call stages its contribution and returns the newest result at once, without opening anything: a late rank
that opened rounds would be alone in them (of 8 ranks, 1.8 instead of 6.1 stay active).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncoll.algorithms import dense
from asyncoll.algorithms.activation import OPEN, REDUCE, Step, activation, heard, synchronous
from asyncoll.algorithms.operation import Opening, Operation
from asyncoll.algorithms.tally import OperationStatistics, Tally
from asyncoll.endpoint import Endpoint
from asyncoll.errors import ProtocolError
from asyncoll.group import Group, Lane
from asyncoll.schedule import Schedule
from asyncoll.tensors import Array, combiner, fill_neutral, storage
from asyncoll.wire import digest

# Steps of signals that are no edges of the tree: what the drawn ranks of a round are told.
ARRIVED = 255  # I am here
GONE = 254  # I make no more calls, so do not wait for me

_EARLY_MAX = 1 << 16  # signals kept for rounds that this rank has not come to

Parts = list[Array]  # a contribution or a result: one flat array for each entry of the operation's layout


@dataclass(frozen=True, slots=True)
class Result:
    """What a round produced; nobody writes into `parts` any more."""

    number: int
    parts: Parts
    active: int
    members: tuple[int, ...]  # places of the ranks that reduced together
    taken: int  # the newest of this rank's contributions when the round took what was staged
    synchronous: bool
    deserted: bool  # a synchronous one, and no rank makes any more calls


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
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._turn = asyncio.Lock()
        self._tally = Tally(group.size)
        self._staged: Parts | None = None
        self._spare: Parts | None = None  # memory that nobody uses any more
        self._submitted = 0  # contributions staged here so far
        self._seen = 0  # the newest round that a caller here was given
        self._history: deque[Result] = deque(maxlen=operation.history)  # before the latest
        self._latest = Result(0, [], 0, (), 0, False, False)
        self._waiting: dict[int, asyncio.Future[Result]] = {}
        self._early: dict[int, list[int]] = {}  # signals for later rounds, by round
        self._announced = 0  # the newest round whose drawn ranks have been told that this rank is here, or gone
        self._arm()
        endpoint.on_signal(self._context, self._signalled)
        endpoint.on_depart(self._stand_in)
        self._stand_in()

    async def call(self, read: Callable[[Parts], None]) -> Delivery:
        """Contribute what `read` writes into arrays when the calls before are done; wait for the round aimed at.

        Cancelling the wait leaves the contribution in: the round belongs to the runtime. Use the results at once: their
        memory serves again when `history` has let go of them.
        """
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._stage(read)
            raise
        try:
            return await self._call(read)
        finally:
            self._turn.release()

    async def _call(self, read: Callable[[Parts], None]) -> Delivery:
        self._endpoint.check(self._group.communicator)
        self._tally.came(self._endpoint.now_s())
        aim = self._seen + 1
        ticket = self._stage(read)
        if self._latest.number < aim or self._is_awaited():
            result = await self._take_part(self._number)
        else:
            result = self._latest
        self._seen = result.number
        included, lag = ticket <= result.taken, result.number - aim
        self._tally.count_call(lag, included=included, next_has_begun=REDUCE in self._schedule.fired)
        missed = tuple(old for old in self._history if aim <= old.number < result.number)
        return Delivery(result, included, lag - len(missed), missed)

    def _stage(self, read: Callable[[Parts], None]) -> int:
        contribution = self._memory()
        read(contribution)
        if self._staged is None:
            self._staged = contribution
        elif self.operation.group_size:
            self._staged, self._spare = contribution, self._staged
        else:
            for combine, into, other in zip(self._combines, self._staged, contribution, strict=True):
                combine(into, other)
            self._spare = contribution
        self._submitted += 1
        return self._submitted

    def _memory(self) -> Parts:
        """Arrays for a contribution. Used ones, if there are any: the pages of new ones cost more than what is done."""
        spare, self._spare = self._spare, None
        return spare or [np.empty(count, storage(dtype)) for dtype, count in self.operation.layout]

    async def _take_part(self, number: int) -> Result:
        with self._endpoint.watch(self._group.communicator, f"{self.describe()}: round {number}") as future:
            self._waiting[number] = future
            try:
                self._arrive(number)
                result: Result = await future
                return result
            finally:
                self._waiting.pop(number, None)

    def statistics(self) -> OperationStatistics:
        return self._tally.statistics()

    # -- opening a round --------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The round that is armed or running here."""
        return self._latest.number + 1

    def _arm(self) -> None:
        """A persistent schedule makes its own next round."""
        number, size = self._number, self._group.size
        self._arrivals = self._gone = 0  # as told to this rank, if it is drawn
        self._drawn = () if self.operation.opening is Opening.SOLO else self.operation.drawn(number, size)
        if self.operation.is_synchronous(number):
            plan = synchronous()
        else:
            plan = activation(size, flood=self.operation.group_size > 0)
        self._schedule: Schedule[Step] = plan.fresh()

    def _arrive(self, number: int) -> None:
        """This rank's caller is here for round `number`, which may run already: open it, or tell the rank that does."""
        if REDUCE in self._schedule.fired:
            return
        opening = self.operation.opening
        alone = opening is Opening.SOLO or self.operation.is_synchronous(number)
        if alone or (opening is Opening.MAJORITY and self._group.rank in self._drawn):
            self._fire(OPEN)
        else:
            self._tell_drawn(number, ARRIVED)

    def _tell_drawn(self, number: int, step: int) -> None:
        if self._announced < number:
            self._announced = number
            for place in self._drawn:
                self._send(place, number, step)

    def _is_awaited(self) -> bool:
        """Whether most of the others wait for this late rank, because it is drawn to open the round.

        Then its late call opens the round: to compute another step first would only keep them waiting. If fewer are
        there, the round would come too early for the rest, and the late rank goes on as any other does.
        """
        return self._may_open() and 2 * self._arrivals >= self._group.size

    def _may_open(self) -> bool:
        return self.operation.opening is Opening.MAJORITY and self._group.rank in self._drawn

    def _signalled(self, source: int, number: int, step: int, fingerprint: int) -> None:
        if fingerprint != self._fingerprint:
            return  # the announcement that came before it has already failed the communicator
        if number == self._number:
            self._heed(step)
        elif number > self._number:
            self._keep(number, step)

    def _keep(self, number: int, step: int) -> None:
        """A round that includes everybody cannot be over elsewhere before it is here; a group's can, many times."""
        newest = self._number + (1 if not self.operation.group_size else _EARLY_MAX)
        if number > newest:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {self._number} is open")
        self._early.setdefault(number, []).append(step)

    def _heed(self, step: int) -> None:
        if (edge := heard(step)) in self._schedule:
            self._fire(edge)
        elif step == ARRIVED:
            self._arrivals += 1
            self._stand_in()
        elif step == GONE:
            self._gone += 1
        else:
            raise ProtocolError(f"signal {step} has no meaning in round {self._number} of {self.operation}")
        if self.operation.opening is Opening.QUORUM and self._arrivals:
            self._open_if(self._arrivals + self._gone >= self.operation.quorum)

    def _stand_in(self) -> None:
        """Once this rank makes no more calls, nobody waits for one: it is always there, with what it has staged.

        It opens no more synchronous rounds after one in which nobody else made calls either.
        """
        if not self._endpoint.departed:
            return
        if self.operation.is_synchronous(self._number):
            self._open_if(not self._latest.deserted)
        elif self._may_open():
            self._open_if(self._arrivals > 0)
        elif self.operation.opening is Opening.QUORUM:
            self._tell_drawn(self._number, GONE)

    def _open_if(self, ready: bool) -> None:
        if ready and REDUCE not in self._schedule.fired:
            self._fire(OPEN)

    def _fire(self, step: Step) -> None:
        for fired in self._schedule.fire(step):
            if fired.kind == "forward":
                self._send((self._group.rank + (1 << fired.edge)) % self._group.size, self._number, fired.edge)
            elif fired == REDUCE:
                self._tally.began(self._endpoint.now_s())
                self._endpoint.spawn(self._reduce(self._number), self._group.communicator)

    def _send(self, place: int, number: int, step: int) -> None:
        self._endpoint.signal(self._group.ranks[place], self._context, number, step, self._fingerprint)

    # -- executing it -----------------------------------------------------------------------------

    async def _reduce(self, number: int) -> None:
        contributes, taken = self._staged is not None, self._submitted
        parts = self._take()
        members = self.operation.members(number, self._group.size, self._group.rank)
        group = self._group.subset(members)
        attendance = self._tally.sign(group.size, group.rank, contributes=contributes, gone=self._endpoint.departed)
        await self._allreduce(group, number, parts, attendance)
        active, gone = self._tally.count_round(members, attendance)
        synchronous = self.operation.is_synchronous(number)
        self._publish(Result(number, parts, active, members, taken, synchronous, synchronous and gone == group.size))

    def _take(self) -> Parts:
        """What this rank puts into a round, as arrays of the round's own."""
        staged, operation = self._staged, self.operation
        if staged is not None and not operation.group_size:
            self._staged = None
            return staged
        parts = self._memory()
        for place, (part, (dtype, _)) in enumerate(zip(parts, operation.layout, strict=True)):
            if staged is None:
                fill_neutral(part, operation.op, dtype)
            else:
                np.copyto(part, staged[place])
        return parts

    async def _allreduce(self, group: Group, number: int, parts: Parts, attendance: Array) -> None:
        """Reduce the parts and the attendance list: small ones together, in one message at each step.

        Otherwise side by side, so that the short list costs no time of its own.
        """
        if sum(part.nbytes for part in parts) <= dense.DOUBLING_MAX_BYTES:
            with self._lane(group, self._context, number) as lane:
                await dense.packed_allreduce(lane, [*parts, attendance], [*self._combines, dense.add])
            return
        async with asyncio.TaskGroup() as both:
            both.create_task(self._count(group, number, attendance))
            with self._lane(group, self._context, number) as lane:
                for part, combine in zip(parts, self._combines, strict=True):
                    await dense.allreduce(lane, part, combine)
                    lane.next_phase()

    async def _count(self, group: Group, number: int, attendance: Array) -> None:
        with self._lane(group, digest(self._context, "attendance"), number) as lane:
            await dense.short_allreduce(lane, attendance, dense.add)

    def _lane(self, group: Group, context: int, number: int) -> Lane:
        return Lane(
            self._endpoint, group, context, number, self._fingerprint, lambda: f"round {number} of {self.describe()}"
        )

    def _publish(self, result: Result) -> None:
        """Hand out the result and re-arm."""
        self._retire(self._latest)
        self._latest = result
        self._arm()
        waiter = self._waiting.get(result.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)
        for step in self._early.pop(self._number, []):
            self._heed(step)
        self._stand_in()

    def _retire(self, result: Result) -> None:
        """A newer result is there; this one goes into history, and what falls out of it is memory to use again."""
        if not result.number:
            return
        kept = self._history
        oldest = result if not kept.maxlen else kept[0] if len(kept) == kept.maxlen else None
        kept.append(result)
        if oldest is not None:
            self._spare = oldest.parts
