"""The part of a host in one attempt at a round between hosts: claim, reduce, exchange, publish. See `agent`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from asyncoll.algorithms.dense import by_size
from asyncoll.algorithms.rounds import tally
from asyncoll.algorithms.rounds.agent_signals import CLAIM, ranks_of, step_of
from asyncoll.algorithms.rounds.attempts import ATTEMPTS_MAX
from asyncoll.algorithms.rounds.engine import Parts
from asyncoll.algorithms.rounds.host_record import RoundOutcome, Share, Taken
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.wait_avoiding import packed, unpack
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.port import Port
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import Array, combiner, storage
from asyncoll.transport.wire import Buffer

# The most bytes of a contribution that the opener reduces: four messages one after another instead of six or more.
OPENER_MAX = 1 << 14
# The most bytes that all hosts send to the opener, with their participation lists, which have an entry for each rank:
# they pass its link one after another, and so do the results.
ALL_AT_OPENER_MAX = 1 << 18


class HostPart(Protocol):
    """The part of a host in a round. On the runtime's loop.

    All but `arrays` and `recheck` take the lock of the host's memory. They raise the failure of the world if a rank of
    the host has died with that lock. `claim` and `copied` raise UsageError if the host has no memory left for a block.
    """

    def claim(self, number: int, attempt: int) -> Taken | None:
        """Take what is staged for round `number`, or was taken for an earlier attempt. Never waits.

        None if another agent of this host takes part in this attempt, or no host needs this one for the round any more.
        The caller keeps the blocks.
        """

    def reduce(self, number: int) -> Coroutine[Any, Any, None]:
        """Reduce what was claimed into the blocks of its shares, together with the callers that wait.

        Raises the failure of the communicator. If it is cancelled, this agent still reduces the chunks that are left.
        """

    def until_over(self, number: int) -> Coroutine[Any, Any, None]:
        """Wait until round `number`, in which another agent of this host takes part, is over here.

        Raises the failure of the communicator. Cancelling it changes nothing.
        """

    def copied(self, block: int) -> int:
        """A new block like `block`, which the caller keeps in place of that; a neutral one if that is NONE."""

    def arrays(self, block: int) -> Parts:
        """The parts of a contribution in `block`, not copied: one flat array for each of the operation's layout."""

    def drop(self, blocks: Sequence[int]) -> None:
        """The caller keeps these blocks no longer."""

    def recheck(self) -> None:
        """Have the calls of this rank that wait in memory look at it again.

        A process may have stopped after it has changed the memory, and before it has woken those that wait for that.
        """

    def conclude(self, number: int, outcome: RoundOutcome) -> None:
        """Round `number` is over: publish its result on this host, and wake the callers that wait. Never waits.

        It is dropped if another attempt was over before. The caller keeps its blocks no longer.
        """


class HostExchange:
    """What all attempts of one operation at one rank have in common. On the runtime's loop."""

    def __init__(
        self, port: Port, operation: Operation, hosts: Hosts, part: HostPart, describe: Callable[[], str]
    ) -> None:
        """`describe` gives the operation and its first call, for errors and for the report of a deadlock."""
        self.port = port
        self.hosts = hosts
        self.part = part
        self._operation = operation
        self._describe = describe
        self._size = port.group.size
        self.combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self.is_short = _goes_through_opener(operation, self._size, len(hosts.ranks))

    def text(self, number: int) -> str:
        """Round `number`, for errors."""
        return f"round {number} of {self._describe()}"

    def lane_number(self, number: int, attempt: int, share: Share) -> int:
        """Groups of one round share agents."""
        return (number * ATTEMPTS_MAX + attempt) * self._size + share.members[0]

    def short_bytes(self) -> int | None:
        """The size of a short contribution with its participation list; None if contributions are long."""
        return sum([array.nbytes for array in self._empty_arrays()]) if self.is_short else None

    def sum(self, payloads: Sequence[Buffer]) -> bytes:
        """The reduction of short contributions, and their participation list."""
        total, other = self._empty_arrays(), self._empty_arrays()
        unpack(payloads[0], total)
        for payload in payloads[1:]:
            unpack(payload, other)
            np.maximum(total[0], other[0], out=total[0])  # each host has filled in the columns of its own ranks
            for combine, mine, its in zip(self.combines, total[1:], other[1:], strict=True):
                combine(mine, its)
        return packed(total)

    def _empty_arrays(self) -> list[Array]:
        """Arrays for a participation list and a contribution."""
        return [
            self._blank_list().reshape(-1),
            *(np.empty(count, storage(dtype)) for dtype, count in self._operation.layout),
        ]

    def _blank_list(self) -> Array:
        # Totals, because in groups a host is not told of every round of the ranks of other hosts.
        return tally.blank_totals(self._size, weighted=self._operation.weighted)

    def sign(self, taken: Taken) -> Array:
        """The participation list of this host: the columns of its ranks are filled."""
        participation = self._blank_list()
        here = list(self.hosts.here)
        for share in taken.shares:
            participation[tally.PRESENT, list(share.contributors)] = 1
            if self._operation.weighted and share.contributors:
                participation[tally.WEIGHT, share.contributors[0]] = share.weight
        participation[tally.GONE, here] = taken.ends
        participation[tally.TIMES_S, here] = taken.times_s
        return participation.reshape(-1)

    def outcome(self, shares: Sequence[Share], participation: Array) -> RoundOutcome:
        """The outcome of a round whose groups have these results, and this list."""
        rows = participation.reshape(-1, self._size)
        ends = tuple(rows[tally.GONE].astype(int).tolist())
        told = [self._told(share, rows) for share in shares]
        return RoundOutcome(tuple(told), ends, rows[tally.TIMES_S])

    def _told(self, share: Share, rows: Array) -> Share:
        """`share` with the contributors of all hosts."""
        contributors = tuple([rank for rank in share.members if rows[tally.PRESENT, rank]])
        weight = float(rows[tally.WEIGHT, list(share.members)].sum()) if self._operation.weighted else 0.0
        return share._replace(contributors=contributors, weight=weight)


