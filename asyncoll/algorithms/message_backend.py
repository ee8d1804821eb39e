"""The backend of ranks that do not all share memory: every call exchanges messages, on the runtime's loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncoll.algorithms.dense.message_call import MessageCall
from asyncoll.algorithms.rounds.announced import AnnouncedOperations
from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.seam.short_calls import GeneralCalls, NoShortCalls
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.message_carrier import MessageCarrier
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature, Site
from asyncoll.tensors.staged import Staged

T = TypeVar("T")


class WithoutMemory:
    """What backends have in common that share no memory: messages between two ranks, and RPC."""

    memory = None
    device_route = None

    def __init__(self, member: Member) -> None:
        self._member = member
        self.operations = Directory(member)

    def pair(self, call: Signature, context: int, peer: int, staged: Staged | None) -> MessageCall:
        return MessageCall(self._member, call, context)

    def is_idle(self, wake: Callable[[], None]) -> bool:
        return True

    def finished(self) -> None:
        """There is nothing to end: no call is under way."""

    def forget(self) -> None:
        """There is no memory to give back."""

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        member = self._member
        return MessageCarrier(member.endpoint.router, member.group, member.post, broken)


class MessageBackend(WithoutMemory):
    """The `Backend` by message."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        # Made with the communicator: announcements of other ranks may arrive before this rank calls an operation.
        self._announced = self._operations()

    def _operations(self) -> AnnouncedOperations:
        return AnnouncedOperations(self._member, self.operations)

    def short_calls(self, general: GeneralCalls) -> NoShortCalls:
        return NoShortCalls()  # a call by message needs the runtime's loop

    def collectives(self, call: Call[Any]) -> Collectives:
        return MessageCall(self._member, call.signature, self._member.communicator)

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        # The runtime's loop carries out all calls, short or long.
        del describe, nbytes
        return self._member.runner.start(work, discarded)

    def here(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> Coroutine[Any, Any, T]:
        return work

    async def open(self, operation: Operation, site: Site) -> Rounds:
        return self._announced.open(operation, self._member.group.rank, str(site))

    def retire(self) -> None:
        for port in self._announced.ports:
            port.depart()
