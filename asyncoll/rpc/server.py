"""The server of RPC: runs the functions that peers call here, and sends the answers.

Each call is a task. Coroutines run on the loop of this object, plain functions in threads. A function is cancelled when
its caller sends CANCEL, and at the end of the caller's deadline. The calls that a function makes inherit that deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from asyncoll.errors import AsyncollError, DeadlineError, ProtocolError, UsageError
from asyncoll.rpc import codec, failure, protocol
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.failure import CallerError, LateError, Limit
from asyncoll.rpc.protocol import CALL, ITEM, ITEMS_MAX, NOTIFY, RESULT, STREAM, Message
from asyncoll.rpc.service import Function, FunctionRegistry
from asyncoll.runtime.deadlines import deadline, lift, now_s
from asyncoll.runtime.progress import offload
from asyncoll.tensors.reductions import Array

# Twice the limit of the client: a peer begins a new call as soon as it has an answer, when the task here may not be
# over.
_CALLS_MAX = 2 * protocol.CALLS_MAX
_ANSWERS_MAX = protocol.CALLS_MAX * (protocol.MAX_DEPTH + 1)  # answers to CANCEL on their way to one peer
_ENDING_S = 1.0  # longest time between the end of a program's tasks and the end of its world
_AHEAD_BYTES = 1 << 23  # items of a stream that have been sent and not taken
# How many nested calls wait for the code that runs in this context.
depth: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)
logger = logging.getLogger("asyncoll")


class _Stream:
    """Bounds the items of one stream that have been sent and not taken, in number and bytes."""

    def __init__(self) -> None:
        self._costs: deque[int] = deque()
        self._total = 0
        self.room = asyncio.Event()  # set while another item may be sent
        self.room.set()

    def sent(self, nbytes: int) -> None:
        """Count an item of `nbytes`."""
        self._costs.append(nbytes)
        self._total += nbytes
        if len(self._costs) >= ITEMS_MAX or self._total > _AHEAD_BYTES:
            self.room.clear()

    def taken(self, number: int) -> None:
        """Count off the oldest `number` items. Raises ProtocolError if fewer have been sent."""
        if number > len(self._costs):
            raise ProtocolError(f"{number} items of a stream taken, but {len(self._costs)} sent")
        for _ in range(number):
            self._total -= self._costs.popleft()
        if len(self._costs) < ITEMS_MAX and self._total <= _AHEAD_BYTES:
            self.room.set()


class Server:
    """The calls of all peers that run here, on the loop on which it was made.

    In: `begin`, `cancel` and `taken` (messages of peers), `forget` (a peer is gone), `stop`. Out: RESULT, ERROR and
    ITEM messages through the carrier; protocol errors through `broken`.
    """

    def __init__(
        self, carrier: Carrier, registry: FunctionRegistry, broken: Callable[[int, ProtocolError], None]
    ) -> None:
        """`broken` handles a message with which a peer violates the protocol."""
        self._carrier = carrier
        self._registry = registry
        self._broken = broken
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}  # by peer and call
        self._notified: set[tuple[int, int]] = set()  # the notifications among them
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._counts: Counter[tuple[int, int]] = Counter()  # by peer and depth
        self._answering: Counter[int] = Counter()  # by peer: answers on their way that have no call here
        # Functions must not inherit the deadline under which this rank happened to use RPC first.
        self._context = contextvars.copy_context()
        self._context.run(lift)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._closing = asyncio.Event()
        self._cancelled_by_caller: set[tuple[int, int]] = set()  # by peer and call
        self._threads: ThreadPoolExecutor | None = None
        self._in_threads: set[object] = set()  # the functions that run there; each thread removes its own

    def begin(self, peer: int, message: Message, arrays: Sequence[Array]) -> None:
        """Start the task of a call. Raises ProtocolError if the peer may not make it."""
        if self._closed:
            return
        key, level = (peer, message.call), (peer, message.number)
        if key in self._tasks:
            raise ProtocolError(f"two calls with the number {message.call}")
        if self._counts[level] >= _CALLS_MAX:
            raise ProtocolError(f"more than {_CALLS_MAX} calls at a time")
        self._counts[level] += 1
        if message.kind == NOTIFY:
            self._notified.add(key)
        work = self._run(peer, message, arrays)
        task = self._tasks[key] = self._loop.create_task(work, context=self._context.copy())
        task.add_done_callback(partial(self._ended, key, level))

    def cancel(self, peer: int, call: int) -> None:
        """A CANCEL message. It is always answered: the call may never have arrived, or may be over.

        Raises ProtocolError if too many answers to that peer are on their way.
        """
        task = self._tasks.get((peer, call))
        if task is not None:
            self._cancelled_by_caller.add((peer, call))
            task.cancel()
        elif self._answering[peer] >= _ANSWERS_MAX:
            raise ProtocolError(f"more than {_ANSWERS_MAX} cancellations of unknown calls at a time")
        else:
            self.answer(peer, call)

    def taken(self, peer: int, call: int, number: int) -> None:
        """A CREDIT message: the reader of a stream has taken `number` items."""
        stream = self._streams.get((peer, call))
        if stream is not None:
            stream.taken(number)

    def answer(self, peer: int, call: int, kind: int = RESULT, body: bytes = b"") -> None:
        """Send the answer to a call without a task, in the background; by default a RESULT without a body."""
        key = (peer, -1 - call)  # numbers of calls are not negative, so this is none of them
        if key not in self._tasks and not self._closed:  # otherwise this answer is on its way already
            task = self._tasks[key] = self._loop.create_task(self._send(peer, kind, call, body))
            self._answering[peer] += 1
            task.add_done_callback(lambda _: self._answered(key))

    def _answered(self, key: tuple[int, int]) -> None:
        del self._tasks[key]
        self._answering[key[0]] -= 1
        if not self._answering[key[0]]:
            del self._answering[key[0]]

    def forget(self, peer: int) -> None:
        """Cancel the calls of a peer that is gone. Its notifications continue."""
        for key in self._tasks.keys() - self._notified:
            if key[0] == peer:
                self._tasks[key].cancel()

    def stop(self) -> None:
        """Cancel all calls, and send no more answers. Idempotent."""
        self._closed = True
        self._closing.set()
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Cancel all calls and wait for their ends, but not for plain functions, which cannot be stopped."""
        self.stop()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks.values())
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=not self._in_threads, cancel_futures=True)

    def _ended(self, key: tuple[int, int], level: tuple[int, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        self._notified.discard(key)
        self._cancelled_by_caller.discard(key)
        self._streams.pop(key, None)
        self._counts[level] -= 1
        if not self._counts[level]:
            del self._counts[level]
        if task.cancelled():  # before its first step, or while it sent its answer
            self.answer(*key)
        elif (error := task.exception()) is not None:
            logger.error("a call of peer %d ended with a BaseException", key[0], exc_info=error)
            self.answer(*key, protocol.ERROR, failure.encode(error))

    async def _run(self, peer: int, message: Message, arrays: Sequence[Array]) -> None:
        """The task of one call: parse, run, answer."""
        depth.set(message.number + 1)
        try:
            function, call = self._parse(message, arrays)
        except ProtocolError as error:
            self._broken(peer, error)
            return
        except Exception as error:  # CallerError, or an error of the user's dataclasses
            await self._fail(peer, message, error)
            return
        try:
            result = await self._call_in_time(peer, message, function, call)
            body, out = codec.encode(result, f"the result of {function.name}") if message.kind == CALL else (b"", [])
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # a caller must not end this program
            await self._wait_for_closing(peer, message.call)
            await self._fail(peer, message, error)
        else:
            await self._send(peer, RESULT, message.call, body, out)

    async def _wait_for_closing(self, peer: int, call: int) -> None:
        """Delay the answer of a call that this rank's program has cancelled, because the program is probably ending.

        The caller then raises the error that ends the world. An answer before that would be a RemoteError, as if the
        function had been cancelled for a reason of its own. A cancellation by the caller or by the function is answered
        at once.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling() and (peer, call) not in self._cancelled_by_caller:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _ENDING_S)

    async def _fail(self, peer: int, message: Message, error: BaseException) -> None:
        if message.kind == NOTIFY and not isinstance(error, asyncio.CancelledError):
            logger.error("%s failed, of which its caller is not told: %s", message.name, error, exc_info=error)
        await self._send(peer, protocol.ERROR, message.call, failure.encode(error))

    async def _send(self, peer: int, kind: int, call: int, body: bytes = b"", arrays: Sequence[Array] = ()) -> None:
        """Send a message unless this server is closed. The error of a lost peer is dropped: others report the loss.

        A message that the carrier refuses, because there is no memory for its arrays, is replaced by its UsageError.
        """
        if not self._closed:
            with contextlib.suppress(AsyncollError):
                try:
                    await self._carrier.send(peer, *protocol.encode(kind, call, body, arrays))
                except UsageError as error:  # nothing was sent
                    await self._carrier.send(peer, *protocol.encode(protocol.ERROR, call, failure.encode(error)))

    def _parse(self, message: Message, arrays: Sequence[Array]) -> tuple[Function, Callable[[], Any]]:
        """The function of a call, also with its arguments. Raises CallerError for a wrong call."""
        try:
            function = self._registry.find(message.name)
            args, kwargs = _arguments(codec.decode(message.body, arrays, function.types))
            if function.streams != (message.kind == STREAM):
                advice = "use `stream`" if function.streams else "use `call`"
                raise UsageError(f"{function.name} {'streams' if function.streams else 'does not stream'}: {advice}")
            function.check(args, kwargs)
        except UsageError as error:
            raise CallerError(str(error)) from None
        return function, partial(function.fn, *args, **kwargs)

    async def _call_in_time(self, peer: int, message: Message, function: Function, call: Callable[[], Any]) -> Any:
        """Run the function under its caller's deadline. Raises LateError at its end."""
        if message.seconds == math.inf:
            return await self._call(peer, message.call, function, call)
        if not message.seconds:
            raise LateError(f"{message.name} was called after its caller's deadline")
        ends_s = now_s() + message.seconds
        late = partial(LateError, f"{message.name} was cancelled at its caller's deadline")
        try:
            with deadline(message.seconds):
                async with Limit(message.seconds, late):
                    return await self._call(peer, message.call, function, call)
        except DeadlineError as error:  # a call that the function made was late
            if now_s() < ends_s:  # by a shorter deadline of the function's own
                raise
            raise LateError(str(error)) from None

    async def _call(self, peer: int, number: int, function: Function, call: Callable[[], Any]) -> Any:
        if function.is_coroutine:
            return await call()
        if function.streams:
            return await self._stream(peer, number, function, call())
        result = await self._in_a_thread(call)
        # A plain decorator may hide that the function is a coroutine function.
        return await result if inspect.isawaitable(result) else result

    async def _in_a_thread(self, call: Callable[[], Any]) -> Any:
        """Run `call` in a thread of this server.

        The loop's own threads are few: functions that wait for each other's calls could occupy all of them for ever.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(protocol.CALLS_MAX, "asyncoll-rpc")
        self._in_threads.add(call)

        def run() -> Any:
            try:
                return call()
            finally:
                self._in_threads.discard(call)

        return await offload(run, threads=self._threads)

    async def _stream(self, peer: int, call: int, function: Function, items: Any) -> None:
        """Send the items of a generator, as fast as its reader takes them."""
        stream = self._streams[peer, call] = _Stream()
        name = f"an item of {function.name}"
        async with contextlib.aclosing(items) if hasattr(items, "aclose") else contextlib.nullcontext():
            async for item in items:
                body, arrays = codec.encode(item, name)
                stream.sent(len(body) + sum(array.nbytes for array in arrays))
                await self._carrier.send(peer, *protocol.encode(ITEM, call, body, arrays))
                await stream.room.wait()


def _arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the decoded body of a call. Raises ProtocolError for any other value."""
    match value:
        case [list(args), dict(kwargs)] if all(isinstance(name, str) for name in kwargs):
            return args, kwargs
    raise ProtocolError("the body of a call is not a list of arguments")