class Attempt:
    """One attempt at one round, in which this rank takes part for its host."""

    def __init__(self, exchange: HostExchange, number: int, attempt: int, opener: int) -> None:
        self.awaited: Sequence[int] = [opener]  # the ranks that it waits for
        self.traffic = Traffic()  # with them, in the exchange under way
        self._exchange = exchange
        self._number = number
        self._attempt = attempt
        self._answer: asyncio.Future[Buffer | None] | None = None  # to the claim

    def answer(self, payload: Buffer | None) -> None:
        """The answer to the claim has come; None if no answer is needed any more."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(payload)

    async def run(self, taken: Taken) -> None:
        """Reduce between hosts what this host gives, and publish the result.

        Raises the failure of the communicator. It is cancelled only with the world.
        """
        exchange, number = self._exchange, self._number
        participation = exchange.sign(taken)
        way = self._through_opener if exchange.is_short else self._among_agents
        with exchange.port.watch(f"{exchange.text(number)}: the agents of the other hosts") as self._answer:
            shares = await way(taken, participation, self._answer)
        if shares:
            exchange.part.conclude(number, exchange.outcome(shares, participation))

    async def _through_opener(
        self, taken: Taken, participation: Array, answer: asyncio.Future[Buffer | None]
    ) -> list[Share]:
        """The contribution travels with the claim, and the result with the answer. Fills in `participation`."""
        part = self._exchange.part
        await part.reduce(self._number)
        (share,) = taken.shares
        block = part.copied(share.block)
        arrays = [participation, *part.arrays(block)]
        self._claim(packed(arrays))
        result = await answer
        if result is None:
            part.drop([block])
            return []
        unpack(result, arrays)
        return [share._replace(block=block)]

    async def _among_agents(
        self, taken: Taken, participation: Array, answer: asyncio.Future[Buffer | None]
    ) -> list[Share]:
        """The agents that the answer tells of reduce between hosts. Fills in `participation`."""
        part = self._exchange.part
        self._claim()
        await part.reduce(self._number)
        team = await answer
        if team is None:
            part.drop([share.block for share in taken.shares])
            return []
        self.awaited = ranks = ranks_of(team)
        # One group after another, in the same order on all hosts, so that each finds the others in the same group.
        return [await self._reduced(share, ranks, participation) for share in taken.shares]

    def _claim(self, contribution: bytes = b"") -> None:
        (opener,) = self.awaited
        self._exchange.port.send(opener, self._number, step_of(CLAIM, self._attempt), contribution)

    async def _reduced(self, share: Share, team: Sequence[int], participation: Array) -> Share:
        """Reduce `share` between the hosts of its group. Returns it with the result, and fills in `participation`."""
        exchange, number = self._exchange, self._number
        hosts = sorted({exchange.hosts.host[rank] for rank in share.members})
        if len(hosts) == 1:
            return share
        block = exchange.part.copied(share.block)
        group = exchange.port.group.subset(tuple([team[host] for host in hosts]))
        lane_number = exchange.lane_number(number, self._attempt, share)
        with exchange.port.lane(group, lane_number, partial(exchange.text, number), participation) as lane:
            self.traffic = lane.traffic
            for array, combine in zip(exchange.part.arrays(block), exchange.combines, strict=True):
                await by_size.allreduce(lane, array, combine)
        return share._replace(block=block)


def _goes_through_opener(operation: Operation, ranks: int, hosts: int) -> bool:
    totals = tally.blank_totals(ranks, weighted=operation.weighted)
    together = hosts * (operation.nbytes + totals.nbytes)
    return not operation.group_size and operation.nbytes <= OPENER_MAX and together <= ALL_AT_OPENER_MAX
