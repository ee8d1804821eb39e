"""Calls of threads that run no event loop: their handles, and the runner that begins them.

A call begins in its caller's thread, as on an event loop (`progress`). A short one may end there, too, or in a thread
that waits for it: the compiled core looks for its result, in one step that no signal handler can interrupt. All else is
done on the runtime's loop, where no handler runs. So an exception of a handler (Ctrl-C) ends a wait, and never a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

from asyncoll import forks
from asyncoll.arguments import real
from asyncoll.errors import AsyncollError, ClosedError, UsageError
from asyncoll.runtime.interruption import handlers_may_run, may_interrupt
from asyncoll.runtime.progress import ProgressThread, ignore, see, task_of
from asyncoll.runtime.shared_work import BegunWork, Driven
from asyncoll.runtime.threads import program_loop
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.transport import settle_from_any_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
logger = logging.getLogger("asyncoll")

_FAILED = "a callback of `Handle.when_done` has failed"

# A signal that comes as a thread falls asleep does not wake it, so threads sleep in naps: the handler runs after one.
_NAP_S = 0.5

# These threads run no code of the program, so no call of it can come from them.
_OWN_THREADS = ("asyncoll-progress", "asyncoll-membership", "asyncoll-joining")

# While a thread looks at a call, the runtime cannot take it over. It asks again after this time.
_LOOKED_AT_S = 0.0005


class Shared(BegunWork[T_co], Protocol[T_co]):
    """A short call in `Runner.held`, which any thread may end."""

    @property
    def result(self) -> T_co:
        """What the caller gets, if the call is over."""

    def look(self) -> bool:
        """Whether the call is over. Blocks for a short time, if that may end it, until the first `claim`.

        One thread looks at a time. An exception leaves the call to the runtime: that of a signal handler, or an error
        that the runtime finds, too.
        """

    def claim(self) -> bool:
        """Take the call out of `held`, to `finish` it. Returns False if a thread looks at it, or if it is not there."""


class Gate:
    """An event that happens once. A signal handler that raises in `wait` breaks nothing, unlike in threading.Event."""

    __slots__ = ("_waiting", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        # Each is held, and released when the gate opens. (`set[...]()` takes five times as long.)
        self._waiting: set[threading.Lock] = set()

    def open(self) -> None:
        """Let all pass, from now on."""
        # Before the locks are released: a thread that comes meanwhile finds the gate open, and does not wait.
        self.is_open = True
        for lock in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # another thread opens the gate, too
                lock.release()

    def wait(self, limit_s: float) -> bool:
        """Block this thread until the gate is open, for at most `limit_s`. Returns whether it is."""
        lock = threading.Lock()
        lock.acquire()
        self._waiting.add(lock)
        thread = threading.get_ident()
        try:
            if limit_s == threading.TIMEOUT_MAX:
                waiting_threads[thread] = self
            left_s = limit_s
            # The lock is among those that `open` releases by now: whichever of the two comes second sees the other.
            while not self.is_open and left_s > 0 and not lock.acquire(timeout=min(left_s, _NAP_S)):
                left_s -= _NAP_S
            return self.is_open
        finally:
            waiting_threads.pop(thread, None)
            self._waiting.discard(lock)


# The threads that wait for the runtime without a limit, and at which gate. Nothing else wakes them.
waiting_threads: dict[int | None, Gate] = {}


class Handle(Uncopied, Awaitable[T]):
    """A call that has begun. Any thread may wait for its end, and any task, on any event loop, may await it.

    The call goes on whether or not anything waits for it, and also if the handle is dropped. It is not cancelled:
    neither by a wait that is too short, nor with a task that awaits it, nor by an exception of a signal handler.

    The results of `sparse_allreduce` and `push_sum` must be fetched, by `wait` or `await`: this rank alone would lack
    its part. If such a handle is destroyed before, the communicator is aborted.

    Example:

        with asyncoll.init() as comm:
            handle = comm.barrier()
            while not handle.done():
                pass  # other work
    """

    # Handlers run in the main thread, between any two steps: its stores are in an order that loses nothing, and what
    # other threads wait for is told by the runtime (`_tell`).
    __slots__ = (
        "__weakref__",
        "_call",
        "_callbacks",
        "_discarded",
        "_error",
        "_gate",
        "_is_done",
        "_is_handed_over",
        "_result",
        "_runner",
        "_trace",
    )

    def __init__(self, runner: HandleRunner, call: Shared[T] | None = None) -> None:
        """`call` is looked at by the threads that wait; None: the runtime ends it."""
        self._runner = runner
        self._call = call
        self._discarded: Callable[[], None] = ignore
        self._result: T | None = None
        self._error: BaseException | None = None
        self._trace: Any = None  # of the error, where it was raised first
        self._is_done = False
        self._is_handed_over = False
        self._gate = Gate()  # of the threads that wait
        self._callbacks: dict[object, Callable[[], None]] = {}  # the thread that removes one calls it

    # -- for the caller ---------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the call is over. May be called in any thread, and more than once.

        Args:
            timeout: seconds; None or infinity: no limit but the deadline of the call; 0 or less: do not wait.

        Returns:
            The result of the call.

        Raises:
            TimeoutError: the call is not over after `timeout`; it goes on.
            UsageError: `timeout` is no number; this is a forked child of the process that has made the call; or the
                call is not over, and this is a callback of `when_done`.
            AsyncollError: the call has failed. The classes are those that its method names.
        """
        limit_s = _limit_s(timeout)
        if not self.done() and not self._sleep(limit_s):
            raise TimeoutError(f"the call is not over after {round(limit_s, 3):g} s; it goes on")
        return self._outcome()

    def done(self) -> bool:
        """Whether the call is over: `wait` would return, or raise its error, at once."""
        if not self._is_done:
            if self._runner.parent:
                self._fail(forks.refusal(self._runner.parent))
            elif (call := self._call) is not None:
                try:
                    if call.look():
                        self._end(call.result)
                    elif self._runner.has_taken(call):
                        # The runtime ends the call, and tells this handle.
                        self._hand_over()
                except AsyncollError:  # the runtime finds it, too
                    pass
        return self._is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the call is over: in the runtime's thread, or here and now if it is over already.

        Threads that wait for the call are woken before. The callback must not block: the calls of this rank stand still
        meanwhile. If it raises an exception, that is logged.
        """
        key = self._add(callback)
        if self._is_done and self._remove(key) is not None:
            try:
                callback()
            except Exception:
                logger.exception(_FAILED)

    def __await__(self) -> Generator[Any, None, T]:
        if self.done():
            if self._runner.is_turn_due():
                yield
            return self._outcome()
        ended = program_loop().create_future()
        key = self._add(partial(settle_from_any_thread, ended))
        try:
            # Asked once the callback is there: a call that ends earlier is seen here, a later one wakes the future.
            if not self._is_done:
                yield from ended
        finally:
            self._remove(key)
        return self._outcome()

    def claim(self) -> None:
        """The result counts as fetched, also if the handle is destroyed before."""

    def resume(self) -> None:
        """The call is over, and this thread goes on without its outcome: what `wait` does for tensors of devices."""

    # -- how it ends ------------------------------------------------------------------------------

    def _end(self, result: T) -> None:
        # Other threads read these without a lock: `_is_done` promises that the result is there.
        self._result = result
        self._is_done = True
        self._call = None

    def _fail(self, error: BaseException) -> None:
        self._trace = error.__traceback__
        self._error = error
        self._is_done = True
        self._call = None

    def _outcome(self) -> T:
        """The result, or the error, for the caller."""
        # Each `raise` appends to the traceback, and several threads may raise the same error: each begins at the first.
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        return self._result  # type: ignore[return-value]

    def _add(self, callback: Callable[[], None]) -> object:
        """Call `callback` in the runtime's thread when the call is over, unless it was over before. Returns its key."""
        key = object()
        self._callbacks[key] = callback
        self._runner.kept[key] = self
        if not self.done():
            self._hand_over()
        return key

    def _remove(self, key: object) -> Callable[[], None] | None:
        self._runner.kept.pop(key, None)
        return self._callbacks.pop(key, None)

    def _sleep(self, limit_s: float) -> bool:
        """Wait until the call is over. Returns whether it is."""
        if limit_s <= 0:
            return False
        if self._runner.is_here():
            raise UsageError("this thread ends the calls of its rank: in a callback of `when_done`, wait for no call")
        self._hand_over()
        # Asked again after the limit: the call may be over before the runtime has come to open the gate.
        return self._is_done or self._gate.wait(limit_s) or self._is_done

    def _hand_over(self) -> None:
        """Let the runtime end the call, and tell those that wait."""
        if self._call is not None and not self._is_handed_over:
            self._runner.adopt(self)
            # Last: if a handler raises before, the next wait has the runtime adopt it once more, which does no harm.
            self._is_handed_over = True

    def _tell(self) -> None:
        """Wake those that wait. In the runtime's thread, when the call is over."""
        self._gate.open()
        # Another thread may remove a callback meanwhile, because its task was cancelled: it is not called then.
        for key in list(self._callbacks):
            if (callback := self._remove(key)) is not None:
                try:
                    callback()
                except BaseException:  # SystemExit, too, would end the runtime
                    logger.exception(_FAILED)


