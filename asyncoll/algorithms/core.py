"""What one rank has of one communicator: everything behind the public `Communicator`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from asyncoll.algorithms.backend import Backend
from asyncoll.algorithms.calls import Calls
from asyncoll.algorithms.choice import choose_backend
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operations import Operations
from asyncoll.algorithms.sparse.operations import SparseOperations
from asyncoll.rpc.ranks import Rpc
from asyncoll.runtime.group import Group
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCalls
from asyncoll.runtime.signature import Site
from asyncoll.tensors.registered import RegisteredMemory

_PLANS_MAX = 1024
ChooseBackend = Callable[[Member], Backend]


class Core:
    """The parts of a communicator, put together."""

    def __init__(self, member: Member, choose: ChooseBackend = choose_backend, rpcs: list[Rpc] | None = None) -> None:
        """`rpcs` collects those of this communicator and of all that are split off: they close with the world."""
        self.member = member
        self.rpcs: list[Rpc] = [] if rpcs is None else rpcs
        self._choose = choose
        self.backend = choose(member)
        pending = PendingCalls(member.endpoint, member.group, member.post)
        self.calls = Calls(member, self.backend, pending)
        self.memory = RegisteredMemory(self.backend.memory)
        self.operations = Operations(member, self.backend, pending)
        self.sparse = SparseOperations()
        self.plans: dict[tuple[object, ...], Operation] = {}  # by the arguments of calls
        self._rpc: Rpc | None = None

    @property
    def rpc(self) -> Rpc:
        """Answers from its first use on those who call functions of this rank."""
        return self._rpc or self._open_rpc()

    def _open_rpc(self) -> Rpc:
        self.member.endpoint.check_not_forked()
        if self._rpc is None:
            self.member.check_caller()
            self._rpc = Rpc(self.member, self.backend.carrier)
            self.rpcs.append(self._rpc)
        return self._rpc

    def remember(self, arguments: tuple[object, ...], operation: Operation) -> None:
        """Calls with these arguments are calls of `operation`, which need not be checked again."""
        if len(self.plans) == _PLANS_MAX:
            self.plans.clear()
        self.plans[arguments] = operation

    def leave(self, site: Site) -> Coroutine[Any, Any, None]:
        """A barrier as the last call of this rank; `site` is shown in errors."""
        call = self.calls.number("the end of its program", "", -1, "", site)
        return self.calls.start(call, lambda collectives: collectives.barrier())

    def split(self, group: Group) -> Core:
        """The same for a communicator of some of its ranks."""
        member = Member(self.member.endpoint, group, self.member.runner)
        return Core(member, self._choose, self.rpcs)
