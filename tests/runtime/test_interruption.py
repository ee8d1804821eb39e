"""Exceptions that signal handlers raise in the main thread, between any two bytecodes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import uvloop

from asyncoll import AVG, SUM, forks
from asyncoll.algorithms.rounds.operations import Receipt
from asyncoll.errors import PeerLostError, UsageError
from asyncoll.runtime import progress
from asyncoll.runtime.interruption import handlers_may_raise, may_interrupt
from asyncoll.testing import run_ranks
from asyncoll.transport.memory import mutex
from asyncoll.transport.memory.arena import local_world
from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S


class AlarmError(Exception):
    pass


@pytest.fixture
def handler() -> Iterator[None]:
    """A signal handler of the program's own."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before)


# -- among processes -------------------------------------------------------------------------------


def launched(transport: str, script: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-m", "asyncoll", "launch", "-n", 3, "--transport", transport, SCRIPTS / script]
    done = subprocess.run(
        [*map(str, command), *map(str, arguments)],
        env=os.environ | LIGHT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line.partition(": ")[2] for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(("seed", "elements"), [(1, 8), (2, 8), (3, 200_000)])
def test_rounds_continue_while_a_signal_handler_raises(transport, seed, elements):
    told = launched(transport, "runtime/signals_during_calls.py", seed, elements)
    assert [line.split()[0] for line in told] == ["0", "1", "2"]
    assert all(line.endswith("[3.0, 3.0, 3.0]") for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_an_exception_at_each_line_of_a_call_leaves_nothing_half_done(transport):
    assert launched(transport, "runtime/exceptions_at_each_line.py") == ["held"] * 3


# -- the lock --------------------------------------------------------------------------------------


def refused_by(control_block) -> str:
    with pytest.raises(PeerLostError) as refusal, control_block:
        pytest.fail("the lock was given")
    assert refusal.value.rank == 0
    return refusal.value.cause


def test_an_exception_in_a_critical_section_marks_the_control_block_for_all_ranks():
    with local_world(2) as (mine, theirs):
        with pytest.raises(AlarmError), mine.control_block(1, 4):
            raise AlarmError
        assert "an exception interrupted it" in refused_by(theirs.control_block(1, 4))
        assert "an exception interrupted it" in refused_by(mine.control_block(1, 4))


def test_an_exception_just_after_the_acquisition_releases_the_lock(monkeypatch):
    def take_and_raise(address):
        assert take(address) == 0
        raise AlarmError

    take = mutex._try_lock
    with local_world(2, [None]) as (mine, theirs):
        control_blocks = mine.control_block(1, 4), theirs.control_block(1, 4)
        with monkeypatch.context() as patch:
            patch.setattr(mutex, "_try_lock", take_and_raise)
            with pytest.raises(AlarmError), control_blocks[0]:
                pytest.fail("the exception came before")
        assert "an exception interrupted it" in refused_by(control_blocks[1])


def test_the_next_call_releases_a_lock_that_an_exception_kept():
    """The exception came before the first step of the code that would release the lock."""
    with local_world(2) as (mine, theirs):
        control_blocks = mine.control_block(1, 4), theirs.control_block(1, 4)
        control_blocks[0].__enter__()
        assert "an exception interrupted it" in refused_by(control_blocks[0])
        assert "an exception interrupted it" in refused_by(control_blocks[1])


def test_an_error_of_the_library_in_a_critical_section_marks_nothing():
    with local_world(2) as (mine, theirs):
        with pytest.raises(UsageError), mine.control_block(1, 4):
            raise UsageError("as intended")
        with theirs.control_block(1, 4) as control_block:
            control_block.cells[0] = 1


# -- wake-ups and forks ----------------------------------------------------------------------------


def test_a_cancelled_caller_ends_although_its_wake_up_is_lost(monkeypatch):
    """A signal handler raises in the callback, and the runtime stops before it repeats the callback."""

    def lost(*_):
        raise AlarmError

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(progress._Crossing, "_settle", lost)
        is_done = threading.Event()

        async def work() -> None:
            is_done.set()

        thread = progress.ProgressThread(asyncio.get_running_loop())
        call = asyncio.ensure_future(thread.start(work()))
        await asyncio.to_thread(is_done.wait, PATIENCE_S)
        thread.stop()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class Strike:
    """A trace function that raises AlarmError at the given line of the hooks of `forks` in this thread."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, _):
        if event == "line" and frame.f_code in (forks._prepare.__code__, forks._await_child.__code__):
            self.left -= 1
            if self.left == 0:
                raise AlarmError
        return self


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("hook", [forks._before, forks._after_in_parent])
def test_an_exception_in_a_fork_hook_leaves_no_lock_and_no_pipe(hook):
    class Owner:
        def abandon(self, parent):
            pass

    def strike_each_line():
        line, is_struck = 0, True
        while is_struck:
            line += 1
            strike = Strike(line)
            for step in (forks._before, forks._after_in_parent):
                sys.settrace(strike if step is hook else outer)
                step()
                sys.settrace(outer)
            is_struck = strike.left <= 0
            with ThreadPoolExecutor(1) as pool:  # another thread may fork now
                assert pool.submit(forks._forking.acquire, timeout=0).result()
                pool.submit(forks._forking.release).result()
        return line

    owner, before, outer = Owner(), len(os.listdir("/proc/self/fd")), sys.gettrace()
    forks.register(owner)
    # In a thread of its own: CPython 3.11 may take an error that a trace function raised for one that is still handled.
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(strike_each_line).result()
    forks.unregister(owner)
    forks._before()
    forks._after_in_parent()
    assert line > 3
    assert len(os.listdir("/proc/self/fd")) == before


# -- threads and handlers --------------------------------------------------------------------------


class StrikeEvent:
    """A trace function that raises AlarmError as a function of `progress` begins, or goes on after an `await`.

    There Python runs signal handlers; not between any two lines.
    """

    def __init__(self, event: int) -> None:
        self.left = event

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename == progress.__file__ and event == "call":
            self.left -= 1
            if self.left == 0:
                raise AlarmError
        return self


async def interrupt(thread: progress.ProgressThread, event: int) -> bool:
    """Await work that never ends, and raise AlarmError there at this event. Returns whether there was such an event.

    Afterwards the work has stopped; or the `await` has not begun, and may be repeated.
    """
    begun, uses_memory, strike = threading.Event(), threading.Event(), StrikeEvent(event)

    async def work() -> None:
        uses_memory.set()
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            uses_memory.clear()

    async def wait(call) -> None:
        sys.settrace(strike)
        await call

    call = thread.start(work())
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    task = asyncio.ensure_future(wait(call))
    await asyncio.wait([task], timeout=0)
    sys.settrace(None)
    may_repeat = type(call) is progress._BegunCoroutine
    if may_repeat:
        assert isinstance(task.exception(), AlarmError)
        task = asyncio.ensure_future(wait(call))
        await asyncio.wait([task], timeout=0)
    if may_repeat or strike.left > 0:
        task.cancel()
    await asyncio.wait([task])
    assert not uses_memory.is_set()
    return strike.left <= 0


def test_a_call_that_is_interrupted_as_its_await_begins_stops_using_memory():
    async def main() -> None:
        thread = progress.ProgressThread(asyncio.get_running_loop())
        event = 1
        while await interrupt(thread, event):
            event += 1
        assert event > 3
        thread.stop()

    def run() -> None:  # in a thread of its own, as above
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def test_handlers_of_loops_and_of_python_do_not_raise():
    async def main() -> bool:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
        try:
            return may_interrupt()
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert not runner.run(main())


def test_only_the_main_thread_is_interrupted(handler):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(may_interrupt()))
    thread.start()
    thread.join()
    assert (may_interrupt(), handlers_may_raise(), answers) == (True, True, [False])


# -- results without a receiver --------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_next_call_reports_the_round_of_a_call_that_was_not_awaited(transport, size):
    async def main(comm):
        comm.solo_allreduce(np.ones(3), sync_every=1, history=4)
        reduction = await comm.solo_allreduce(np.ones(3), sync_every=1, history=4)
        return reduction.round, len(reduction.missed), reduction.skipped

    told = (2, 1, 0) if size == 1 else (1, 0, 0)  # a rank alone has opened a round with its second call
    with pytest.warns(RuntimeWarning, match="'a call of asyncoll' was never awaited"):
        assert run_ranks(size, main, transport=transport) == [told] * size


def test_a_result_that_is_returned_before_its_delivery_is_returned_once():
    taken = []

    class Operation:
        def take_back(self, delivery):
            taken.append(delivery)

    receipt = Receipt()
    receipt.take_back()
    receipt.sign(Operation(), "delivery")
    receipt.take_back()
    assert taken == ["delivery"]


def test_a_call_whose_await_is_interrupted_before_its_first_step_is_discarded():
    class Struck:
        """A coroutine; a signal handler raises as `await` begins."""

        def __await__(self):
            raise AlarmError

    async def main():
        discarded = []
        call = progress._BegunCoroutine(Struck(), lambda: discarded.append(True))
        with pytest.raises(AlarmError):
            await call
        del call
        return discarded

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == [True]


WAYS = ["dropped", "closed", "cancelled"]


def give_up(call, way):
    """Return a coroutine that ends `call`, which has begun, without its first step."""

    async def cancel():
        task = asyncio.ensure_future(call)
        task.cancel()
        await asyncio.wait([task])

    if way == "cancelled":
        return cancel()
    if way == "closed":
        call.close()
    return asyncio.sleep(0)


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_call_that_is_given_up_before_its_first_step_is_told_once_and_in_order(transport, size, way):
    async def main(comm):
        def call():
            return comm.solo_allreduce(np.ones(3), history=8)

        told = [0]
        for _ in range(3):
            lost, kept = call(), call()
            ended = asyncio.ensure_future(give_up(lost, way))
            del lost
            for reduction in (await kept, await call()):
                told += range(reduction.round - len(reduction.missed), reduction.round + 1)
            await ended
        return told

    for told in run_ranks(size, main, transport=transport):
        assert told == sorted(set(told))


@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize("op", [SUM, AVG])
@pytest.mark.parametrize("transport", ["inproc", "shm", "zmq"])
@pytest.mark.parametrize("history", [0, 4])
def test_the_call_after_one_whose_answer_was_lost_is_given_its_round_at_once(transport, history, op, count):
    """No rank comes to a further round: a call that waited for one would wait for ever."""

    async def main(comm):
        def call(x):
            return comm.quorum_allreduce(x, quorum=2, op=op, history=history)

        lost, x = call(np.full(count, 1.0 + comm.rank)), np.full(count, 7.0)
        await comm.barrier()  # of a round that is over
        await comm.barrier()
        lost.close()
        reduction = await call(x)
        await comm.barrier()
        return reduction.round, float(x[0])

    expected = {SUM: 3.0, AVG: 1.5}[op]
    assert run_ranks(2, main, transport=transport) == [(1, expected)] * 2
