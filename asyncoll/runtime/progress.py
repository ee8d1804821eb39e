"""Runners: they start the work of calls on the runtime's loop, and return the results to the caller's loop.

In a world of processes the runtime has a thread and a uvloop loop of its own: the auxiliary thread of Li et al.,
"Taming unbalanced training workloads in deep learning with partial collective operations", PPoPP 2020, section 4.3. So
a rank takes part in the rounds of others while its program blocks its own loop, for example in `backward()`. In the
in-process worlds the runtime and the callers share one loop. In both cases a call starts when it is made, not when it
is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import uvloop

from asyncoll import forks
from asyncoll.runtime.interruption import handlers_may_raise, may_interrupt
from asyncoll.runtime.shared_work import BegunWork, Driven
from asyncoll.runtime.threads import check_threads
from asyncoll.runtime.timer import Timer
from asyncoll.transport.processes import runnable_s
from asyncoll.transport.system_calls import needed
from asyncoll.transport.virtual_time import VirtualTimeLoop

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# The time that pure Python code in another thread may keep the GIL while the progress thread waits for it. At Python's
# default of 5 ms a round waits up to 10 ms for a rank that computes in Python; at this value, 1.2 ms.
SWITCH_INTERVAL_S = 0.0005

# After once to twice this time, the runtime takes over work in shared memory that its caller has not awaited. A caller
# that computes before it awaits the call expects the work to be done meanwhile.
TAKEOVER_S = 0.0005

CALLS_PER_TURN = 64  # calls that are over when they are awaited, before the caller's loop turns

# The time between two attempts to wake a caller. A signal handler may have interrupted the first one.
_AGAIN_S = 0.01

# The time limit at the end for cancelled work. It may wait for a dead peer to leave the memory that it reads.
_ENDING_S = 1.0

# In a forked child: the loops of its parent's runtime. No thread runs them there, so no caller waits for their work.
_abandoned: set[asyncio.AbstractEventLoop] = set()


def _named_in_warnings(function: F) -> F:
    """Python warns of a coroutine that was never awaited by this name, and shows the line that has made it."""
    function.__qualname__ = "a call of asyncoll"
    return function


def ignore() -> None:
    """For `discarded`: nothing is lost with the result."""


class Runner(ABC):
    """Starts the work of calls on the runtime's loop.

    `start` and `drive` may be called from any running loop, `post` from any thread. `home` is the loop of the program,
    on which the runner was made.
    """

    # Work that has begun and that its caller has not awaited yet: the caller's loop, and `turn` when it began. Whoever
    # removes an entry goes on with the work: its caller, or the runtime, which takes it over after once to twice
    # TAKEOVER_S. After an entry has been added, `set_timer` must be called unless `is_timer_set`. None: work that is
    # not over at once is left to `start`, on the loop `home`.
    held: dict[BegunWork[Any], tuple[asyncio.AbstractEventLoop, int]] | None = None
    turn = 0  # how often the timer has expired
    is_timer_set = False

    def __init__(self, home: asyncio.AbstractEventLoop, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is the runtime's."""
        self.home = home
        self._loop = loop
        # It is called on the runtime's loop with what has ended that, which goes on then.
        self.broke: Callable[[BaseException], None] = _raise
        self._turns = _Turns()

    # The loop that will await a call of this thread. Raises RuntimeError if no loop runs here, and one must.
    caller = staticmethod(asyncio.get_running_loop)

    def set_timer(self) -> None:
        """Arm the timer unless it is armed: a system call for each piece of work would take too long."""
        raise AssertionError("nothing is held here")

    def taken(self, work: BegunWork[T]) -> Coroutine[Any, Any, T]:
        """A coroutine that waits for `work`, which the runtime has taken over."""
        raise AssertionError("nothing is held here")

    @abstractmethod
    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        """Start `work` now; the returned coroutine waits for it and returns its result.

        Cancelling the returned coroutine cancels `work`, after its first step, and waits until it has stopped: `work`
        does not use the caller's memory afterwards. Then `discarded` is called, because `work` may have completed, and
        its result has no receiver. The caller goes on after that. An exception that a signal handler raises in the
        caller has the same effect. If the returned coroutine is never awaited, or is closed, `discarded` is called at
        once, and `work` runs to its end.

        `discarded` may be called in any thread, between any two steps, as finalizers are: it must take no lock. The
        next call of the same thread finds its effect.
        """

    def may_block(self) -> bool:
        """Whether the calling thread waits for the call that it makes: long work there keeps nothing else waiting."""
        return False

    @abstractmethod
    def drive(self, work: Driven[T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        """Begin `work` in shared memory now, in the caller's thread; the returned coroutine completes it.

        If the returned coroutine is not awaited, the runtime's loop continues the work after once to twice TAKEOVER_S.
        A cancellation waits until the work has stopped, and `discarded` is called if its result has no receiver.
        """

    def done(self, result: T, discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        """A coroutine for a call that is over with `result`. Awaiting it lets the loop turn now and then.

        `discarded` is called if the result has no receiver, in any thread, between any two steps.
        """
        return _ended(lambda: result, self._turns, discarded)

    def within(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """For a task on `home`: a coroutine that runs `work` on the runtime's loop.

        Cancelling it cancels `work`, and waits until that has stopped.
        """
        return self.start(work)

    def resuming(self, call: Coroutine[Any, Any, T], resume: Callable[[], None]) -> Coroutine[Any, Any, T]:
        """`call`, which is a coroutine; `resume` is called where its caller goes on with its outcome.

        It must not raise. It is called once for each thread or task that goes on. If none comes, it is not called.
        """
        return _ResumingCoroutine(call, resume)

    @abstractmethod
    def post(self, what: Callable[[], None]) -> None:
        """Schedule `what` on the runtime's loop, from any thread."""

    def post_from_finalizer(self, what: Callable[[], None]) -> None:
        """Schedule `what` from a finalizer, which Python runs in any thread, between any two steps.

        Without effect once the loop is closed.
        """
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what)

    def is_waiting(self) -> bool:
        """Whether the program waits for a call, as far as this can be known. It may have calls under way and go on."""
        # A program on an event loop waits in one of its tasks, and the loop does not tell in which.
        return True

    def is_stuck(self) -> bool:
        """Whether nothing but the end of a call wakes the program: no thread, task, timer, signal or connection.

        False if that is not certain. On the runtime's loop.
        """
        # An event loop does not tell its timers and connections.
        return False

    @abstractmethod
    def computed_s(self) -> float:
        """The seconds that the threads of this process have computed, or waited for a core."""


class _Awaited(Coroutine[Any, Any, T]):
    """The coroutine that the caller of a runner gets, after its first step."""

    def __init__(self, waiting: Coroutine[Any, Any, T], discarded: Callable[[], None]) -> None:
        """`waiting` waits for the work; `discarded` is called if the result has no receiver."""
        self._discarded = discarded
        self._waiting = waiting

    def __await__(self) -> Generator[Any, None, T]:
        return self._waiting.__await__()

    def send(self, value: Any) -> Any:
        return self._waiting.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        return self._waiting.throw(error, *more)

    def close(self) -> None:
        self._waiting.close()


class _BegunCoroutine(_Awaited[T]):
    """The coroutine that the caller of a runner gets, before its first step.

    If a task is cancelled before its first step, asyncio closes a plain coroutine without running it. This one runs its
    first step before it raises the cancellation, so that the work is cancelled and stops using the caller's memory.

    If this object is closed or destroyed before its first step, the result has no receiver, and `discarded` is called.

    The first step changes the class to `_Awaited`, which has no finalizer. With a finalizer, every call would run it in
    the caller's thread, and Python drops an exception that a signal handler raises in a finalizer.
    """

    def __await__(self) -> Generator[Any, None, T]:
        waiting = self._waiting.__await__()
        # After the call: a signal handler may raise at its end, and the finalizer must find that no step was made.
        self.__class__ = _Awaited  # type: ignore[assignment]
        return waiting

    def send(self, value: Any) -> Any:
        # Before the step, which may deliver the result: a finalizer that ran afterwards would report it as discarded.
        self.__class__ = _Awaited  # type: ignore[assignment]
        return self._waiting.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        self.__class__ = _Awaited  # type: ignore[assignment]
        try:
            self._waiting.send(None)
        # The result was ready, and has no receiver now.
        except StopIteration:
            self._discarded()
            raise error from None
        return self._waiting.throw(error, *more)

    def close(self) -> None:
        has_receiver = self.__class__ is not _BegunCoroutine  # a reference to this method may outlive the first step
        self.__class__ = _Awaited  # type: ignore[assignment]
        self._waiting.close()
        if not has_receiver:
            self._discarded()

    def __del__(self) -> None:
        # The attribute is not set if a signal handler raised during `__init__`.
        if hasattr(self, "_waiting"):
            # The loop is closed: the world has ended.
            with contextlib.suppress(RuntimeError):
                self._discarded()


class _Turns:
    """Makes the loop turn now and then in a program that awaits nothing but calls that are over.

    Otherwise no other task would run, and no Ctrl-C would be seen. A turn takes about as long as ten short calls.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls = 0

    def is_due(self) -> bool:
        """Count a call that is over. Returns whether its caller has to let the loop turn."""
        self._calls += 1
        if self._calls < CALLS_PER_TURN:
            return False
        self._calls = 0
        return True


class _Ended(Coroutine[Any, Any, T]):
    """The coroutine that the caller of a runner gets for a call that is over.

    It needs no task, future or generator, whose cost would add to every short call.
    """

    __slots__ = ("_discarded", "_take", "_turns")

    def __init__(self, take: Callable[[], T], turns: _Turns, discarded: Callable[[], None] = ignore) -> None:
        """`take` returns the result, or raises the exception."""
        self._take: Callable[[], T] | None = take
        self._turns = turns
        self._discarded = discarded

    def __await__(self) -> Generator[Any, None, T]:
        # An iterator is enough for `await`.
        return self

    def __iter__(self) -> _Ended[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        if self._take is not None and self._turns.is_due():
            return None  # what `asyncio.sleep(0)` yields
        # Cleared before it is called: also an exception is delivered, and `close` must not count that as discarded.
        take, self._take = self._take, None
        if take is None:
            raise RuntimeError("cannot reuse already awaited coroutine")
        raise StopIteration(take())

    def throw(self, error: Any, *more: Any) -> Any:
        self.close()
        raise error

    def close(self) -> None:
        take, self._take = self._take, None
        if take is not None:
            self._discarded()


class _EndedForOne(_Ended[T]):
    """The same where the runtime has to know whether the caller gets the result: if not, `discarded` is called."""

    __slots__ = ()

    def __del__(self) -> None:
        # The attribute is not set if a signal handler raised during `__init__`.
        if getattr(self, "_take", None) is not None:
            # The loop is closed, and the world has ended.
            with contextlib.suppress(RuntimeError):
                self.close()


def _ended(take: Callable[[], T], turns: _Turns, discarded: Callable[[], None]) -> _Ended[T]:
    return _Ended(take, turns) if discarded is ignore else _EndedForOne(take, turns, discarded)


class _ResumingCoroutine(Coroutine[Any, Any, T]):
    """A coroutine of a runner, with something to do where its caller goes on."""

    def __init__(self, call: Coroutine[Any, Any, T], resume: Callable[[], None]) -> None:
        self._call = call
        self._resume = resume

    def __await__(self) -> Generator[Any, None, T]:
        try:
            result = yield from self._call.__await__()
        except GeneratorExit:  # the caller never comes
            raise
        except BaseException:
            self._resume()
            raise
        self._resume()
        return result

    def send(self, value: Any) -> Any:
        return self._step(self._call.send, value)

    def throw(self, error: Any, *more: Any) -> Any:
        return self._step(self._call.throw, error)

    def close(self) -> None:
        self._call.close()

    def _step(self, step: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return step(argument)
        # The outcome: StopIteration has the result.
        except BaseException:
            self._resume()
            raise


class SharedLoop(Runner):
    """A runner for in-process worlds: the runtime and the program share the loop on which this object is made."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop(), asyncio.get_running_loop())

    def computed_s(self) -> float:
        return 0.0  # time may be virtual, and a world in virtual time is the same each time

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        if asyncio.get_running_loop() is not self.home:
            return _crossed(self.home, work, discarded, set())
        task = self.home.create_task(work)
        # A program that hears of the failure elsewhere may not await the call.
        task.add_done_callback(see)
        return _BegunCoroutine(_join(task, discarded), discarded)

    def drive(self, work: Driven[T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        # The memory of in-process worlds has no locks: only the thread of `home` may run work in it.
        if asyncio.get_running_loop() is not self.home:
            return _crossed(self.home, work.finish(), discarded, set())
        work.begin()
        if work.is_over:
            return _ended(work.result, self._turns, discarded)
        return self.start(work.finish(), discarded)

    def post(self, what: Callable[[], None]) -> None:
        try:
            is_home = asyncio.get_running_loop() is self.home
        except RuntimeError:
            is_home = False
        # A closed loop runs no callback any more: what is left to do then is done here.
        if is_home or self.home.is_closed():
            what()
        else:
            self.home.call_soon_threadsafe(what)


@_named_in_warnings
async def _join(task: asyncio.Task[T], discarded: Callable[[], None]) -> T:
    """Wait for `task`. Cancelling the waiter cancels `task`, waits until it has stopped, and calls `discarded`."""
    try:
        if not task.done():
            await asyncio.wait([task])  # not the task itself, which a cancellation of the waiter would cancel at once
        return task.result()
    except asyncio.CancelledError:
        # Later than the first step of the task, which is already scheduled.
        asyncio.get_running_loop().call_soon(task.cancel)
        await _settled(task)
        # Not before: until the task has stopped, it may complete all the same, and it may use the caller's memory.
        discarded()
        raise
    # A coroutine that is being closed cannot await.
    except GeneratorExit:
        discarded()
        raise


def see(future: asyncio.Future[Any]) -> None:
    """Mark the exception of `future` as seen: nothing may wait for it any more."""
    if not future.cancelled():
        future.exception()


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, with any outcome. Cancelling the waiter does not end the wait."""
    while not future.done():
        with contextlib.suppress(BaseException):
            await asyncio.wait([future])
    see(future)


def new_loop() -> asyncio.AbstractEventLoop:
    """Raises UsageError if the system refuses what an event loop needs."""
    with needed("epoll_create1, eventfd2 or pipe2"):
        return uvloop.new_event_loop()


class ProgressThread(Runner):
    """A runner for worlds of processes: the runtime has a thread and a loop of its own.

    The loop and the thread exist from `__init__` to `stop`. Signal handlers of Python never run on that thread.
    """

    def __init__(self, home: asyncio.AbstractEventLoop | None) -> None:
        """`home` is the loop of the program; None: the program has none, and the runtime's takes its place.

        Raises UsageError if a library has replaced the threads of Python, or if the system refuses an event loop.
        """
        check_threads()
        loop = new_loop()
        super().__init__(home or loop, loop)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="asyncoll-progress", daemon=True)
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_s))
        self.held: dict[BegunWork[Any], tuple[asyncio.AbstractEventLoop, int]] = {}
        # Work that the runtime has taken over. Weak, because the caller may never come.
        self._taken: weakref.WeakKeyDictionary[BegunWork[Any], _Crossing] = weakref.WeakKeyDictionary()
        # The crossings whose callers are not told of the end yet. After an exception in its thread the runtime looks
        # here for what that has interrupted.
        self._untold: set[_Crossing] = set()
        self._timer = Timer()
        self._loop.set_exception_handler(self._raised)
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._timer.fileno(), self._take_over)
        self._thread.start()
        forks.register(self)

    def start(self, work: Coroutine[Any, Any, T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        return _crossed(self._loop, work, discarded, self._untold)

    def computed_s(self) -> float:
        return runnable_s()

    def drive(self, work: Driven[T], discarded: Callable[[], None] = ignore) -> Coroutine[Any, Any, T]:
        # A signal handler that raises between two steps would leave shared memory half written, and the other ranks
        # waiting for the rest. On the runtime's loop no handler runs.
        if not work.is_atomic and may_interrupt():
            return self.start(work.finish(), discarded)
        work.begin()
        if work.is_over:
            return _ended(work.result, self._turns, discarded)
        # Entered before the timer is set: one that expires while nothing is held is not set again.
        self.held[work] = asyncio.get_running_loop(), self.turn
        self.set_timer()
        return _BegunCoroutine(self._claim(work, discarded), discarded)

    @_named_in_warnings
    async def _claim(self, work: Driven[T], discarded: Callable[[], None]) -> T:
        """Continue `work` for the caller that awaits it, or wait for the runtime if that has taken it over."""
        claimed = self.held.pop(work, None) is not None
        # The program may have set a signal handler since the call began.
        if claimed and may_interrupt():
            return await self.start(work.finish(), discarded)
        try:
            if claimed:
                return await work.finish()
            return await self.taken(work)
        except (asyncio.CancelledError, GeneratorExit):
            discarded()
            raise

    def taken(self, work: BegunWork[T]) -> Coroutine[Any, Any, T]:
        return _Awaited(self._taken.pop(work).outcome(ignore), ignore)

    def set_timer(self) -> None:
        if self.is_timer_set:
            return
        # First: if the timer expired in between, it would stay unarmed, and count as set.
        self.is_timer_set = True
        try:
            self._timer.set(TAKEOVER_S)
        except BaseException:  # of a signal handler
            self.is_timer_set = False
            raise

    def _take_over(self) -> None:
        """Take over the work that its callers have not awaited for a full turn of the timer. On the runtime's loop."""
        self._timer.read()
        self.is_timer_set = False
        # Work of this turn has been held for less than a whole one, and its caller may be about to await it. The list
        # is a copy, because callers add and remove entries in their threads meanwhile.
        for work, (caller, turn) in list(self.held.items()):
            if turn < self.turn:
                self._take(work, caller)
        self.turn += 1
        if self.held:
            self.set_timer()

    def _take(self, work: BegunWork[Any], caller: asyncio.AbstractEventLoop) -> None:
        crossing = self._taken[work] = _Crossing(self._loop, caller, self._untold)
        # `_claim` runs in the caller's thread. Exactly one of the two removes the entry and owns the work, so the
        # crossing must be in `_taken` before: a caller that loses the race looks there.
        if self.held.pop(work, None) is None:
            del self._taken[work]
        else:
            crossing.owns(work.finish())
            crossing.begin_here()

    def post(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def stop(self) -> None:
        """Cancel the work that still runs, and end the thread. Blocks until the thread has ended."""
        forks.unregister(self)
        asyncio.run_coroutine_threadsafe(_cancel_the_rest(), self._loop).result()
        # Before the loop is stopped: `_run` takes any other end of it for a fault, and runs it again.
        self._is_stopping = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._timer.close()
        sys.setswitchinterval(self._switch_interval_s)

    def abandon(self, parent: int) -> None:
        """In a forked child, which does not have this thread: callers there must not wait for its work."""
        _abandoned.add(self._loop)
        forks.isolate(self._loop)
        forks.give_up([self._timer.fileno()])
        # It counts as running, and uvloop refuses to destroy such a loop.
        forks.keep(self._loop)

    def _run(self) -> None:
        """Run the loop until `stop`. Whatever ends it before fails the world, so that every wait has an end."""
        asyncio.set_event_loop(self._loop)
        error: BaseException | None = None
        try:
            while not self._is_stopping:
                try:
                    if error is not None:
                        self._go_on_after(error)
                    # `run_forever` returns without an exception if a callback of the program stops the loop.
                    error = RuntimeError("its loop was stopped")
                    self._loop.run_forever()
                # A callback may raise SystemExit, and another thread may send an exception of any class to this one.
                except BaseException as raised:
                    error = raised
        finally:
            self._loop.close()

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler: an exception of a callback does not end it, but is no less an interruption."""
        loop.default_exception_handler(context)
        # Only a callback has a handle. The exception of a task that nothing awaits, for example, has interrupted none.
        if "handle" in context:
            self._go_on_after(context["exception"])

    def _go_on_after(self, error: BaseException) -> None:
        """Fail the world, and do what `error` has kept callbacks from doing. Before the loop runs another callback."""
        self._loop.call_soon(self.broke, error)
        self._begin_again()

    def _begin_again(self) -> None:
        for crossing in list(self._untold):
            crossing.begin_again()


def _raise(error: BaseException) -> None:
    raise error


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_ENDING_S)


class _Crossing:
    """One piece of work on the runtime's loop, and its outcome as a future of the caller's loop.

    A signal handler may raise in the caller's thread at any point, also in the callback that wakes the caller
    (`_settle`). So the runtime's loop repeats that callback until it has run to its end, as long as the world is open.
    A caller that is cancelled does not rely on the callback: it polls the state of the task.
    """

    def __init__(
        self, there: asyncio.AbstractEventLoop, here: asyncio.AbstractEventLoop, untold: set[_Crossing]
    ) -> None:
        """`there` is the runtime's loop, `here` the caller's. `untold` has this one from `owns` to its end."""
        self._there = there
        self._here = here
        self._untold = untold
        self._work: Coroutine[Any, Any, Any] | None = None
        self._outcome: asyncio.Future[Any] = self._here.create_future()
        self._end: asyncio.Future[None] | None = None  # of a caller that was cancelled: what it waits for has come
        self._is_told = False  # `_settle` has run to its end
        self._discarded: Callable[[], None] | None = None  # of a caller that was cancelled, and waits for it
        self._has_discarded = False
        self._task: asyncio.Task[Any] | None = None

    def owns(self, work: Coroutine[Any, Any, Any]) -> None:
        """`work` is the work of this crossing. In any thread, before it begins."""
        self._work = work
        self._untold.add(self)

    def begin(self) -> None:
        """Start the work on the runtime's loop. On the caller's loop."""
        self._there.call_soon_threadsafe(self.begin_here)

    def outcome(self, discarded: Callable[[], None]) -> Coroutine[Any, Any, Any]:
        """A coroutine for the result of the work. An exception in the waiter cancels the work. On the caller's loop.

        Its first step is made here. A signal handler may raise as the waiter makes the next one, and a coroutine that
        has not begun would not notice that.
        """
        waiting = self._wait(discarded)
        waiting.send(None)
        return waiting

    async def _wait(self, discarded: Callable[[], None]) -> Any:
        is_awaited = False
        try:
            await _pause()
            is_awaited = True
            return await self._outcome
        except BaseException as error:
            # No task has waited: the work goes on.
            if isinstance(error, GeneratorExit) and not is_awaited:
                raise
            # The work's own error is its outcome. Any other one is of the waiter, while the work still runs.
            if self._outcome.done() and not self._outcome.cancelled() and error is self._outcome.exception():
                raise
            # Otherwise the work has ended, too.
            if not self._there.is_closed() and self._there not in _abandoned:
                self._there.call_soon_threadsafe(self._cancel)
                # A coroutine that is being closed cannot await.
                if isinstance(error, GeneratorExit):
                    discarded()
                else:
                    # The caller may use its memory again when this returns, so the work must have stopped by then.
                    # The result is discarded on the runtime's loop, where no handler can interrupt that. An exception
                    # of another kind there has it repeated, because this crossing is among those untold.
                    await self._until(self._is_over)
                    self._discarded = discarded
                    self._untold.add(self)
                    self._there.call_soon_threadsafe(self._discard)
                    await self._until(self._is_discarded)
            raise

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so()`. Cancelling the waiter does not end the wait."""
        # With a limit, as a handler may interrupt `_wake`: then the condition holds, and nothing tells so.
        while not is_so():
            self._end = self._here.create_future()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await asyncio.wait([self._end], timeout=_AGAIN_S)

    def _discard(self) -> None:
        """The result of the work has no receiver, and its caller waits for this. On the runtime's loop."""
        try:
            if self._discarded is not None:
                self._discarded()
        finally:
            self._has_discarded = True
            self._untold.discard(self)
            # The caller's loop is closed.
            with contextlib.suppress(RuntimeError):
                self._here.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """End the wait of `_until`. On the caller's loop."""
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _is_discarded(self) -> bool:
        return self._has_discarded or self._there.is_closed()

    def _is_over(self) -> bool:
        return self._is_told or self._there.is_closed() or (self._task is not None and self._task.done())

    def begin_here(self) -> None:
        """Start the work. On the runtime's loop."""
        # Not for the first time, if an exception has ended the runtime's callback after one of these lines. `_done`
        # may be called twice: it has no effect once the caller is told.
        if self._task is None:
            self._task = self._there.create_task(self._work)  # type: ignore[arg-type]
        self._task.add_done_callback(self._done)

    def begin_again(self) -> None:
        """Start the work, tell of its end, or discard it: what an exception interrupted. In the runtime's thread."""
        if self._discarded is not None:
            self._discard()
        else:
            # The exception may have come after the task was made, and before it was stored here.
            self._task = self._task or task_of(self._there, self._work)
            self.begin_here()

    def _cancel(self) -> None:
        # After its first step: a task that is cancelled earlier never runs, and so never gives back what it holds.
        if self._task is not None:  # None if a signal handler raised before `begin`
            self._there.call_soon(self._task.cancel)

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Wake the caller, and wake it again later if a signal handler interrupted that. On the runtime's loop."""
        if self._is_told:
            return
        try:
            self._here.call_soon_threadsafe(self._settle, task)
        # The caller's loop is closed: there is no waiter.
        except RuntimeError:
            self._untold.discard(self)
            return
        # A handler that raises in `_settle` leaves the caller asleep for ever, so it is scheduled until it has ended.
        if handlers_may_raise():
            self._there.call_later(_AGAIN_S, self._done, task)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        """Complete the future that the caller awaits. On the caller's loop. May run again after an interruption."""
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
        self._wake()
        self._untold.discard(self)
        self._is_told = True  # last: a signal handler may raise at any line above


@types.coroutine
def _pause() -> Generator[None, None, None]:
    # A bare yield needs no future, which would belong to a loop: `outcome` makes this step before a task does.
    yield


def _crossed(
    there: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    discarded: Callable[[], None],
    untold: set[_Crossing],
) -> Coroutine[Any, Any, T]:
    """Start `work` on the loop `there`; the returned coroutine waits for it on the running loop of this thread."""
    crossing = _Crossing(there, asyncio.get_running_loop(), untold)
    begun: _BegunCoroutine[T] = _BegunCoroutine(crossing.outcome(discarded), discarded)
    # Owned before it begins: after an exception in its thread the runtime begins again what is among those untold.
    crossing.owns(work)
    crossing.begin()
    return begun


def task_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | None) -> asyncio.Task[T] | None:
    """The task of `loop` that runs `work`, or None."""
    return next((task for task in asyncio.all_tasks(loop) if task.get_coro() is work), None)


async def offload(fn: Callable[..., T], *args: Any, threads: Executor | None = None) -> T:
    """Run `fn(*args)` in a thread and return its result, so that the caller's loop continues meanwhile.

    ```python
    loss = await asyncoll.offload(train_step, model, batch)  # blocks for 100 ms, but not the loop
    ```

    Use it for functions that block or compute. `fn` is a plain function. It runs in a copy of the caller's context. Any
    one rank may call it: no other rank takes part. `threads` is the executor to use, by default that of the loop.

    An exception of `fn` is raised here, StopIteration as RuntimeError. Cancelling the wait does not stop `fn`, which
    runs to its end in its thread. In a simulated world `fn` runs at once on the loop, because virtual time has no
    threads.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualTimeLoop):
        return fn(*args)
    return await loop.run_in_executor(threads, partial(contextvars.copy_context().run, _run, fn, *args))


def _run(fn: Callable[..., T], *args: Any) -> T:
    try:
        return fn(*args)
    # A future cannot hold it: the waiter would never wake.
    except StopIteration as error:
        raise RuntimeError(f"{fn!r} raised StopIteration") from error
