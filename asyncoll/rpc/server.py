"""The server of RPC: runs the functions that peers call here, and sends the answers.

Coroutines run on the loop of this object, and so do plain functions that are registered as inline; other plain
functions run in threads. A function is cancelled when its caller sends CANCEL, and at the end of the caller's deadline.
The calls that a function makes inherit that deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from asyncoll.errors import AsyncollError, DeadlineError, DeviceError, ProtocolError, UsageError
from asyncoll.rpc import codec, failure, fetching, protocol, shown
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.codec import Encoded, Encoder
from asyncoll.rpc.device_place import NONE_LANDED, Arrivals, Placing
from asyncoll.rpc.device_route import LandingTensor
from asyncoll.rpc.failure import CallerError, FetchError, LateError, Limit
from asyncoll.rpc.function_threads import SETTLED, Done, Threads
from asyncoll.rpc.protocol import CALL, ITEM, NOTIFY, RESULT, SHOW_RESULT, STREAM, Message
from asyncoll.rpc.service import Function, FunctionRegistry
from asyncoll.rpc.shown import Sender
from asyncoll.rpc.steps import awaited, outcome, plain, resumed
from asyncoll.rpc.window import StreamWindow
from asyncoll.runtime.deadlines import clock, expiry, lift
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Staged
from asyncoll.transport.virtual_time import VirtualTimeLoop

# Twice the limit of the client: a peer begins a new call as soon as it has an answer, when the task here may not be
# over.
_CALLS_MAX = 2 * protocol.CALLS_MAX
_ANSWERS_MAX = protocol.CALLS_MAX * (protocol.MAX_DEPTH + 1)  # answers to CANCEL on their way to one peer
_ENDING_S = 1.0  # longest time between the end of a program's tasks and the end of its world
# How many nested calls wait for the code that runs in this context.
depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
logger = logging.getLogger("asyncoll")


class _EncodedResult(NamedTuple):
    """The result of a plain function, which was encoded in the thread that it ran in."""

    encoded: Encoded


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a peer that is not over.

    `task` is the task that it runs in. It is None while the call waits for its first step, and while a plain function
    runs in a thread.
    """

    peer: int
    message: Message
    arrays: Sequence[Array]
    landed: Mapping[int, LandingTensor]  # arguments that have been shown
    key: tuple[int, int]  # peer and call
    level: tuple[int, int]  # peer and depth
    ends_s: float = math.inf  # the caller's deadline
    has_begun: bool = False
    is_cancelled: bool = False  # by its caller
    is_on_device: bool = False  # arguments of the function may be shown
    placing: Placing | None = None  # of arguments, for the thread of a plain function
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None  # for the deadline of a plain function in a thread


