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
from collections.abc import Callable, Sequence

import numpy as np

from asyncoll.algorithms.dense import by_size
from asyncoll.algorithms.rounds import wait_avoiding
from asyncoll.algorithms.rounds.activation import edges
from asyncoll.algorithms.rounds.engine import (
    ARRIVED,
    GONE,
    JOINED,
    ActivatedRound,
    Instruction,
    NextRound,
    Parts,
    Result,
)
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, WaitAvoiding
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.runtime.group import Group
from asyncoll.runtime.port import Port
from asyncoll.transport.wire import Buffer

# A step of signals beside the edges of the tree and the events of `engine`, to the ranks that signal the sender on an
# edge: the sender has reached the round with that number.
REACHED = 252


class ActivatedRounds(WaitAvoiding):
    """An operation whose rounds are carried out by all ranks. On the runtime's loop.

    A caller that waits for the next round lends its tensors: they are reduced in place, without a copy. A contribution
    that stays (groups) and a result for `history` outlive the call, so they are copied.
    """

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self._lent = False  # whether the staged arrays are the memory of the caller that waits
        self._lent_to = 0  # the newest round that has reduced in the memory of its caller
        # By group rank, of the ranks that this one signals: the newest round that they are known to have reached.
        # Groups that share no rank do not wait for each other, so one could run ahead of another without end, and the
        # ranks of the slower group would have to keep all signals of the faster one.
        self._reached = dict.fromkeys(_neighbours(port.group, 1), 0) if operation.group_size else {}
        self._held: list[Instruction] = []  # of the armed round, which is too far ahead to take part in
        super().__init__(port, operation, describe)

    # -- contributions ----------------------------------------------------------------------------

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        # Memory is lent only if the very next round takes it and then the call ends. Older staged arrays have to be
        # added to it first, and a round that runs here already has taken its contribution.
        outlives = self.operation.group_size or self.operation.history
        next_takes_it = self._staged is None and not self._round.has_begun
        lent = contribution.lend() if may_lend and next_takes_it and not outlives else None
        if lent is None:
            # A later contribution is added to the staged arrays. If they are lent, their caller waits and must not see
            # them change.
            self._keep_staged()
            return super()._stage(contribution)
        contribution.scale_lent()
        self._staged, self._staged_weight, self._lent = lent, contribution.weight, True
        self._submitted += 1
        return self._submitted

    def _keep_staged(self) -> None:
        """Copy a lent contribution into memory of this operation."""
        if self._lent and self._staged is not None:
            self._staged = self._copy(self._staged)
        self._lent = False

    async def _reclaim(self, number: int) -> None:
        """Stop using the caller's memory. A round that reduces in it ends first.

        That wait depends on no other caller: a round reduces only once every rank that it waits for has arrived.
        """
        self._keep_staged()
        # A cancelled caller may be cancelled again, and may leave only when the round has ended: each cancellation is
        # swallowed here, and the caller of this method raises the first one.
        while self._lent_to == self._round.number and not self._port.has_failed:
            with contextlib.suppress(asyncio.CancelledError, AsyncollError), self._result_of(number) as done:
                await done
        # The result of that round lies in the caller's memory too, and a later call may be given it.
        if self._latest.lent:
            own = [part.copy() for part in self._latest.parts]
            self._latest = self._latest._replace(parts=own, lent=False)

    # -- signals ----------------------------------------------------------------------------------

    def _arm(self, number: int) -> NextRound:
        return ActivatedRound(self.operation, number, self._group.size, self._group.rank)

    def _accept(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        if len(payload):
            raise ProtocolError(f"signal {step} of {self.operation} has nothing to carry")
        if step not in edges(self._group.size) and step not in (ARRIVED, GONE, JOINED):
            raise ProtocolError(f"signal {step} has no meaning in {self.operation}")
        # A round of all ranks ends nowhere before this rank takes part in it. A round of another group may.
        armed = self._round.number
        if number > armed + 1 and not self.operation.group_size:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {armed} is open")

    # -- staying in reach -------------------------------------------------------------------------

    def _is_far_ahead(self) -> bool:
        """Whether a rank that this one signals may be so far behind that it would reject a signal of the armed round.

        The rank that is furthest behind is never far ahead of another, so it goes on, and all others after it.
        """
        armed = self._round.number
        return armed > min(self._reached.values(), default=armed) + wait_avoiding.EARLY_MAX

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        self._held += instructions
        if not self._is_far_ahead():
            held, self._held = self._held, []
            super()._follow(held)

    def _received(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        if step == REACHED and rank in self._reached:
            self._reached[rank] = max(self._reached[rank], number)
            self._follow(())  # those that were held
        else:
            super()._received(rank, number, step, payload)

    def _publish(self, result: Result) -> None:
        super()._publish(result)
        # Tell the ranks that signal this one how far it has come: four times in EARLY_MAX rounds, so that ranks which
        # keep pace never wait for it.
        if self._reached and self._round.number % max(1, wait_avoiding.EARLY_MAX // 4) == 0:
            for rank in _neighbours(self._group, -1):
                self._port.send(rank, self._round.number, REACHED)
        # Signals for the next round, which arrived while this one was running.
        self._handle_signals()

    # -- executing it -----------------------------------------------------------------------------

    async def _carry_out(self) -> None:
        # No await up to the reduction: the contribution, its number and its participation are of one moment.
        number, port = self._round.number, self._port
        contributes, taken = int(self._staged is not None), self._submitted
        weight = self._staged_weight if contributes else 0.0
        if not self.operation.group_size:  # contributions add up until a round takes them
            contributes = taken - self._latest.taken
        parts, lent = self._take()
        if lent:
            self._lent_to = number
        members = self.operation.members(number, self._group.size, self._group.rank)
        group = self._group.subset(members)
        sign, place, gone = self._tally.sign, group.rank, self._is_gone
        participation = sign(group.size, place, contributes=contributes, gone=gone, weight=weight)
        # The participation lists, of which each rank has filled in its own column, are summed on the way.
        with port.lane(group, number, lambda: f"round {number} of {self.describe()}", participation) as lane:
            for part, combine in zip(parts, self._combines, strict=True):
                await by_size.allreduce(lane, part, combine)
        ranks, absent, total = self._tally.count_round(number, members, participation)
        synchronous = self.operation.is_synchronous(number)
        deserted = synchronous and absent == group.size
        synchronous &= not absent
        self._end_round(Result(number, parts, ranks, members, taken, synchronous, total, deserted, lent), absent)

    def _take(self) -> tuple[Parts, bool]:
        """This rank's part of a round: arrays that only the round uses, and whether they are its caller's memory.

        Without a contribution they are neutral elements of the reduction.
        """
        staged, lent = self._staged, self._lent
        if staged is not None and not self.operation.group_size:
            self._staged, self._lent = None, False
            return staged, lent
        if staged is not None:
            return self._copy(staged), False
        return self._neutral(), False

    def _copy(self, parts: Parts) -> Parts:
        mine = self._memory()
        for own, part in zip(mine, parts, strict=True):
            np.copyto(own, part)
        return mine


def _neighbours(group: Group, direction: int) -> list[int]:
    """The group ranks at the other end of an edge: those that this rank signals (1), or that signal it (-1)."""
    return [(group.rank + direction * (1 << edge)) % group.size for edge in edges(group.size)]
