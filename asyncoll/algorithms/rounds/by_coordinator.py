"""Rounds at a coordinator: a short contribution travels with the news of its arrival, to a rank drawn for the round.

The coordinator opens the round by the operation's rule, sums what has come by then and hands out the result. A round
takes 2(P-1) messages and wakes each of the others once; by activation it takes three times as many, one after another.
And nobody but the coordinator need run for a round to be over.

What a rank has sent and the result does not include came too late: it goes to the next round's coordinator. The result
says how many of each rank's contributions it includes, and those of one rank arrive in order; so all know which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.dense.on_lane import children
from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.tally import PARTICIPATION_BYTES
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Parts, Result, WaitAvoiding
from asyncoll.errors import ProtocolError
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer

# Contributions of all ranks together up to which one rank sums them faster than all do: measured, see BENCHMARKS.md.
COORDINATED_MAX_BYTES = 1 << 20

# Steps of signals. The first three go to the coordinator, with a contribution or, from a rank that is gone, without.
ARRIVED = 0  # my caller is here
LATE = 1  # my caller is not waiting
GONE = 2  # I make no more calls, so do not wait for me
RESULT = 3  # the coordinator's, to everybody

RADIX = 32  # of the tree that hands out results: up to so many ranks hear them from the coordinator itself


class _Sent(NamedTuple):
    """A contribution that no result is known to include."""

    ticket: int
    payload: bytes


def suits(operation: Operation, size: int) -> bool:
    """Whether rounds of `operation` among `size` ranks are better coordinated by one of them."""
    return not operation.group_size and size * operation.nbytes <= COORDINATED_MAX_BYTES


class CoordinatedRounds(WaitAvoiding):
    """An operation whose rounds are carried out by one rank for all."""

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self._everybody = tuple(range(port.group.size))
        self._sent: list[_Sent] = []  # to the coordinator of the round that is armed, in order
        self._early: dict[int, list[tuple[int, int, Buffer]]] = {}  # (place, step, payload), by round
        super().__init__(port, operation, describe)

    # -- contributing -----------------------------------------------------------------------------

    def _arm(self) -> None:
        self._gather()
        self._coordinator = self._gathering.drawn[0]
        # At the coordinator:
        self._begun = False
        self._given: list[tuple[int, Buffer]] = []
        for sent in self._sent:  # it came too late for the round before
            self._submit(LATE, sent.payload)

    def _has_begun(self) -> bool:
        return self._begun

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        ticket = super()._stage(contribution)
        assert self._staged is not None
        participation = self._tally.sign(1, 0, contributes=True, gone=False)
        self._sent.append(_Sent(ticket, _packed([participation, *self._staged])))
        self._spare, self._staged = self._staged, None
        return ticket

    def _arrive(self, number: int) -> None:
        self._submit(ARRIVED, self._sent[-1].payload)

    def _offer(self) -> None:
        self._submit(LATE, self._sent[-1].payload)

    def _submit(self, step: int, payload: bytes) -> None:
        self._port.send(self._coordinator, self._number, step, payload)

    def _stand_in(self) -> None:
        """Also the coordinator tells itself by message: what it has submitted before must be heard before that."""
        if self._port.departed:
            self._submit(GONE, b"")

    # -- coordinating -----------------------------------------------------------------------------

    def _signalled(self, place: int, number: int, step: int, payload: Buffer) -> None:
        """Rounds end in order: what is said of a later one waits until this rank has come to it."""
        self._check(number, step, payload)
        if step == RESULT:
            self._pass_on(number, payload)
        self._early.setdefault(number, []).append((place, step, payload))
        while waiting := self._early.get(self._number):
            self._heed(*waiting.pop(0))

    def _check(self, number: int, step: int, payload: Buffer) -> None:
        if step not in (ARRIVED, LATE, GONE, RESULT):
            raise ProtocolError(f"signal {step} has no meaning in {self.operation}")
        mine = self._group.rank == self._coordinator_of(number)
        if mine == (step == RESULT):
            raise ProtocolError(f"signal {step} for round {number} of {self.operation}, which another rank coordinates")
        expected = 0 if step == GONE else self._payload_bytes(self._group.size if step == RESULT else 1)
        if len(payload) != expected:
            raise ProtocolError(f"{len(payload)} bytes for round {number} of {self.operation}, expected {expected}")

    def _heed(self, place: int, step: int, payload: Buffer) -> None:
        if step == RESULT:
            self._finish(payload)
            return
        if step == GONE:
            self._gathering.gone(place)
        else:
            self._given.append((place, payload))
            if step == ARRIVED or rules.late_call_opens(self.operation, self._gathering, place):
                self._gathering.arrived(place)
        if not self._begun and rules.may_open(self.operation, self._gathering):
            self._begun = True
            self._port.spawn(self._carry_out())

    async def _carry_out(self) -> None:
        """In the loop's next turn, so that what has arrived here together takes part together."""
        result = self._sum()
        self._pass_on(self._number, result)
        self._finish(result)

    def _sum(self) -> bytes:
        """What has come, in order of ranks, so that the bits do not depend on who was first."""
        participation = np.zeros((4, self._group.size), np.float32)
        total: Parts | None = None
        for place, payload in sorted(self._given, key=lambda given: given[0]):
            column, *parts = self._unpacked(payload, 1)
            participation[:, place] += column
            if total is None:
                total = parts
            else:
                self._combine(total, parts)
        assert total is not None
        return _packed([participation.reshape(-1), *total])

    # -- results ----------------------------------------------------------------------------------

    def _pass_on(self, number: int, result: Buffer) -> None:
        """Down a tree that is rooted at the coordinator. It tells those first whose callers wait."""
        size, root = self._group.size, self._coordinator_of(number)
        told = [(root + child) % size for child in children((self._group.rank - root) % size, size, RADIX)]
        for place in sorted(told, key=lambda place: not self._gathering.is_waiting(place)):
            self._port.send(place, number, RESULT, result)

    def _finish(self, payload: Buffer) -> None:
        """The round that is armed is over."""
        number = self._number
        self._early.pop(number, None)  # what came too late for it is sent again by those who sent it
        participation, *parts = self._unpacked(payload, self._group.size)
        counted = self._count_mine(participation[self._group.rank])
        taken = self._sent[counted - 1].ticket if counted else self._latest.taken
        del self._sent[:counted]
        self._tally.began(self._port.now_s())
        active, _ = self._tally.count_round(self._everybody, participation)
        synchronous = self.operation.is_synchronous(number)
        self._publish(Result(number, parts, active, self._everybody, taken, synchronous))

    def _count_mine(self, counted: float) -> int:
        """How many of the contributions that this rank has sent are in a result."""
        if not 0 <= counted <= len(self._sent):  # nor is it NaN
            raise ProtocolError(f"a result of {self.operation} has {counted} of the {len(self._sent)} sent to it")
        return int(counted)

    def _coordinator_of(self, number: int) -> int:
        return self._coordinator if number == self._number else self.operation.drawn(number, self._group.size)[0]

    # -- payloads: an participation list, then the parts ---------------------------------------------

    def _payload_bytes(self, ranks: int) -> int:
        return PARTICIPATION_BYTES * ranks + self.operation.nbytes

    def _unpacked(self, payload: Buffer, ranks: int) -> Parts:
        raw = np.frombuffer(payload, np.uint8)
        arrays = [np.empty(4 * ranks, np.float32), *self._memory()]
        start = 0
        for array in arrays:
            array.view(np.uint8)[...] = raw[start : start + array.nbytes]
            start += array.nbytes
        return arrays


def _packed(arrays: Iterable[Array]) -> bytes:
    return b"".join(array.view(np.uint8).data for array in arrays)
