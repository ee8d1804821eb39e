"""Rounds by activation: a tree tells every rank that the round is open, and all of them reduce together.

For contributions of any size. Operations differ in the ranks that may open a round (`Opening`), in the ranks that
reduce together (all, or the round's group), and in the kind of contribution (gradients add up, models replace each
other). The staged contribution is taken in one step of the runtime's loop, so no call can change it meanwhile.

Sources: Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with
partial collective operations", PPoPP 2020, sections 4.1 (solo) and 4.2 (majority); in groups, Li, Ben-Nun, Nadiradze,
Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel stochastic optimization with
wait-avoiding group averaging", TPDS 2021, section III-A.
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

# Steps of signals that are not edges of the tree. The first two go to the drawn ranks of a round.
ARRIVED = 255  # the sender's caller waits for the round
GONE = 254  # the sender makes no more calls: do not wait for it
REACHED = 253  # to the ranks that signal the sender on an edge: the sender has reached the round with that number


class ActivatedRounds(WaitAvoiding):
    """An operation whose rounds are carried out by all ranks. On the runtime's loop.

    A caller that waits for the next round lends its tensors: they are reduced in place, without a copy. A contribution
    that stays (groups) and a result for `history` outlive the call, so they are copied.
    """

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self._lent = False  # whether the staged arrays are the memory of the caller that waits
        self._lent_to = 0  # the newest round that has reduced in the memory of its caller
        self._early: dict[int, list[tuple[int, int]]] = {}  # signals for later rounds, by round: (group rank, step)
        self._announced = 0  # the newest round whose drawn ranks have been told that this rank is here, or gone
        # By group rank, of the ranks that this one signals: the newest round that they are known to have reached.
        # Groups that share no rank do not wait for each other, so one could run ahead of another without end, and the
        # ranks of the slower group would have to keep all signals of the faster one.
        self._reached = dict.fromkeys(_neighbours(port.group, 1), 0) if operation.group_size else {}
        self._held: dict[Step, None] = {}  # steps of the armed round, which is too far ahead to take part in
        super().__init__(port, operation, describe)

    # -- contributions ----------------------------------------------------------------------------

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        # Memory is lent only if the very next round takes it and then the call ends. Older staged arrays have to be
        # added to it first, and a round that runs here already has taken its contribution.
        outlives = self.operation.group_size or self.operation.history
        next_takes_it = self._staged is None and not self._has_begun()
        lent = contribution.lend() if may_lend and next_takes_it and not outlives else None
        if lent is None:
            # Staging adds to the staged arrays. If they are lent, their caller waits and must not see them change.
            self._keep_staged()
            return super()._stage(contribution)
        self._staged, self._lent = lent, True
        self._submitted += 1
        return self._submitted

    def _keep_staged(self) -> None:
        """Copy a lent contribution into memory of this operation."""
        if self._lent and self._staged is not None:
            mine = self._memory()
            for own, staged in zip(mine, self._staged, strict=True):
                np.copyto(own, staged)
            self._staged = mine
        self._lent = False

    async def _reclaim(self, number: int) -> None:
        """Stop using the caller's memory. A round that reduces in it ends first.

        That wait depends on no other caller: a round reduces only once every rank that it waits for has arrived.
        """
        self._keep_staged()
        # A cancelled caller may be cancelled again, and may leave only when the round has ended: each cancellation is
        # swallowed here, and the caller of this method raises the first one.
        while self._lent_to == self._number and not self._port.has_failed:
            with contextlib.suppress(asyncio.CancelledError, AsyncollError), self._wait_for(number) as done:
                await done
        # The result of that round lies in the caller's memory too, and a later call may be given it.
        if self._latest.lent:
            own = [part.copy() for part in self._latest.parts]
            self._latest = self._latest._replace(parts=own, lent=False)

    # -- opening a round --------------------------------------------------------------------------

    def _arm(self) -> None:
        """Make a new schedule, as the operation is persistent (section 4.1.1 of the PPoPP 2020 paper)."""
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
        if self._has_begun():  # here it reduces already, without this contribution or with it; the caller only waits
            return
        self._gathering.arrived(self._group.rank)
        if not self._open():
            self._tell_drawn(number, ARRIVED)

    def _tell_drawn(self, number: int, step: int) -> None:
        """Send `step` to the drawn ranks of round `number`: once, as a rank may arrive and then leave."""
        if self._announced < number:
            self._announced = number
            for place in self._gathering.drawn:
                if place != self._group.rank:
                    self._port.send(place, number, step)

    def _open(self) -> bool:
        """Open the round if this rank may. Returns whether it is open, as far as this rank knows."""
        if self._has_begun():
            return True
        if not self._may_open():
            return False
        self._fire(OPEN)
        return True

    def _may_open(self) -> bool:
        """Whether this rank may open the round. In a synchronous round: whether its caller is there, or it is gone.

        Each rank opens a synchronous round for itself, and the schedule waits for the others. A rank that is gone opens
        none after a synchronous round in which all ranks were gone. Otherwise the gone ranks would carry out one
        synchronous round after another, without any caller, as long as the world exists.
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
        # A round of all ranks ends nowhere before this rank takes part in it. A round of another group may.
        if number > self._number + 1 and not self.operation.group_size:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {self._number} is open")
        self._early.setdefault(number, []).append((place, step))

    def _heed(self, place: int, step: int) -> None:
        """Handle a signal of group rank `place` for the armed round. Raises ProtocolError for an unknown step."""
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
        # Only a quorum counts the ranks that are gone. A solo needs none of them. A majority needs one drawn rank; if
        # that is gone itself, it opens the round when the first caller tells it that it has arrived.
        counted = self.operation.opening is Opening.QUORUM and not self.operation.is_synchronous(self._number)
        if not self._open() and counted:
            self._tell_drawn(self._number, GONE)

    def _fire(self, step: Step) -> None:
        """`step` has happened in the armed round: forward signals and reduce as the schedule says."""
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
        """Whether a rank that this one signals may be so far behind that it would reject a signal of the armed round.

        The rank that is furthest behind is never far ahead of another, so it goes on, and all others after it.
        """
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
        """Tell the ranks that signal this one how far it has come.

        Four times in EARLY_MAX rounds, so that ranks which keep pace never wait for a report.
        """
        if self._reached and self._number % max(1, wait_avoiding.EARLY_MAX // 4) == 0:
            for place in _neighbours(self._group, -1):
                self._port.send(place, self._number, REACHED)

    # -- executing it -----------------------------------------------------------------------------

    async def _reduce(self, number: int) -> None:
        # No await up to `_allreduce`: the contribution, its number and its participation are of one moment.
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
        """This rank's part of a round: arrays that only the round uses, and whether they are its caller's memory.

        Without a contribution they are neutral elements of the reduction.
        """
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
        """Reduce `parts` in place, and sum the `participation` lists, which travel with the messages of the reduction.

        Each rank has filled in its own column of the list.
        """
        describe = lambda: f"round {number} of {self.describe()}"  # noqa: E731
        with self._port.lane(group, number, describe, participation) as lane:
            for part, combine in zip(parts, self._combines, strict=True):
                await on_lane.allreduce(lane, part, combine)
                lane.next_phase()

    def _publish(self, result: Result) -> None:
        super()._publish(result)
        self._report()
        # The next round is armed now. Signals for it were kept, because they arrived while this one was running.
        for place, step in self._early.pop(self._number, []):
            self._heed(place, step)


def _neighbours(group: Group, direction: int) -> list[int]:
    """The group ranks at the other end of an edge: those that this rank signals (1), or that signal it (-1)."""
    return [(group.rank + direction * (1 << edge)) % group.size for edge in edges(group.size)]
