"""Rounds at a coordinator: a short contribution travels with the signal of its arrival, to a rank drawn for the round.

The coordinator opens the round by the operation's rule, sums the contributions that have arrived by then, and sends the
result to all ranks. A round takes 2(P-1) messages and wakes each of the other ranks once. By activation it takes three
times as many messages, one after another. Only the coordinator has to run for a round to end.

A contribution that arrives after the round has begun is late: its rank sends it again, to the coordinator of the next
round. The result states how many contributions of each rank it includes. The contributions of one rank arrive in order.
So each rank knows from this number which of its contributions are in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.dense.on_lane import children
from asyncoll.algorithms.rounds.engine import ARRIVED, GONE, JOINED, LATE, CoordinatedRound, NextRound, Parts, Result
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, WaitAvoiding, packed, unpack
from asyncoll.errors import ProtocolError
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer

# Contributions of all ranks together up to which one rank sums them faster than all do: measured (benchmarks/).
COORDINATED_MAX_BYTES = 1 << 20

# A step of signals beside the events of `engine`, from the coordinator to all ranks, through a tree. ARRIVED and LATE
# carry a contribution, GONE and JOINED carry nothing.
RESULT = 252

_ENDS = (GONE, JOINED)
RADIX = 32  # of the tree that distributes results: among up to 32 ranks the coordinator sends to every rank itself


class _SentContribution(NamedTuple):
    """A contribution that no result is known to include."""

    ticket: int
    payload: bytes


class CoordinatedRounds(WaitAvoiding):
    """An operation whose rounds are carried out by one rank for all. On the runtime's loop."""

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self._all_ranks = tuple(range(port.group.size))
        self._sent: list[_SentContribution] = []  # to the coordinator of the round that is armed, in order
        # Last: the constructor arms the first round.
        super().__init__(port, operation, describe)

    # -- contributing -----------------------------------------------------------------------------

    def _arm(self, number: int) -> NextRound:
        armed = CoordinatedRound(self.operation, number, self._group.size, self._group.rank)
        self._given: list[tuple[int, Buffer]] = []  # at the coordinator: (group rank, payload) of each contribution
        # The round before did not include these. They are sent before any later contribution, because a result tells
        # the number of contributions included, which identifies them only if they arrive in the order of `_sent`.
        for sent in self._sent:
            self._port.send(armed.drawn[0], number, LATE, sent.payload)
        return armed

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        # Packed at once, so the caller's memory is free when the call has staged: nothing is lent, whatever `may_lend`.
        ticket = super()._stage(contribution)
        assert self._staged is not None
        participation = self._tally.sign(1, 0, contributes=1, gone=False, weight=self._staged_weight)
        self._sent.append(_SentContribution(ticket, packed([participation, *self._staged])))
        self._spare, self._staged = self._staged, None
        return ticket

    def _payload(self, step: int) -> bytes:
        return b"" if step in _ENDS else self._sent[-1].payload

    # -- coordinating -----------------------------------------------------------------------------

    def _accept(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        if step not in (ARRIVED, LATE, *_ENDS, RESULT):
            raise ProtocolError(f"signal {step} has no meaning in {self.operation}")
        coordinates = self._group.rank == self._coordinator_of(number)
        if coordinates == (step == RESULT):
            raise ProtocolError(f"signal {step} for round {number} of {self.operation}, which another rank coordinates")
        ranks = self._group.size if step == RESULT else 1  # in the participation list
        expected = 0 if step in _ENDS else self._tally.participation_bytes * ranks + self.operation.nbytes
        if len(payload) != expected:
            raise ProtocolError(f"{len(payload)} bytes for round {number} of {self.operation}, expected {expected}")
        if step == RESULT:
            # At once, even if this rank has not come to the round: the ranks below in the tree may have.
            self._pass_on(number, payload)

    def _handle(self, rank: int, step: int, payload: Buffer) -> None:
        if step == RESULT:
            participation, *parts = self._unpacked(payload, self._group.size)
            self._finish(participation, parts)
            return
        if step not in _ENDS:
            self._given.append((rank, payload))
        super()._handle(rank, step, payload)

    async def _carry_out(self) -> None:
        """Sum and distribute. A task of its own, so that messages of the same turn of the loop are included.

        Sums in the order of ranks: the bits must not depend on the order of arrival.
        """
        participation = self._tally.blank(self._group.size, self._round.gone_ranks)
        total: Parts | None = None
        for rank, payload in sorted(self._given, key=itemgetter(0)):
            column, *parts = self._unpacked(payload, 1)
            participation[:, rank] += column
            if total is None:
                total = parts
            else:
                self._combine(total, parts)
        total = total or self._neutral()
        self._pass_on(self._round.number, packed([participation.reshape(-1), *total]))
        self._finish(participation.reshape(-1), total)

    # -- results ----------------------------------------------------------------------------------

    def _pass_on(self, number: int, result: Buffer) -> None:
        """Send the result on, down a tree that is rooted at the coordinator: first to the ranks whose callers wait."""
        size, root = self._group.size, self._coordinator_of(number)
        below = [(root + child) % size for child in children((self._group.rank - root) % size, size, RADIX)]
        for rank in sorted(below, key=lambda rank: rank not in self._round.arrived_ranks):
            self._port.send(rank, number, RESULT, result)

    def _finish(self, participation: Array, parts: Parts) -> None:
        """The round that is armed is over, with this participation list and this result. Raises ProtocolError."""
        included = participation[self._group.rank]  # so many of the contributions that this rank has sent
        # The condition also fails for NaN, which a peer may send.
        if not 0 <= included <= len(self._sent):
            raise ProtocolError(f"a result of {self.operation} has {included} of the {len(self._sent)} sent to it")
        taken = self._sent[int(included) - 1].ticket if included >= 1 else self._latest.taken
        del self._sent[: int(included)]
        number = self._round.number
        if not self._round.has_begun:  # as far as this rank knew: only the coordinator sees a round begin
            self._tally.began(self._port.now_s())
        ranks, gone, weight = self._tally.count_round(number, self._all_ranks, participation)
        synchronous = self.operation.is_synchronous(number) and not gone
        self._end_round(Result(number, parts, ranks, self._all_ranks, taken, synchronous, weight), gone)

    def _coordinator_of(self, number: int) -> int:
        armed = self._round
        return armed.drawn[0] if number == armed.number else self.operation.first_drawn(number, self._group.size)

    # -- payloads: a participation list, then the parts -------------------------------------------

    def _unpacked(self, payload: Buffer, ranks: int) -> Parts:
        """The participation list, to be read only, and the parts in memory of their own.

        The parts are copies, because a payload is read-only, and goes on to the next rank.
        """
        raw, parts, start = np.frombuffer(payload, np.uint8), self._memory(), ranks * self._tally.participation_bytes
        unpack(raw[start:].data, parts)
        return [raw[:start].view(self._tally.dtype), *parts]
