"""The parts of one communicator at one rank: everything behind the public `Communicator`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from asyncoll.algorithms.calls import Calls
from asyncoll.algorithms.choice import choose_backend
from asyncoll.algorithms.hosts_backend import HostsBackend
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.messages import Messages
from asyncoll.algorithms.rounds.descriptions import Descriptions
from asyncoll.algorithms.rounds.directory import RoundsBackend
from asyncoll.algorithms.rounds.operations import Operations
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.sparse.sparse_operations import SparseOperations
from asyncoll.algorithms.totals import Statistics
from asyncoll.arguments import digest
from asyncoll.errors import DeadlineError, Reason, UsageError
from asyncoll.rpc.ranks import Rpc
from asyncoll.rpc.service import FunctionRegistry
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.group import Group
from asyncoll.runtime.lifetime import Lifetime
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCalls
from asyncoll.runtime.signature import END, Site
from asyncoll.statistics import Traffic
from asyncoll.tensors.registered import RegisteredMemory, SharedMemory
from asyncoll.transport.staging.opening import open_stager

ChooseBackend = Callable[[Member], RoundsBackend]


class Family:
    """What all communicators of one rank in one epoch share: that of the world, and those split from it."""

    def __init__(self) -> None:
        self.rpcs: list[Rpc] = []  # of all communicators: they close with the world
        self._memories: list[tuple[SharedMemory | None, RegisteredMemory]] = []

    def memory_of(self, arena: SharedMemory | None, rank: int) -> RegisteredMemory:
        """The registered memory in `arena` of this rank of the world.

        Its tensors may outlive the communicator that has made them.
        """
        for known, memory in self._memories:
            if known is arena:
                return memory
        self._memories.append((arena, RegisteredMemory(arena, open_stager, f"rank {rank}")))
        return self._memories[-1][1]


class Core:
    """The parts of a communicator, put together."""

    def __init__(
        self,
        member: Member,
        choose: ChooseBackend = choose_backend,
        family: Family | None = None,
        *,
        keeps_messages: bool = True,
    ) -> None:
        """`choose` selects the backend. A communicator that is split from another one shares its `family`.

        `keeps_messages`: sends and receives under way may be waited for after `close`.
        """
        self.member = member
        self.family = family or Family()
        self.rpcs = self.family.rpcs
        self._choose = choose
        self.backend = choose(member)
        self.pending = pending = PendingCalls(member.endpoint, member.group, member.post)
        self.memory = self.family.memory_of(self.backend.memory, member.endpoint.rank)
        self.calls = calls = Calls(member, self.backend, pending, self.memory)
        self.messages = Messages(member, calls)
        self.operations = Operations(member, self.backend, pending)
        self.sparse = SparseOperations()
        self.descriptions = Descriptions(member.group)
        self._rpc: Rpc | None = None
        self._by_message: Core | None = None  # as of `for_rounds_over_deaths`
        self._later: Core | None = None  # the same communicator in a later epoch
        self._origin = member.communicator  # its number in the epoch in which `split` has made it
        self.lifetime = Lifetime(
            member,
            pending,
            self.backend,
            lambda: calls.last,
            is_world=family is None,
            keeps_messages=keeps_messages,
        )

    def __del__(self) -> None:
        # An exception may have ended `__init__` before it was made.
        if hasattr(self, "lifetime"):
            self.lifetime.drop(self.calls.check_started)

    @property
    def rpc(self) -> Rpc:
        """The RPC of this communicator. From its first use on this rank answers calls of its functions."""
        return self._rpc or self._open_rpc()

    def _open_rpc(self, registry: FunctionRegistry | None = None) -> Rpc:
        """The RPC, made now if there is none, with the functions of `registry`.

        Raises UsageError in a forked child, and in a thread without a running loop.
        """
        self.member.endpoint.check_not_forked()
        if self._rpc is None:
            self.member.check_caller()
            self.lifetime.serves = True  # the other ranks may call functions of this one until the world ends
            self._rpc = Rpc(self.member, self.backend.carrier, self.backend.device_route, registry)
            self.rpcs.append(self._rpc)
        return self._rpc

    def statistics(self) -> Statistics:
        """The counts of this rank and of this communicator. Raises UsageError in a forked child."""
        self.member.endpoint.check_not_forked()
        calls = self.calls.ledger.totals()  # read first: calls end on other threads, and the totals must not be less
        endpoint = self.member.endpoint
        traffic = Traffic.total([endpoint.traffic, *endpoint.in_memory.totals().values()])
        return Statistics(
            rank=self.member.group.rank,
            messages_sent=traffic.messages_sent,
            messages_received=traffic.messages_received,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            operations=self.operations.statistics(),
            calls=calls,
        )

    def leave(self, site: Site) -> Coroutine[Any, Any, None]:
        """Start a barrier as the last call of this rank. `site` is shown in errors."""
        call = self.calls.number(END, "", -1, "", site)
        return self.calls.start(Call(call, lambda collectives: collectives.barrier()))

    def split(self, group: Group, *, keeps_messages: bool = True) -> Core:
        """The parts of a new communicator of the ranks in `group`, with the same choice of backend.

        This rank leaves it when they are garbage. `keeps_messages`: sends and receives under way may be waited for
        after `close`.
        """
        member = Member(self.member.endpoint, group, self.member.runner)
        return Core(member, self._choose, self.family, keeps_messages=keeps_messages)

    def for_rounds_over_deaths(self) -> Core:
        """A communicator of the same ranks whose rounds tell survivors of a death what is in them.

        Rounds between hosts that meet in the memory of each do not.
        """
        if not isinstance(self.backend, HostsBackend):
            return self
        if self._by_message is None:
            group = self.member.group
            context = digest(self.member.communicator, "by message")
            group = Group(group.ranks, group.rank, context, epoch=group.epoch)
            member = Member(self.member.endpoint, group, self.member.runner)
            self._by_message = Core(member, MessageBackend, self.family)
        return self._by_message

    @property
    def waiting(self) -> int:
        """The number of newcomers that this rank is connected to. From now on the coordinator looks for them."""
        self.member.check_open()
        succession = self.member.succession("waiting")
        self.member.post(succession.watch)
        return succession.linked

    async def next_epoch(self, what: str, *, grows: bool = False) -> Core:
        """The parts of this communicator in the next epoch, which `what` asks for. For a task on the program's loop."""
        self.member.check_caller()
        limit_s = min(self.member.endpoint.patience_s, remaining_s() or math.inf)
        world = await self.member.runner.within(self._next_world(what, limit_s, grows=grows))
        later = self._later
        if later is None or later.member.group.epoch != world.member.group.epoch:  # else it was asked for before
            later = world if self.lifetime.is_world else world.split(self._group_in(world.member))
            self._later, later._origin = later, self._origin
        if self._rpc is not None and later._rpc is None:
            later._open_rpc(self._rpc.registry)
        return later

    async def _next_world(self, what: str, limit_s: float, *, grows: bool) -> Core:
        """On the runtime's loop: the communicator of all ranks in the next epoch."""
        endpoint = self.member.endpoint
        succession = self.member.succession(what)
        try:
            async with asyncio.timeout(limit_s if limit_s < math.inf else None):
                world: Core = await succession.next(self.member.group.epoch, grows=grows)
        except TimeoutError:
            absent, numbers = succession.absent(), endpoint.membership.numbers
            missing = tuple(numbers[rank] for rank in absent)
            names = " and ".join(map(endpoint.membership.name, absent)) or "the store of epochs"
            waited = f"{what} is not over after {max(limit_s, 0):g} s, and waits for {names}"
            raise DeadlineError(f"{waited}: all ranks that live must call it", (), missing) from None
        return world

    def _group_in(self, world: Member) -> Group:
        """The members of this communicator that live in the epoch of `world`, in the same order."""
        before, now = self.member.endpoint.membership.numbers, world.endpoint.membership.numbers
        ranks = tuple(now.index(before[rank]) for rank in self.member.group.ranks if before[rank] in now)
        context = digest(self._origin, "shrink", world.group.epoch)
        return Group(ranks, ranks.index(world.group.rank), context, epoch=world.group.epoch)

    def close(self, error: Reason | None = None) -> None:
        """Make no more calls. In any thread. Raises UsageError for the communicator of the world.

        With an `error`, calls under way end with it, and the other ranks are told of it.
        """
        self.member.endpoint.check_not_forked()
        if self.lifetime.is_world:
            raise UsageError(
                "the communicator of all ranks closes with the world: `close` is for those made by `split`"
            )
        if not self.member.endpoint.closed:
            self.lifetime.close(error)
