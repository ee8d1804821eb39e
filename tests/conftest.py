"""What every test must leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import uvloop

from asyncoll import testing
from asyncoll.errors import AsyncollError

# What is opened once in a process, by importing torch or by the first loop of libuv, is charged to no test.
uvloop.new_event_loop().close()

SIZES = [*range(1, 10), 13, 17]
SPARED = (4, 6, 7, 9, 17)


@pytest.fixture(params=["messages", "memory"])
def simulated(request):
    """Ranks in virtual time that talk by messages, and such that share memory."""
    return partial(testing.simulate, shared_memory=request.param == "memory")


@pytest.fixture(params=["inproc", "shm", "memory"])
def run(request):
    """Ranks that talk by messages, such that share real memory, and its twin, where they come between each other."""
    if request.param != "memory":
        return partial(testing.run_ranks, transport=request.param)
    weather = testing.Network(jitter_s=1e-3)
    return lambda size, main: testing.simulate(size, main, weather, shared_memory=True).results


@pytest.fixture(scope="module")
def one_thread():
    """The models of trainers are tiny, and threads that wait for each other crawl where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Keeper:
    """Keeps what it is told of, for tests to wait for."""

    def __init__(self):
        self.messages = []
        self.changed = asyncio.Event()

    def keep(self, kept, what):
        kept.append(what)
        self.changed.set()

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def take(self, count=1):
        """So many messages, which are not held here any more."""
        await self.until(lambda: len(self.messages) >= count)
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


def failures(size, act, run, survivors=0):
    """What `act(comm)` raised at each rank, in a world that `run(size, main)` makes; none leaves before all know."""
    raised = {}
    begin, end = asyncio.Barrier(size), asyncio.Barrier(survivors or size)

    async def main(comm):
        await begin.wait()
        try:
            await act(comm)
        except AsyncollError as error:
            raised[comm.rank] = error
        await end.wait()

    with contextlib.suppress(AsyncollError):  # whether a failed communicator can be left is another test
        run(size, main)
    return raised


def pytest_collection_modifyitems(items):
    """Every size runs in the twin of real memory; real memory, which takes longer, leaves out some."""
    items[:] = [item for item in items if not _is_spared(item)]


def _is_spared(item):
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    return chosen.get("run") == "shm" and chosen.get("size") in SPARED


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            found |= set(task.read_text().split())
    return found


def _state() -> dict[str, set]:
    return {
        "descriptors": _descriptors(),
        "threads": {thread.name for thread in threading.enumerate()},
        "children": _children(),
        # Those semaphores are Python's, of process pools of this or any other program, and it removes them itself.
        "/dev/shm": {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")},
        "tasks": {repr(task) for task in asyncio.tasks._all_tasks if not task.done()},
    }


def _left(before: dict[str, set]) -> dict[str, set]:
    after = _state()
    return {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No descriptor, thread, process, shared memory or pending task outlives a test."""
    before = _state()
    yield
    if _left(before):
        gc.collect()  # what a cycle still holds is garbage, not a leak
    assert not _left(before), "the test leaked"
