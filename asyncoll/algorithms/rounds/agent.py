"""The agents of a host: the ranks that take part for it in the rounds between hosts.

All agents of a host are told the same, and the first that runs acts; the memory of the host says what is done already.
So an agent whose process is stopped between two rounds delays nobody. A round takes these signals:

1. Every rank tells the agents of the round's host that it has arrived, or makes no more calls. That is the host of a
   rank that is drawn for the round. Its agents count ranks, not hosts.
2. The first of them that finds the round open, by the rule of the operation, is its opener. It tells all agents (OPEN).
3. The first agent of each host takes what is staged there, and tells the opener that it takes part (CLAIM). It reduces
   that, together with the callers that wait on its host.
4. The opener tells those agents of each other (TEAM), and they reduce between hosts. A short contribution comes with
   the claim: the opener reduces, and sends them the result (RESULT).
5. They publish the result on their hosts. The other agents of a host wait for that in its memory, and then look for the
   next round.

A process that stops in the middle of a round delays it until it goes on: the opener before it has answered all claims,
an agent between its claim and its publication, and any rank while it reduces a chunk or holds the lock of the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from operator import contains
from typing import Any, Protocol

import numpy as np

from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.rounds import host_record, tally
from asyncoll.algorithms.rounds.block_table import NONE
from asyncoll.algorithms.rounds.engine import ARRIVED, GONE, JOINED, LATE, CoordinatedRound
from asyncoll.algorithms.rounds.host_record import HostRecord, Outcome, Share, Taken
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.packing import packed, unpack
from asyncoll.algorithms.rounds.wait_avoiding import Parts
from asyncoll.errors import ProtocolError
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import Array, combiner, storage
from asyncoll.transport.wire import Buffer

# The most bytes of a contribution that the opener reduces: four messages one after another instead of six or more.
SHORT_BYTES = 1 << 14
# The most bytes that all hosts send to the opener, with their participation lists, which have an entry for each rank:
# they pass its link one after another, and so do the results.
ALL_SHORT_BYTES = 1 << 18
AGENTS_MAX = 2  # of a host: its first ranks. Each event of a round wakes all agents of one host

# Steps of signals beside the events of `engine`.
OPEN, CLAIM, TEAM, RESULT = 252, 250, 249, 248
END = 247  # from a rank to the agents of its host: it makes no more calls

# The agents of a host tell which of its ranks make no more calls: their signals GONE and JOINED carry these ranks.
_ENDS = {host_record.GONE: GONE, host_record.JOINED: JOINED}
_LISTS = (GONE, JOINED, TEAM)  # the signals that carry ranks
_RANKS = np.dtype("<i4")


class Part(Protocol):
    """The part of a host in a round. On the runtime's loop.

    All but `arrays` take the lock of the host's memory. They raise the failure of the world if a rank of the host has
    died with that lock. `claim` and `neutral` raise UsageError if the host has no memory left for a block.
    """

    def claim(self, number: int) -> Taken | None:
        """Take what is staged for round `number`. Never waits.

        None if another agent of this host has done that, or the round is over. After any other answer this agent has to
        call `reduce` and `conclude`: no other agent of this host does.
        """

    def reduce(self) -> Coroutine[Any, Any, None]:
        """Reduce what was claimed into the blocks of its shares, together with the callers that wait.

        Raises the failure of the communicator. If it is cancelled, this agent still reduces the chunks that are left.
        """

    def until_over(self, number: int) -> Coroutine[Any, Any, None]:
        """Wait until round `number`, which another agent of this host has claimed, is over here.

        Raises the failure of the communicator. Cancelling it changes nothing.
        """

    def neutral(self) -> int:
        """A new block, whose reduction with others changes nothing. The caller keeps it, or gives it to `conclude`."""

    def arrays(self, block: int) -> Parts:
        """The parts of a contribution in `block`, not copied: one flat array for each of the operation's layout."""

    def conclude(self, outcome: Outcome) -> None:
        """The claimed round is over: publish its result on this host, and wake the callers that wait. Never waits."""


