"""The ranks of a host take part for it in the rounds between hosts: its agents, and others in their place.

The agents of a host are its first two ranks. Both are told the same, and the first that runs acts; the memory of the
host says what is done already. So an agent whose process is stopped between two rounds delays nobody. A round takes
these signals:

1. Every rank tells the agents of the round's host that it has arrived, or makes no more calls. That is the host of a
   rank that is drawn for the round. Its agents count ranks, not hosts.
2. The first of them that finds the round open, by the rule of the operation, is its opener. It tells all agents (OPEN).
3. The first agent of each host takes what is staged there, and tells the opener that it takes part (CLAIM). It reduces
   that, together with the callers that wait on its host.
4. The opener tells those agents of each other (TEAM), and they reduce between hosts. A short contribution comes with
   the claim: the opener reduces, and sends them the result (RESULT).
5. They publish the result on their hosts. The other agents of a host wait for that in its memory, and then look for the
   next round.

Steps 2 to 5 are an attempt. Each agent watches those that it waits for (`watch`): it asks them now and then (ASK). If
one does not answer (HERE), the agents of the round's host are told so (AGAIN), and one of them begins the next attempt
with step 2. That is told to twice as many ranks of each host, which then act as agents do. The callers, too, tell
further ranks of the round's host if the round does not begin (`reminder`). In each attempt the hosts give the same
(`attempts`), so the result has the same bits, and the first attempt that is over on a host counts there. The opener of
an attempt answers each claim once: TEAM, RESULT, or NEVER if there is a newer attempt. So a rank that was stopped, and
goes on, carries its attempt to its end with those that have waited for it. Each reduction between hosts is in a block
of its own, so that disturbs no other attempt.

A process that stops while it reduces a chunk, or while it holds the lock of the memory, delays the round until it goes
on. These are some hundred microseconds of a round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from asyncoll.algorithms.rounds.agent_signals import (
    AGAIN,
    AGENTS,
    ASK,
    CLAIM,
    END,
    END_EVENTS,
    EVENTS,
    HERE,
    NEVER,
    OPEN,
    REMIND,
    RESULT,
    TEAM,
    WATCH,
    SignalRules,
    as_list,
    kind_of,
    ranks_of,
    step_of,
)
from asyncoll.algorithms.rounds.alarm import Alarm
from asyncoll.algorithms.rounds.attempt import Attempt, HostExchange, HostPart
from asyncoll.algorithms.rounds.engine import ARRIVED, CoordinatedRound
from asyncoll.algorithms.rounds.host_record import HostRecord
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.reminder import Reminder
from asyncoll.algorithms.rounds.watch import Situation, Watch
from asyncoll.errors import ProtocolError
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.port import Port
from asyncoll.transport.wire import Buffer

Key = tuple[int, int]  # a round, and an attempt at it


class _Opened(NamedTuple):
    """An attempt at its opener."""

    begun_s: float
    claims: dict[int, tuple[int, Buffer]]  # by host: the agent that takes part, and what has come with its claim


class Agent:
    """The signals and rounds of one operation at one agent. On the runtime's loop."""

    def __init__(
        self,
        port: Port,
        operation: Operation,
        hosts: Hosts,
        record: HostRecord,
        part: HostPart,
        describe: Callable[[], str],
    ) -> None:
        """`describe` gives the operation and its first call, for errors and for the report of a deadlock."""
        self._port = port
        self._operation = operation
        self._hosts = hosts
        self._record = record
        self._part = part
        self._size = port.group.size
        self._exchange = HostExchange(port, operation, hosts, part, describe)
        self._rules = SignalRules(hosts, self._exchange.short_bytes())
        self._watch = Watch(
            self._situation, self._ask, self._try_again, port.now_s, self._alarm(WATCH), operation.nbytes
        )
        self._reminder = Reminder(self._waits_for, self._remind, self._alarm(REMIND))
        self._early: dict[int, list[tuple[int, int, Buffer]]] = {}  # signals by round: (rank, step, payload)
        self._attempts: dict[Key, Attempt] = {}  # in which this agent takes part
        self._opened: dict[Key, _Opened] = {}  # until their claims are answered
        self._arm(1)

    def _arm(self, number: int) -> None:
        """Round `number` is the next one."""
        self._next = CoordinatedRound(self._operation, number, self._size, self._port.group.rank)
        self._told_ends: tuple[int, ...] = ()  # those of this host that the agents of the round's host were told
        for old in [each for each in self._early if each < number]:
            # These signals came too late, and have no effect any more.
            del self._early[old]
        # All hosts are done with the round before the last one.
        for key in [key for key in self._opened if key[0] < number - 1]:
            self._give_up(key)

    # -- what this rank tells ---------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """A caller of this rank has come to wait for round `number`."""
        self.tell(number, ARRIVED)
        self._reminder.begin(number)

    def tell(self, number: int, event: int) -> None:
        """Tell the agents that open round `number` of this event."""
        self._send(self._hosts.first_ranks(self._leading_host(number), AGENTS), number, event)

    def _waits_for(self, number: int) -> bool:
        """Whether round `number` is not over on this host."""
        return self._record.latest < number and not self._record.is_over()

    def _remind(self, number: int, times: int) -> None:
        """A caller waits for long: the agents of the round's host may have stopped, or one that acts in the round."""
        if self._record.running:
            self._watch.begin(self._record.latest + 1)
        else:
            told = self._hosts.first_ranks(self._leading_host(number), _told(times + 1))[_told(times) :]
            self._send(told, number, ARRIVED)

    def _alarm(self, kind: int) -> Alarm:
        """An alarm that rings by the signal `kind` to this rank: a process that is stopped does not act."""

        def ring_after(delay_s: float, serial: int) -> asyncio.TimerHandle:
            loop, me = asyncio.get_running_loop(), self._port.group.rank
            return loop.call_later(delay_s, self._port.send, me, serial, kind)

        return Alarm(ring_after)

    # -- signals ----------------------------------------------------------------------------------

    def received(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """A signal of group rank `rank`. An event of a round that is over has no effect any more.

        Its fields are untrusted; raises ProtocolError.
        """
        kind, attempt = kind_of(step)
        if rank == self._port.group.rank and step in (WATCH, REMIND):
            (self._watch if step == WATCH else self._reminder).act(number)
            self._part.recheck()
        elif step != END:
            self._check(rank, number, step, payload)
            waits = kind in EVENTS or kind == OPEN
            if waits and number > self._record.latest and not self._record.is_over():
                self._early.setdefault(number, []).append((rank, step, payload))
                if number > self._record.latest + 1:
                    # Other hosts are done with the next round, and this one is not.
                    self._watch.begin(self._record.latest + 1)
            elif kind not in EVENTS:
                self._act(rank, number, kind, attempt, payload)
        self.look()

    def _check(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """Raise ProtocolError if no such signal exists."""
        if number > self._record.latest + 2:
            raise ProtocolError(f"a signal for round {number} of {self._operation} long before that round")
        try:
            self._rules.check(rank, self._leading_host(number), step, payload)
        except ProtocolError as error:
            raise ProtocolError(f"round {number} of {self._operation}: {error}") from None

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
            rank, step, payload = signals.pop(0)
            kind, attempt = kind_of(step)
            if kind in EVENTS:
                self._note(dict.fromkeys(ranks_of(payload) or [rank], kind))
            else:
                self._act(rank, number, kind, attempt, payload)

    def _note_ends(self) -> None:
        """Note which ranks make no more calls: those that the last round has told of, and those of this host."""
        record, number = self._record, self._next.number
        # Without the lock, because END comes after a change, and this rank looks again then.
        if record.ends() == self._told_ends:
            return
        with record.control_block:
            ends, known = record.ends(), record.known_ends()
        is_first, self._told_ends = not self._told_ends, ends
        leads = self._leading_host(number)
        if is_first and leads == self._hosts.mine:
            self._note({rank: END_EVENTS[end] for rank, end in enumerate(known) if end})
        for end, event in END_EVENTS.items():
            new = [rank for rank, its in zip(self._hosts.here, ends, strict=True) if its == end != known[rank]]
            if new:
                self._send(self._hosts.first_ranks(leads, AGENTS), number, event, as_list(new))

    def _note(self, events: dict[int, int]) -> None:
        """These events have come, by rank, for a round that the agents of this host open."""
        number = self._next.number
        if not [begin for rank, event in events.items() for begin in self._next.signalled(rank, event)]:
            return
        with self._record.control_block:
            is_opener = self._record.open_for_all(number)
        if is_opener:
            self._port.trace.opened(self._operation, number)
            self._begin(number, 1)
        self._watch.begin(number)

    def _act(self, rank: int, number: int, kind: int, attempt: int, payload: Buffer) -> None:
        """A signal that is no event: it has an effect also for the last round, which may not be over elsewhere."""
        if kind == OPEN:
            self._port.spawn(self._take_part(number, attempt, rank))
            self._watch.begin(number, attempt)
        elif kind == CLAIM:
            self._claimed(rank, number, attempt, payload)
        elif kind in (TEAM, RESULT, NEVER):
            if (mine := self._attempts.get((number, attempt))) is not None:
                mine.answer(payload if kind != NEVER else None)
        elif kind == AGAIN:
            self._begin_again(number, attempt)
        elif kind == ASK:
            self._port.send(rank, number, HERE)
        elif kind == HERE:
            self._watch.heard(rank, number)

    def _send(self, dests: Sequence[int], number: int, step: int, payload: Buffer = b"") -> None:
        for dest in dests:
            self._port.send(dest, number, step, payload)

    def _leading_host(self, number: int) -> int:
        """The host whose agents open round `number`."""
        return self._hosts.host[self._operation.first_drawn(number, self._size)]

    # -- at the opener ----------------------------------------------------------------------------

    def _begin(self, number: int, attempt: int) -> None:
        """This agent is the opener of an attempt. Each attempt is told to further ranks, in place of stopped agents."""
        self._opened[number, attempt] = _Opened(self._port.now_s(), {})
        hosts = range(len(self._hosts.ranks))
        told = {rank for host in hosts for rank in self._hosts.first_ranks(host, _told(attempt))}
        self._send(sorted({self._port.group.rank, *told}), number, step_of(OPEN, attempt))

    def _begin_again(self, number: int, attempt: int) -> None:
        """An agent that acts in `attempt` does not answer any more."""
        with self._record.control_block:
            following = self._record.attempts.open_again(number, attempt)
        if following:
            self._begin(number, following)

    def _give_up(self, key: Key) -> None:
        """There is a newer attempt, or all hosts are done with the round."""
        _, claims = self._opened.pop(key)
        self._send([rank for rank, _ in claims.values()], key[0], step_of(NEVER, key[1]))

    def _claimed(self, rank: int, number: int, attempt: int, payload: Buffer) -> None:
        key = number, attempt
        if (opened := self._opened.get(key)) is None:
            self._send([rank], number, step_of(NEVER, attempt))
            return
        claims = opened.claims
        claims[self._hosts.host[rank]] = rank, payload
        if number > self._record.latest:
            self._watch.learn(rank, self._port.now_s() - opened.begun_s)
        if len(claims) < len(self._hosts.ranks):
            return
        with self._record.control_block:
            is_newest = self._record.attempts.is_newest(number, attempt)
        if is_newest:
            del self._opened[key]
            self._answer_claims(number, attempt, [claim for _, claim in sorted(claims.items())])
        else:
            self._give_up(key)

    def _answer_claims(self, number: int, attempt: int, claims: Sequence[tuple[int, Buffer]]) -> None:
        """All hosts take part, by these claims in the order of hosts."""
        team, payloads = [agent for agent, _ in claims], [payload for _, payload in claims]
        kind, answer = (RESULT, self._exchange.sum(payloads)) if self._exchange.is_short else (TEAM, as_list(team))
        self._send(team, number, step_of(kind, attempt), answer)

    # -- watching those that this agent waits for -------------------------------------------------

    def _situation(self) -> Situation:
        record = self._record
        with record.control_block:
            number = record.latest + 1
            attempt, places = (0, set()) if record.is_over() else record.attempts.in_charge(number)
        key = number, attempt
        mine = self._attempts.get(key)
        awaited = {*(self._hosts.here[place] for place in places), *(mine.awaited if mine is not None else ())}
        others = frozenset(awaited - {self._port.group.rank})
        progress = mine.traffic.messages_received if mine is not None else 0
        return Situation(*key, others, self._is_incomplete(key), progress)

    def _is_incomplete(self, key: Key) -> bool:
        """Whether this agent has begun the attempt, and waits for a host with ranks that were not told of it."""
        if (opened := self._opened.get(key)) is None:
            return False
        told = _told(key[1])
        return any(host not in opened.claims and len(ranks) > told for host, ranks in enumerate(self._hosts.ranks))

    def _ask(self, now: Situation) -> None:
        self._send(sorted(now.awaited), now.number, ASK)

    def _try_again(self, now: Situation, looks: int) -> None:
        """A rank that acts in this attempt does not answer any more: have the next attempt begun."""
        leads = self._leading_host(now.number)
        if leads == self._hosts.mine:
            self._begin_again(now.number, now.attempt)
        else:
            told = self._hosts.first_ranks(leads, _told(1 + looks))
            self._send(told, now.number, step_of(AGAIN, now.attempt))

    async def _take_part(self, number: int, attempt: int, opener: int) -> None:
        """An attempt at round `number` has begun: take part in it for this host, or wait until another agent has.

        Raises the failure of the communicator. It is cancelled only with the world.
        """
        taken = self._part.claim(number, attempt)
        if taken is None:
            await self._part.until_over(number)
        else:
            self._attempts[number, attempt] = mine = Attempt(self._exchange, number, attempt, opener)
            await mine.run(taken)
            del self._attempts[number, attempt]
        self.look()


def _told(attempt: int) -> int:
    """How many ranks of each host are told of an attempt: twice as many as of the one before."""
    return AGENTS << attempt - 1
