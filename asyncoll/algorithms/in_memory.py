"""The backend of ranks that share an arena: calls use shared memory, and their callers' threads carry them out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from asyncoll.algorithms.backend import Body
from asyncoll.algorithms.dense.in_memory import SharedCall
from asyncoll.algorithms.dense.staging import DisagreementError, StagingArea
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.rounds.directory import Directory, Rounds
from asyncoll.algorithms.rounds.in_memory import OneSidedRounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.arguments import digest
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.in_memory import InMemory
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Signature
from asyncoll.runtime.work import Work
from asyncoll.statistics import Traffic
from asyncoll.transport import Arena
from asyncoll.transport.control_block import failure
from asyncoll.transport.wire import Dispute

T = TypeVar("T")
_RECENT = 256  # calls whose description is kept, for reports of a mismatch and of a lost rank


class MemoryBackend:
    """The `Backend` in shared memory."""

    def __init__(self, member: Member, arena: Arena) -> None:
        self._member = member
        self.memory = arena
        self.operations = Directory(member)
        group, endpoint = member.group, member.endpoint
        sizes = choose(group.size, os.environ)
        self._staging = StagingArea(arena, group.size, group.rank, digest(group.communicator, "staging area"), sizes)
        self._registry = OperationRegistry(arena, group.size, group.rank, group.communicator)
        self._recent: deque[Signature] = deque(maxlen=_RECENT)
        self._check = partial(endpoint.failures.check, group.communicator)
        endpoint.on_depart(self._registry.depart)
        endpoint.executions.on_dispute(group.communicator, self._describe)
        endpoint.membership.on_trace(self._trace)

    # -- dense collectives ------------------------------------------------------------------------

    def start(
        self,
        call: Signature,
        body: Body[T],
        nbytes: int,
        ended: Callable[[Traffic], None],
        discarded: Callable[[], None],
    ) -> Coroutine[Any, Any, T]:
        self._recent.append(call)
        self._staging.begin(call.number)
        return self.start_round(self._carry_out(call, body, ended), call.__str__, nbytes, discarded)

    async def _carry_out(self, call: Signature, body: Body[T], ended: Callable[[Traffic], None]) -> T:
        """The whole call. A failure or a cancellation ends the communicator, and returns the caller's arrays to it."""
        member, collectives = self._member, SharedCall(self._staging, call.number, call.fingerprint())
        try:
            self._check()
            return await body(collectives)
        except DisagreementError as disagreement:
            self._dispute(member.communicator, call.number, str(call), disagreement.place)
            # The answer of that rank ends the communicator, with an error that names both calls.
            await failure(self._staging.control_block)
            raise
        except (Exception, asyncio.CancelledError) as error:
            member.failed(call, error)
            await self._retreat(collectives)
            raise
        finally:
            ended(collectives.traffic)
            member.endpoint.in_memory.enter(call.operation, collectives.traffic)
            self._staging.end(call.number)

    async def _retreat(self, collectives: SharedCall) -> None:
        """Withdraw the arrays of a failed call, however often the caller is cancelled meanwhile.

        The other ranks read these arrays in place, so the caller must not get them back while a rank reads. Without
        effect if a rank has died while it held the lock of the control block.
        """
        group, lost = self._member.group, self._member.endpoint.membership.lost
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                with contextlib.suppress(AsyncollError):
                    await collectives.retreat(lambda place: group.ranks[place] in lost)
                return

    # -- wait-avoiding rounds ---------------------------------------------------------------------

    def start_round(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        """Start `work`, which awaits only conditions of shared memory. The runtime's loop runs all of it if it is long.

        A long copy or reduction in the caller's thread would block the program's event loop.
        """
        driven = Work(self.memory, work, self._check, describe)
        if nbytes > self._staging.sizes.long:
            return self._member.runner.start(driven.finish(), discarded)
        return self._member.runner.drive(driven, discarded)

    async def open(self, operation: Operation, site: str) -> Rounds:
        """Make `operation`, or join it if another rank has made it.

        Ranks of a host need no announcement. A rank finds the operation in the registry at its first call; until then
        the others need nothing of it.
        """
        member, text = self._member, f"{operation} at {site}"
        group, endpoint = member.group, member.endpoint
        context = digest(member.communicator, "persistent", operation.name)
        # Before the registry is entered: a rank that finds the entry may ask at once for the call of this rank.
        endpoint.executions.on_dispute(context, lambda _: (group.ranks, text))
        try:
            rounds = OneSidedRounds(
                self.memory, self._registry, group, operation, lambda: text, lambda: bool(endpoint.membership.lost)
            )
        except DisagreementError as disagreement:
            self._dispute(context, 1, text, disagreement.place)
            await self._registry.failure()
            raise
        self.operations.add(rounds)
        return rounds

    # -- RPC --------------------------------------------------------------------------------------

    def carrier(self, broken: Callable[[int, ProtocolError], None]) -> Carrier:
        member = self._member
        context = digest(member.communicator, "rpc")
        return InMemory(self.memory, context, member.group.ranks, self._check, broken)

    # -- reports: disagreements of ranks, and the last call of a lost rank ------------------------

    def _dispute(self, context: int, number: int, description: str, place: int) -> None:
        """Ask group rank `place` which call it has made as number `number` of `context`."""
        member = self._member
        # Posted to the runtime's loop: this may run in the caller's thread, which must not use the router.
        question = Dispute(member.communicator, context, number, description)
        member.post(lambda: member.endpoint.router.tell(member.group.ranks[place], question))

    def _describe(self, number: int) -> tuple[tuple[int, ...], str] | None:
        """The members of call `number` and its description; None if it is not among the recent calls."""
        # A copy, because the caller's thread may append meanwhile. So does `_trace`.
        recent = {call.number: call for call in list(self._recent)}
        return (self._member.group.ranks, str(recent[number])) if number in recent else None

    def _trace(self, rank: int) -> str:
        """The last call that world rank `rank` has begun, as this rank describes it; empty if unknown."""
        ranks = self._member.group.ranks
        number = self._staging.begun(ranks.index(rank)) if rank in ranks else 0
        begun = [call for call in list(self._recent) if call.number <= number]
        return str(begun[-1]) if begun else ""
