"""A world as one of its ranks lives in it: `World` joins the ranks once their addresses are known, and leaves again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from asyncoll import forks
from asyncoll.algorithms.choice import choose_backend
from asyncoll.algorithms.core import ChooseBackend, Core
from asyncoll.algorithms.seam.arrival import to_its_end
from asyncoll.communicator import Communicator
from asyncoll.errors import (
    AsyncollError,
    ClosedError,
    DeadlineError,
    DeviceError,
    PeerLostError,
    UsageError,
    describe,
    reason_to_leave,
)
from asyncoll.runtime import departures, unfinished
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import WORLD, Departed, error_of
from asyncoll.runtime.linking import NewcomerSource
from asyncoll.runtime.member import Member
from asyncoll.runtime.progress import TAKEOVER_S, Runner
from asyncoll.runtime.signature import Site, place_of_end
from asyncoll.runtime.succession import DecisionStore, Succession
from asyncoll.transport.among_members import AmongMembers
from asyncoll.transport.joining import Joining
from asyncoll.transport.messages.peer_reports import FREEZE_S
from asyncoll.world.connecting import barrier, connect_all, group_of
from asyncoll.world.epoch_stores import HOW_TO_GET_ONE

# The time for collectives that all ranks have made and that the program has not awaited.
_SETTLE_S = 60.0
# The time for copies of results to devices, which may have seconds of work before them.
_RETURN_S = 60.0
# An agreement on the next epoch is overdue after this many times the time after which a silent rank counts as lost.
_OVERDUE = 2.0
_ENDED_S = 0.2  # programs of most worlds end within this time of each other: see `_part`


async def _close_former(endpoint: Endpoint, former: Sequence[Core]) -> None:
    """Close the connections of earlier epochs, once no rank needs them to come to that of `endpoint`.

    Their memory stays: communicators of these epochs may still ring its doorbells, as they end.
    """
    try:
        await barrier(endpoint, "leaving the epoch before")
    except AsyncollError:
        return  # a rank may be on its way, and would take the end of a connection for a loss
    for core in former:
        await core.member.endpoint.transport.close(flush=True)


class World:
    """All ranks, from joining to leaving: an async context manager, whose value is the communicator of all ranks."""

    def __init__(
        self,
        endpoint: Endpoint,
        runner: Runner,
        hosts: tuple[str, ...] | None = None,
        joining: Joining | None = None,
        choose: ChooseBackend = choose_backend,
        *,
        departs: bool = False,
        decisions: DecisionStore | None = None,
        newcomers: NewcomerSource | None = None,
        admitted: Callable[[], Awaitable[None]] | None = None,
        freeze_s: float = 0.0,
    ) -> None:
        """`hosts` has the name of each rank's host; None if all ranks are in this process.

        `joining` bounds how long the other ranks may take to join; None if they are in this process. `choose` makes the
        backend of each communicator. With `departs`, leaving is not collective: this rank leaves once its calls are
        over, and the communicators without it go on (see `runtime.departures`). With a ClosedError it does so at once.
        Any other exception aborts the world, as it does where leaving is collective.

        `decisions` is the store of epochs; None if there is none, so that the ranks cannot go on after a death. A rank
        without a sign of life for `freeze_s` is lost; 0: never. `newcomers` are those of the world, if it can have any.
        A newcomer awaits `admitted` once it is connected: that raises if the others go on without it.
        """
        self.endpoint = endpoint  # of the newest epoch
        self._former: list[Core] = []  # the communicators of all ranks in earlier epochs
        endpoint.store_advice = HOW_TO_GET_ONE
        if decisions is not None:
            overdue_s = _OVERDUE * (freeze_s or FREEZE_S)
            endpoint.succession = Succession(endpoint, decisions, overdue_s, self._enter, newcomers)
        endpoint.standstill.program = runner
        self._runner = runner
        self._has_processes = hosts is not None
        self._joining = joining
        self._choose = choose
        self._departs = departs
        self._admitted = admitted
        self._moved: list[Core] = []  # of `_former`, those whose connections the newest epoch does not use
        self._closing: set[asyncio.Task[None]] = set()  # of these
        self.has_joined = False  # so all ranks are connected
        self._unsettled: list[
            departures.CommunicatorLife
        ] = []  # communicators with calls under way at the end of the program
        self._inside = contextlib.ExitStack()  # contexts of the task that is in the world
        self._hosts = hosts or (socket.gethostname(),) * endpoint.size
        self._group = group_of(endpoint)

    async def __aenter__(self) -> Communicator:
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()
        forks.register(self)
        try:
            comm = await self._runner.within(self._join())
        except BaseException as error:
            # It was cancelled as it had joined: the others are in the world, and wait for this rank.
            if self.has_joined:
                await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._inside.enter_context(self._core.memory.as_current())
        return comm

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A forked child leaves the block; the rank stays in the world.
        if os.getpid() != self._process:
            return
        forks.unregister(self)
        self._end_site = Site(*place_of_end(sys._getframe()))
        self._inside.close()
        # A rank that has never used RPC must still answer calls of others, with the error that it has no functions.
        with contextlib.suppress(UsageError):  # shared memory has no room for it: then no rank can call this one
            _ = self._departs or self._core.rpc
        try:
            if error is None:
                unfinished.check(self.endpoint)
                await self._flush()
        except BaseException as reason:
            error = reason
            raise
        finally:
            unfinished.forget(self.endpoint)
            await self._end(error)

    def abandon(self, parent: int) -> None:
        """In a forked child, where the caller's loop goes on: make it independent of the parent's loop."""
        forks.silence_signals()
        forks.isolate(self._loop)

    async def _flush(self) -> None:
        """Wait for what the program may not have awaited. Raises DeviceError if a result has not reached its device."""
        # A call that has just begun on this loop counts as pending then.
        await asyncio.sleep(0)
        self._unsettled = self.endpoint.departures.unsettled(has_begun=bool(self._runner.held))
        if self._runner.held or not self._is_settled():
            await self._runner.within(self._settle())
        if not self._departs:
            # The world has failed, which `_leave` deals with.
            with contextlib.suppress(AsyncollError):
                for rpc in self._core.rpcs:
                    await rpc.flush()
        if self.endpoint.returns.any:
            await self._runner.within(self._return())

    def _is_settled(self) -> bool:
        """Whether no call is pending whose end the end of this rank would overtake. In any thread.

        Calls of the other communicators are waited for in `_part`, where no rank makes another call. Before it a rank
        would wait for those of ranks that are leaving, and that wait for this rank.
        """
        return self.endpoint.departures.is_settled() if self._departs else self._core.lifetime.is_settled()

    async def _settle(self) -> None:
        """On the runtime's loop: wait until then.

        Raises the error of a call that fails meanwhile: perhaps no handle of it is left.
        """
        has_failed = self._failed()
        await self._take_over()
        while not self._is_settled():
            await asyncio.sleep(TAKEOVER_S)
        if not (has_failed or self._departs):
            self._core.member.check()

    async def _take_over(self) -> None:
        """Wait until all calls that have begun count as pending: the runtime takes them over soon."""
        while self._runner.held:
            await asyncio.sleep(TAKEOVER_S)

    async def _return(self) -> None:
        """On the runtime's loop: wait for the copies of results to devices. A failure of the world ends the wait."""
        failures, returns = self.endpoint.failures, self.endpoint.returns
        over, is_late = returns.over(), False
        with contextlib.suppress(AsyncollError):  # `_leave` deals with it
            with failures.watch(self._group.communicator, "results to reach a device") as failed:
                ends = [over, failed]
                is_late = not (await asyncio.wait(ends, timeout=_RETURN_S, return_when=asyncio.FIRST_COMPLETED))[0]
        if is_late:
            names = self._core.memory.devices.names or "a device"
            raise DeviceError(
                f"rank {self.endpoint.rank}: {names} has not taken all results {_RETURN_S:g} s after the last call"
            )
        returns.check()

    async def _end(self, error: BaseException | None) -> None:
        try:
            await self._runner.within(self._leave(error))
        finally:
            for core in (*self._former, self._core):
                for rpc in core.rpcs:
                    await rpc.close()
            try:
                # Before their memory is unmapped, also if this rank is cancelled: a driver goes on with pinned pages.
                await to_its_end(self._runner.within(self._close_devices()))
            finally:
                await self._runner.within(self._let_go())

    async def _close_devices(self) -> None:
        """First the memory that ranks share, and then the devices that copy it."""
        for core in (*self._former, self._core):
            try:
                await core.member.endpoint.end()
            finally:
                await core.memory.devices.close()

    def _broke(self, error: BaseException) -> None:
        """Fail the world at all ranks, because `error` has ended the runtime's loop for a moment, amid any work."""
        reason = f"its runtime was interrupted: {describe(error)}"
        self.endpoint.failures.abort(WORLD, self._group.ranks, reason)

    async def _join(self) -> Communicator:
        self._runner.broke = self._broke
        try:
            host = self._hosts[self.endpoint.rank] if self._has_processes else ""
            await connect_all(self.endpoint, self._joining, host)
            if self._admitted is not None:
                try:
                    await self._admitted()
                except BaseException:
                    await self.endpoint.close()
                    raise
                self._close_former(self.endpoint)
        except BaseException:
            await self._let_go()
            raise
        self._core = Core(Member(self.endpoint, self._group, self._runner), self._choose)
        self.has_joined = True
        return Communicator(self._core, self._hosts)

    def _close_former(self, endpoint: Endpoint) -> None:
        """All ranks of an epoch with newcomers do it, which have none of their own."""
        self._moved = list(self._former)
        closing = asyncio.get_running_loop().create_task(_close_former(endpoint, self._moved))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _enter(self, endpoint: Endpoint) -> Core:
        """Go on in a later epoch, on the runtime's loop."""
        self._former.append(self._core)
        unfinished.forget(self.endpoint)
        if not isinstance(endpoint.transport, AmongMembers):  # but one of its own
            self._close_former(endpoint)
        endpoint.standstill.program = self._runner
        self.endpoint, self._group = endpoint, group_of(endpoint)
        self._core = Core(Member(endpoint, self._group, self._runner), self._choose)
        return self._core

    async def _leave(self, error: BaseException | None) -> None:
        try:
            if self._departs:
                await self._depart(error)
            elif not self._failed():
                await self._part(error)
            elif isinstance(failure := self.endpoint.failures.of(self._group.communicator), Departed):
                # Only this rank knows: the others wait for it to leave in good order.
                self.endpoint.failures.abort(WORLD, self._group.ranks, describe(error or error_of(failure)))
            failure = self.endpoint.failures.of(self._group.communicator)
            if failure is not None and not self._departs:
                await self.endpoint.give_reason(reason_to_leave(error or error_of(failure)))
        finally:
            if self.endpoint.succession is not None:
                await self.endpoint.succession.close()
            for core in self._former:
                core.member.endpoint.closed = True
            for closing in tuple(self._closing):
                closing.cancel()
                await asyncio.wait([closing])
            for core in self._moved:
                await core.member.endpoint.transport.close(flush=True)
            await self.endpoint.close(flush=self._departs or self._failed())

    async def _let_go(self) -> None:
        """Release the memory that the ranks of the host share."""
        for endpoint in (*(core.member.endpoint for core in self._former), self.endpoint):
            if endpoint.arena is not None:
                endpoint.arena.close()

    def _failed(self) -> bool:
        """Whether this rank has heard of a failure: then the ranks do not leave in good order."""
        return self.endpoint.failures.has_failed(self._group.communicator)

    async def _part(self, error: BaseException | None) -> None:
        """Leave in good order, by two barriers; or tell the others of `error`.

        After the first barrier no rank makes another call. It is numbered like a call, so a rank that makes calls while
        others leave gets a MismatchError. After the second no message that matters is under way, so sockets may close
        at once; a rank that ends during the second is not lost, only faster.
        """
        if error is not None:
            self.endpoint.failures.abort(WORLD, self._group.ranks, describe(error))
            return
        self.endpoint.depart()
        # For calls that wait for this rank. Not at once: as all ranks end, each would send a message to each.
        later = asyncio.get_running_loop().call_later(_ENDED_S, self.endpoint.departures.returned)
        try:
            with contextlib.suppress(*self._outlived()):
                await self._core.leave(self._end_site)
            await self._settle_others()
            if self.endpoint.returns.any:
                # First: a copy that has failed is the reason why its communicator has.
                await self._return()
            for communicator in self._unsettled:
                communicator.check()  # perhaps no handle of the call that has failed is left
            self.endpoint.part()
            if self.endpoint.succession is not None:
                with contextlib.suppress(AsyncollError):  # the store may be gone
                    await self.endpoint.succession.over()
            with contextlib.suppress(PeerLostError):
                await barrier(self.endpoint, "leaving the world")
        finally:
            later.cancel()

    def _outlived(self) -> list[type[AsyncollError]]:
        """The errors that are none to a rank whose program has ended, because the others go on after deaths."""
        return [PeerLostError] if self.endpoint.elastic_trainings or self.endpoint.membership.epoch > 1 else []

    async def _settle_others(self) -> None:
        """Wait for the calls of communicators made by `split`. Those that all their ranks have made are over soon.

        Unless a device has much to do before: a minute bounds that, too.
        """
        try:
            async with asyncio.timeout(_SETTLE_S):
                await self.endpoint.departures.settle()
        except TimeoutError:
            raise DeadlineError(
                f"rank {self.endpoint.rank} has left a collective of a communicator made by `split` without an await, "
                f"and {_SETTLE_S:g} s after the last call of all ranks it is not over: another rank has not made it, "
                "or a device has not come to it"
            ) from None

    async def _depart(self, error: BaseException | None) -> None:
        """Leave while the other ranks go on; or, with an exception of the program, abort the world and leave.

        In both cases the others answer before the connections end, so that no rank takes their end for a loss.
        """
        await self._take_over()
        failures, reason = self.endpoint.failures, reason_to_leave(error)
        if (failure := failures.of(WORLD)) is not None:
            await self.endpoint.give_reason(reason or reason_to_leave(error_of(failure)))
            return
        is_its_own = reason is not None and reason.rank is None and not isinstance(error, ClosedError)
        if error is not None and is_its_own and not self._failed():
            failures.abort(WORLD, self._group.ranks, describe(error))
        self.endpoint.depart()
        await self.endpoint.departures.leave_world(reason)
