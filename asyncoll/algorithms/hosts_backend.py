"""The backend of ranks on several hosts, some of which share a host: dense calls and rounds on two levels.

RPC passes through memory between the ranks of a host. Point to point goes by message, among the ranks of a host, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.dense.two_level import EXCHANGES, TwoLevelCall
from asyncoll.algorithms.host_operations import HostMemory, HostOperations
from asyncoll.algorithms.memory_backend import MemoryBackend
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.rounds.announced import AnnouncedOperations
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.hosts_carrier import HostsCarrier
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.transport import Arena


class HostsBackend(MessageBackend):
    """The `Backend` on two levels."""

    def __init__(self, member: Member, hosts: Hosts, common: Arena | None) -> None:
        """`common` is this rank's arena if every rank has one: then rounds meet in the memory of each host."""
        self._hosts = hosts
        self._host = member.among(hosts.here)
        arena = member.endpoint.arena
        self._rounds = HostMemory(self._host, common) if common is not None else None
        super().__init__(member)
        self._team = member.among(hosts.team) if hosts.is_leader else None
        has_neighbours = len(hosts.here) > 1
        self._memory = MemoryBackend(self._host, arena) if arena is not None and has_neighbours else None
        self._between = [digest(member.communicator, "between hosts", lane) for lane in range(EXCHANGES)]
        self._within = digest(member.communicator, "within a host")

    def _operations(self) -> AnnouncedOperations:
        if self._rounds is None:
            return super()._operations()
        return HostOperations(self._member, self.operations, self._hosts, self._rounds)

    def collectives(self, call: Call[Any]) -> Collectives:
        whole, between, memory = super().collectives(call), self._between_hosts(call.signature), self._memory
        if memory is None:
            within = MessageCall(self._host, call.signature, self._within)
            return TwoLevelCall(self._hosts, whole, within, lambda work: work, between)
        # In memory a coroutine awaits conditions only, and the runtime's loop drives those of futures.
        drive = partial(memory.here, describe=call.signature.__str__)
        return TwoLevelCall(self._hosts, whole, memory.collectives_of(call.signature), drive, between)

    def _between_hosts(self, call: Signature) -> list[MessageCall]:
        """The lanes of the leaders of this rank's place; none if this rank is no leader."""
        if self._team is None:
            return []
        return [MessageCall(self._team, call, context) for context in self._between]

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        far = super().carrier(broken)
        if self._memory is None:
            return far
        return HostsCarrier(self._memory.carrier(broken), self._host.group.ranks, far)

    # -- the end, as of `runtime.lifetime.CommunicatorPart` ---------------------------------------------------

    def retire(self) -> None:
        # First: the ports tell other ranks to look there.
        for part in self._in_memory():
            part.retire()
        super().retire()

    def is_idle(self, wake: Callable[[], None]) -> bool:
        return self._memory is None or self._memory.is_idle(wake)

    def finished(self) -> None:
        for part in self._in_memory():
            part.finished()

    def forget(self) -> None:
        for part in self._in_memory():
            part.forget()
        self._host.forget()

    def _in_memory(self) -> list[MemoryBackend | HostMemory]:
        return [part for part in (self._rounds, self._memory) if part is not None]