class Agent:
    """The signals and rounds of one operation at one agent. On the runtime's loop."""

    def __init__(
        self,
        port: Port,
        operation: Operation,
        hosts: Hosts,
        record: HostRecord,
        part: Part,
        describe: Callable[[], str],
    ) -> None:
        """`describe` gives the operation and its first call, for errors and for the report of a deadlock."""
        self._port = port
        self._operation = operation
        self._hosts = hosts
        self._record = record
        self._part = part
        self._describe = describe
        self._size = port.group.size
        self._agents = [hosts.first_ranks(host, AGENTS_MAX) for host in range(len(hosts.ranks))]  # by host
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._is_short = _goes_through_opener(operation, self._size, len(hosts.ranks))
        self._early: dict[int, list[tuple[int, int, Buffer]]] = {}  # signals by round: (rank, step, payload)
        self._answer: asyncio.Future[Buffer] | None = None  # gets what answers the claim of this agent
        self._arm(1)

    def _arm(self, number: int) -> None:
        """Round `number` is the next one."""
        self._next = CoordinatedRound(self._operation, number, self._size, self._port.group.rank)
        self._told_ends: tuple[int, ...] = ()  # those of this host that the agents of the round's host were told
        self._is_opener = False
        # At the opener, by host: the agent that takes part, and what has come with its claim.
        self._claims: dict[int, tuple[int, Buffer]] = {}
        for old in [each for each in self._early if each < number]:
            del self._early[old]  # these signals came too late, and have no effect any more

    # -- signals ----------------------------------------------------------------------------------

    def received(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """A signal of group rank `rank`. One for a round that is over has no effect any more.

        Its fields are untrusted; raises ProtocolError.
        """
        if step != END:
            self._check(rank, number, step, payload)
            if number > self._record.latest:
                self._early.setdefault(number, []).append((rank, step, payload))
        self.look()

    def _check(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """Raise ProtocolError if no such signal exists."""
        if number > self._record.latest + 2:
            raise ProtocolError(f"a signal for round {number} of {self._operation} long before that round")
        if not self._may_send(rank, number, step) or not self._may_carry(rank, step, payload):
            raise ProtocolError(f"signal {step} for round {number} of {self._operation} has no meaning here")

    def _may_send(self, rank: int, number: int, step: int) -> bool:
        leads = self._leading_host(number)
        if step in (OPEN, TEAM, RESULT):
            return rank in self._agents[leads]
        if step == CLAIM:
            return leads == self._hosts.mine and rank in self._agents[self._hosts.host(rank)]
        return leads == self._hosts.mine and step in (ARRIVED, LATE, GONE, JOINED)

    def _may_carry(self, rank: int, step: int, payload: Buffer) -> bool:
        if self._is_short and step in (CLAIM, RESULT):
            return len(payload) == sum([array.nbytes for array in self._empty_arrays()])
        if step not in _LISTS:
            return step != RESULT and not len(payload)
        if not len(payload) or len(payload) % _RANKS.itemsize:
            return False
        ranks = _ranks(payload)
        if step == TEAM:
            return not self._is_short and len(ranks) == len(self._agents) and all(map(contains, self._agents, ranks))
        return set(ranks) <= set(self._hosts.ranks[self._hosts.host(rank)])

    def look(self) -> None:
        """Act on all that has come for the next round, and on what the memory of the host tells."""
        record = self._record
        while not record.is_over():
            number = record.latest + 1
            if number != self._next.number:
                self._arm(number)
            self._note_ends()
            if not (signals := self._early.get(number)):
                return
            self._handle(*signals.pop(0))

    def _note_ends(self) -> None:
        """Note which ranks make no more calls: those that the last round has told of, and those of this host."""
        record, number = self._record, self._next.number
        with record.control_block:
            ends, known = record.ends(), record.known_ends()
        if ends == self._told_ends:
            return
        is_first, self._told_ends = not self._told_ends, ends
        leads = self._leading_host(number)
        if is_first and leads == self._hosts.mine:
            self._note({rank: _ENDS[end] for rank, end in enumerate(known) if end})
        for end, event in _ENDS.items():
            new = [rank for rank, its in zip(self._hosts.here, ends, strict=True) if its == end != known[rank]]
            if new:
                self._send(self._agents[leads], event, new)

    def _handle(self, rank: int, step: int, payload: Buffer) -> None:
        if step == OPEN:
            self._port.spawn(self._take_part(self._next.number, rank))
        elif step == CLAIM:
            self._claims[self._hosts.host(rank)] = rank, payload
            if self._is_opener and len(self._claims) == len(self._agents):
                self._answer_claims([claim for _, claim in sorted(self._claims.items())])
        elif step in (TEAM, RESULT):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(payload)
        else:
            self._note(dict.fromkeys(_ranks(payload) or [rank], step))

    def _answer_claims(self, claims: Sequence[tuple[int, Buffer]]) -> None:
        """All hosts take part, by these claims in the order of hosts."""
        team, payloads = [agent for agent, _ in claims], [payload for _, payload in claims]
        step, answer = (RESULT, self._sum(payloads)) if self._is_short else (TEAM, _list(team))
        for agent in team:
            self._port.send(agent, self._next.number, step, answer)

    def _sum(self, payloads: Sequence[Buffer]) -> bytes:
        """The reduction of short contributions, and their participation list."""
        total, other = self._empty_arrays(), self._empty_arrays()
        unpack(payloads[0], total)
        for payload in payloads[1:]:
            unpack(payload, other)
            np.maximum(total[0], other[0], out=total[0])  # each host has filled in the columns of its own ranks
            for combine, mine, its in zip(self._combines, total[1:], other[1:], strict=True):
                combine(mine, its)
        return packed(total)

    def _note(self, events: dict[int, int]) -> None:
        """These events have come, by rank, for a round that the agents of this host open."""
        if not [begin for rank, event in events.items() for begin in self._next.signalled(rank, event)]:
            return
        with self._record.control_block:
            self._is_opener = self._record.open_for_all(self._next.number)
        if self._is_opener:
            self._send([agent for agents in self._agents for agent in agents], OPEN)

    def _send(self, dests: Sequence[int], step: int, ranks: Sequence[int] = ()) -> None:
        for dest in dests:
            self._port.send(dest, self._next.number, step, _list(ranks))

    def _leading_host(self, number: int) -> int:
        """The host whose agents open round `number`."""
        return self._hosts.host(self._operation.first_drawn(number, self._size))

    # -- a round ----------------------------------------------------------------------------------

    async def _take_part(self, number: int, opener: int) -> None:
        """Round `number` is open: take part in it for this host, or wait until another agent has done so.

        Raises the failure of the communicator. A claimed round is cancelled only with the world: the host would be in
        it for ever.
        """
        port = self._port
        taken = self._part.claim(number)
        if taken is None:
            await self._part.until_over(number)
            self.look()
            return
        participation = self._sign(taken)
        way = self._through_opener if self._is_short else self._among_agents
        with port.watch(f"{self._text(number)}: the agents of the other hosts") as self._answer:
            shares = await way(number, opener, taken, participation, self._answer)
        self._answer = None
        self._part.conclude(self._outcome(shares, participation))
        self.look()

    async def _through_opener(
        self, number: int, opener: int, taken: Taken, participation: Array, answer: asyncio.Future[Buffer]
    ) -> list[Share]:
        """The contribution travels with the claim, and the result with the answer. Fills in `participation`."""
        await self._part.reduce()
        (share,) = taken.shares
        block = share.block if share.block != NONE else self._part.neutral()
        arrays = [participation, *self._part.arrays(block)]
        self._port.send(opener, number, CLAIM, packed(arrays))
        unpack(await answer, arrays)
        return [share._replace(block=block)]

    async def _among_agents(
        self, number: int, opener: int, taken: Taken, participation: Array, answer: asyncio.Future[Buffer]
    ) -> list[Share]:
        """The agents that the answer tells of reduce between hosts. Fills in `participation`."""
        self._port.send(opener, number, CLAIM)
        await self._part.reduce()
        team = _ranks(await answer)
        # One group after another, in the same order on all hosts, so that each finds the others in the same group.
        return [await self._exchange(number, share, team, participation) for share in taken.shares]

    async def _exchange(self, number: int, share: Share, team: Sequence[int], participation: Array) -> Share:
        """Reduce `share` between the hosts of its group. Returns it with the result, and fills in `participation`."""
        hosts = sorted({self._hosts.host(rank) for rank in share.members})
        if len(hosts) == 1:
            return share
        block = share.block if share.block != NONE else self._part.neutral()
        group = self._port.group.subset(tuple([team[host] for host in hosts]))
        lane_number = number * self._size + share.members[0]  # groups of one round share agents
        with self._port.lane(group, lane_number, partial(self._text, number), participation) as lane:
            for part, combine in zip(self._part.arrays(block), self._combines, strict=True):
                await on_lane.allreduce(lane, part, combine)
        return share._replace(block=block)

    def _text(self, number: int) -> str:
        return f"round {number} of {self._describe()}"

    def _empty_arrays(self) -> list[Array]:
        """Arrays for a participation list and a contribution."""
        return [
            self._blank_list().reshape(-1),
            *(np.empty(count, storage(dtype)) for dtype, count in self._operation.layout),
        ]

    def _blank_list(self) -> Array:
        # Totals, because in groups a host is not told of every round of the ranks of other hosts.
        return tally.blank(self._size, weighted=self._operation.weighted, totals=True)

    def _sign(self, taken: Taken) -> Array:
        """The participation list of this host: the columns of its ranks are filled."""
        participation = self._blank_list()
        here = list(self._hosts.here)
        for share in taken.shares:
            participation[tally.PRESENT, list(share.contributors)] = 1
            if self._operation.weighted and share.contributors:
                participation[tally.WEIGHT, share.contributors[0]] = share.weight
        participation[tally.GONE, here] = taken.ends
        participation[tally.TIMES_S, here] = taken.times_s
        return participation.reshape(-1)

    def _outcome(self, shares: Sequence[Share], participation: Array) -> Outcome:
        """The outcome of a round whose groups have these results, and this list."""
        rows = participation.reshape(-1, self._size)
        ends = tuple(rows[tally.GONE].astype(int).tolist())
        told = [self._told(share, rows) for share in shares]
        return Outcome(tuple(told), ends, rows[tally.TIMES_S])

    def _told(self, share: Share, rows: Array) -> Share:
        """`share` with the contributors of all hosts."""
        contributors = tuple([rank for rank in share.members if rows[tally.PRESENT, rank]])
        weight = float(rows[tally.WEIGHT, list(share.members)].sum()) if self._operation.weighted else 0.0
        return share._replace(contributors=contributors, weight=weight)


def _goes_through_opener(operation: Operation, ranks: int, hosts: int) -> bool:
    together = hosts * (operation.nbytes + ranks * tally.PARTICIPATION_BYTES)
    return not operation.group_size and operation.nbytes <= SHORT_BYTES and together <= ALL_SHORT_BYTES


def _list(ranks: Sequence[int]) -> bytes:
    return np.array(ranks, _RANKS).tobytes()


def _ranks(payload: Buffer) -> list[int]:
    ranks: list[int] = np.frombuffer(payload, _RANKS).tolist()
    return ranks
