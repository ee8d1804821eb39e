"""Rounds of ranks on several hosts: one-sided on each host, and by message between one rank of each, its agent.

A rank stages its contribution in the memory of its host, tells the agents of one host that it has arrived (`agent`),
and waits in memory. An agent takes what is staged on its host, without asking. So a rank that computes delays nobody,
and what it has staged is used. A process that is stopped between two rounds delays nobody either, as long as one agent
of its host runs. In the middle of a round it may be the one that carries the round out (`agent`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncoll.algorithms.rounds.agent import AGENTS_MAX, END, Agent
from asyncoll.algorithms.rounds.engine import ARRIVED, LATE
from asyncoll.algorithms.rounds.host_record import HostRecord, Outcome, Taken
from asyncoll.algorithms.rounds.in_memory import Call, OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_record import RoundRecord
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Delivery, Parts
from asyncoll.errors import ProtocolError
from asyncoll.runtime.group import Group
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import fill_neutral
from asyncoll.transport import Arena
from asyncoll.transport.control_block import until
from asyncoll.transport.wire import Buffer

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
        self._told = 0  # the newest round of which this rank has told that it has arrived
        super().__init__(setting, operation)
        self._rank, self._size = port.group.rank, port.group.size
        self._all_ranks = tuple(range(port.group.size))
        is_agent = hosts.place < AGENTS_MAX
        self._agent = Agent(port, operation, hosts, self._rounds, self, self.describe) if is_agent else None
        port.open(self._received, self._ended)
        if self._agent is not None:
            self._agent.look()  # ranks of this host may have left before

    def _record(self, arena: Arena, registry: OperationRegistry, group: Group) -> RoundRecord:
        here, ranks = self._hosts.here, self._port.group.size
        parts = self.operation, self._layout, self._reduce_blocks
        return HostRecord(arena, registry, group, *parts, here=here, ranks=ranks)

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, contribution: Contribution) -> Delivery:
        delivery: Delivery = await self._drive(super().call(contribution))
        return delivery

    async def join(self) -> Delivery | None:
        delivery: Delivery | None = await self._drive(super().join())
        return delivery

    def _mark_joined(self) -> None:
        super()._mark_joined()
        self._port.post(self._ended)

    def _come(self, call: Call) -> int:
        missing, number = super()._come(call), call.number
        if not number and self.operation.opening is Opening.MAJORITY:
            self._port.post(lambda: self._tell(self._rounds.latest + 1, LATE))
        elif number > self._told and call.kept is None:
            self._told = number
            self._port.post(lambda: self._tell(number, ARRIVED))
        return missing

    # -- signals ----------------------------------------------------------------------------------

    def _tell(self, number: int, event: int) -> None:
        """Tell the agents that open round `number` of this event."""
        host = self._hosts.host(self.operation.first_drawn(number, self._port.group.size))
        for agent in self._hosts.first_ranks(host, AGENTS_MAX):
            self._port.send(agent, number, event)

    def _ended(self) -> None:
        """This rank makes no more calls, and the memory of the host says so: make its agents look."""
        for agent in self._hosts.first_ranks(self._hosts.mine, AGENTS_MAX):
            self._port.send(agent, 0, END)

    def _received(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        if self._agent is None:
            raise ProtocolError(f"signal {step} of {self.operation} is for agents, and this rank is none")
        self._agent.received(rank, number, step, payload)

    # -- the part of the host, for its agent: as of `agent.Part` -----------------------------------

    def claim(self, number: int) -> Taken | None:
        rounds = self._rounds
        while True:
            with self._control_block:
                needed = rounds.blocks_needed(number)
                taken = None if needed else rounds.take(number, self._now_ns())
            if not needed:
                return taken
            rounds.blocks.provide(needed)

    def reduce(self) -> Coroutine[Any, Any, None]:
        return self._drive(self._reduce_taken())

    async def _reduce_taken(self) -> None:
        rounds = self._rounds
        with self._control_block:
            running, work = rounds.running, rounds.work() if rounds.is_help_wanted() else []
        await self._help(running, work)
        await until(self._control_block, rounds.is_reduced)

    def until_over(self, number: int) -> Coroutine[Any, Any, None]:
        return self._drive(self._until_over(number))

    async def _until_over(self, number: int) -> None:
        await until(self._control_block, lambda: self._rounds.running != number)

    def neutral(self) -> int:
        block, _ = self._new_block()
        for part, (dtype, _) in zip(self.arrays(block), self.operation.layout, strict=True):
            fill_neutral(part, self.operation.op, dtype)
        return block

    def arrays(self, block: int) -> Parts:
        return self._parts(self._rounds.blocks.address(block))

    def conclude(self, outcome: Outcome) -> None:
        with self._control_block:
            self._rounds.conclude(outcome)
