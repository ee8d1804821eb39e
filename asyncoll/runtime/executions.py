"""Executions of operations: what one rank sends and receives in each, and how much may be on the way.

Short arrays (up to one segment) are sent at once and wait at the receiver until they are asked for; a window per link
bounds how much may wait there. Long arrays wait at the sender until their receive is posted (GRANT), so they never
occupy the receiver's memory twice and cannot be caught behind anything.

Peers may speak of an execution before this rank has opened it, and after it has ended here. Whatever comes says what
its sender takes the execution for, so ranks that call different things find out, and all of them hear both sides.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.runtime.failures import WORLD, Failure, Failures, break_off
from asyncoll.runtime.matching import Key, Mailbox, Receive
from asyncoll.runtime.router import Router
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Buffer, Transport, wire
from asyncoll.transport.wire import SEGMENT_BYTES

WINDOW_BYTES = 64 * SEGMENT_BYTES  # unconsumed short arrays on the way from one rank to another
_MESSAGE_COST = 64  # what a message costs of the window beside its payload
_RECENT_MAX = 256  # finished executions whose description is kept to explain a mismatch


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

    __slots__ = ("early_piggybacks", "granted", "identity", "mailbox", "piggyback", "spoken", "waits")

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.mailbox = Mailbox()
        self.piggyback: Array | None = None  # goes along with every message, and grows to the maximum of all that come
        self.early_piggybacks: list[tuple[int, Buffer]] = []
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


class Executions:
    """Those of one rank. Everything happens on the runtime's loop."""

    def __init__(self, transport: Transport, router: Router, failures: Failures) -> None:
        self._transport = transport
        self._router = router
        self._failures = failures
        self._current: dict[tuple[int, int], Execution] = {}  # also those that only peers have spoken of
        self._finished: dict[tuple[int, int], Identity] = {}
        self._abandoned: set[tuple[int, int]] = set()
        self._links: defaultdict[int, _Link] = defaultdict(_Link)
        self._described: dict[int, Callable[[int], tuple[tuple[int, ...], str] | None]] = {}
        self._last_heard: dict[int, tuple[int, int]] = {}  # by source: the execution it last spoke of
        failures.on_any(self._break_off)

    def open(self, identity: Identity, piggyback: Array | None = None) -> Execution:
        """Begin an execution at this rank. Raises the communicator's failure, if it has one."""
        self._failures.check(identity.communicator)
        key = (identity.context, identity.number)
        execution = self._of(key)
        assert execution.identity is None, f"{identity.describe()} is already open"
        execution.identity, execution.piggyback = identity, piggyback
        for source, fingerprint in execution.spoken.items():
            if fingerprint != identity.fingerprint:
                execution.mailbox.forget(source)  # it is part of something else
                self._dispute(source, identity)
        for source, early in execution.early_piggybacks:
            if execution.spoken[source] == identity.fingerprint:
                self._ride(source, execution, early)
        return execution

    def end(self, execution: Execution, *, completed: bool) -> None:
        """Forget an execution. What still arrives for one that was not completed is dropped."""
        identity = execution.identity
        assert identity is not None
        key = (identity.context, identity.number)
        del self._current[key]
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
            self._failures.broken(source, error)
            self._failures.check(identity.communicator)
            raise
        if receive.into.nbytes > SEGMENT_BYTES:
            header = wire.encode(wire.GRANT, identity.context, identity.number, step, identity.fingerprint)
            self._router.send(source, [header])
        else:
            for payload in early:
                self._earn(source, _cost(payload))

    async def wait(self, execution: Execution, receive: Receive) -> None:
        """Wait until `receive`, which is not complete yet, is."""
        assert execution.identity is not None
        self._failures.check(execution.identity.communicator)
        future = asyncio.get_running_loop().create_future()
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
        self._router.send(dest, _data_frames(execution, step, data.view(np.uint8)))
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
            self._router.send(dest, _data_frames(execution, step, raw[start : start + SEGMENT_BYTES]))
            await self._transport.drain(dest)

    async def _credit(self, execution: Execution, dest: int) -> None:
        identity = execution.identity
        assert identity is not None
        what = f"{identity.describe()}: rank {dest} has not consumed what it was sent"
        with self._failures.watch(identity.communicator, what) as future:
            self._links[dest].waiters.append(future)
            await future

    async def _grant(self, execution: Execution, dest: int, step: int) -> None:
        key = (dest, step)
        assert execution.identity is not None
        self._failures.check(execution.identity.communicator)
        if key not in execution.granted:
            future = asyncio.get_running_loop().create_future()
            execution.waits[future] = key
            try:
                await future
            finally:
                del execution.waits[future]
        execution.granted.discard(key)

    def waiting(self) -> list[str]:
        """What this rank waits for, one line each."""
        lines = []
        for execution in self._current.values():
            if execution.identity is None or not execution.waits:
                continue
            what = execution.identity.describe()
            lines += [f"{what}: step {step} from rank {source}" for source, step in execution.mailbox.waiting_for()]
            to = [key for key in execution.waits.values() if key is not None]
            lines += [f"{what}: rank {dest} has not posted its receive for step {step}" for dest, step in to]
        return lines

    def _break_off(self, failure: Failure, communicator: int) -> None:
        for execution in self._current.values():
            if execution.identity is not None and communicator in (WORLD, execution.identity.communicator):
                for future in execution.waits:
                    break_off(future, failure)

    # -- what comes -------------------------------------------------------------------------------

    def arrived(self, source: int, header: wire.Header, payload: Buffer, piggyback: Buffer | None = None) -> None:
        """A segment of `source`, and what goes along with it."""
        execution = self._agreed(source, header)
        if execution is None:
            return
        if piggyback is not None:
            self._ride(source, execution, piggyback)
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

    def granted(self, source: int, header: wire.Header) -> None:
        """`source` has posted its receive for a long array."""
        execution = self._agreed(source, header)
        if execution is not None:
            key = (source, header.step)
            execution.granted.add(key)
            for future, awaited in execution.waits.items():
                if awaited == key:
                    _set(future)

    def credited(self, source: int, amount: int) -> None:
        """`source` has consumed so many bytes of short arrays."""
        link = self._links[source]
        if amount > link.outstanding:
            raise ProtocolError(f"a credit of {amount} bytes, but only {link.outstanding} are outstanding")
        link.outstanding -= amount
        waiters, link.waiters = link.waiters, []
        for future in waiters:
            _set(future)

    def _ride(self, source: int, execution: Execution, piggyback: Buffer) -> None:
        """Take in what came along with the data of `source`."""
        if execution.identity is None:
            execution.early_piggybacks.append((source, piggyback))
            return
        mine = execution.piggyback
        if mine is None or len(piggyback) != mine.nbytes:
            text = f"{len(piggyback)} bytes go along with {execution.identity.describe()}"
            self._failures.broken(source, ProtocolError(text))
            return
        np.maximum(mine, np.frombuffer(piggyback, np.uint8).view(mine.dtype), out=mine)

    def _agreed(self, source: int, header: wire.Header) -> Execution | None:
        """The execution that `source` speaks of, if the two agree on what it is."""
        key = (header.context, header.number)
        if key in self._abandoned:
            return None
        execution = self._of(key)
        self._last_heard[source] = key
        if execution.identity is None:
            execution.spoken[source] = header.fingerprint
        elif execution.identity.fingerprint != header.fingerprint:
            self._dispute(source, execution.identity)
            return None
        return execution

    def _of(self, key: tuple[int, int]) -> Execution:
        execution = self._current.get(key)
        if execution is None:
            execution = self._current[key] = Execution()
        return execution

    def _earn(self, source: int, amount: int) -> None:
        """`amount` bytes of `source` have been consumed; tell it once it is worth a message."""
        link = self._links[source]
        link.earned += amount
        if link.earned >= WINDOW_BYTES // 4:
            self._router.send(source, [wire.encode(wire.CREDIT, number=link.earned)])
            link.earned = 0

    # -- what ranks disagree about ----------------------------------------------------------------

    def _dispute(self, source: int, identity: Identity) -> None:
        """Ask `source` what it meant; its answer, which names both sides, goes to every member."""
        question = wire.Dispute(identity.communicator, identity.context, identity.number, identity.describe())
        self._router.tell(source, question)

    def on_dispute(self, context: int, describe: Callable[[int], tuple[tuple[int, ...], str] | None]) -> None:
        """`describe(number)` knows who takes part in that execution of `context`, and what it is."""
        self._described[context] = describe

    def answer(self, source: int, dispute: wire.Dispute) -> None:
        """Tell everybody whom it concerns what `source` called, and what this rank did."""
        identity = self._identity((dispute.context, dispute.number))
        known = (identity.members, identity.describe()) if identity else None
        if known is None and dispute.context in self._described:
            known = self._described[dispute.context](dispute.number)
        members, mine = known or ((source,), "something long ago")
        text = f"rank {source} called {dispute.description}, but rank {self._router.rank} called {mine}"
        self._failures.mismatch(dispute.communicator, members, text)

    def trace(self, source: int) -> str:
        """The last execution that `source` has spoken of."""
        identity = self._identity(self._last_heard.get(source, (0, 0)))
        return identity.describe() if identity else ""

    def _identity(self, key: tuple[int, int]) -> Identity | None:
        """What this rank knows, or has known until lately, under `key`."""
        execution = self._current.get(key)
        return (execution.identity if execution else None) or self._finished.get(key)


def _data_frames(execution: Execution, step: int, payload: Buffer) -> list[Buffer]:
    identity = execution.identity
    assert identity is not None
    header = wire.encode(wire.DATA, identity.context, identity.number, step, identity.fingerprint)
    return [header, payload] if execution.piggyback is None else [header, payload, execution.piggyback.view(np.uint8)]


def _check_whole(receive: Receive) -> None:
    """A short array comes in one piece; part of one is not the array that was asked for."""
    if receive.into.nbytes <= SEGMENT_BYTES and not receive.complete:
        raise ProtocolError(f"a segment of {receive.filled} elements; {receive.into.size} were expected")


def _cost(payload: Buffer) -> int:
    return len(payload) + _MESSAGE_COST


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
