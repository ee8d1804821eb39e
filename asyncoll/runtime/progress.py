"""Where the runtime runs, and how the caller's loop reaches it.

In a process world the runtime has a thread and a uvloop loop of its own (the papers' auxiliary thread), so a caller who
blocks its loop in `backward()` still takes part in other ranks' rounds. In the in-process worlds runtime and callers
share one loop. Either way a call starts when it is made, not when it is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol, TypeVar

import uvloop

from asyncoll import forks
from asyncoll.runtime.interruption import handlers_may_raise, may_interrupt
from asyncoll.runtime.timer import Timer
from asyncoll.runtime.work import Work
from asyncoll.transport.virtual_time import VirtualTimeLoop

T = TypeVar("T")

# How long pure Python code in another thread may keep the GIL once the progress thread wants it. At the default of
# 5 ms a round waits up to 10 ms for a rank that computes in Python; at this value, 1.2 ms.
SWITCH_INTERVAL_S = 0.0005

# Work in memory waits for its caller to come back to it for once to twice as long. A caller who computes first wants it
# done meanwhile.
TAKEOVER_S = 0.0005

_AGAIN_S = 0.01  # between two attempts to wake a caller, or to see what it waits for, if signal handlers may raise
_ENDING_S = 1.0  # for work that is cancelled at the end and waits for peers to leave its memory, which may be dead
_abandoned: set[asyncio.AbstractEventLoop] = set()  # in a forked child: loops of its parent's runtime


def _ignore() -> None:
    pass


class Runner(Protocol):
    """Starts coroutines on the runtime's loop.

    `home` is the loop of the program, where the runner was made. Calls may come from any running loop.
    """

    home: asyncio.AbstractEventLoop

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        """Start `work` now; the coroutine that is returned waits for it.

        Cancelling that coroutine cancels `work`, which has by then taken its first step, and waits until it has
        stopped: nothing of the caller's memory is in use afterwards. Then `discarded` is called on the runtime's loop,
        as `work` may have been done already, and nobody gets its result. An exception of a signal handler does the
        same. If nobody awaits it, `work` runs to its end, and `discarded` is called, too.
        """

    def drive(self, work: Work[T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        """Begin `work` now; the coroutine that is returned goes on with it, and the runtime does if nobody awaits that.

        Cancelling it cancels `work`, and waits until it has stopped. Then `discarded` is called, as above.
        """

    def post(self, what: Callable[[], None]) -> None:
        """Call `what` on the runtime's loop, soon."""


