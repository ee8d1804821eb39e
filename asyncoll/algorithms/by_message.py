"""The backend of ranks that do not all share memory: every call exchanges messages, on the runtime's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Body
from asyncoll.algorithms.dense.by_message import MessageCall
from asyncoll.algorithms.rounds.announced import AnnouncedOperations
from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.errors import ProtocolError
from asyncoll.rpc.by_message import MessageCarrier
from asyncoll.rpc.carrier import Carrier
from asyncoll.runtime.group import Lane
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.statistics import Traffic

T = TypeVar("T")


def start_on_lane(
    member: Member,
    call: Signature,
    context: int,
    body: Callable[[Lane], Awaitable[T]],
    ended: Callable[[Traffic], None],
    discarded: Callable[[], None] = lambda: None,
) -> Coroutine[Any, Any, T]:
    """Start `call` as execution `call.number` of `context`: run `body` with a lane of its own.

    `ended` and `discarded` are those of `Backend.start`. An exception or a cancellation of `body` fails the
    communicator: the other ranks wait for messages of this rank.
    """
    executions = member.endpoint.executions
    lane = Lane(executions, member.group, context, call.number, call.fingerprint(), call.__str__)

    async def work() -> T:
        try:
            with lane:
                return await body(lane)
        except (Exception, asyncio.CancelledError) as error:
            member.failed(call, error)
            raise
        finally:
            ended(lane.traffic)

    return member.runner.start(work(), discarded)


class MessageBackend:
    """The `Backend` by message."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.operations = Directory(member)
        self.memory = None
        # Made with the communicator: announcements of other ranks may arrive before this rank calls an operation.
        self._announced = AnnouncedOperations(member, self.operations)

    def start(
        self,
        call: Signature,
        body: Body[T],
        nbytes: int,
        ended: Callable[[Traffic], None],
        discarded: Callable[[], None],
    ) -> Coroutine[Any, Any, T]:
        del nbytes  # the runtime's loop carries out all calls, short or long
        member = self._member
        return start_on_lane(member, call, member.communicator, lambda lane: body(MessageCall(lane)), ended, discarded)

    def start_round(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        del describe, nbytes
        return self._member.runner.start(work, discarded)

    async def open(self, operation: Operation, site: str) -> Rounds:
        return self._announced.open(operation, self._member.group.rank, site)

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        member = self._member
        return MessageCarrier(member.endpoint.router, member.group, member.post, broken)