class _Unfetched(Handle[T]):
    """A handle whose call tells the others if its result was not fetched.

    `_outcome` changes the class. With a finalizer, every handle would run it in its thread, and Python drops an
    exception that a signal handler raises in a finalizer.
    """

    __slots__ = ()

    def _outcome(self) -> T:
        self.claim()
        return self._outcome()

    def claim(self) -> None:
        self.__class__ = Handle  # type: ignore[assignment]

    def __del__(self) -> None:
        # The loop is closed, or `__init__` was interrupted.
        with contextlib.suppress(RuntimeError, AttributeError):
            self._discarded()


class _ResumingHandle(Handle[T]):
    """A handle with something to do where a thread or a task goes on with the outcome."""

    __slots__ = ()

    def resume(self) -> None:
        self._runner.resumes[self]()

    def _outcome(self) -> T:
        self.resume()
        return super()._outcome()


class _ResumingUnfetched(_Unfetched[T]):
    """Both: once the result has been fetched, a `_ResumingHandle`."""

    __slots__ = ()

    def claim(self) -> None:
        self.__class__ = _ResumingHandle  # type: ignore[assignment]


class _Answered(Handle[T]):
    """The handle of a wait-avoiding call that is over. Its result is fetched from `_call`, the compiled core's answer.

    An answer that is destroyed before is counted as not received.
    """

    __slots__ = ("_answer",)

    def __init__(self, runner: HandleRunner, answer: Coroutine[Any, Any, T]) -> None:
        super().__init__(runner)
        self._answer: Coroutine[Any, Any, T] | None = answer
        self._is_done = True

    def _outcome(self) -> T:
        while self._answer is not None:
            try:
                self._answer.send(None)  # returns None once, to let a loop turn
            # No call before the result is kept: a handler could raise there.
            except StopIteration as stop:
                self._result = stop.value
                self._answer = None
        return super()._outcome()


