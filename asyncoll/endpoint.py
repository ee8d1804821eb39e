"""One rank's presence in the world: frames in; matched segments, signals and failures out.

Short arrays (up to one segment) are sent at once and wait at the receiver until they are asked for; a window per link
bounds how much may wait there. Long arrays wait at the sender until their receive is posted (GRANT), so they never
occupy the receiver's memory twice and cannot be caught behind anything.

A failure belongs to one communicator, or to the whole world (communicator 0). It ends every wait of that communicator
and every later call on it with the same error.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

from asyncoll import wire
from asyncoll.errors import AsyncollError, PeerLostError, ProtocolError
from asyncoll.failures import WORLD, Closed, Failure, Failures, break_off, error_of
from asyncoll.matching import Key, Mailbox, Receive
from asyncoll.membership import Membership
from asyncoll.tensors import Array
from asyncoll.traffic import Traffic
from asyncoll.transport import Arena, Buffer, Transport
from asyncoll.wire import SEGMENT_BYTES

WINDOW_BYTES = 64 * SEGMENT_BYTES  # unconsumed short arrays on the way from one rank to another
_MESSAGE_COST = 64  # what a message costs of the window beside its payload
_EARLY_MAX = 1 << 16  # signals and announcements kept for what does not exist here yet
_RECENT_MAX = 256  # finished executions whose description is kept to explain a mismatch

SignalHandler: TypeAlias = Callable[[int, int, int, int, Buffer], None]  # source, number, step, fingerprint, payload
Told: TypeAlias = wire.Abort | wire.Broken | wire.Lost | wire.Mismatch | wire.Overdue  # failures that others hear of
Asked = TypeVar("Asked", wire.Announce, wire.Where, wire.Here)  # control messages for whoever asks for them
logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which execution of what: everything that its ranks must agree on, and how to name it in an error."""

    communicator: int
    members: tuple[int, ...]  # ranks of the world
    context: int
    number: int
    fingerprint: int
    describe: Callable[[], str]


class Execution:
    """One execution of one operation at this rank; `identity` is None while only peers have spoken of it."""

    __slots__ = ("early_riders", "granted", "identity", "mailbox", "rider", "spoken", "waits")

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.mailbox = Mailbox()
        self.rider: Array | None = None  # goes along with every message, and grows to the maximum of all that come
        self.early_riders: list[tuple[int, Buffer]] = []
        self.granted: set[Key] = set()
        self.waits: dict[asyncio.Future[None], Key | None] = {}
        self.spoken: dict[int, int] = {}  # source: fingerprint, heard before this rank opened the execution


