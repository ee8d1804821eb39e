"""The client of RPC: calls from here, until they are answered.

Each call has a number of its own, so a late answer to a cancelled call cannot be mistaken for the answer to another
call. A call keeps its slot until it is answered, also after its caller was cancelled, because the function runs at the
peer until the CANCEL message arrives there. The peer answers every CANCEL.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from asyncoll.arguments import text
from asyncoll.errors import AsyncollError, ClosedError, DeadlineError, ProtocolError, UsageError
from asyncoll.rpc import codec, failure, fetching, protocol, shown
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.codec import NO_TYPES, Encoder, Types
from asyncoll.rpc.device_place import NONE_LANDED, Arrivals, DevicePlace
from asyncoll.rpc.device_route import LandingTensor
from asyncoll.rpc.protocol import ITEMS_MAX, Message
from asyncoll.rpc.server import depth
from asyncoll.rpc.service import METHODS, is_name
from asyncoll.rpc.shown import Sender
from asyncoll.rpc.window import Slots
from asyncoll.runtime.deadlines import clock, expiry, remaining_s
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged

R = TypeVar("R")
_CREDIT_EVERY = ITEMS_MAX // 4
_BURST = 32  # notifications that may be sent before other tasks of the loop get a turn
_TICK_S = 1e-6  # a deadline that is as close is over: a timer cannot wait for less
FOREIGN_LOOP = (
    "calls of functions belong to the loop that the program runs on, and this is another: make them inside an "
    "`async def` there, and from another thread pass that to asyncio.run_coroutine_threadsafe"
)


class Reply(NamedTuple):
    """What the callee has sent, and the tensors beside it that have come to a device."""

    message: Message
    arrays: Sequence[Array]
    landed: Mapping[int, LandingTensor] = NONE_LANDED

    def value(self, request: Request) -> Any:
        """Where the caller goes on. Raises DeviceError."""
        if request.place is None:
            return codec.decode(self.message.body, self.arrays, request.types)
        place = request.place.placing(self.landed)
        value = codec.decode(self.message.body, self.arrays, request.types, place)
        place.join()
        return value


class Request(NamedTuple):
    """What a caller asks for: a function at a peer."""

    peer: int
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    types: Types = NO_TYPES  # the dataclasses that the result may contain
    place: DevicePlace | None = None  # for tensors in the result


@dataclass(slots=True)
class _Pending:
    """One call that is not answered. `answer` and `items` are None if there is no waiter (any more)."""

    peer: int
    name: str
    slots: Slots
    nbytes: int  # of the arguments
    kind: int
    ends_s: float  # when its caller stops waiting
    arrivals: Arrivals | None = None  # of results on a device
    answer: asyncio.Future[Reply] | None = None  # of a call
    items: asyncio.Queue[Reply | None] | None = None  # of a stream; the item None says that all calls have failed


class Client:
    """The calls of one rank, or of one connection, on the loop on which it was made.

    In: `call`, `notify` and `stream` (tasks of the program), `on_answer` (answers of peers), `fail` (the world or the
    connection has ended). Out: CALL, NOTIFY, STREAM, CANCEL and CREDIT messages through the carrier.
    """

    def __init__(
        self,
        carrier: Carrier,
        sender: Sender,
        rank_of: Callable[[int], int],
        name: str,
        patience_s: float,
    ) -> None:
        """`rank_of` returns the rank of a peer for errors, -1 for a service; `name` is the subject of the ClosedError.

        `patience_s` is the longest time that a caller waits, for a slot and for an answer. A shorter deadline takes
        precedence.
        """
        self._carrier = carrier
        self._sender = sender
        self._shown_to: set[tuple[int, str]] = set()  # peers and functions that read arguments on their device
        self._name = name
        self._patience_s = patience_s
        self._rank_of = rank_of
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._slots: defaultdict[tuple[int, int], Slots] = defaultdict(Slots)  # by peer and depth
        self._sending: set[asyncio.Task[Any]] = set()  # callers that wait for a slot or for the carrier
        self._background_sends: set[asyncio.Task[None]] = set()  # of CANCEL and CREDIT, which have no caller
        self._failure: Callable[[], AsyncollError] | None = None
        self._lost_notifications = False  # the failure came before the answers to some, so that they may not have begun
        self._loop = asyncio.get_running_loop()
        self._now_s = clock()
        self._encoder = Encoder()
        # One timer for all calls: most calls are answered long before it expires, and need no timer of their own.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf  # when it expires

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Any:
        """Call a function and return its result."""
        return (await self._exchange(request)).value(request)

    async def notify(self, request: Request) -> None:
        """Call a function without waiting for its end. Waits for a slot if all are taken."""
        number, _ = await self._begin(protocol.NOTIFY, request)
        if number % _BURST == 0:
            await asyncio.sleep(0)

    async def stream(self, request: Request) -> AsyncGenerator[Any, None]:
        """The items of an async generator."""
        number, pending = await self._begin(protocol.STREAM, request)
        peer, items = pending.peer, pending.items
        assert items is not None
        taken = 0
        try:
            while (answer := await self._next_item(items, request)) is not None:
                yield answer.value(request)
                taken += 1
                # In batches, but at once if the reader is about to wait: the generator may be waiting for credit.
                if taken >= _CREDIT_EVERY or items.empty():
                    self._tell(protocol.CREDIT, peer, number, taken)
                    taken = 0
        finally:
            self._give_up(number)

    async def _next_item(self, items: asyncio.Queue[Reply | None], request: Request) -> Reply | None:
        """The next item of a stream; None at its end. Raises the error of the generator, or that of the connection."""
        self.check()
        answer = await self._in_time(items.get, self._ends_s(), request)
        if answer is None:  # put by `fail`
            self.check()
            return None
        if answer.message.kind == protocol.ERROR:
            raise failure.decode(answer.message.body, self._rank_of(request.peer))
        return answer if answer.message.kind == protocol.ITEM else None

    async def _exchange(self, request: Request) -> Reply:
        """Send a call and wait for its answer. Cancelling it cancels the function at the peer."""
        number, pending = await self._begin(protocol.CALL, request)
        assert pending.answer is not None
        try:
            answer = await pending.answer
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        if answer.message.kind == protocol.ERROR:
            raise failure.decode(answer.message.body, self._rank_of(request.peer))
        return answer

    def _ends_s(self) -> float:
        """When a caller in this context stops waiting: after `patience_s`, or at its own deadline."""
        expires = expiry.get()
        if self._patience_s == math.inf:
            return math.inf if expires is None else expires
        ends_s = self._now_s() + self._patience_s
        return ends_s if expires is None else min(expires, ends_s)

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, R]], ends_s: float, request: Request) -> R:
        """Await `work()`; raise DeadlineError at `ends_s`."""
        if ends_s == math.inf:
            return await work()
        seconds = ends_s - self._now_s()
        if seconds <= 0:
            raise self._late(request)
        async with failure.Limit(seconds, partial(self._late, request)):
            return await work()

    def _set_timer(self, ends_s: float) -> None:
        """Make `_on_timer` run at `ends_s`, or earlier."""
        if ends_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = ends_s
            self._timer = self._loop.call_later(ends_s - self._now_s(), self._on_timer)

    def _on_timer(self) -> None:
        """End the calls whose time is over, and set the timer for the others."""
        self._timer, self._timer_s = None, math.inf
        now_s, earliest_s = self._now_s() + _TICK_S, math.inf
        for number, pending in list(self._pending.items()):
            if pending.answer is None:
                continue
            if pending.ends_s > now_s:
                earliest_s = min(earliest_s, pending.ends_s)
            elif not pending.answer.done():
                _raise_in(pending.answer, self._late(pending))
                self._give_up(number)
        if earliest_s < math.inf:
            self._set_timer(earliest_s)

    def _late(self, of: Request | _Pending) -> DeadlineError:
        rank = self._rank_of(of.peer)
        missing = (of.peer,) if rank >= 0 else ()
        return DeadlineError(f"{of.name} at {failure.callee(rank)} did not answer before the deadline", missing=missing)

    async def _begin(self, kind: int, request: Request) -> tuple[int, _Pending]:
        """Take a slot, send a call and return its number. Raises UsageError, without sending, for a wrong call."""
        peer, ends_s, seconds = request.peer, self._ends_s(), remaining_s()
        if seconds is not None and seconds <= 0:
            raise self._late(request)
        name, level = self._check(kind, request.name)
        body, arrays, staged = self._encode(name, request)
        place = request.place if kind != protocol.NOTIFY else None
        arrivals = place.arrivals() if place is not None and place.reads(peer) else None
        if staged:
            if (peer, name) in self._shown_to:
                self._sender.defer(peer, staged, are_kept=False)
            await self._fetch(staged, ends_s, name)
            seconds = remaining_s()
        deferred = [tensor for tensor in staged if tensor.is_deferred] if staged else staged
        slots, nbytes = self._slots[peer, level], len(body)
        for array in arrays:
            nbytes += array.nbytes
        if not slots.take_nowait(nbytes):
            await self._in_time(lambda: self._unless_failed(slots.take(nbytes)), ends_s, request)
            seconds = remaining_s()
        number = next(self._numbers)
        pending = self._pending[number] = _Pending(peer, name, slots, nbytes, kind, ends_s, arrivals)
        try:
            if deferred:
                message = shown.ShownMessage(protocol.SHOW_ARGUMENT, peer, number, name)
                arrays = await self._in_time(partial(self._shown, message, arrays, deferred), ends_s, request)
                seconds = remaining_s()
            if kind == protocol.CALL:
                pending.answer = self._loop.create_future()
                if ends_s < self._timer_s:
                    self._set_timer(ends_s)
            elif kind == protocol.STREAM:
                pending.items = asyncio.Queue()
            on_device = arrivals is not None
            head, out = protocol.encode(
                kind, number, body, arrays, name=name, number=level, seconds=seconds, is_on_device=on_device
            )
            if not self._carrier.send_nowait(peer, head, out):
                await self._in_time(lambda: self._unless_failed(self._carrier.send(peer, head, out)), ends_s, request)
        except BaseException as error:
            if deferred or isinstance(error, asyncio.CancelledError | DeadlineError):
                # The message, or an argument, may have arrived.
                self._give_up(number)
            else:
                self._forget(number)
            raise
        return number, pending

    def _check(self, kind: int, name: Any) -> tuple[str, int]:
        """The name of the function, and the depth of the call. Raises UsageError, and the failure."""
        self.check()
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError(FOREIGN_LOOP)
        if type(name) is not str:
            name = text(name, "a function is called by its name, which")
        if not is_name(name):
            raise UsageError(f"a function is called by its name, got {name!r:.60}")
        level = depth.get()
        if kind == protocol.NOTIFY:
            level %= protocol.MAX_DEPTH + 1  # no caller waits, so a chain of notifications may be infinite
        elif level > protocol.MAX_DEPTH:
            raise UsageError(f"{name}: {protocol.MAX_DEPTH} calls wait for each other already: does one call itself?")
        return name, level

    def _encode(self, name: str, request: Request) -> codec.Encoded:
        """The arguments. Raises UsageError, which names the argument that cannot be sent."""
        args, kwargs = request.args, request.kwargs
        try:
            return self._encoder.encode([[*args], kwargs])
        except UsageError:
            for which, value in (*enumerate(args, 1), *kwargs.items()):
                codec.encode(value, f"{name}: argument {which}")  # raises an error that names the argument
            raise

    async def _fetch(self, staged: Sequence[Staged], ends_s: float, name: str) -> None:
        """Wait until the tensors of devices are at the host, and can be sent, but for those that are deferred."""
        seconds = None if ends_s == math.inf else ends_s - self._now_s()
        devices = " and ".join(sorted({tensor.device for tensor in staged}))
        late = partial(DeadlineError, f"{name}: its arguments have not arrived from {devices} before the deadline")
        fetching.begin(staged)
        try:
            async with failure.Limit(seconds, late):
                await self._unless_failed(fetching.arrived(staged))
        finally:
            fetching.join([tensor for tensor in staged if not tensor.is_deferred])

    async def _shown(
        self, message: shown.ShownMessage, arrays: Sequence[Array], deferred: Sequence[Staged]
    ) -> list[Array]:
        """Show these tensors. Returns what is sent beside a call, to which those belong that the peer has not read."""
        try:
            left = await self._unless_failed(self._sender.show(message, arrays, deferred))
            await self._unless_failed(fetching.arrived(deferred))
        finally:
            fetching.join(deferred)
        return left

    async def _unless_failed(self, work: Coroutine[Any, Any, R]) -> R:
        """Await `work`, or raise the failure if `fail` is called meanwhile.

        `fail` takes the task out of `_sending` and cancels it. So a task that is still in `_sending` was cancelled by
        its owner. `uncancel` returns 0 if there was no cancellation of the owner's besides.
        """
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if task not in self._sending and task.uncancel() == 0 and self._failure is not None:
                raise self._failure() from None
            raise
        finally:
            self._sending.discard(task)

    # -- the ends of calls ------------------------------------------------------------------------

    def on_answer(self, peer: int, message: Message, arrays: Sequence[Array]) -> None:
        """An answer, or an item of a stream. Raises ProtocolError if the peer may not send it.

        A message for a call that is over is dropped: it has crossed a CANCEL on its way.
        """
        pending = self._pending.get(message.call)
        if pending is None:
            return
        if pending.peer != peer:
            raise ProtocolError(f"an answer to call {message.call}, which was sent to another peer")
        if message.kind != protocol.ITEM:
            self._forget(message.call)
        if message.is_on_device:
            self._shown_to.add((peer, pending.name))
        answer = Reply(message, arrays, NONE_LANDED if pending.arrivals is None else pending.arrivals.come())
        if pending.answer is not None:
            if message.kind == protocol.ITEM:
                raise ProtocolError("a stream item in answer to a call")
            if not pending.answer.done():
                pending.answer.set_result(answer)
        elif pending.items is not None:
            if pending.items.qsize() > ITEMS_MAX:  # one more than that: the end of the stream
                raise ProtocolError(f"more than {ITEMS_MAX} stream items without credit")
            pending.items.put_nowait(answer)

    def arrivals(self, peer: int, call: int) -> Arrivals | None:
        """Where the results of a call go that `peer` shows. None: nobody waits for them."""
        pending = self._pending.get(call)
        if pending is None or pending.peer != peer or (pending.answer is None and pending.items is None):
            return None
        return pending.arrivals

    def _forget(self, number: int) -> None:
        """Free the slot of a call that is over at both ends, or that was not sent."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.slots.give_back(pending.nbytes)

    def _give_up(self, number: int) -> None:
        """The caller does not wait any more: send CANCEL. The call keeps its slot until the peer answers."""
        pending = self._pending.get(number)
        if pending is not None and self._failure is None:
            pending.answer = pending.items = None
            message = shown.ShownMessage(protocol.SHOW_ARGUMENT, pending.peer, number, pending.name)
            self._sender.when_over(message, partial(self._withdraw, pending.peer, number))

    def _withdraw(self, peer: int, number: int) -> None:
        if self._failure is None:
            self._tell(protocol.CANCEL, peer, number)

    def _tell(self, kind: int, peer: int, call: int, number: int = 0) -> None:
        """Send a message, in the background if it has to wait."""
        message = protocol.encode(kind, call, number=number)

        async def send() -> None:
            with contextlib.suppress(AsyncollError):
                await self._carrier.send(peer, *message)

        # The failure ends all calls, whose callers raise it.
        with contextlib.suppress(AsyncollError):
            if not self._carrier.send_nowait(peer, *message):
                task = self._loop.create_task(send())
                self._background_sends.add(task)
                task.add_done_callback(self._background_sends.discard)

    # -- failures ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that has ended all calls, if `fail` was called."""
        if self._failure is not None:
            raise self._failure()

    def fail(self, make: Callable[[], AsyncollError]) -> None:
        """End every call, and every later one, with an exception of `make()`. Only the first failure counts."""
        if self._failure is not None:
            return
        self._failure = make
        self._lost_notifications = any(pending.kind == protocol.NOTIFY for pending in self._pending.values())
        for pending in self._pending.values():
            if pending.answer is not None and not pending.answer.done():
                _raise_in(pending.answer, make())
            if pending.items is not None:
                pending.items.put_nowait(None)
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        sending, self._sending = self._sending, set()
        for task in (*sending, *self._background_sends):
            # The current task noticed the failure and raises it itself.
            if task is not asyncio.current_task():
                task.cancel()

    async def flush(self) -> None:
        """Wait until every notification from here has begun.

        Messages to one peer are delivered in order. So the answer to a later call shows that the notifications have
        begun. So does the answer to each of them, which a peer that a notification ends may be the last to send.
        """
        if self._lost_notifications:
            self.check()
        # At this depth slots are free, so the call does not wait for other calls.
        level = depth.set(protocol.MAX_DEPTH)
        try:
            for peer in {pending.peer for pending in self._pending.values() if pending.kind == protocol.NOTIFY}:
                await self._exchange(Request(peer, METHODS, (), {}))
        except AsyncollError:
            if self._failure is None or self._lost_notifications:
                raise
        finally:
            depth.reset(level)

    async def close(self) -> None:
        """End every call with ClosedError, and wait for the background sends. Idempotent."""
        closed = partial(ClosedError, f"{self._name} is closed")
        self.fail(closed)
        # Also after a loss: peers disappear as they leave the world in good order.
        self._failure = closed
        if self._background_sends:
            await asyncio.wait(self._background_sends)


def _raise_in(waiting: asyncio.Future[Reply], error: AsyncollError) -> None:
    """Make the waiter for an answer raise `error`."""
    waiting.set_exception(error)
    waiting.exception()  # mark it as retrieved, because the waiter may have been cancelled
