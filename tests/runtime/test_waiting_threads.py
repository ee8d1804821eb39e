"""Threads that wait for the calls that they make carry them out, also calls that would block an event loop for long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from asyncoll.algorithms.memory_backend import MemoryBackend
from asyncoll.runtime.handles import HandleRunner
from asyncoll.runtime.progress import ignore


class Polled:
    """Work that is over after a number of polls, or that the runtime's loop finishes."""

    is_atomic = True

    def __init__(self, polls: int, most: int) -> None:
        """It needs `polls` polls, of which the first `most` find that it goes on."""
        self.is_over = False
        self.polled = 0
        self.finished = False
        self._polls, self._most = polls, most

    def begin(self) -> None:
        pass

    def look(self) -> bool:
        return self.is_over

    def poll(self) -> bool:
        self.polled += 1
        self.is_over = self.polled == self._polls
        return self.polled <= self._most

    async def finish(self) -> str:
        self.finished = True
        return "by the runtime"

    def result(self) -> str:
        return "by the caller"


@pytest.fixture
def runner():
    runner = HandleRunner()
    yield runner
    runner.stop()


def test_a_thread_that_waits_polls_any_work(runner):
    runner.waiting.now = True
    work = Polled(polls=3, most=3)
    assert runner.drive(work).wait() == "by the caller"
    assert (work.polled, work.finished) == (3, False)


def test_the_runtime_finishes_what_has_to_wait_for_longer(runner):
    runner.waiting.now = True
    work = Polled(polls=3, most=1)
    assert runner.drive(work).wait() == "by the runtime"
    assert (work.polled, work.finished) == (2, True)


def test_a_thread_that_does_not_wait_polls_nothing(runner):
    work = Polled(polls=1, most=1)
    assert runner.drive(work).wait() == "by the runtime"
    assert work.polled == 0


@pytest.mark.parametrize("is_waiting", [False, True])
def test_only_a_thread_that_waits_carries_out_long_calls(runner, is_waiting):
    runner.waiting.now = is_waiting
    work = Polled(polls=1, most=1)
    sizes = SimpleNamespace(sizes=SimpleNamespace(long=64))
    backend = SimpleNamespace(_work=lambda body, what: work, _area=sizes, _member=SimpleNamespace(runner=runner))
    MemoryBackend.start(backend, work, str, 65, ignore).wait()
    assert work.finished is not is_waiting


def test_a_wait_that_is_too_short_tells_a_rounded_time(runner):
    handle = runner.handle(asyncio.sleep(3600))
    for limit_s, told in ((0.0000916, "0"), (0.00999916, "0.01")):
        with pytest.raises(TimeoutError, match=f"is not over after {told} s; it goes on"):
            handle.wait(limit_s)
