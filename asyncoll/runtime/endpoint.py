"""The endpoint of one rank: dispatches incoming messages, reports lost peers, supervises background tasks.

The endpoint creates the other parts of the runtime (`Executions`, `Router`, `Failures`, `Notices`, `Membership`,
`Departures`) and connects them to the transport. It is the `Receiver` of the transport.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from asyncoll import forks
from asyncoll.errors import AsyncollError, ClosedError, ProtocolError, Reason, describe, text_of
from asyncoll.runtime.departures import Departures
from asyncoll.runtime.executions import Executions
from asyncoll.runtime.failures import WORLD, Closed, Failures, Succeeded, error_of, ranks_in
from asyncoll.runtime.host_losses import HostLosses
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.notices import MemberLeft, MembersLost, NoticeHeard, Notices
from asyncoll.runtime.returns import Returns
from asyncoll.runtime.router import Router
from asyncoll.runtime.standstill import Standstill
from asyncoll.statistics import Ledger, Traffic
from asyncoll.transport import Arena, Buffer, Loss, Transport, wire

logger = logging.getLogger("asyncoll")


class NextEpoch(Protocol):
    """What leads from one epoch to the next: `runtime.succession.Succession`."""

    def lost(self, number: int, *, is_dead: bool) -> None:
        """The process of this member number is lost, or has left; with `is_dead` it has ended for certain."""

    def heard(self, source: int, message: wire.ReadyForNext | wire.Decided) -> None:
        """A message of member number `source`."""

    def keep(self, source: int, header: wire.Header, frames: list[Buffer]) -> None:
        """A message of member number `source` in a later epoch. Raises ProtocolError for too many."""

    def link(self, message: wire.BeginLink) -> None:
        """The coordinator has begun an attempt to connect to newcomers."""

    @property
    def linked(self) -> int:
        """The number of newcomers that this rank is connected to."""

    def watch(self) -> None:
        """Look for newcomers from now on, if this rank is the coordinator."""

    async def next(self, epoch: int, *, grows: bool) -> Any:
        """Wait for an epoch after `epoch`, and return its communicator of all ranks; with newcomers if it `grows`."""

    def absent(self) -> list[int]:
        """The ranks of this epoch that this one waits for, to enter the next."""

    def waiting(self) -> list[str]:
        """One line for each wait of this process in the newest epoch, and for each rank that the next one waits for."""

    async def over(self) -> None:
        """All ranks leave the world in good order."""

    async def close(self) -> None:
        """This rank leaves the world."""


class Endpoint:
    """The runtime of one rank in one epoch.

    In: `received` and `lost`, called by the transport; `lost_in_memory`, called by a lock in shared memory;
    `introduce`, `depart`, `part` and `close`, called by `world.world` as the rank joins and leaves. Out: the methods of
    `executions`, `router`, `failures` and `membership`, and `recheck` and `peer_lost` of the arena.

    All of it runs on the loop that called `start`. Only `lost_in_memory`, `check_open` and `check_not_forked` may be
    called in any thread, where the attributes may be read, too.
    """

    def __init__(
        self,
        transport: Transport,
        arena: Arena | None = None,
        patience_s: float = math.inf,
        host_of: Sequence[object] = (),
        *,
        shares_memory: bool = True,
        all_have_arenas: bool = False,
        membership: Membership | None = None,
    ) -> None:
        """`arena` is the memory that the ranks of this host share; None without shared memory.

        `host_of` identifies each rank's host, the same at all ranks; by default each rank is on one of its own.
        `membership` is that of the epoch; by default the ranks of the transport, in the first one.
        `shares_memory`: ranks of one host may share memory; False if the job forbids it, then all is by message.
        `all_have_arenas`: every rank of the world has an arena, also one that is alone on its host.

        `patience_s` is the longest time in seconds that a call may take (ASYNCOLL_DEADLINE_S). A shorter
        `asyncoll.deadline` takes precedence.
        """
        self.transport = transport
        self.arena = arena
        self.patience_s = patience_s
        self.rank = transport.rank
        self.size = transport.size
        self.host_of = host_of or range(self.size)
        self.shares_memory = shares_memory
        self.all_have_arenas = all_have_arenas
        self.traffic = Traffic()  # messages of the transport
        self.in_memory = Ledger()  # calls in shared memory, added when they end
        self.membership = membership or Membership(self.size)
        self.router = Router(transport, self.traffic, self.membership)
        self.failures = Failures(self.router, self.membership)
        self.executions = Executions(transport, self.router, self.failures, self.membership)
        self.succession: NextEpoch | None = None  # to the next epoch; None without a store of epochs
        self.elastic_trainings = 0  # those of this rank that go on after deaths
        self.store_advice = ""  # how to get such a store, for errors
        self._notices = Notices(self.router, self.membership)
        self._host_losses = HostLosses(self.host_of, self.rank, self.membership, self._ask_of, self.report)
        self.standstill = Standstill(self.router, self.failures, self.membership)
        self.departures = Departures(self.router, self.membership, self.failures)
        self.returns = Returns()
        self._services: set[asyncio.Task[None]] = set()
        # Called once this rank has made its last call. From then on it only takes part in the rounds of others.
        self.at_depart: list[Callable[[], None]] = []
        self.at_part: list[Callable[[], None]] = []  # called once every rank has made its last call
        # Awaited when no call is under way here, before devices and the arena close: see `end`.
        self.at_end: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._parted = False  # every rank has made its last call
        self.is_ahead = False  # the ranks may go on in this epoch: one may give it up, and is not lost
        self._retired = False  # the ranks have gone on in a later epoch
        self.departed = False  # this rank has made its last call
        self.closed = False
        self._parent: int | None = None  # in a forked child: the process id of the rank
        self.membership.last_calls.append(self.executions.last_call)
        if arena is not None:
            self.failures.on_failure(WORLD, lambda *_: arena.recheck())
        forks.register(self)

    @property
    def number(self) -> int:
        """The member number of this rank, which errors have."""
        return self.membership.numbers[self.rank]

    async def start(self) -> None:
        """Connect to all peers, on the runtime's loop. Raises PeerLostError for a rank that does not come in time."""
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time  # of the runtime's loop, in seconds; virtual time in a simulated world
        if self.arena is not None:
            self.arena.on_loss(self.lost_in_memory)
        await self.transport.start(self)

    def waiting(self) -> list[str]:
        """One line for each wait of this process, for the report of a deadlock."""
        return self.own_waits() if self.succession is None else self.succession.waiting()

    def own_waits(self) -> list[str]:
        """One line for each wait of this rank in this epoch."""
        in_memory = self.arena.waiting() if self.arena is not None else []
        return self.executions.waiting() + in_memory + self.failures.watched()

    async def close(self, *, flush: bool = False) -> None:
        """Stop at once: pending waits raise ClosedError, background tasks are cancelled. Idempotent.

        First tells the other ranks all failures that this rank knows, unless every rank has made its last call.

        `flush` gives messages that were sent a moment to leave this process.
        """
        if self.closed:
            return
        self._host_losses.settle()
        if not self._parted:
            self.failures.pass_on()
        self._notices.close()
        # A loss that another thread has noticed may be recorded while its waits have not ended yet: this ends them.
        self.failures.fail(self.failures.record(Closed()))
        self.closed = True
        self.standstill.finished()
        for service in list(self._services):
            service.cancel()
        try:
            await asyncio.gather(*self._services, return_exceptions=True)
        # Also if the task that leaves is cancelled meanwhile.
        finally:
            await self.transport.close(flush=flush)

    def next(self, epoch: int, numbers: Sequence[int], transport: Transport) -> Endpoint:
        """The endpoint of this rank in a later epoch, whose members are these: their calls go by message.

        `transport` is that among them.
        """
        ranks = [self.membership.numbers.index(number) for number in numbers]
        later = Endpoint(
            transport,
            None,
            self.patience_s,
            [self.host_of[rank] for rank in ranks],
            shares_memory=False,
            membership=self.membership.next(epoch, numbers),
        )
        later.succession = self.succession
        return later

    def neighbours_lost(self) -> set[int]:
        """The members that this rank shares memory with, and takes for lost. They have not left."""
        shared = self.arena.ranks if self.arena is not None else ()
        lost = self.membership.lost - self.membership.ended
        return {self.membership.numbers[rank] for rank in lost.intersection(shared)}

    @property
    def is_broken(self) -> bool:
        """Whether the world has failed here, or a rank of it is lost."""
        return self.failures.has_failed(WORLD) or bool(self.membership.lost)

    def retire(self, epoch: int) -> None:
        """The ranks have gone on in `epoch`: every call here has failed, or fails now. Its memory stays."""
        self._retired = True
        self.failures.fail(self.failures.record(Succeeded(epoch)))
        self._host_losses.clear()
        self._notices.close()
        self.standstill.finished()
        for service in list(self._services):
            service.cancel()

    async def give_reason(self, reason: Reason | None) -> None:
        """Before `close`, if the world has failed: wait until the other ranks know why this one leaves.

        Not once every rank has made its last call: they leave then without reading.
        """
        if not self._parted:
            await self.departures.part_from_others(reason)

    async def end(self) -> None:
        """After `close`: await the callbacks of `at_end`."""
        await asyncio.gather(*(callback() for callback in tuple(self.at_end)))

    def check_open(self) -> None:
        """Raises ClosedError after `close`, and UsageError in a forked child of this process."""
        self.check_not_forked()
        if self.closed:
            raise ClosedError("this communicator is closed")

    def check_not_forked(self) -> None:
        """Raises UsageError in a forked child of the process that this endpoint belongs to."""
        if self._parent is not None:
            raise forks.refusal(self._parent)

    def abandon(self, parent: int) -> None:
        """In a forked child of process `parent`: every later call raises UsageError. Called by `asyncoll.forks`."""
        self.closed = True
        self._parent = parent

    # -- joining and leaving ----------------------------------------------------------------------

    def introduce(self, host: str, pid: int) -> None:
        """Send the host name and the process id of this rank to all others, which name them in errors."""
        me = wire.Hello(host, pid)
        self.membership.introduced(self.rank, me)
        for peer in self.membership.members:
            if peer != self.rank:
                self.router.tell(peer, me)

    def depart(self) -> None:
        """Mark that this rank has made its last call, and run the callbacks of `at_depart`."""
        self.departed = True
        for callback in tuple(self.at_depart):
            callback()

    def part(self) -> None:
        """Mark that every rank has made its last call. From now on the loss of a peer is not sent to other ranks."""
        self._parted = True
        for callback in tuple(self.at_part):
            callback()

    # -- background tasks -------------------------------------------------------------------------

    def spawn(self, service: Coroutine[Any, Any, None], communicator: int) -> None:
        """Run `service` as a background task of the runtime, for `communicator`.

        An exception in it aborts the world, unless it is the error of a communicator that has failed already.
        """
        task = self._loop.create_task(service)
        self._services.add(task)
        task.add_done_callback(partial(self._served, communicator))

    def _served(self, communicator: int, task: asyncio.Task[None]) -> None:
        self._services.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AsyncollError) and self.failures.has_failed(communicator):
            # The task was ended by that failure, which all members know.
            return
        self._unhandled(describe(error), error)

    def _unhandled(self, text: str, error: BaseException) -> None:
        """Abort the world because of an exception that nothing has handled, unless it has failed before."""
        if not isinstance(error, AsyncollError):
            logger.error("rank %d: %s", self.rank, text, exc_info=error)
        self.failures.abort(WORLD, self.membership.members, text)

    # -- incoming messages ------------------------------------------------------------------------

    def received(self, source: int, frames: list[Buffer]) -> None:
        """Dispatch one message of the world rank `source`. Bytes that violate the protocol end the world.

        The bytes come from another process, so each branch may raise ProtocolError, and it is caught here only. Any
        other exception ends the world, too: it must not end the transport's reader, for which all ranks would wait.
        """
        self.traffic.messages_received += 1
        try:
            header = wire.decode(frames)
            if header.epoch != self.membership.epoch and not self._is_due(source, header, frames):
                return
            self.router.received_from[source] += 1
            if header.kind == wire.DATA:
                self.traffic.bytes_received += len(frames[1])
                self.executions.arrived(source, header, *frames[1:])
            elif header.kind == wire.GRANT:
                self.executions.granted(source, header)
            elif header.kind == wire.OFFER:
                self.executions.offered(source, header)
            elif header.kind == wire.CHECK:
                self.executions.checked(source, header)
            elif header.kind == wire.CREDIT:
                self.executions.credited(source, header.number)
            elif header.kind == wire.SIGNAL:
                self.traffic.bytes_received += len(frames[1])
                self.router.signalled(source, header, frames[1])
            else:
                self._control(source, wire.decode_control(frames[1]))
        except ProtocolError as error:
            self.failures.broken(source, error)
        except AsyncollError as error:
            self._unhandled(text_of(error), error)  # of a function of the program, such as the policy of a round
        except Exception as error:
            self._unhandled(f"it could not handle a message of rank {source}: {describe(error)}", error)

    def _is_due(self, source: int, header: wire.Header, frames: list[Buffer]) -> bool:
        """Whether a message that is not of this epoch is to be dispatched now.

        One of an earlier epoch is dropped: its sender has failed there, or soon knows. One of a later epoch waits until
        this rank enters that, too. Raises ProtocolError for too many of them.
        """
        if header.epoch == wire.OF_NO_EPOCH:
            if header.kind != wire.CONTROL:
                raise ProtocolError(f"a message of kind {header.kind} is of no epoch")
            return True
        if header.epoch > self.membership.epoch:
            self._successor().keep(self.membership.numbers[source], header, frames)
        return False

    def _successor(self) -> NextEpoch:
        if self.succession is None:
            raise ProtocolError("it goes on to another epoch, for which this rank has no store: give one to all ranks")
        return self.succession

    def _control(self, source: int, message: wire.Control) -> None:
        """Dispatch a control message."""
        if isinstance(message, wire.Abort | wire.Deadlock | wire.Mismatch | wire.Overdue):
            self.failures.fail(message, message.communicator)
        elif isinstance(message, wire.Broken):
            self.failures.fail(message)
        elif isinstance(message, wire.Lost):
            # A rank of another host may hold the loss back until a rank of the lost rank's host, such as this one, says
            # that the host is not gone (see `HostLosses`). It has to be told.
            own = self.host_of[self.rank]
            rank = self.membership.rank_of(message.rank, -1)
            is_asked = rank >= 0 and self.host_of[rank] == own != self.host_of[source]
            self._lost(message, None if is_asked else source)
        elif isinstance(message, wire.Hello):
            self.membership.introduced(source, message)
        elif isinstance(message, wire.Dispute):
            self.executions.answer(source, message)
        elif isinstance(message, wire.Still | wire.Stillness):
            self.standstill.received(source, message)
        elif isinstance(message, wire.Ending):
            numbers = self.membership.numbers  # not all ranks of an earlier epoch are among them
            known = message if message.rank in numbers else message._replace(rank=numbers[source])
            self.departures.ending(source, known)
            self._notices.happened(MemberLeft(source))
            self._tell_succession({source}, has_left=True)
            self.standstill.wake()
        elif isinstance(message, wire.ReadyForNext | wire.Decided):
            self.router.received_from[source] -= 1  # the router has not sent it
            self._successor().heard(self.membership.numbers[source], message)
        elif isinstance(message, wire.BeginLink):
            self._successor().link(message)
        elif isinstance(message, wire.EndingSeen):
            self.departures.answered(source)
        else:
            self.router.told(source, message)

    # -- lost ranks -------------------------------------------------------------------------------

    def lost(self, loss: Loss) -> None:
        """The transport has noticed the loss of a rank, or the end of one that has left.

        Ends the world, at once or, while the rank's whole host may be gone, within a short time.
        """
        if self._retired or loss.rank in self.membership.ended:
            return
        self._tell_succession({loss.rank})
        if self.succession is not None and loss.last_seen_s:  # it may live, and hears it as it comes back
            self.router.tell(loss.rank, self.membership.news_of(loss))
        if self.departures.has_told:  # perhaps the other rank has left, too, and does not tell one that has
            self.departures.answered(loss.rank)
            return
        if self._parted or self.closed or self.failures.of(WORLD) is not None:  # nothing waits for what others say
            self.report(loss, is_known=not loss.last_seen_s)
        else:
            self._host_losses.noticed(loss)

    def _tell_succession(self, ranks: Collection[int], *, has_left: bool = False) -> None:
        if self.succession is not None and not self.is_ahead:
            own = self.host_of[self.rank]
            for rank in ranks:
                is_dead = has_left or (self.host_of[rank] == own and self.membership.is_gone(rank))
                self.succession.lost(self.membership.numbers[rank], is_dead=is_dead)

    def report(self, loss: Loss, ranks: Sequence[int] = (), *, is_known: bool = True) -> None:
        """End the world at once because of `loss`. `ranks` are all ranks that are lost with it; by default its own.

        `is_known`: each rank notices it, unless it is the first loss.
        """
        news = self.membership.news_of(loss, ranks)
        if not (is_known or self.closed or self._parted) and self.failures.of(WORLD) is not None:
            for member in self.membership.members:
                if member != self.rank and member not in self.membership.lost:
                    self.router.tell(member, news)
        self._lost(news)

    def _ask_of(self, rank: int, loss: Loss) -> None:
        """Have `rank`, which is on the host of the lost rank, report the loss if it is alive."""
        self.router.tell(rank, self.membership.news_of(loss))

    def lost_in_memory(self, loss: Loss) -> AsyncollError:
        """A lock in shared memory has met a lost owner. Returns the error that the lock raises. From any thread.

        If the world has failed already, that is the error of the first failure. So one rank does not report two causes.
        """
        known = self.failures.of(WORLD)
        if known is None:
            news = self.membership.news_of(loss)
            # Posted before it is recorded: a signal handler may raise between the two, and a recorded failure that is
            # not posted would end no wait. Not called here: this thread may hold other locks, which a send may need.
            self._loop.call_soon_threadsafe(self._lost, news)
            known = self.failures.record(news)
        return error_of(known)

    def _lost(self, news: wire.Lost, source: int | None = None) -> None:
        """End the world because of a lost rank. Every loss comes here: `source` has told it; None: noticed here.

        The first loss is told to others, which may not have noticed it, unless all have made their last call. So all
        survivors raise a PeerLostError, and name the same rank if one is lost.
        """
        numbers = {news.rank, *ranks_in(news.ranks)}
        lost = {rank for rank, number in enumerate(self.membership.numbers) if number in numbers}
        self.membership.lost |= lost
        self._host_losses.clear()
        for rank in lost:
            self.departures.answered(rank)
        self._tell_succession(lost)
        if not self.closed:  # `close` has told the others and ended the waits
            is_first = self.failures.record(news) is news
            # Before the waits end here: this rank may leave as soon as its program has the error.
            if not self._parted:
                self._notices.happened(MembersLost(frozenset(lost)))
                if source is not None:
                    self._notices.happened(NoticeHeard(source))
                if is_first:
                    self._notices.know(news, source)
            if is_first:
                self.failures.fail(news)
        if self.arena is not None:
            self.arena.peer_lost()
