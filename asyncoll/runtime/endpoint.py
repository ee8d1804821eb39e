"""One rank's presence in the world: what comes goes to those it is for, what is gone is missed, services run beside.

Here the runtime of a rank is put together: its executions, its router, its failures, and what it knows of others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from asyncoll import forks
from asyncoll.errors import AsyncollError, ClosedError, PeerLostError, ProtocolError, describe
from asyncoll.runtime.executions import Executions
from asyncoll.runtime.failures import WORLD, Closed, Failures, error_of
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.statistics import Ledger, Traffic
from asyncoll.transport import Arena, Buffer, Transport, wire

logger = logging.getLogger("asyncoll")


class Endpoint:
    """The runtime of one rank. Everything happens on the loop that it was started on."""

    def __init__(self, transport: Transport, arena: Arena | None = None, patience_s: float = math.inf) -> None:
        """`arena` is what this rank shares with those of its host, if there is one.

        `patience_s` is how long a call may take where no deadline says less.
        """
        self.transport = transport
        self.arena = arena
        self.patience_s = patience_s
        self.rank = transport.rank
        self.size = transport.size
        self.traffic = Traffic()  # by message
        self.in_memory = Ledger()  # the same of calls in shared memory, when they have ended
        self.router = Router(transport, self.traffic)
        self.failures = Failures(self.router)
        self.executions = Executions(transport, self.router, self.failures)
        self.membership = Membership()
        self._services: set[asyncio.Task[None]] = set()
        self._departures: list[Callable[[], None]] = []
        self._parted = False
        self.departed = False
        self.closed = False
        self._parent: int | None = None  # whose endpoint it is, in a forked child
        self.membership.on_trace(self.executions.trace)
        if arena is not None:
            self.failures.on_any(lambda *_: arena.recheck())
        forks.register(self)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.transport.start(self)

    def shared_by(self, ranks: tuple[int, ...]) -> Arena | None:
        """The arena, if it is that of all these ranks of the world, and they are several."""
        arena = self.arena
        return arena if arena is not None and len(ranks) > 1 and set(ranks) <= set(arena.ranks) else None

    def now_s(self) -> float:
        """The time of this rank's loop: virtual in a simulated world."""
        return self._loop.time()

    def waiting(self) -> list[str]:
        """What this rank waits for, one line each."""
        in_memory = self.arena.waiting() if self.arena is not None else []
        return self.executions.waiting() + in_memory + self.failures.watched()

    async def close(self, *, flush: bool = False) -> None:
        """Stop at once: pending waits raise ClosedError, services are cancelled. Idempotent."""
        if self.closed:
            return
        self.failures.fail(Closed())
        self.closed = True
        for service in list(self._services):
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        await self.transport.close(flush=flush)

    def check_open(self) -> None:
        """Raises ClosedError after the end of the world, and UsageError in a forked child of its process."""
        self.check_not_forked()
        if self.closed:
            raise ClosedError("this communicator is closed")

    def check_not_forked(self) -> None:
        """Raises UsageError in a forked child of the process that this endpoint belongs to."""
        if self._parent is not None:
            raise forks.refusal(self._parent)

    def abandon(self, parent: int) -> None:
        """In a forked child: nothing can be called here any more."""
        self.closed = True
        self._parent = parent

    # -- coming and going -------------------------------------------------------------------------

    def introduce(self, host: str, pid: int) -> None:
        """Tell all ranks which process this is."""
        me = wire.Hello(host, pid)
        self.membership.introduced(self.rank, me)
        for peer in range(self.size):
            if peer != self.rank:
                self.router.tell(peer, me)

    def on_depart(self, callback: Callable[[], None]) -> None:
        """`callback` is called when this rank has made its last call and only serves the others."""
        self._departures.append(callback)

    def depart(self) -> None:
        """This rank has made its last call."""
        self.departed = True
        for callback in self._departures:
            callback()

    def part(self) -> None:
        """Every rank has made its last call, so it matters to nobody any more who goes."""
        self._parted = True

    # -- services ---------------------------------------------------------------------------------

    def spawn(self, service: Coroutine[Any, Any, None], communicator: int) -> None:
        """Run `service` beside everything else. Its own failure is the world's; that of `communicator` is not."""
        task = self._loop.create_task(service)
        self._services.add(task)
        task.add_done_callback(lambda task: self._served(task, communicator))

    def _served(self, task: asyncio.Task[None], communicator: int) -> None:
        self._services.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, AsyncollError) and self.failures.has_failed(communicator):
            return
        if not isinstance(error, AsyncollError):
            logger.error("a service of rank %d failed", self.rank, exc_info=error)
        self.failures.abort(WORLD, range(self.size), describe(error))

    # -- what comes -------------------------------------------------------------------------------

    def received(self, source: int, frames: list[Buffer]) -> None:
        self.traffic.messages_received += 1
        try:
            header = wire.decode(frames)
            if header.kind == wire.DATA:
                self.traffic.bytes_received += len(frames[1])
                self.executions.arrived(source, header, *frames[1:])
            elif header.kind == wire.GRANT:
                self.executions.granted(source, header)
            elif header.kind == wire.CREDIT:
                self.executions.credited(source, header.number)
            elif header.kind == wire.SIGNAL:
                self.traffic.bytes_received += len(frames[1])
                self.router.signalled(source, header, frames[1])
            else:
                self._told(source, wire.decode_control(frames[1]))
        except ProtocolError as error:
            self.failures.broken(source, error)

    def _told(self, source: int, message: wire.Control) -> None:
        if isinstance(message, wire.Abort | wire.Mismatch | wire.Overdue):
            self.failures.fail(message, message.communicator)
        elif isinstance(message, wire.Broken):
            self.failures.fail(message)
        elif isinstance(message, wire.Lost):
            self.failures.fail(message)
            self._bury(message.rank)
        elif isinstance(message, wire.Hello):
            self.membership.introduced(source, message)
        elif isinstance(message, wire.Dispute):
            self.executions.answer(source, message)
        else:
            self.router.told(source, message)

    # -- who is gone ------------------------------------------------------------------------------

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        """This rank has noticed it; not everybody may have."""
        others = () if self._parted else (peer for peer in range(self.size) if peer != source)
        self.failures.give_up(self.membership.news_of(source, cause, last_seen_s), WORLD, others)
        self._bury(source)

    def noticed(self, error: PeerLostError, post: Callable[[Callable[[], None]], None]) -> AsyncollError:
        """A rank is gone, as was noticed in memory, in any thread; `post` calls on this loop. Returns what to raise."""
        if (known := self.failures.of(WORLD)) is not None:
            return error_of(known)
        cause, last_seen_s = error.cause, error.last_seen_s
        rank = self.membership.culprit(error.rank, self.arena.ranks if self.arena is not None else ())
        post(lambda: self.lost(rank, cause, last_seen_s))
        return error_of(self.membership.news_of(rank, cause, last_seen_s))

    def _bury(self, rank: int) -> None:
        """Nobody waits any more for `rank` to leave their memory."""
        self.membership.lost.add(rank)
        if self.arena is not None:
            self.arena.peer_lost()
