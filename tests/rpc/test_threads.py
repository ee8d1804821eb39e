"""The threads of plain functions."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

from asyncoll.rpc import function_threads as rpc_threads
from asyncoll.rpc.function_threads import SETTLED, Threads
from tests.support.processes import PATIENCE_S


class AlarmError(Exception):
    """Raised by a signal handler."""


def awaited(threads: Threads, work: Any) -> asyncio.Future[Any]:
    """Run `work` in a thread; the future has its result, or its exception as a result."""
    outcome = asyncio.get_running_loop().create_future()
    threads.submit(work, lambda result, error: outcome.set_result(error or result))
    return outcome


def run(main: Any) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main()

    asyncio.run(in_time())


def test_results_and_exceptions_come_back_on_the_loop():
    async def main():
        threads = Threads(4, "test")
        try:
            assert await awaited(threads, lambda: 3) == 3
            assert isinstance(await awaited(threads, lambda: 1 / 0), ZeroDivisionError)
            assert isinstance(await awaited(threads, lambda: sys.exit(1)), SystemExit)
        finally:
            threads.close()

    run(main)


def test_an_idle_thread_is_used_again():
    async def main():
        threads = Threads(4, "test")
        try:
            used = {await awaited(threads, threading.get_ident) for _ in range(10)}
            assert len(used) == 1
            assert threading.get_ident() not in used
        finally:
            threads.close()

    run(main)


def test_functions_that_wait_for_each_other_have_a_thread_each():
    async def main():
        threads, together = Threads(9, "test"), threading.Barrier(9, timeout=PATIENCE_S)
        try:
            assert sorted(await asyncio.gather(*(awaited(threads, together.wait) for _ in range(9)))) == list(range(9))
        finally:
            threads.close()

    run(main)


def test_further_functions_wait_for_a_thread():
    async def main():
        threads, go, ran = Threads(2, "test"), threading.Event(), []

        def work(number):
            assert go.wait(PATIENCE_S)
            ran.append(number)
            return threading.get_ident()

        try:
            waiting = [awaited(threads, lambda number=number: work(number)) for number in range(7)]
            go.set()
            assert len(set(await asyncio.gather(*waiting))) == 2
            assert sorted(ran) == list(range(7))
        finally:
            threads.close()

    run(main)


def test_a_settled_outcome_does_not_wake_the_loop_and_frees_its_thread():
    async def main():
        threads, done = Threads(1, "test"), []

        def settled():
            return SETTLED

        try:
            for _ in range(3):
                threads.submit(settled, lambda result, error: done.append(result))
            assert await awaited(threads, lambda: 4) == 4  # the queue is served although nothing was urgent
            assert done == [SETTLED] * 3
        finally:
            threads.close()

    run(main)


def test_close_drops_what_has_not_begun_and_ends_the_threads():
    async def main():
        threads, begun, go, outcomes = Threads(1, "test"), threading.Event(), threading.Event(), []

        def work():
            begun.set()
            assert go.wait(PATIENCE_S)
            outcomes.append(threading.current_thread())

        for _ in range(2):
            threads.submit(work, lambda result, error: outcomes.append(error))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        threads.close()
        assert not outcomes  # it has not waited for the function
        go.set()
        for thread in threads._all:
            await asyncio.to_thread(thread.join, PATIENCE_S)
            assert not thread.is_alive()
        await asyncio.sleep(0)
        assert outcomes == [threads._all[0]]

    run(main)


def test_an_idle_thread_keeps_nothing():
    class Value:
        pass

    async def main():
        threads, value = Threads(1, "test"), Value()
        kept = weakref.ref(value)
        try:
            threads.submit(lambda value=value: value, lambda result, error: None)
            del value
            await awaited(threads, lambda: None)
            gc.collect()
            assert kept() is None
        finally:
            threads.close()

    run(main)


LEFT = """
import asyncio, threading
from asyncoll.rpc.function_threads import Threads

def work():
    threading.main_thread().join()
    print(sum(range(1_000_000)))

async def main():
    threads = Threads(3, "test")
    threads.submit(lambda: None, lambda result, error: None)
    threads.submit(work, lambda result, error: None)
    if CLOSE:
        threads.close()