class _Awaited(Coroutine[Any, Any, T]):
    """The coroutine that a caller gets for work that has begun."""

    def __init__(
        self,
        waiting: Coroutine[Any, Any, T],
        discarded: Callable[[], None],
        runtime_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`waiting` waits for the work; `discarded` is called if nobody gets its answer."""
        self._discarded = discarded
        self._runtime_loop = runtime_loop
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, T]:
        return self._waiting.__await__()

    def send(self, value: Any) -> Any:
        return self._waiting.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        return self._waiting.throw(error, *more)

    def close(self) -> None:
        self._waiting.close()


class _Begun(_Awaited[T]):
    """The same before its first step.

    A task that is cancelled before its first step throws a plain coroutine away. This one takes the step first, so that
    the work hears of it and lets go of the caller's memory. If the object ends without a step, nobody will get the
    answer, and it is discarded once the work is over. That is done on the runtime's loop, because objects may end in
    any thread, and while that has a lock. After the first step the object has no finalizer any more: each call would
    run it in the caller's thread, and an exception that a signal handler raises in a finalizer is lost.
    """

    def __await__(self) -> Generator[Any, None, T]:
        self.__class__ = _Awaited  # type: ignore[assignment]
        return self._waiting.__await__()

    def send(self, value: Any) -> Any:
        self.__class__ = _Awaited  # type: ignore[assignment]
        return self._waiting.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        self.__class__ = _Awaited  # type: ignore[assignment]
        try:
            self._waiting.send(None)
        except StopIteration:  # the answer was there, and nobody gets it
            self._discarded()
            raise error from None
        return self._waiting.throw(error, *more)

    def __del__(self) -> None:
        if hasattr(self, "_waiting"):  # or a signal handler has raised while it was made
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the world has ended
                self._runtime_loop.call_soon_threadsafe(self._discarded)


class _Ended(Coroutine[Any, Any, T]):
    """The coroutine that a caller gets for work in memory that was over at once. No task, future or generator waits.

    If no caller takes the answer, it is discarded as that of `_Begun` is.
    """

    __slots__ = ("_discarded", "_runtime_loop", "_work")

    def __init__(self, work: Work[T], discarded: Callable[[], None], runtime_loop: asyncio.AbstractEventLoop) -> None:
        self._work: Work[T] | None = work
        self._discarded = discarded
        self._runtime_loop = runtime_loop

    def __await__(self) -> Generator[Any, None, T]:
        return self  # an iterator is enough for `await`

    def __iter__(self) -> _Ended[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        raise StopIteration(work.result())

    def throw(self, error: Any, *more: Any) -> Any:
        work, self._work = self._work, None
        if work is not None:
            self._discarded()
        raise error

    def close(self) -> None:
        """Nothing runs. The answer is discarded when the object goes."""

    def __del__(self) -> None:
        if getattr(self, "_work", None) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the world has ended
                self._runtime_loop.call_soon_threadsafe(self._discarded)


class SharedLoop:
    """The runtime runs on the caller's own loop."""

    def __init__(self) -> None:
        self.home = asyncio.get_running_loop()

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        if asyncio.get_running_loop() is not self.home:
            return _crossed(self.home, work, discarded)
        return _Begun(_join(self.home.create_task(work), discarded), discarded, self.home)

    def drive(self, work: Work[T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        if asyncio.get_running_loop() is not self.home:
            return _crossed(self.home, work.finish(), discarded)
        work.begin()
        if work.is_over:
            return _Ended(work, discarded, self.home)
        return self.start(work.finish(), discarded)

    def post(self, what: Callable[[], None]) -> None:
        try:
            is_home = asyncio.get_running_loop() is self.home
        except RuntimeError:
            is_home = False
        if is_home or self.home.is_closed():
            what()
        else:
            self.home.call_soon_threadsafe(what)


async def _join(task: asyncio.Task[T], discarded: Callable[[], None]) -> T:
    try:
        return await _shielded(task)
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_soon(task.cancel)  # after the first step, which is already scheduled
        await _settled(task)
        discarded()
        raise


def _shielded(future: asyncio.Future[T]) -> asyncio.Future[T]:
    """`asyncio.shield`. Who is cancelled in the turn in which the future fails does not look at its exception."""
    shield = asyncio.shield(future)
    shield.add_done_callback(_see)
    return shield


def _see(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # mark it as seen


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, however it ends and however often the waiter is cancelled."""
    while not future.done():
        with contextlib.suppress(BaseException):
            await _shielded(future)
    _see(future)


class ProgressThread:
    """The runtime runs on its own thread."""

    def __init__(self) -> None:
        self.home = asyncio.get_running_loop()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="asyncoll-progress", daemon=True)
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_s))
        # Begun by callers who have not come to wait for it: their loop, and the timer's turn in which it began.
        self._unclaimed: dict[Work[Any], tuple[asyncio.AbstractEventLoop, int]] = {}
        self._taken: weakref.WeakKeyDictionary[Work[Any], _Crossing] = weakref.WeakKeyDictionary()  # by the runtime
        self._turn = 0
        self._timer = Timer()
        self._is_timer_set = False
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._timer.fileno(), self._take_over)
        self._thread.start()
        forks.register(self)

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        return _crossed(self._loop, work, discarded)

    def drive(self, work: Work[T], discarded: Callable[[], None] = _ignore) -> Coroutine[Any, Any, T]:
        if may_interrupt():
            return self.start(work.finish(), discarded)
        work.begin()
        if work.is_over:
            return _Ended(work, discarded, self._loop)
        self._unclaimed[work] = asyncio.get_running_loop(), self._turn
        self._set_timer()
        return _Begun(self._claim(work, discarded), discarded, self._loop)

    async def _claim(self, work: Work[T], discarded: Callable[[], None]) -> T:
        """The caller has come to wait for it."""
        claimed = self._unclaimed.pop(work, None) is not None
        if claimed and may_interrupt():  # since the call
            return await self.start(work.finish(), discarded)
        try:
            if claimed:
                return await work.finish()
            outcome: T = await self._taken.pop(work).outcome(_ignore)
            return outcome
        except asyncio.CancelledError:
            discarded()  # here: the caller's next call may begin before the runtime's loop turns
            raise

    def _set_timer(self) -> None:
        """After something was left unclaimed. It takes long, so not once for each."""
        if not self._is_timer_set:
            self._is_timer_set = True
            self._timer.set(TAKEOVER_S)

    def _take_over(self) -> None:
        """What nobody has come to wait for is the runtime's."""
        self._timer.read()
        self._is_timer_set = False
        for work, (caller, turn) in list(self._unclaimed.items()):
            if turn < self._turn:
                crossing = self._taken[work] = _Crossing(self._loop, caller)
                if self._unclaimed.pop(work, None) is None:  # its caller has come in this moment
                    del self._taken[work]
                else:
                    crossing.begin_here(work.finish())
        self._turn += 1
        if self._unclaimed:
            self._set_timer()

    def post(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def stop(self) -> None:
        """End the thread, and what was begun on it and is awaited no more."""
        forks.unregister(self)
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._timer.close()
        sys.setswitchinterval(self._switch_interval_s)

    def abandon(self, parent: int) -> None:
        """In a forked child, which has no such thread: whoever waits for its work there has nothing to wait for."""
        _abandoned.add(self._loop)
        forks.isolate(self._loop)
        forks.give_up([self._timer.fileno()])
        forks.keep(self._loop)  # it counts as running, and so cannot be destroyed

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_ENDING_S)


class _Crossing:
    """One piece of work on the runtime's loop, and its outcome on the caller's.

    Signal handlers may raise in the caller's thread, also in the callback that wakes the caller. So the runtime repeats
    that callback until it has run to its end, as long as the world is open. A caller that gives up does not rely on it.
    """

    def __init__(self, there: asyncio.AbstractEventLoop, here: asyncio.AbstractEventLoop | None = None) -> None:
        """`here` is the caller's, by default the one that runs."""
        self._there = there
        self._here = here or asyncio.get_running_loop()
        self._outcome: asyncio.Future[Any] = self._here.create_future()
        self._end: asyncio.Future[None] | None = None  # for a caller that does not want the outcome any more
        self._is_told = False  # the caller's loop knows how the work has ended
        self._task: asyncio.Task[Any] | None = None

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self._there.call_soon_threadsafe(self.begin_here, work)

    async def outcome(self, discarded: Callable[[], None]) -> Any:
        try:
            return await self._outcome
        except BaseException as error:
            if self._outcome.done() and not self._outcome.cancelled() and error is self._outcome.exception():
                raise
            if not self._there.is_closed() and self._there not in _abandoned:  # or the runtime has ended with its work
                self._there.call_soon_threadsafe(self._cancel)
                if not isinstance(error, GeneratorExit):  # after which there is no waiting
                    await self._ended()
                self._there.call_soon_threadsafe(discarded)
            raise

    async def _ended(self) -> None:
        """Wait until the work is over, however often the waiter is interrupted."""
        while not self._is_over():
            self._end = self._here.create_future()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait([self._end], timeout=_AGAIN_S)

    def _is_over(self) -> bool:
        return self._is_told or self._there.is_closed() or (self._task is not None and self._task.done())

    def begin_here(self, work: Coroutine[Any, Any, Any]) -> None:
        """On the runtime's loop."""
        self._task = self._there.create_task(work)
        self._task.add_done_callback(self._done)

    def _cancel(self) -> None:
        if self._task is not None:  # or an interruption came before `begin`
            self._there.call_soon(self._task.cancel)  # after its first step

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Tell the caller's loop, and look later whether it knows."""
        if self._is_told:
            return
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody is left to be told
            self._here.call_soon_threadsafe(self._settle, task)
            if handlers_may_raise():
                self._there.call_later(_AGAIN_S, self._done, task)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        outcome = self._outcome
        if outcome.done():
            pass
        elif task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
            outcome.exception()  # mark it as seen: the caller may have been cancelled
        else:
            outcome.set_result(task.result())
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        self._is_told = True  # last: a signal handler may raise before


def _crossed(
    there: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], discarded: Callable[[], None]
) -> Coroutine[Any, Any, T]:
    """Start `work` on the loop `there`; the coroutine that is returned waits for it on the one that runs here."""
    crossing = _Crossing(there)
    begun: _Begun[T] = _Begun(crossing.outcome(discarded), discarded, there)
    crossing.begin(work)
    return begun


async def offload(fn: Callable[..., T], *args: Any, threads: Executor | None = None) -> T:
    """Run `fn(*args)`, which blocks or computes, in a thread and wait for it, so that the caller's loop goes on.

    The thread is one of the loop's own, or of `threads`. Cancelling the wait does not stop it. In virtual time it runs
    at once, on the loop: there are no threads.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        return fn(*args)
    return await loop.run_in_executor(threads, partial(contextvars.copy_context().run, _run, fn, *args))


def _run(fn: Callable[..., T], *args: Any) -> T:
    try:
        return fn(*args)
    except StopIteration as error:  # no future can hold it, and whoever waits would wait for ever
        raise RuntimeError(f"{fn!r} raised StopIteration") from error
