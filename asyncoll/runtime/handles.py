"""Calls of threads that run no event loop: their handles, and the runner that begins them.

A call begins in its caller's thread, as on an event loop (`progress`). What is not over then is driven by the thread
that waits for it, for a short time, and by the runtime's loop afterwards. So a handle belongs to no thread, and any
thread may wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar

from asyncoll import forks
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.progress import ProgressThread, ignore
from asyncoll.runtime.work import Begun, Driven

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_FOLLOW = object()  # sent to a call by the thread that drives it without a loop


class _Steps(Protocol[T_co]):
    """A call that has begun, and whose next step is `send(_FOLLOW)`: it yields the `Handle` that it waits for.

    None is yielded by a call that is over, and that lets the loop turn.
    """

    def send(self, value: Any, /) -> Any: ...


class Handle(Coroutine[Any, Any, T]):
    """A call that has begun. Any thread may wait for its end, and any task, on any event loop, may await it.

    The call goes on whether or not anything waits for it, and also if the handle is dropped.

    Example:

        with asyncoll.init() as comm:
            handle = comm.barrier()
            while not handle.done():
                pass  # other work
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_discarded",
        "_error",
        "_is_done",
        "_is_wanted",
        "_result",
        "_steps",
        "_waits",
    )

    def __init__(self, steps: _Steps[T] | None = None, discarded: Callable[[], None] = ignore) -> None:
        """`steps` is driven by the thread that waits; None: the runner ends it.

        `discarded` is called if the handle is destroyed before its result was asked for.
        """
        self._steps = deque[_Steps[T]]() if steps is None else deque((steps,))
        self._discarded = discarded
        self._callbacks: deque[Callable[[], None]] = deque()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._is_wanted = False
        self._waits: Generator[Any, None, T] | None = None

    # -- for the caller ---------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the call is over. May be called in any thread, and more than once.

        Args:
            timeout: seconds; None: no limit but the deadline of the call.

        Returns:
            The result of the call.

        Raises:
            TimeoutError: the call is not over after `timeout`; it goes on.
            AsyncollError: the call has failed. The classes are those that its method names.
        """
        if not self._is_done:
            self._drive()
            if not self._is_done:
                self._sleep(timeout)
        self._is_wanted = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def done(self) -> bool:
        """Whether the call is over: `wait` would return, or raise its error, at once."""
        if not self._is_done:
            self._drive()
        return self._is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the call is over; now, if it is over already.

        It runs in the thread in which the call ends, often that of the runtime: it must not wait, nor raise.
        """
        if not self._is_done:
            self._drive()
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            self.when_done(lambda: _tell(loop, ended))
            yield from ended
        return self.wait()

    # -- as a coroutine, of a task or of another handle -------------------------------------------

    def send(self, value: Any, /) -> Any:
        """The next step of a task that awaits the handle, as for any coroutine."""
        if value is not _FOLLOW:
            if self._waits is None:
                self._waits = self.__await__()
            return self._waits.send(value)
        if not self.done():
            return self
        raise StopIteration(self.wait())

    def throw(self, error: Any, /, *more: Any) -> Any:
        """The cancellation of a task that awaits the handle. The call goes on."""
        if self._waits is None:
            raise error
        return self._waits.throw(error, *more)

    def close(self) -> None:
        """Without effect: the call goes on."""

    def claim(self) -> None:
        """The result counts as asked for: it is not discarded with the handle."""
        self._is_wanted = True

    # -- how it ends ------------------------------------------------------------------------------

    def _end(self, result: T) -> None:
        self._result = result
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._is_done = True
        self._call_back()

    def _call_back(self) -> None:
        """Each callback is removed, and called, by one thread: this one, or that which adds it."""
        while self._callbacks:
            with contextlib.suppress(IndexError):
                self._callbacks.popleft()()

    def _drive(self) -> None:
        """Make the next step of the call, unless another thread has made it."""
        try:
            steps = self._steps.pop()
        except IndexError:
            return
        self._step(steps)

    def _step(self, steps: _Steps[T]) -> None:
        try:
            while (waiting := steps.send(_FOLLOW)) is None:
                pass
        except StopIteration as stop:
            self._end(stop.value)
        except BaseException as error:
            self._fail(error)
        else:
            waiting.when_done(lambda: self._step(steps))

    def _sleep(self, timeout: float | None) -> None:
        ended = threading.Lock()
        ended.acquire()
        self.when_done(ended.release)
        if not ended.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise TimeoutError(f"the call is not over after {timeout:g} s; it goes on")

    def __del__(self) -> None:
        if not self._is_wanted and self._discarded is not ignore:
            self._discarded()


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the task that waits
        loop.call_soon_threadsafe(_set, ended)


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


