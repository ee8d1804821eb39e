"""The operations of a communicator on several hosts at one rank: their announcement, and the memory of their rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from asyncoll.algorithms.rounds.activation import edges
from asyncoll.algorithms.rounds.agent_signals import AGENTS
from asyncoll.algorithms.rounds.announced import AnnouncedOperations
from asyncoll.algorithms.rounds.directory import Directory
from asyncoll.algorithms.rounds.host_rounds import HostRounds
from asyncoll.algorithms.rounds.one_sided import Setting
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_record import Memory
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.member import Member
from asyncoll.runtime.port import Port
from asyncoll.runtime.shared_work import SharedWork
from asyncoll.transport import Arena
from asyncoll.transport.lease import Lease

T = TypeVar("T")


class HostMemory:
    """The memory in which the rounds of one communicator meet on one host, at one rank. A part of its `Lifetime`."""

    def __init__(self, host: Member, arena: Arena) -> None:
        """`host` is this rank as a member of the ranks of its host."""
        self._host = host
        self._lease = Lease(arena)
        group = host.group
        context = digest(group.communicator, "rounds between hosts")
        self._registry = OperationRegistry(cast(Arena, self._lease), group.size, group.rank, context)
        host.at_failure(self._registry.close)
        self._give_back: Callable[[], None] | None = None  # the memory of the lease, once it has ended
        host.endpoint.at_depart.append(self._registry.depart)

    def rounds(self, port: Port, operation: Operation, hosts: Hosts, describe: Callable[[], str]) -> HostRounds:
        """The rounds of `operation` at this rank. On the runtime's loop; never waits.

        `describe` gives the operation and its first call, for errors and for the report of a deadlock. Raises
        UsageError if the communicator has too many operations, or the host has no memory left for another; and the
        failure of the world if a rank of this host has died with the lock of its memory.
        """
        arena, endpoint = cast(Arena, self._lease), self._host.endpoint
        memory = Memory(arena, self._registry, self._host.group)
        setting = Setting(memory, describe, port.trace, lambda: bool(endpoint.membership.lost))

        def drive(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
            # Raises what `work` raises. A cancellation and a failure are thrown into it, where it waits (`SharedWork`).
            return SharedWork(arena, work, self._host.check, describe).finish()

        return HostRounds(setting, operation, port, hosts, drive)

    def retire(self) -> None:
        # A rank has died in a critical section: the world has failed.
        with contextlib.suppress(AsyncollError):
            self._registry.depart()

    def finished(self) -> None:
        self._host.endpoint.at_depart.remove(self._registry.depart)
        self._give_back = self._lease.end()

    def forget(self) -> None:
        assert self._give_back is not None
        self._give_back()


class HostOperations(AnnouncedOperations):
    """A rank announces an operation to the agents of its host, and these announce it to those of other hosts.

    Another rank finds what it needs in the memory of its host when it comes.
    """

    def __init__(self, member: Member, directory: Directory, hosts: Hosts, memory: HostMemory) -> None:
        self._hosts = hosts
        self._memory = memory
        # Last: it handles the announcements that have come already.
        super().__init__(member, directory)

    def _told(self, operation: Operation) -> list[int]:
        del operation
        hosts = self._hosts
        told = [hosts.mine]
        if hosts.place < AGENTS:
            told += [(hosts.mine + (1 << edge)) % len(hosts.ranks) for edge in edges(len(hosts.ranks))]
        agents = [agent for host in told for agent in hosts.first_ranks(host, AGENTS)]
        return [agent for agent in agents if agent != self._member.group.rank]

    def _make(self, port: Port, operation: Operation, describe: Callable[[], str]) -> HostRounds:
        return self._memory.rounds(port, operation, self._hosts, describe)