class HandleRunner(ProgressThread):
    """A `Runner` whose callers need no event loop: what it returns are handles.

    They are awaitable, but no coroutines, so their type is Any here.

    `held` has short calls (`Shared`) only. Other work is begun by its caller only if no handler can break it, and is
    left to the runtime's loop if it is not over then.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.parent = 0  # in a forked child, which has no runtime: its parent
        self.waiting = threading.local()  # `now`: this thread waits for the call that it makes, and may carry it out
        self._is_stopped = False
        # Those that the runtime is to end, and what begins that again after an exception in its thread. Weak: a handle
        # that is dropped is destroyed before its call is over, so the next call knows that the answer has no receiver.
        self._left: dict[weakref.ref[Handle[Any]], Callable[[], None]] = {}
        self.kept: dict[object, Handle[Any]] = {}  # by the keys of their callbacks, which are called all the same
        self.resumes = weakref.WeakKeyDictionary[Handle[Any], Callable[[], None]]()  # of `resuming`
        self._finishing = weakref.WeakKeyDictionary[BegunWork[Any], asyncio.Task[Any]]()  # those of `Shared`

    def abandon(self, parent: int) -> None:
        super().abandon(parent)
        self.parent = parent
        # So that no handle looks at the memory of the parent.
        self.held.clear()

    def stop(self) -> None:
        super().stop()
        self._is_stopped = True
        self._refuse()

    def _refuse(self) -> None:
        """Fail the handles that a stopped runtime cannot end."""
        for mine in list(self._left):
            if (handle := mine()) is not None:
                self._over(handle, ClosedError("this rank has left the world, and the call was not over"))

    def is_here(self) -> bool:
        """Whether the calling thread is that of the runtime."""
        return threading.current_thread() is self._thread

    def is_turn_due(self) -> bool:
        """Whether a task that awaits nothing but calls that are over has to let its loop turn."""
        return self._turns.is_due()

    def is_waiting(self) -> bool:
        return any(map(_is_waiting, _threads_of_program()))

    def is_stuck(self) -> bool:
        """Whether all threads of the program wait for calls, without a limit, and no signal handler may wake one.

        A thread of C that runs no Python now, and calls it later, cannot be seen.
        """
        # Without the times of threads, one of them may be computing unseen.
        if handlers_may_run() or not self.computed_s():
            return False
        # Threads that run Python, but that C has started: they may be about to make a call.
        unknown = sys._current_frames().keys() - {each.ident for each in threading.enumerate()}
        return not unknown and all(map(_is_waiting, _threads_of_program()))

    # -- from callers, in any thread --------------------------------------------------------------

    def caller(self) -> asyncio.AbstractEventLoop:
        return self.home

    def within(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        return work  # `home` is the runtime's loop

    def done(self, result: T, discarded: Callable[[], None] = ignore) -> Any:
        handle: Handle[T] = self._handle(discarded)
        handle._end(result)
        return handle

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = ignore) -> Any:
        if self.parent:
            work.close()
            raise forks.refusal(self.parent)
        handle: Handle[T] = self._handle(discarded)
        # The work does not keep the handle alive: that of a dropped one has no receiver for its result.
        run = _Run(self.home, work, partial(self._settle_if_alive, weakref.ref(handle)))
        self._post(handle, run.begin, run.begin_again)
        return handle

    def resuming(self, call: Any, resume: Callable[[], None]) -> Any:
        handle = self.handle(call)
        # Beside the handle, and not in it: one more slot would add to the cost of every call.
        self.resumes[handle] = resume
        handle.__class__ = _ResumingUnfetched if isinstance(handle, _Unfetched) else _ResumingHandle
        return handle

    def may_block(self) -> bool:
        return bool(getattr(self.waiting, "now", False))

    def drive(self, work: Driven[T], discarded: Callable[[], None] = ignore) -> Any:
        # Only then can a signal handler not raise in the middle, with shared memory half written.
        if work.is_atomic or not may_interrupt():
            work.begin()
            # This thread waits for the call in any case. Two switches of threads take longer than most calls.
            while not work.is_over and self.may_block() and work.poll():
                pass
            if work.is_over:
                handle: Handle[T] = self._handle(discarded)
                # Exceptions of other kinds, such as KeyboardInterrupt, are of a signal handler, and not of the call.
                try:
                    handle._end(work.result())
                except (Exception, asyncio.CancelledError) as error:
                    handle._fail(error)
                return handle
        return self.start(work.finish(), discarded)

    def handle(self, call: Any) -> Handle[Any]:
        """The handle of `call`, which has begun: what a method of a communicator with this runner returns."""
        if hasattr(call, "look"):
            return Handle(self, call)
        if isinstance(call, Handle):  # slow, for a class of `abc`
            return call
        if isinstance(call, types.CoroutineType):
            handle: Handle[Any] = self.start(call)
            return handle
        return _Answered(self, call)

    def adopt(self, handle: Handle[Any]) -> None:
        """End `handle`, which has a short call, and tell those that wait for it."""
        adopt = partial(self._adopt, handle)
        self._post(handle, adopt, adopt)

    def has_taken(self, call: Shared[Any]) -> bool:
        """Whether the runtime finishes `call`, and no thread that looks at it finds its end."""
        return call in self._finishing

    def _handle(self, discarded: Callable[[], None]) -> Handle[Any]:
        if discarded is ignore:
            return Handle(self)
        handle: Handle[Any] = _Unfetched(self)
        handle._discarded = discarded
        return handle

    def _post(self, handle: Handle[Any], what: Callable[[], None], again: Callable[[], None]) -> None:
        # Entered first: after an exception in its thread the runtime begins again what it finds here.
        self._left[weakref.ref(handle)] = again
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.home.call_soon_threadsafe(what)
        # The runtime may have stopped before it was asked, and has failed those that were entered by then.
        if self._is_stopped:
            self._refuse()

    # -- on the runtime's loop --------------------------------------------------------------------

    def _take(self, work: Any, caller: asyncio.AbstractEventLoop) -> None:
        if work.claim():
            task = self._finishing[work] = self.home.create_task(work.finish())
            task.add_done_callback(see)

    def _adopt(self, handle: Handle[Any]) -> None:
        call = handle._call
        if call is not None:
            self._take(call, self.home)
        task = None if call is None else self._finishing.get(call)
        if task is not None:
            task.add_done_callback(partial(self._settle, handle))
        elif handle.done():
            self._over(handle)
        else:  # a thread looks at the call, which takes a short time
            self.home.call_later(_LOOKED_AT_S, self._adopt, handle)

    def _begin_again(self) -> None:
        super()._begin_again()
        for again in list(self._left.values()):
            again()

    def _settle_if_alive(self, mine: weakref.ref[Handle[T]], task: asyncio.Task[T]) -> None:
        handle = mine()
        if handle is not None:
            self._settle(handle, task)
        else:
            self._left.pop(mine, None)
            see(task)

    def _settle(self, handle: Handle[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():  # by `stop`
            self._over(handle, ClosedError("this rank has left the world, and the call was not over"))
        elif (error := task.exception()) is not None:
            self._over(handle, error)
        else:
            handle._end(task.result())
            self._over(handle)

    def _over(self, handle: Handle[Any], error: BaseException | None = None) -> None:
        # A thread that looks at the call may have found its end already.
        if error is not None and not handle._is_done:
            handle._fail(error)
        self._left.pop(weakref.ref(handle), None)
        handle._tell()


class _Run:
    """Work that runs as a task of the runtime's loop, to the end of `over(task)`, which may be called twice."""

    __slots__ = ("_loop", "_over", "_task", "_work")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any],
        over: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._loop = loop
        self._work = work
        self._over = over
        self._task: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        # After an exception in the runtime's thread between these two lines, the task exists, and `over` is missing.
        if self._task is None:
            self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._over)

    def begin_again(self) -> None:
        """Start the work, or tell of its end, if an exception has interrupted that. In the runtime's thread."""
        self._task = self._task or task_of(self._loop, self._work)
        self.begin()


def _threads_of_program() -> list[threading.Thread]:
    """The threads that may make calls."""
    return [each for each in threading.enumerate() if each.name not in _OWN_THREADS]


def _is_waiting(thread: threading.Thread) -> bool:
    """Whether `thread` makes no call before another one ends."""
    gate = waiting_threads.get(thread.ident)
    return gate is not None and not gate.is_open


def _limit_s(timeout: float | None) -> float:
    if timeout is None:
        return threading.TIMEOUT_MAX
    limit_s = real(timeout, "timeout")
    if math.isnan(limit_s):
        raise UsageError("timeout must be a number of seconds, got nan")
    return min(limit_s, threading.TIMEOUT_MAX)
