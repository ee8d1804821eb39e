"""Rounds by activation: a tree tells every rank that the round is open, and all of them reduce together.

Of any size. They differ in who may open a round (`Opening`), in who reduces with whom (everybody, or the round's
group), and in what a contribution is. Taking what is staged is one step of this loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import numpy as np

from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.rounds import rules, wait_avoiding
from asyncoll.algorithms.rounds.activation import OPEN, REDUCE, Step, activation, edges, heard, synchronous
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Parts, Result, WaitAvoiding
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.runtime.group import Group
from asyncoll.runtime.port import Port
from asyncoll.runtime.schedule import Schedule
from asyncoll.tensors.reductions import Array, fill_neutral
from asyncoll.transport.wire import Buffer

# Steps of signals that are no edges of the tree: what the drawn ranks of a round are told.
ARRIVED = 255  # I am here
GONE = 254  # I make no more calls, so do not wait for me
REACHED = 253  # To the ranks that signal this one: it has come to the round with that number.


class ActivatedRounds(WaitAvoiding):
    """An operation whose rounds are carried out by all ranks.

    A caller who is in time lends its tensors: they are reduced in place, without a copy. What would outlive the call, a
    contribution that stays or a result for `history`, is copied.
    """

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self._lent = False  # what is staged is the memory of the caller who waits
        self._lent_to = 0  # the newest round that has reduced in the memory of its caller
        self._early: dict[int, list[tuple[int, int]]] = {}  # signals for later rounds, by round: (place, step)
        self._announced = 0  # the newest round whose drawn ranks have been told that this rank is here, or gone
        # By place, of the ranks that this one signals: the newest round that they are known to have reached. Groups
        # that share no rank do not wait for each other, so one could run ahead of another without end.
        self._reached = dict.fromkeys(_neighbours(port.group, 1), 0) if operation.group_size else {}
        self._held: dict[Step, None] = {}  # steps of the armed round, which is too far ahead to take part in
        super().__init__(port, operation, describe)

    # -- contributions ----------------------------------------------------------------------------

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        outlives = self.operation.group_size or self.operation.history
        next_takes_it = self._staged is None and not self._has_begun()
        lent = contribution.lend() if may_lend and next_takes_it and not outlives else None
        if lent is None:
            self._keep_staged()
            return super()._stage(contribution)
        self._staged, self._lent = lent, True
        self._submitted += 1
        return self._submitted

    def _keep_staged(self) -> None:
        """Hold what is staged in memory of our own."""
        if self._lent and self._staged is not None:
            mine = self._memory()
            for own, staged in zip(mine, self._staged, strict=True):
                np.copyto(own, staged)
            self._staged = mine
        self._lent = False

    async def _reclaim(self, number: int) -> None:
        """Take the caller's memory back. Only a round that reduces in it has to end first.

        That takes no caller: a round takes what is lent once every rank that it waits for is there.
        """
        self._keep_staged()
        while self._lent_to == self._number and not self._port.has_failed:
            with contextlib.suppress(asyncio.CancelledError, AsyncollError), self._wait_for(number) as done:
                await done
        if self._latest.lent:
            own = [part.copy() for part in self._latest.parts]
            self._latest = self._latest._replace(parts=own, lent=False)

    # -- opening a round --------------------------------------------------------------------------

    def _arm(self) -> None:
        """A persistent schedule makes its own next round."""
        number, size = self._number, self._group.size
        self._gather()
        if self.operation.is_synchronous(number):
            plan = synchronous(size)
        else:
            plan = activation(size, flood=self.operation.group_size > 0)
        self._schedule: Schedule[Step] = plan.fresh()

    def _has_begun(self) -> bool:
        return REDUCE in self._schedule.fired

    def _arrive(self, number: int) -> None:
        if self._has_begun():
            return
        self._gathering.arrived(self._group.rank)
        if not self._open():
            self._tell_drawn(number, ARRIVED)

    def _tell_drawn(self, number: int, step: int) -> None:
        if self._announced < number:
            self._announced = number
            for place in self._gathering.drawn:
                if place != self._group.rank:
                    self._port.send(place, number, step)

    def _open(self) -> bool:
        """Open the round if this rank may. Returns whether that is done, here or elsewhere."""
        if self._has_begun():
            return True
        if not self._may_open():
            return False
        self._fire(OPEN)
        return True

    def _may_open(self) -> bool:
        """Of a synchronous round: whether this rank is there. The schedule of such a round waits for the others.

        A rank that is gone opens no more of them after one in which no rank made calls either.
        """
        if not self.operation.is_synchronous(self._number):
            return rules.may_open(self.operation, self._gathering)
        is_waiting = self._gathering.is_waiting(self._group.rank)
        return is_waiting or (self._port.departed and not self._latest.deserted)

    def _signalled(self, place: int, number: int, step: int, payload: Buffer) -> None:
        if len(payload):
            raise ProtocolError(f"signal {step} of {self.operation} has nothing to carry")
        if number == self._number:
            self._heed(place, step)
            return
        # A round that includes everybody cannot be over elsewhere before it is here; a group's can, many times.
        if number > self._number + 1 and not self.operation.group_size:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {self._number} is open")
        self._early.setdefault(number, []).append((place, step))

    def _heed(self, place: int, step: int) -> None:
        if (edge := heard(step)) in self._schedule:
            self._fire(edge)
        elif step == ARRIVED:
            self._gathering.arrived(place)
            self._open()
        elif step == GONE:
            self._gathering.gone(place)
            self._open()
        else:
            raise ProtocolError(f"signal {step} has no meaning in round {self._number} of {self.operation}")

    def _stand_in(self) -> None:
        if not self._port.departed:
            return
        self._gathering.gone(self._group.rank)
        counted = self.operation.opening is Opening.QUORUM and not self.operation.is_synchronous(self._number)
        if not self._open() and counted:
            self._tell_drawn(self._number, GONE)

    def _fire(self, step: Step) -> None:
        if self._is_far_ahead():
            self._held[step] = None
            return
        for fired in self._schedule.fire(step):
            if fired.kind == "forward":
                self._port.send((self._group.rank + (1 << fired.edge)) % self._group.size, self._number, fired.edge)
            elif fired == REDUCE:
                self._tally.began(self._port.now_s())
                self._port.spawn(self._reduce(self._number))

    # -- staying in reach -------------------------------------------------------------------------

    def _is_far_ahead(self) -> bool:
        """Whether a signal for the armed round may be more than a rank accepts that has not come so far."""
        return self._number > min(self._reached.values(), default=self._number) + wait_avoiding.EARLY_MAX

    def _heard(self, place: int, number: int, step: int, payload: Buffer) -> None:
        if step != REACHED or place not in self._reached:
            super()._heard(place, number, step, payload)
            return
        self._reached[place] = max(self._reached[place], number)
        if not self._is_far_ahead():
            held, self._held = self._held, {}
            for kept in held:
                self._fire(kept)

    def _report(self) -> None:
        """Tell the ranks that signal this one how far it has come: often enough that they do not wait for that."""
        if self._reached and self._number % max(1, wait_avoiding.EARLY_MAX // 4) == 0:
            for place in _neighbours(self._group, -1):
                self._port.send(place, self._number, REACHED)

    # -- executing it -----------------------------------------------------------------------------

    async def _reduce(self, number: int) -> None:
        contributes, taken = self._staged is not None, self._submitted
        parts, lent = self._take()
        if lent:
            self._lent_to = number
        members = self.operation.members(number, self._group.size, self._group.rank)
        group = self._group.subset(members)
        participation = self._tally.sign(group.size, group.rank, contributes=contributes, gone=self._port.departed)
        await self._allreduce(group, number, parts, participation)
        active, gone = self._tally.count_round(members, participation)
        synchronous = self.operation.is_synchronous(number)
        deserted = synchronous and gone == group.size
        self._publish(Result(number, parts, active, members, taken, synchronous, deserted, lent))

    def _take(self) -> tuple[Parts, bool]:
        """What this rank puts into a round, as arrays for the round alone; whether they are its caller's memory."""
        staged, lent, operation = self._staged, self._lent, self.operation
        if staged is not None and not operation.group_size:
            self._staged, self._lent = None, False
            return staged, lent
        parts = self._memory()
        for place, (part, (dtype, _)) in enumerate(zip(parts, operation.layout, strict=True)):
            if staged is None:
                fill_neutral(part, operation.op, dtype)
            else:
                np.copyto(part, staged[place])
        return parts, False

    async def _allreduce(self, group: Group, number: int, parts: Parts, participation: Array) -> None:
        """Reduce the parts; the participation list, of which every rank fills in its own column, rides along."""
        describe = lambda: f"round {number} of {self.describe()}"  # noqa: E731
        with self._port.lane(group, number, describe, participation) as lane:
            for part, combine in zip(parts, self._combines, strict=True):
                await on_lane.allreduce(lane, part, combine)
                lane.next_phase()

    def _publish(self, result: Result) -> None:
        super()._publish(result)
        self._report()
        for place, step in self._early.pop(self._number, []):
            self._heed(place, step)


def _neighbours(group: Group, direction: int) -> list[int]:
    """Places that are an edge of the activation away: those that this rank signals (1), or that signal it (-1)."""
    return [(group.rank + direction * (1 << edge)) % group.size for edge in edges(group.size)]
