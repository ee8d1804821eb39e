"""Rounds of ranks on several hosts: one-sided on each host, and by message between one rank of each, its agent.

A rank stages its contribution in the memory of its host, tells the agents of one host that it has arrived (`agent`),
and waits in memory. An agent takes what is staged on its host, without asking. So a rank that computes delays nobody,
and what it has staged is used. If a process is stopped, another agent of its host does its part (`agent`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asyncoll.algorithms.rounds.agent import Agent
from asyncoll.algorithms.rounds.agent_signals import AGENTS, END
from asyncoll.algorithms.rounds.engine import LATE, Delivery, Parts, Result
from asyncoll.algorithms.rounds.host_record import HostRecord, RoundOutcome, Taken
from asyncoll.algorithms.rounds.one_sided import OneSidedCall, OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.round_cells import NONE
from asyncoll.algorithms.rounds.round_record import RoundRecord
from asyncoll.algorithms.rounds.wait_avoiding import Contribution
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import fill_neutral
from asyncoll.transport.control_block import until

T = TypeVar("T")
Drive = Callable[[Coroutine[Any, Any, T]], Coroutine[Any, Any, T]]


class HostRounds(OneSidedRounds):
    """A persistent operation at one rank. On the runtime's loop."""

    _rounds: HostRecord

    def __init__(self, setting: Setting, operation: Operation, port: Port, hosts: Hosts, drive: Drive[Any]) -> None:
        """Raises UsageError if the communicator has too many operations, or the host has no memory left for another.

        `drive` drives a coroutine in memory on the runtime's loop. What it returns raises what the coroutine raises. It
        throws a cancellation, and the failure of the communicator, into the coroutine where that waits.
        """
        self._port = port
        self._hosts = hosts
        self._drive = drive
        self._newest: Result | None = None  # of the results that calls were given
        self._told = 0  # the newest round of which this rank has told that it has arrived
        super().__init__(setting, operation)
        self._rank, self._size = port.group.rank, port.group.size
        self._all_ranks = tuple(range(port.group.size))
        self._agent = Agent(port, operation, hosts, self._rounds, self, self.describe)

    def serve(self) -> None:
        self._port.open(self._agent.received, self._ended)
        if self._hosts.place < AGENTS:
            # Ranks of this host may have left before.
            self._agent.look()

    def _record(self) -> RoundRecord:
        return HostRecord(self._memory, self.operation, self._layout, self._reduce_blocks, self._trace, self._hosts)

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, contribution: Contribution) -> Delivery:
        delivery: Delivery = await self._drive(super().call(contribution))
        self._newest = delivery.results[-1]
        return delivery

    def last_round(self, rank: int) -> int:
        if rank in self._hosts.here:
            return super().last_round(self._hosts.here.index(rank))
        return self._newest.number if self._newest is not None and rank in self._newest.ranks else 0

    async def join(self) -> Delivery | None:
        delivery: Delivery | None = await self._drive(super().join())
        return delivery

    def _mark_joined(self) -> None:
        super()._mark_joined()
        self._port.post(self._ended)

    def _come(self, call: OneSidedCall) -> int:
        missing, number = super()._come(call), call.number
        if not number and self.operation.rule.drawn:
            self._port.post(lambda: self._agent.tell(self._rounds.latest + 1, LATE))
        elif number > self._told and call.kept is None:
            self._told = number
            self._port.post(lambda: self._agent.arrived(number))
        return missing

    # -- signals ----------------------------------------------------------------------------------

    def _ended(self) -> None:
        """This rank makes no more calls, and the memory of the host says so: make its agents look."""
        for agent in self._hosts.first_ranks(self._hosts.mine, AGENTS):
            self._port.send(agent, 0, END)

    # -- the part of the host, for its agent: as of `attempt.HostPart` -----------------------------------

    def claim(self, number: int, attempt: int) -> Taken | None:
        rounds = self._rounds
        rounds.sections(number)  # computed once, here: others wait for the lock
        while True:
            with self._control_block:
                needed = rounds.blocks_needed(number)
                taken = None if needed else rounds.take(number, attempt, self._now_ns())
            if not needed:
                return taken
            rounds.blocks.provide(needed)

    def reduce(self, number: int) -> Coroutine[Any, Any, None]:
        return self._drive(self._reduce_taken(number))

    async def _reduce_taken(self, number: int) -> None:
        await self._help(number)
        await until(self._control_block, lambda: self._rounds.is_reduced(number))

    def until_over(self, number: int) -> Coroutine[Any, Any, None]:
        return self._drive(self._until_over(number))

    async def _until_over(self, number: int) -> None:
        await until(self._control_block, lambda: self._rounds.running != number)

    def copied(self, block: int) -> int:
        copy, _ = self._new_block()
        if block == NONE:
            for part, (dtype, _) in zip(self.arrays(copy), self.operation.layout, strict=True):
                fill_neutral(part, self.operation.op, dtype)
        else:
            for part, its in zip(self.arrays(copy), self.arrays(block), strict=True):
                part[:] = its
            self.drop([block])
        return copy

    def arrays(self, block: int) -> Parts:
        return self._parts(self._rounds.blocks.address(block))

    def drop(self, blocks: Sequence[int]) -> None:
        self._drop(blocks)

    def recheck(self) -> None:
        self.arena.recheck()

    def conclude(self, number: int, outcome: RoundOutcome) -> None:
        with self._control_block:
            self._rounds.conclude(number, outcome)