class _Link:
    """The window of short arrays to one peer, what of its own waits here, and the credit that it has earned."""

    __slots__ = ("early", "earned", "outstanding", "waiters")

    def __init__(self) -> None:
        self.outstanding = 0
        self.early = 0
        self.earned = 0
        self.waiters: list[asyncio.Future[None]] = []


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
        self.traffic = Traffic()
        self._executions: dict[tuple[int, int], Execution] = {}
        self._finished: dict[tuple[int, int], Identity] = {}
        self._abandoned: set[tuple[int, int]] = set()
        self._links: defaultdict[int, _Link] = defaultdict(_Link)
        self.failures = Failures()
        self._handlers: dict[int, SignalHandler] = {}
        self._listeners: dict[tuple[type, int], Callable[[int, Any], None]] = {}
        self._early_signals: dict[int, list[tuple[int, int, int, int, Buffer]]] = {}
        self._early_controls: dict[tuple[type, int], list[tuple[int, Any]]] = {}
        self._early_count = 0
        self._services: set[asyncio.Task[None]] = set()
        self._departures: list[Callable[[], None]] = []
        self._described: dict[int, Callable[[int], tuple[tuple[int, ...], str] | None]] = {}
        self._last_heard: dict[int, tuple[int, int]] = {}  # by source: the execution it last spoke of
        self._parted = False
        self.membership = Membership()
        self.departed = False
        self.closed = False
        self.membership.on_trace(self._trace)

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

    async def close(self, *, flush: bool = False) -> None:
        """Stop at once: pending waits raise ClosedError, services are cancelled. Idempotent."""
        if self.closed:
            return
        self.fail(Closed())
        self.closed = True
        for service in list(self._services):
            service.cancel()
        await asyncio.gather(*self._services, return_exceptions=True)
        await self.transport.close(flush=flush)

    # -- executions -------------------------------------------------------------------------------

    def open(self, identity: Identity, rider: Array | None = None) -> Execution:
        """Begin an execution at this rank. Raises the communicator's failure, if it has one."""
        self.failures.check(identity.communicator)
        key = (identity.context, identity.number)
        execution = self._execution(key)
        assert execution.identity is None, f"{identity.describe()} is already open"
        execution.identity, execution.rider = identity, rider
        for source, fingerprint in execution.spoken.items():
            if fingerprint != identity.fingerprint:
                execution.mailbox.forget(source)  # it is part of something else
                self._dispute(source, identity)
        for source, early in execution.early_riders:
            if execution.spoken[source] == identity.fingerprint:
                self._ride(source, execution, early)
        return execution

    def end(self, execution: Execution, *, completed: bool) -> None:
        """Forget an execution. What still arrives for one that was not completed is dropped."""
        identity = execution.identity
        assert identity is not None
        key = (identity.context, identity.number)
        del self._executions[key]
        if not completed:
            self._abandoned.add(key)
            return
        self._finished[key] = identity
        if len(self._finished) > _RECENT_MAX:
            del self._finished[next(iter(self._finished))]

    def post(self, execution: Execution, source: int, step: int, receive: Receive) -> None:
        """Post a receive from world rank `source`."""
        identity = execution.identity
        assert identity is not None
        try:
            early = execution.mailbox.post((source, step), receive)
            if early:
                self._links[source].early -= sum(map(_cost, early))
                _check_whole(receive)
        except ProtocolError as error:
            self.broken(source, error)
            self.failures.check(identity.communicator)
            raise
        if receive.into.nbytes > SEGMENT_BYTES:
            header = wire.encode(wire.GRANT, identity.context, identity.number, step, identity.fingerprint)
            self._send(source, [header])
        else:
            for payload in early:
                self._earn(source, _cost(payload))

    async def wait(self, execution: Execution, receive: Receive) -> None:
        """Wait until `receive`, which is not complete yet, is."""
        assert execution.identity is not None
        self.failures.check(execution.identity.communicator)
        future = self._loop.create_future()
        receive.on_complete = lambda: _set(future)
        execution.waits[future] = None
        try:
            await future
        finally:
            del execution.waits[future]

    def send_nowait(self, execution: Execution, dest: int, step: int, data: Array) -> bool:
        """Send the flat array `data` to world rank `dest`, if it is short and the window has room for it."""
        cost = data.nbytes + _MESSAGE_COST
        link = self._links[dest]
        if data.nbytes > SEGMENT_BYTES or link.outstanding + cost > WINDOW_BYTES:
            return False
        link.outstanding += cost
        self._send(dest, _data_frames(execution, step, data.view(np.uint8)))
        return True

    async def send(self, execution: Execution, dest: int, step: int, data: Array) -> None:
        """Send the flat array `data` to world rank `dest`; `data` must not change until this returns."""
        if data.nbytes <= SEGMENT_BYTES:
            while not self.send_nowait(execution, dest, step, data):
                await self._credit(execution, dest)
            return
        await self._grant(execution, dest, step)
        raw = data.view(np.uint8)
        for start in range(0, raw.size, SEGMENT_BYTES):
            self._send(dest, _data_frames(execution, step, raw[start : start + SEGMENT_BYTES]))
            await self.transport.drain(dest)

    async def _credit(self, execution: Execution, dest: int) -> None:
        identity = execution.identity
        assert identity is not None
        what = f"{identity.describe()}: rank {dest} has not consumed what it was sent"
        with self.failures.watch(identity.communicator, what) as future:
            self._links[dest].waiters.append(future)
            await future

    async def _grant(self, execution: Execution, dest: int, step: int) -> None:
        key = (dest, step)
        assert execution.identity is not None
        self.failures.check(execution.identity.communicator)
        if key not in execution.granted:
            future = self._loop.create_future()
            execution.waits[future] = key
            try:
                await future
            finally:
                del execution.waits[future]
        execution.granted.discard(key)

    def _execution(self, key: tuple[int, int]) -> Execution:
        execution = self._executions.get(key)
        if execution is None:
            execution = self._executions[key] = Execution()
        return execution

    def waiting(self) -> list[str]:
        """What this rank waits for, one line each."""
        lines = []
        for execution in self._executions.values():
            if execution.identity is None or not execution.waits:
                continue
            what = execution.identity.describe()
            lines += [f"{what}: step {step} from rank {source}" for source, step in execution.mailbox.waiting_for()]
            to = [key for key in execution.waits.values() if key is not None]
            lines += [f"{what}: rank {dest} has not posted its receive for step {step}" for dest, step in to]
        lines += self.arena.waiting() if self.arena is not None else []
        return lines + self.failures.watched()

    # -- persistent operations and services -------------------------------------------------------

    def signal(self, dest: int, context: int, number: int, step: int, fingerprint: int, payload: Buffer = b"") -> None:
        """Tell the handler of `context` at `dest`. The payload, at most a segment, does not wait for credit."""
        self._send(dest, [wire.encode(wire.SIGNAL, context, number, step, fingerprint), payload])

    def on_signal(self, context: int, handler: SignalHandler) -> None:
        """Signals for `context` go to `handler`, those that have come already first."""
        self._handlers[context] = handler
        for signal in self._early_signals.pop(context, []):
            self._early_count -= 1
            handler(*signal)

    def tell(self, dest: int, message: wire.Control) -> None:
        """Send a control message."""
        self._send(dest, wire.encode_control(message))

    def introduce(self, host: str, pid: int) -> None:
        """Tell all ranks which process this is."""
        me = wire.Hello(host, pid)
        self.membership.introduced(self.rank, me)
        for peer in range(self.size):
            if peer != self.rank:
                self.tell(peer, me)

    def on_control(self, kind: type[Asked], communicator: int, listener: Callable[[int, Asked], None]) -> None:
        """Messages of that kind for `communicator` go to `listener`, those that have come already first."""
        self._listeners[kind, communicator] = listener
        for source, message in self._early_controls.pop((kind, communicator), []):
            self._early_count -= 1
            listener(source, message)

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
        self.abort(WORLD, range(self.size), f"{type(error).__name__}: {error}")

    # -- failures ---------------------------------------------------------------------------------

    def fail(self, failure: Failure, communicator: int = WORLD) -> None:
        """End every wait of `communicator`, and every later call on it. The first failure stays."""
        if self.closed or not self.failures.enter(failure, communicator):
            return
        for execution in self._executions.values():
            if execution.identity is not None and communicator in (WORLD, execution.identity.communicator):
                for future in execution.waits:
                    break_off(future, failure)
        self._alarm()

    def _alarm(self) -> None:
        if self.arena is not None:
            self.arena.alarm()

    def give_up(self, failure: Told, communicator: int, members: Iterable[int]) -> None:
        """Fail, and tell the members, unless that has happened. Local, immediate, idempotent."""
        if not self.closed and not self.failures.has_failed(communicator):
            self._spread(failure, members)
            self.fail(failure, communicator)

    def abort(self, communicator: int, members: Iterable[int], reason: str) -> None:
        """Give up for a reason of this rank's own."""
        self.give_up(wire.Abort(communicator, self.rank, reason), communicator, members)

    def noticed(self, error: PeerLostError, post: Callable[[Callable[[], None]], None]) -> AsyncollError:
        """A rank is gone, as was noticed in memory, in any thread; `post` calls on this loop. Returns what to raise."""
        cause, last_seen_s = error.cause, error.last_seen_s
        rank = self.membership.culprit(error.rank, self.arena.ranks if self.arena is not None else ())
        post(lambda: self.lost(rank, cause, last_seen_s))
        return error_of(self.membership.news_of(rank, cause, last_seen_s))

    def _bury(self, rank: int) -> None:
        """Nobody waits any more for `rank` to leave their memory."""
        self.membership.lost.add(rank)
        if self.arena is not None:
            self.arena.bury()

    def pass_on(self) -> None:
        """Tell everybody what has failed, as this rank has heard it.

        It leaves because of that, and others who have not heard of it yet would take this rank for the first to go.
        """
        for failure in self.failures.all():
            if not isinstance(failure, Closed):
                self._spread(failure, range(self.size))

    def _spread(self, failure: Told, members: Iterable[int]) -> None:
        for member in members:
            if member != self.rank:
                self.tell(member, failure)

    # -- what ranks disagree about ----------------------------------------------------------------

    def _dispute(self, source: int, identity: Identity) -> None:
        self.dispute(source, identity.communicator, identity.context, identity.number, identity.describe())

    def dispute(self, source: int, communicator: int, context: int, number: int, description: str) -> None:
        """Ask `source` what it meant; its answer, which names both sides, goes to every member."""
        self.tell(source, wire.Dispute(communicator, context, number, description))

    def on_dispute(self, context: int, describe: Callable[[int], tuple[tuple[int, ...], str] | None]) -> None:
        """`describe(number)` knows who takes part in that execution of `context`, and what it is."""
        self._described[context] = describe

    def _answer(self, source: int, dispute: wire.Dispute) -> None:
        key = (dispute.context, dispute.number)
        execution = self._executions.get(key)
        identity = (execution.identity if execution else None) or self._finished.get(key)
        known = (identity.members, identity.describe()) if identity else None
        if known is None and dispute.context in self._described:
            known = self._described[dispute.context](dispute.number)
        members, mine = known or ((source,), "something long ago")
        text = f"rank {source} called {dispute.description}, but rank {self.rank} called {mine}"
        self.mismatch(dispute.communicator, members, text)

    def mismatch(self, communicator: int, members: tuple[int, ...], text: str) -> None:
        """Ranks called different things: tell every member, and fail the communicator here."""
        self.give_up(wire.Mismatch(communicator, text), communicator, members)

    # -- what the transport tells -----------------------------------------------------------------

    def received(self, source: int, frames: list[Buffer]) -> None:
        self.traffic.messages_received += 1
        try:
            header = wire.decode(frames)
            if header.kind == wire.DATA:
                self.traffic.bytes_received += len(frames[1])
                self._data(source, header, *frames[1:])
            elif header.kind == wire.GRANT:
                self._granted(source, header)
            elif header.kind == wire.CREDIT:
                self._credited(source, header.number)
            elif header.kind == wire.SIGNAL:
                self.traffic.bytes_received += len(frames[1])
                self._signalled(source, header, frames[1])
            else:
                self._told(source, wire.decode_control(frames[1]))
        except ProtocolError as error:
            self.broken(source, error)

    def broken(self, source: int, error: ProtocolError) -> None:
        """`source` broke the protocol: nothing it says can be trusted, so the world ends, and everybody hears why."""
        text = f"rank {source} broke the protocol: {error}"
        logger.error(text)
        self.give_up(wire.Broken(source, text), WORLD, range(self.size))

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        """This rank has noticed it; not everybody may have."""
        others = () if self._parted else (peer for peer in range(self.size) if peer != source)
        self.give_up(self.membership.news_of(source, cause, last_seen_s), WORLD, others)
        self._bury(source)

    def _trace(self, source: int) -> str:
        """The last execution that `source` has spoken of."""
        key = self._last_heard.get(source, (0, 0))
        execution = self._executions.get(key)
        identity = (execution.identity if execution else None) or self._finished.get(key)
        return identity.describe() if identity else ""

    def _data(self, source: int, header: wire.Header, payload: Buffer, rider: Buffer | None = None) -> None:
        execution = self._agreed(source, header)
        if execution is None:
            return
        if rider is not None:
            self._ride(source, execution, rider)
        receive = execution.mailbox.posted.get((source, header.step))
        if execution.mailbox.arrive((source, header.step), payload):
            assert receive is not None
            _check_whole(receive)
            if receive.into.nbytes <= SEGMENT_BYTES:
                self._earn(source, _cost(payload))
            return
        link = self._links[source]
        link.early += _cost(payload)
        if link.early > WINDOW_BYTES:
            raise ProtocolError(f"{link.early} bytes that nobody here has asked for, where {WINDOW_BYTES} are allowed")

    def _ride(self, source: int, execution: Execution, rider: Buffer) -> None:
        """Take in what came along with the data of `source`."""
        if execution.identity is None:
            execution.early_riders.append((source, rider))
            return
        mine = execution.rider
        if mine is None or len(rider) != mine.nbytes:
            self.broken(source, ProtocolError(f"{len(rider)} bytes go along with {execution.identity.describe()}"))
            return
        np.maximum(mine, np.frombuffer(rider, np.uint8).view(mine.dtype), out=mine)

    def _granted(self, source: int, header: wire.Header) -> None:
        execution = self._agreed(source, header)
        if execution is not None:
            key = (source, header.step)
            execution.granted.add(key)
            for future, awaited in execution.waits.items():
                if awaited == key:
                    _set(future)

    def _agreed(self, source: int, header: wire.Header) -> Execution | None:
        """The execution that `source` speaks of, if the two agree on what it is."""
        key = (header.context, header.number)
        if key in self._abandoned:
            return None
        execution = self._execution(key)
        self._last_heard[source] = key
        if execution.identity is None:
            execution.spoken[source] = header.fingerprint
        elif execution.identity.fingerprint != header.fingerprint:
            self._dispute(source, execution.identity)
            return None
        return execution

    def _credited(self, source: int, amount: int) -> None:
        link = self._links[source]
        if amount > link.outstanding:
            raise ProtocolError(f"a credit of {amount} bytes, but only {link.outstanding} are outstanding")
        link.outstanding -= amount
        waiters, link.waiters = link.waiters, []
        for future in waiters:
            _set(future)

    def _signalled(self, source: int, header: wire.Header, payload: Buffer) -> None:
        signal = (source, header.number, header.step, header.fingerprint, payload)
        handler = self._handlers.get(header.context)
        if handler is not None:
            handler(*signal)
        else:
            self._count_early()
            self._early_signals.setdefault(header.context, []).append(signal)

    def _told(self, source: int, message: wire.Control) -> None:
        if isinstance(message, wire.Abort | wire.Mismatch | wire.Overdue):
            self.fail(message, message.communicator)
        elif isinstance(message, wire.Broken):
            self.fail(message)
        elif isinstance(message, wire.Lost):
            self.fail(message)
            self._bury(message.rank)
        elif isinstance(message, wire.Hello):
            self.membership.introduced(source, message)
        elif isinstance(message, wire.Dispute):
            self._answer(source, message)
        elif (listener := self._listeners.get((type(message), message.communicator))) is not None:
            listener(source, message)
        else:
            self._count_early()
            self._early_controls.setdefault((type(message), message.communicator), []).append((source, message))

    def _count_early(self) -> None:
        self._early_count += 1
        if self._early_count > _EARLY_MAX:
            raise ProtocolError(f"more than {_EARLY_MAX} messages for operations that nobody here has opened")

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, dest: int, frames: list[Buffer]) -> None:
        self.traffic.messages_sent += 1
        if len(frames) > 1:
            self.traffic.bytes_sent += len(frames[1])
        self.transport.send(dest, frames)

    def _earn(self, source: int, amount: int) -> None:
        """`amount` bytes of `source` have been consumed; tell it once it is worth a message."""
        link = self._links[source]
        link.earned += amount
        if link.earned >= WINDOW_BYTES // 4:
            self._send(source, [wire.encode(wire.CREDIT, number=link.earned)])
            link.earned = 0


def _data_frames(execution: Execution, step: int, payload: Buffer) -> list[Buffer]:
    identity = execution.identity
    assert identity is not None
    header = wire.encode(wire.DATA, identity.context, identity.number, step, identity.fingerprint)
    return [header, payload] if execution.rider is None else [header, payload, execution.rider.view(np.uint8)]


def _check_whole(receive: Receive) -> None:
    """A short array comes in one piece; part of one is not the array that was asked for."""
    if receive.into.nbytes <= SEGMENT_BYTES and not receive.complete:
        raise ProtocolError(f"a segment of {receive.filled} elements; {receive.into.size} were expected")


def _cost(payload: Buffer) -> int:
    return len(payload) + _MESSAGE_COST


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
