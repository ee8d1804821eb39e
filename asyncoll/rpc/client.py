"""Calls from here that have not been answered.

Each has a number of its own, so that an answer to one that nobody waits for any more cannot be taken for another's.
It keeps its slot until it is answered, even then: what it was sent for goes on there until it has heard of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from asyncoll.arguments import text
from asyncoll.errors import AsyncollError, ClosedError, DeadlineError, ProtocolError, UsageError
from asyncoll.rpc import codec, failure, protocol
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.codec import Types
from asyncoll.rpc.protocol import ITEMS_MAX, Message
from asyncoll.rpc.server import depth
from asyncoll.rpc.service import MAX_NAME, METHODS
from asyncoll.rpc.window import Slots
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.tensors.reductions import Array

R = TypeVar("R")
Answer = tuple[Message, Sequence[Array]]
_CREDIT_EVERY = ITEMS_MAX // 4
FOREIGN_LOOP = (
    "calls of functions belong to the loop that the program runs on, and this is another: make them inside an "
    "`async def` there, and from another thread pass that to asyncio.run_coroutine_threadsafe"
)


class _Pending:
    """One call. `answer` is what waits for it, `items` is what has come of a stream; neither if nobody waits."""

    __slots__ = ("answer", "is_word", "items", "nbytes", "peer", "slots")

    def __init__(self, peer: int, slots: Slots, nbytes: int, *, is_word: bool) -> None:
        self.peer = peer
        self.is_word = is_word  # that nobody has waited for from the start
        self.slots = slots
        self.nbytes = nbytes
        self.answer: asyncio.Future[Answer] | None = None
        self.items: asyncio.Queue[Answer | None] | None = None  # None: there will be no more


class Client:
    """The calls of one rank, or of one connection, by their numbers."""

    def __init__(self, carrier: Carrier, rank_of: Callable[[int], int], what: str, patience_s: float) -> None:
        """`rank_of` says how a peer is called in errors; `what` is what is closed at the end.

        `patience_s` is how long a caller waits, for a slot as for an answer, where no deadline says less.
        """
        self._carrier = carrier
        self._what = what
        self._patience_s = patience_s
        self._rank_of = rank_of
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._slots: defaultdict[tuple[int, int], Slots] = defaultdict(Slots)  # by peer and depth
        self._sending: set[asyncio.Task[Any]] = set()  # tasks that wait for a slot, or for the carrier
        self._words: set[asyncio.Task[None]] = set()  # that nobody waits for
        self._failure: Callable[[], AsyncollError] | None = None
        self._loop = asyncio.get_running_loop()

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], types: Types) -> Any:
        """What the function of that name returns at `peer`. `types` are the dataclasses that may come."""
        message, arrays = await self._in_time(self._exchange(peer, name, args, kwargs), name, peer)
        return codec.decode(message.body, arrays, types)

    async def notify(self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Have a function called, and do not wait for it. Waits for a slot, if all are taken."""
        await self._in_time(self._begin(protocol.NOTIFY, peer, name, args, kwargs), name, peer)

    async def stream(
        self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any], types: Types
    ) -> AsyncGenerator[Any, None]:
        """The items of an async generator at `peer`."""
        work = self._begin(protocol.STREAM, peer, name, args, kwargs)
        number, pending = await self._in_time(work, name, peer)
        assert pending.items is not None
        taken = 0
        try:
            while (answer := await self._next_item(pending.items, name, peer)) is not None:
                yield codec.decode(answer[0].body, answer[1], types)
                taken += 1
                if taken >= _CREDIT_EVERY or pending.items.empty():
                    self._tell(protocol.CREDIT, peer, number, taken)
                    taken = 0
        finally:
            self._give_up(number)

    async def _next_item(self, items: asyncio.Queue[Answer | None], name: str, peer: int) -> Answer | None:
        """None at the end."""
        self.check()
        answer = await self._in_time(items.get(), name, peer)
        if answer is None:
            self.check()
            return None
        if answer[0].kind == protocol.ERROR:
            raise failure.decode(answer[0].body, self._rank_of(peer))
        return answer if answer[0].kind == protocol.ITEM else None

    async def _exchange(self, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer:
        number, pending = await self._begin(protocol.CALL, peer, name, args, kwargs)
        assert pending.answer is not None
        try:
            message, arrays = await pending.answer
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        if message.kind == protocol.ERROR:
            raise failure.decode(message.body, self._rank_of(peer))
        return message, arrays

    async def _in_time(self, work: Coroutine[Any, Any, R], name: str, peer: int) -> R:
        """Await `work`, or raise DeadlineError."""
        remaining = remaining_s()
        seconds = self._patience_s if remaining is None else min(remaining, self._patience_s)
        if seconds == math.inf:
            return await work
        if seconds <= 0:
            work.close()
            raise self._late(name, peer)
        late = asyncio.timeout(seconds)
        try:
            async with late:
                return await work
        except TimeoutError:
            if not late.expired():
                raise
            raise self._late(name, peer) from None

    def _late(self, name: str, peer: int) -> DeadlineError:
        rank = self._rank_of(peer)
        where = f"rank {rank}" if rank >= 0 else "the service"
        missing = (peer,) if rank >= 0 else ()
        return DeadlineError(f"{name} at {where} did not answer before the deadline", missing=missing)

    async def _begin(
        self, kind: int, peer: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[int, _Pending]:
        self.check()
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(FOREIGN_LOOP)
        name = text(name, "a function is called by its name, which")
        if len(name) > MAX_NAME or not all(map(str.isidentifier, name.split("."))):
            raise UsageError(f"a function is called by its name, got {name!r:.60}")
        level = depth.get()
        if kind == protocol.NOTIFY:
            level %= protocol.MAX_DEPTH + 1  # nobody waits for its end, so it may be passed on for ever
        elif level > protocol.MAX_DEPTH:
            raise UsageError(f"{name}: {protocol.MAX_DEPTH} calls wait for each other already: does one call itself?")
        body, arrays = _encode(name, args, kwargs)
        slots, nbytes = self._slots[peer, level], len(body) + sum(array.nbytes for array in arrays)
        if not slots.take_nowait(nbytes):
            await self._unless_failed(slots.take(nbytes))
        number, pending = next(self._numbers), _Pending(peer, slots, nbytes, is_word=kind == protocol.NOTIFY)
        if kind == protocol.CALL:
            pending.answer = self._loop.create_future()
        elif kind == protocol.STREAM:
            pending.items = asyncio.Queue()
        self._pending[number] = pending
        seconds = remaining_s()
        head, out = protocol.encode(
            kind,
            number,
            body,
            arrays,
            name=name,
            number=level,
            seconds=math.inf if seconds is None else max(0.0, seconds),
        )
        try:
            await self._unless_failed(self._carrier.send(peer, head, out))
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        except BaseException:
            self._forget(number)
            raise
        return number, pending

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, or raise the failure that comes up meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            await work
        except asyncio.CancelledError:
            if task not in self._sending and task.uncancel() == 0 and self._failure is not None:
                raise self._failure() from None
            raise
        finally:
            self._sending.discard(task)

    # -- the ends of calls ------------------------------------------------------------------------

    def received(self, peer: int, message: Message, arrays: Sequence[Array]) -> None:
        """An answer, or an item of a stream. Those to calls that are over, as they cross a CANCEL, are dropped."""
        pending = self._pending.get(message.call)
        if pending is None:
            return
        if pending.peer != peer:
            raise ProtocolError(f"an answer to call {message.call}, which went to another peer")
        if message.kind != protocol.ITEM:
            self._forget(message.call)
        if pending.answer is not None:
            if message.kind == protocol.ITEM:
                raise ProtocolError("an item of what does not stream")
            if not pending.answer.done():
                pending.answer.set_result((message, arrays))
        elif pending.items is not None:
            if pending.items.qsize() > ITEMS_MAX:
                raise ProtocolError(f"more than {ITEMS_MAX} items of a stream that were not asked for")
            pending.items.put_nowait((message, arrays))

    def _forget(self, number: int) -> None:
        """The call is over at both ends, or everything is."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.slots.give_back(pending.nbytes)

    def _give_up(self, number: int) -> None:
        """Nobody waits for the call any more; it is over when the peer has said so."""
        pending = self._pending.get(number)
        if pending is not None and self._failure is None:
            pending.answer = pending.items = None
            self._tell(protocol.CANCEL, pending.peer, number)

    def _tell(self, kind: int, peer: int, call: int, number: int = 0) -> None:
        """Send a message that nobody waits for."""
        task = self._loop.create_task(self._send(peer, *protocol.encode(kind, call, number=number)))
        self._words.add(task)
        task.add_done_callback(self._words.discard)

    async def _send(self, peer: int, head: bytes, arrays: Sequence[Array]) -> None:
        with contextlib.suppress(AsyncollError):  # the failure is everybody's, and others hear of it
            await self._carrier.send(peer, head, arrays)

    # -- failures ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended all calls, if anything has."""
        if self._failure is not None:
            raise self._failure()

    def fail(self, make: Callable[[], AsyncollError]) -> None:
        """End every call, and every later one, with `make()`. The first failure stays."""
        if self._failure is not None:
            return
        self._failure = make
        for pending in self._pending.values():
            if pending.answer is not None and not pending.answer.done():
                pending.answer.set_exception(make())
                pending.answer.exception()  # mark it as seen: its waiter may be gone
            if pending.items is not None:
                pending.items.put_nowait(None)
        self._pending.clear()
        sending, self._sending = self._sending, set()
        for task in (*sending, *self._words):
            if task is not asyncio.current_task():  # which is about to raise it
                task.cancel()

    async def flush(self) -> None:
        """Wait until every notification from here has begun, as the answer to a later call shows."""
        level = depth.set(protocol.MAX_DEPTH)  # where slots are free, whatever is under way
        try:
            for peer in {pending.peer for pending in self._pending.values() if pending.is_word}:
                await self._in_time(self._exchange(peer, METHODS, (), {}), METHODS, peer)
        finally:
            depth.reset(level)

    async def close(self) -> None:
        """End every call, and wait for what nobody else waits for. Idempotent."""
        closed = partial(ClosedError, f"{self._what} is closed")
        self.fail(closed)
        self._failure = closed  # whatever ended it before: parting from each other is no loss
        if self._words:
            await asyncio.wait(self._words)


def _encode(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bytes, list[Array]]:
    try:
        return codec.encode([list(args), kwargs])
    except UsageError:
        for which, value in (*enumerate(args, 1), *kwargs.items()):
            codec.encode(value, f"{name}: argument {which}")  # raises what says where
        raise