class _Held(Generic[T]):
    """The steps of work that has begun in its caller's thread: the caller goes on with it, or the runtime."""

    __slots__ = ("_rest", "_runner", "_work")

    def __init__(self, runner: HandleRunner, work: Driven[T]) -> None:
        self._runner = runner
        self._work = work
        self._rest: Handle[T] | None = None

    def send(self, value: Any, /) -> Any:
        if self._rest is None:
            runner, work = self._runner, self._work
            if runner.held.pop(work, None) is None:
                self._rest = runner.taken(work)
            elif not may_interrupt() and work.look():
                raise StopIteration(work.result())
            else:
                self._rest = runner.start(work.finish())
        return self._rest.send(value)


class HandleRunner(ProgressThread):
    """A `Runner` whose callers need no event loop: what it returns are handles."""

    def __init__(self) -> None:
        super().__init__(None)
        self._handles: weakref.WeakKeyDictionary[Begun[Any], Handle[Any]] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakSet[Handle[Any]] = weakref.WeakSet()  # those of work on the runtime's loop
        self._parent = 0  # in a forked child, which has no such loop: its parent

    def abandon(self, parent: int) -> None:
        super().abandon(parent)
        self._parent = parent
        for handle in list(self._running):
            handle._fail(forks.refusal(parent))

    def caller(self) -> asyncio.AbstractEventLoop:
        return self.home

    def done(self, result: T) -> Handle[T]:
        handle: Handle[T] = Handle()
        handle._end(result)
        return handle

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = ignore) -> Handle[T]:
        if self._parent:
            work.close()
            raise forks.refusal(self._parent)
        handle: Handle[T] = Handle(discarded=self._later(discarded))
        self._running.add(handle)
        self.home.call_soon_threadsafe(self._run_here, work, handle)
        return handle

    def drive(self, work: Driven[T], discarded: Callable[[], None] = ignore) -> Handle[T]:
        if not work.is_atomic and may_interrupt():
            return self.start(work.finish(), discarded)
        work.begin()
        if not work.is_over:
            self.held[work] = self.home, self.turn
            self.set_timer()
            return Handle(_Held(self, work), self._later(discarded))
        handle: Handle[T] = Handle(discarded=self._later(discarded))
        try:
            handle._end(work.result())
        except BaseException as error:
            handle._fail(error)
        return handle

    def taken(self, work: Begun[T]) -> Handle[T]:
        return self._handles.pop(work)

    def _later(self, discarded: Callable[[], None]) -> Callable[[], None]:
        """`discarded` on the runtime's loop: a finalizer may run in any thread, also in one that holds a lock."""
        if discarded is ignore:
            return ignore

        def later() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the world has ended
                self.home.call_soon_threadsafe(discarded)

        return later

    def _take(self, work: Begun[Any], caller: asyncio.AbstractEventLoop) -> None:
        handle = self._handles[work] = Handle[Any]()
        self._running.add(handle)
        if self.held.pop(work, None) is None:
            del self._handles[work]
        else:
            self._run_here(work.finish(), handle)

    def _run_here(self, work: Coroutine[Any, Any, T], handle: Handle[T]) -> None:
        """Run `work`, whose outcome is that of `handle`. On the runtime's loop."""
        task = self.home.create_task(work)
        task.add_done_callback(lambda task: _settle(task, handle))


def _settle(task: asyncio.Task[T], handle: Handle[T]) -> None:
    if task.cancelled():
        handle._fail(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        handle._fail(error)
    else:
        handle._end(task.result())


def as_handle(call: Coroutine[Any, Any, T]) -> Handle[T]:
    """The handle of a call that has begun."""
    return call if isinstance(call, Handle) else Handle(call)