asyncio.run(main())
"""


def test_a_program_ends_after_its_functions():
    """Whether `close` was called or not."""
    for close in (False, True):
        program = [sys.executable, "-c", f"CLOSE = {close}{LEFT}"]
        ended = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S)
        assert ended.stdout == "499999500000\n"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_close_gives_the_descriptors_back():
    async def main():
        before = descriptors()
        threads = Threads(2, "test")
        assert await awaited(threads, lambda: 1) == 1
        assert descriptors() > before
        threads.close()
        assert descriptors() == before

    run(main)


def test_all_threads_are_used_and_used_again():
    """Whichever way a thread sleeps: each of several rounds needs all of them at the same time."""

    async def main():
        size = 5
        threads, together = Threads(size, "test"), threading.Barrier(size, timeout=PATIENCE_S)

        def meet():
            together.wait()
            return threading.get_ident()

        try:
            rounds = [set(await asyncio.gather(*(awaited(threads, meet) for _ in range(size)))) for _ in range(20)]
            assert all(len(used) == size for used in rounds)
            assert set.union(*rounds) == rounds[0]
        finally:
            threads.close()

    run(main)


def test_close_keeps_the_functions_that_have_a_thread():
    """Two of three have one; the last may find a thread, too, if another function has ended by then."""

    async def main():
        threads, ran = Threads(2, "test"), []
        for number in range(3):
            threads.submit(lambda number=number: ran.append(number), lambda result, error: None)
        threads.close()
        for thread in threads._all:
            await asyncio.to_thread(thread.join, PATIENCE_S)
        assert {0, 1} <= set(ran)

    run(main)


def test_a_forked_child_ends_without_the_threads_of_its_parent():
    async def main():
        threads = Threads(2, "test")
        assert await asyncio.gather(*(awaited(threads, lambda: 1) for _ in range(2))) == [1, 1]
        child = os.fork()
        if not child:
            threads.finish(join=True)
            os._exit(len(threads._all))
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert await awaited(threads, lambda: 2) == 2
        threads.close()

    run(main)


@pytest.mark.parametrize("kind", [rpc_threads._OnLock, rpc_threads._OnPipe])
def test_a_wake_up_that_is_interrupted_is_not_lost(kind, monkeypatch):
    """A signal handler raises before a sleeper is woken, or after it."""
    really_wake, moments = kind.wake, []

    def wake(sleeper):
        moment = moments.pop() if moments else None
        if moment == "before":
            raise AlarmError
        is_woken = really_wake(sleeper)
        if moment == "after":
            raise AlarmError
        return is_woken

    async def main():
        monkeypatch.setattr(kind, "wake", wake)
        threads = Threads(2, "test")
        if kind is rpc_threads._OnLock:
            threads._may_read.clear()  # no thread reads the pipe
        assert await awaited(threads, lambda: 1) == 1
        for number in range(20):
            while not threads._sleepers:
                await asyncio.sleep(0)
            moments.append(("before", "after")[number % 2])
            ended = asyncio.Event()
            with pytest.raises(AlarmError):
                threads.submit(lambda: 1, lambda *_, ended=ended: ended.set())
            assert await awaited(threads, lambda: 2) == 2
            await ended.wait()
        threads.close()

    run(main)


def test_without_descriptors_threads_sleep_on_locks(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(os, "pipe", refuse)
            threads = Threads(2, "test")
        for _ in range(20):
            assert await asyncio.gather(*(awaited(threads, lambda: 1) for _ in range(5))) == [1] * 5
        threads.close()

    run(main)


def test_a_function_without_a_thread_does_not_run(monkeypatch):
    ran = []

    def refuse(_):
        raise RuntimeError("can't start new thread")

    async def main():
        threads = Threads(2, "test")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                threads.submit(lambda: ran.append(1), lambda *_: None)
        assert await awaited(threads, lambda: ran.append(2)) is None
        with monkeypatch.context() as patch:  # the one thread carries out both
            patch.setattr(threading.Thread, "start", refuse)
            await asyncio.gather(*(awaited(threads, lambda: ran.append(3)) for _ in range(2)))
        threads.close()

    run(main)
    assert ran == [2, 3, 3]