class Server:
    """The calls of all peers that run here, on the loop on which it was made.

    In: `on_call`, `on_cancel` and `on_credit` (messages of peers), `forget` (a peer is gone), `stop`. Out: messages
    RESULT, ERROR and ITEM through the carrier; protocol errors through `broken`.

    One task, the leader, makes the first steps of all calls. A call that is over after its first step needs no task of
    its own. A call that waits keeps the task: another leader is made. So the current task of a function never changes.
    """

    def __init__(
        self,
        carrier: Carrier,
        sender: Sender,
        registry: FunctionRegistry,
        broken: Callable[[int, ProtocolError], None],
    ) -> None:
        """`broken` handles a message with which a peer violates the protocol."""
        self._carrier = carrier
        self._sender = sender
        self._registry = registry
        self._broken = broken
        self._calls: dict[tuple[int, int], _Call] = {}  # by peer and call
        self._unbegun: deque[_Call] = deque()  # calls that wait for their first step
        self._streams: dict[tuple[int, int], StreamWindow] = {}
        self._counts: dict[tuple[int, int], int] = {}  # calls by peer and depth
        self._answers: dict[tuple[int, int], asyncio.Task[None]] = {}  # by peer and call: answers without a call here
        self._answering: Counter[int] = Counter()  # by peer: the number of those
        self._fetching: dict[tuple[int, int], Sequence[Staged]] = {}  # by peer and call: tensors in its answer
        self._arrivals: dict[tuple[int, int], Arrivals] = {}  # by peer and call: arguments of calls that follow
        self._tasks: set[asyncio.Task[None]] = set()  # of calls
        self._leader: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None  # that the leader waits for
        # Functions must not inherit the deadline under which this rank happened to use RPC first.
        self._context = contextvars.copy_context()
        self._context.run(lift)
        self._contexts: dict[int, contextvars.Context] = {}  # by depth: that of a call before its first step
        self._loop = asyncio.get_running_loop()
        self._is_virtual = isinstance(self._loop, VirtualTimeLoop)
        self._now_s = clock()
        self._encoder = Encoder()
        self._closed = False
        self._closing = asyncio.Event()
        self._threads: Threads | None = None

    # -- messages of peers ------------------------------------------------------------------------

    def on_call(self, peer: int, message: Message, arrays: Sequence[Array]) -> None:
        """Start a call. Raises ProtocolError if the peer may not make it."""
        if self._closed:
            return
        if self._threads is not None:
            self._threads.settle()
        key, level = (peer, message.call), (peer, message.number)
        landed = self._arrivals.pop(key).come() if key in self._arrivals else NONE_LANDED
        count = self._counts.get(level, 0)
        if key in self._calls:
            raise ProtocolError(f"two calls with the number {message.call}")
        if count >= _CALLS_MAX:
            raise ProtocolError(f"more than {_CALLS_MAX} calls at a time")
        self._counts[level] = count + 1
        call = self._calls[key] = _Call(peer, message, arrays, landed, key, level)
        self._unbegun.append(call)
        if self._leader is None:
            self._appoint()
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    def on_cancel(self, peer: int, call: int) -> None:
        """A CANCEL message. It is always answered: the call may never have arrived, or may be over.

        Raises ProtocolError if too many answers to that peer are on their way.
        """
        self._arrivals.pop((peer, call), None)
        found = self._calls.get((peer, call))
        if found is not None:
            found.is_cancelled = True
            self._cancel(found)
        elif self._answering[peer] >= _ANSWERS_MAX:
            raise ProtocolError(f"more than {_ANSWERS_MAX} cancellations of unknown calls at a time")
        else:
            self.answer(peer, call)

    def arrivals(self, peer: int, message: Message) -> Arrivals | None:
        """Where the arguments of a call go that `peer` shows in a SHOW_ARGUMENT message. None: they are not wanted.

        Raises ProtocolError if too many calls have arguments here and have not begun.
        """
        key, place = (peer, message.call), self._registry.place_of(message.name)
        if self._closed or place is None or not place.reads(peer):
            return None
        if key not in self._arrivals:
            if sum(other == peer for other, _ in self._arrivals) >= _ANSWERS_MAX:
                raise ProtocolError(f"more than {_ANSWERS_MAX} calls whose arguments are shown, and which do not begin")
            try:
                self._arrivals[key] = place.arrivals()
            # The device takes no copies now.
            except (DeviceError, UsageError):
                return None
        return self._arrivals[key]

    def on_credit(self, peer: int, call: int, number: int) -> None:
        """A CREDIT message: the reader of a stream has taken `number` items."""
        stream = self._streams.get((peer, call))
        if stream is not None:
            stream.count_taken(number)

    def answer(self, peer: int, call: int, kind: int = RESULT, body: bytes = b"") -> None:
        """Send the answer to a call that does not run here, in the background; by default a RESULT without a body."""
        self._in_background((peer, call), self._send(peer, kind, call, body))

    def _in_background(self, key: tuple[int, int], sending: Coroutine[Any, Any, None]) -> None:
        """Answer that call by `sending`, unless its answer is on its way already or this server is closed."""
        if key in self._answers or self._closed:
            sending.close()
            return
        task = self._answers[key] = self._loop.create_task(sending)
        self._answering[key[0]] += 1
        task.add_done_callback(lambda _: self._on_answered(key))

    def _on_answered(self, key: tuple[int, int]) -> None:
        del self._answers[key]
        self._answering[key[0]] -= 1
        if not self._answering[key[0]]:
            del self._answering[key[0]]

    # -- ends -------------------------------------------------------------------------------------

    def forget(self, peer: int) -> None:
        """Cancel the calls of a peer that is gone; plain functions run to their end. Its notifications continue."""
        for call in list(self._calls.values()):
            if call.peer == peer and call.message.kind != NOTIFY:
                call.is_cancelled = True  # its answer has no receiver, and is not delayed
                self._cancel(call)
        for key, task in self._answers.items():
            if key[0] == peer:
                task.cancel()

    def answer_notifications(self) -> None:
        """Answer those that have begun, which is all that their callers wait for, before this server ends."""
        for call in self._calls.values():
            if call.message.kind == NOTIFY and call.has_begun:
                # A lost peer waits for nothing.
                with contextlib.suppress(AsyncollError):
                    self._carrier.send_nowait(call.peer, *protocol.encode(RESULT, call.message.call))

    def stop(self) -> None:
        """Cancel all calls, and send no more answers. Idempotent."""
        self._closed = True
        self._closing.set()
        self._arrivals.clear()
        for call in list(self._calls.values()):
            self._cancel(call)
        for task in self._answers.values():
            task.cancel()
        if self._news is not None:
            self._news.cancel()

    async def close(self) -> None:
        """Cancel all calls and wait for their ends, but not for plain functions, which cannot be stopped."""
        self.stop()
        try:
            tasks = {*self._tasks, *self._answers.values()}
            if self._leader is not None:
                tasks.add(self._leader)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            if self._threads is not None:
                self._threads.close()

    def _cancel(self, call: _Call) -> None:
        """Cancel a call. Its answer says so."""
        if call.task is not None:
            call.task.cancel()
        elif call.has_begun:  # a function in a thread, whose result is dropped
            self._finish(call, self._answer_error(call, asyncio.CancelledError()))
        else:
            self._unbegun.remove(call)
            self._release(call)
            self.answer(*call.key)

    def _release(self, call: _Call) -> None:
        """The call is over: free its place."""
        if self._fetching:
            fetching.join(self._fetching.pop(call.key, ()))
        if call.timer is not None:
            call.timer.cancel()
        level = call.level
        del self._calls[call.key]
        count = self._counts[level] - 1
        if count:
            self._counts[level] = count
        else:
            del self._counts[level]

    def _on_end(self, call: _Call, task: asyncio.Task[None]) -> None:
        """The task of a call has ended."""
        self._tasks.discard(task)
        self._streams.pop(call.key, None)
        self._release(call)
        # Before its first step, or while it sent its answer.
        if task.cancelled():
            if call.is_cancelled or call.message.kind == NOTIFY:
                self.answer(*call.key)
            else:
                self._in_background(call.key, self._tell_cancelled(call))
        elif (error := task.exception()) is not None:
            logger.error("a call of peer %d ended with a BaseException", call.peer, exc_info=error)
            self.answer(*call.key, protocol.ERROR, failure.encode(error))

    # -- running ----------------------------------------------------------------------------------

    def _appoint(self) -> None:
        """Make a leader."""
        self._leader = self._loop.create_task(self._lead(), context=self._context.copy())

    async def _lead(self) -> None:
        """The leader: make the first steps of calls, until one of them waits."""
        me = asyncio.current_task()
        assert me is not None
        try:
            while not self._closed:
                while self._unbegun:
                    call = self._unbegun.popleft()
                    try:
                        rest = self._make_first_step(call, me)
                    except BaseException:  # raised by the function, to end more than its call
                        self._keep(call, me)
                        raise
                    if rest is not None:
                        self._appoint()
                        self._keep(call, me)
                        await rest
                        return
                    # A function has cancelled its own task, which no other call may get.
                    if me.cancelling():
                        return
                self._news = self._loop.create_future()
                await self._news
        finally:
            if self._leader is me:
                self._leader = None
                if self._unbegun and not self._closed:
                    self._appoint()

    def _keep(self, call: _Call, task: asyncio.Task[None]) -> None:
        """Make `task` the task of a call that waits."""
        call.task = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_end, call))

    def _finish(
        self, call: _Call, rest: Coroutine[Any, Any, None] | None, context: contextvars.Context | None = None
    ) -> None:
        """Run the rest of a call that has no task, if there is one, in a task."""
        if rest is not None:
            self._keep(call, self._loop.create_task(rest, context=context))

    def _make_first_step(self, call: _Call, leader: asyncio.Task[None]) -> Coroutine[Any, Any, None] | None:
        """Make the first step of a call. Returns its rest, which the leader awaits; None if nothing is left to it."""
        call.has_begun = True
        message = call.message
        try:
            function, args, kwargs = self._parse(call)
            call.arrays, call.landed = (), NONE_LANDED  # the arguments may be dropped before the call is over
            if message.seconds < math.inf:
                if not message.seconds:
                    raise LateError(f"{message.name} was called after its caller's deadline")
                call.ends_s = self._now_s() + message.seconds
        except ProtocolError as error:
            self._release(call)
            self._broken(call.peer, error)
            return None
        except Exception as error:  # CallerError, LateError, or an error of the user's dataclasses
            return self._answer_error(call, error)
        context = self._context_of(call)
        runs_here = function.streams or function.is_coroutine or function.is_inline or self._is_virtual
        if runs_here:
            call.placing = None
        if function.streams:
            self._finish(
                call, self._to_its_end(call, function, partial(self._stream, call, function, args, kwargs)), context
            )
        elif runs_here:
            call.task = leader
            return self._run_here(call, function, args, kwargs, context)
        else:
            if call.ends_s < math.inf:
                call.timer = self._loop.call_later(message.seconds, self._on_deadline, call, function)
            work = partial(self._run_in_thread, call, function, args, kwargs, context)
            self._in_a_thread(work, partial(self._on_return, call, function, context))
        return None

    def _context_of(self, call: _Call) -> contextvars.Context:
        """The context that a function runs in: the depth and the deadline of its call."""
        level = call.message.number
        base = self._contexts.get(level)
        if base is None:
            base = self._contexts[level] = self._context.copy()
            base.run(depth.set, level + 1)
        context = base.copy()
        if call.ends_s < math.inf:
            context.run(expiry.set, call.ends_s)
        return context

    def _run_here(
        self, call: _Call, function: Function, args: list[Any], kwargs: dict[str, Any], context: contextvars.Context
    ) -> Coroutine[Any, Any, None] | None:
        """Run a function on the loop until it waits. Returns the rest of the call."""
        try:
            if function.is_coroutine:
                steps = function.fn(*args, **kwargs)
            else:
                result = context.run(plain, function.fn, args, kwargs)
                if not inspect.isawaitable(result):
                    return self._answer_result(call, function, result)
                steps = awaited(result)
            waits_for = context.run(steps.send, None)
        except StopIteration as end:
            return self._answer_result(call, function, end.value)
        # A caller must not end this program.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            return self._answer_error(call, error)
        return self._to_its_end(call, function, partial(resumed, steps, waits_for, context))

    def _on_return(
        self, call: _Call, function: Function, context: contextvars.Context, result: Any, error: BaseException | None
    ) -> None:
        """A plain function has returned `result`, or raised `error`, in its thread. The call may be over."""
        if self._calls.get(call.key) is not call or call.task is not None:
            _drop(result)
            return
        if result is SETTLED:
            self._release(call)
        elif error is None and not inspect.isawaitable(result):
            self._finish(call, self._answer_result(call, function, result))
        elif isinstance(error, Exception | asyncio.CancelledError | SystemExit):
            self._finish(call, self._answer_error(call, error))
        else:  # a plain decorator may hide that the function is a coroutine function
            self._finish(call, self._to_its_end(call, function, partial(outcome, result, error)), context)

    async def _to_its_end(self, call: _Call, function: Function, work: Callable[[], Awaitable[Any]]) -> None:
        """Await the work of a function under its caller's deadline, and answer."""
        try:
            if call.ends_s < math.inf:
                async with Limit(call.ends_s - self._now_s(), partial(_late, function)):
                    result = await work()
            else:
                result = await work()
            rest = self._answer_result(call, function, result)
        # A caller must not end this program.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            await self._wait_for_closing(call)
            rest = self._answer_error(call, error)
        if rest is not None:
            await rest

    async def _wait_for_closing(self, call: _Call) -> None:
        """Delay the answer of a call that this rank's program has cancelled, because the program is probably ending.

        The caller then raises the error that ends the world. An answer before that would be a RemoteError, as if the
        function had been cancelled for a reason of its own. A cancellation by the caller or by the function is answered
        at once.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling() and not call.is_cancelled:
            await self._closing_or_later()

    async def _tell_cancelled(self, call: _Call) -> None:
        """Answer a call whose task this rank's program has cancelled. The caller still waits for a result.

        If its answer has been sent before, the caller drops this one.
        """
        await self._closing_or_later()
        await self._send(call.peer, protocol.ERROR, call.message.call, failure.encode(asyncio.CancelledError()))

    async def _closing_or_later(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _ENDING_S)

    def _parse(self, call: _Call) -> tuple[Function, list[Any], dict[str, Any]]:
        """The function of a call and its arguments. Raises CallerError for a wrong call, and FetchError."""
        message = call.message
        try:
            function = self._registry.find(message.name)
            if function.place is not None:
                call.is_on_device = function.place.reads(call.peer)
                call.placing = function.place.placing(call.landed)
            args, kwargs = _arguments(codec.decode(message.body, call.arrays, function.types, call.placing))
            if function.streams != (message.kind == STREAM):
                if function.streams:
                    raise UsageError(f"{function.name} streams: use `stream`")
                raise UsageError(f"{function.name} does not stream: use `call`")
            function.check(args, kwargs)
            if call.placing is not None:
                call.placing.join()
        except UsageError as error:
            raise CallerError(str(error)) from None
        except DeviceError as error:
            raise FetchError(str(error)) from None
        return function, args, kwargs

    # -- plain functions --------------------------------------------------------------------------

    def _in_a_thread(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work` in a thread of this server, and then `done` on the loop.

        The loop's own threads are few: functions that wait for each other's calls could occupy all of them for ever.
        """
        if self._threads is None:
            self._threads = Threads(protocol.CALLS_MAX, "asyncoll-rpc")
        self._threads.submit(work, done)

    def _run_in_thread(
        self, call: _Call, function: Function, args: list[Any], kwargs: dict[str, Any], context: contextvars.Context
    ) -> Any:
        """Run a plain function, and answer from this thread if that is possible: to wake the loop costs more.

        Returns SETTLED for a call that is answered, and otherwise the result.
        """
        result = context.run(self._call_and_encode, call, function, args, kwargs)
        if not self._carrier.sends_in_any_thread or type(result) is not _EncodedResult:
            return result
        body, arrays, _ = result.encoded
        head, out = protocol.encode(RESULT, call.message.call, body, arrays, is_on_device=call.is_on_device)
        if out or self._closed or self._calls.get(call.key) is not call:  # it was cancelled, for instance
            return result
        try:
            return SETTLED if self._carrier.send_nowait(call.peer, head, out) else result
        except AsyncollError:  # the loop meets it, too
            return result

    def _call_and_encode(self, call: _Call, function: Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a plain function and encode its result, in a thread: copies follow the work queued there.

        An awaitable result is returned as it is.
        """
        if call.placing is not None:
            call.placing.join()
            call.placing = None
        result = plain(function.fn, args, kwargs)
        if inspect.isawaitable(result):
            return result
        if call.message.kind != CALL:
            return _EncodedResult((b"", [], []))
        encoded = codec.encode(result, function.result)
        self._begin_to_answer(call, encoded[2])
        return _EncodedResult(encoded)

    def _on_deadline(self, call: _Call, function: Function) -> None:
        """The deadline of a plain function has come. The function runs to its end, and its result is dropped."""
        assert self._threads is not None
        self._threads.settle()  # its thread may have answered
        if self._calls.get(call.key) is call and call.task is None:
            self._finish(call, self._answer_error(call, _late(function)))

    # -- answers ----------------------------------------------------------------------------------

    def _answer_result(self, call: _Call, function: Function, result: Any) -> Coroutine[Any, Any, None] | None:
        """Answer with a result. Returns what is left to do."""
        if call.message.kind != CALL:
            return self._answer(call, RESULT, b"", ())
        try:
            if type(result) is _EncodedResult:
                body, arrays, staged = result.encoded
            else:
                body, arrays, staged = self._encoder.encode(result, function.result)
                if staged:
                    self._begin_to_answer(call, staged)
        except Exception as error:
            return self._answer_error(call, error)
        if not staged:
            return self._answer(call, RESULT, body, arrays)
        self._fetching[call.key] = staged
        return self._answer_once_fetched(call, body, arrays, staged)

    async def _answer_once_fetched(
        self, call: _Call, body: bytes, arrays: Sequence[Array], staged: Sequence[Staged]
    ) -> None:
        """Answer with a result once its tensors have arrived from their devices."""
        try:
            rest = self._answer(call, RESULT, body, await self._wait_until_ready(call, arrays, staged))
        except FetchError as error:
            rest = self._answer_error(call, error)
        if rest is not None:
            await rest

    def _answer_error(self, call: _Call, error: BaseException) -> Coroutine[Any, Any, None] | None:
        """Answer with an error. Returns what is left to do."""
        message = call.message
        if isinstance(error, DeadlineError) and call.ends_s <= self._now_s():
            # A call that the function made was late, and not by a shorter deadline of the function's own.
            error = LateError(str(error))
        if message.kind == NOTIFY and not isinstance(error, asyncio.CancelledError):
            logger.error("%s failed, of which its caller is not told: %s", message.name, error, exc_info=error)
        return self._answer(call, protocol.ERROR, failure.encode(error), ())

    def _answer(self, call: _Call, kind: int, body: bytes, arrays: Sequence[Array]) -> Coroutine[Any, Any, None] | None:
        """Answer at once if that is possible; else return the coroutine that answers. A call without a task is over."""
        head, out = protocol.encode(kind, call.message.call, body, arrays, is_on_device=call.is_on_device)
        try:
            if not self._closed and not self._carrier.send_nowait(call.peer, head, out):
                return self._send_encoded(call.peer, call.message.call, head, out)
        except AsyncollError:  # a lost peer: others report the loss
            pass
        if call.task not in self._tasks:
            self._release(call)
        return None

    async def _send(self, peer: int, kind: int, call: int, body: bytes) -> None:
        await self._send_encoded(peer, call, *protocol.encode(kind, call, body))

    async def _send_encoded(self, peer: int, call: int, head: bytes, arrays: Sequence[Array]) -> None:
        """Send a message unless this server is closed. The error of a lost peer is dropped: others report the loss.

        A message that the carrier refuses, because there is no memory for its arrays, is replaced by its UsageError.
        """
        if not self._closed:
            with contextlib.suppress(AsyncollError):
                try:
                    await self._carrier.send(peer, head, arrays)
                except UsageError as error:  # nothing was sent
                    await self._carrier.send(peer, *protocol.encode(protocol.ERROR, call, failure.encode(error)))

    def _begin_to_answer(self, call: _Call, staged: Sequence[Staged]) -> None:
        """Begin to fetch the tensors of an answer, but for those that are shown. In the thread of the function."""
        if call.message.is_on_device:
            self._sender.defer(call.peer, staged, are_kept=True)
        fetching.begin_to_answer(staged)

    async def _wait_until_ready(self, call: _Call, arrays: Sequence[Array], staged: Sequence[Staged]) -> list[Array]:
        """What goes beside an answer, once its tensors have arrived from their devices or are at the caller's."""
        try:
            left = await self._sender.show(shown.ShownMessage(SHOW_RESULT, *call.key), arrays, staged)
            await fetching.arrived(staged)
        except DeviceError as error:
            raise FetchError(str(error)) from None
        return left

    async def _stream(self, call: _Call, function: Function, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Send the items of a generator, as fast as its reader takes them."""
        stream = self._streams[call.key] = StreamWindow()
        name = f"an item of {function.name}"
        items = function.fn(*args, **kwargs)
        async with contextlib.aclosing(items) if hasattr(items, "aclose") else contextlib.nullcontext():
            async for item in items:
                body, arrays, staged = self._encoder.encode(item, name)
                nbytes, left = len(body) + sum(array.nbytes for array in arrays), [*arrays]
                if staged:
                    self._begin_to_answer(call, staged)
                    try:
                        left = await self._wait_until_ready(call, arrays, staged)
                    finally:
                        fetching.join(staged)
                stream.count_sent(nbytes)
                await self._carrier.send(call.peer, *protocol.encode(ITEM, call.message.call, body, left))
                await stream.room.wait()


def _arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the decoded body of a call. Raises ProtocolError for any other value."""
    if type(value) is list and len(value) == 2:
        args, kwargs = value
        if type(args) is list and type(kwargs) is dict and (not kwargs or all(type(name) is str for name in kwargs)):
            return args, kwargs
    raise ProtocolError("the body of a call is not a list of arguments")


def _late(function: Function) -> LateError:
    return LateError(f"{function.name} was cancelled at its caller's deadline")


def _drop(result: Any) -> None:
    """No caller waits for the result of a plain function any more."""
    if type(result) is _EncodedResult:
        fetching.join(result.encoded[2])
