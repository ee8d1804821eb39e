"""Fixtures of worlds, and the check that no test leaves anything behind.

A test of a room that needs neither torch nor a world takes a fraction of a second, so nothing here imports them before
a fixture needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import uvloop

from asyncoll.transport.messages import service_protocol
from tests.support.processes import FORKED, FREEZE_S, ForkedRank, children

SUPPORT = Path(__file__).parent / "support"
SPARED = (4, 6, 7, 9, 17)  # sizes that real shared memory leaves out, because it takes longer than its simulation

# Launched processes inherit the environment; transports that a test makes itself are given the limit. Tests of frozen
# ranks set a limit of their own.
os.environ["ASYNCOLL_FREEZE_S"] = str(FREEZE_S)
service_protocol.FREEZE_S = FREEZE_S  # a service outside of a world reads no environment

# Threads of torch spin while they wait for each other: with several of them, tests of tensors took twice the processor
# time. Processes of tests inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

# `nohup`, background jobs of a shell and some CI systems ignore SIGINT, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that hangs ends this process after a time limit (`faulthandler_timeout`). The reaper kills what the process has
# started.
os.environ["TEST_PROCESS"] = str(os.getpid())
subprocess.run(
    [sys.executable, "-IS", SUPPORT / "reaper.py", str(os.getpid())],
    env={},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
    check=True,
)

# The first loop of libuv opens descriptors that stay open. They are opened here, so that no test is charged for them.
uvloop.new_event_loop().close()


@pytest.fixture(params=["messages", "memory"])
def simulated(request):
    """`simulate` for ranks that exchange messages, and for ranks that share memory."""
    from asyncoll import testing

    return partial(testing.simulate, shared_memory=request.param == "memory")


@pytest.fixture(params=["inproc", "shm", "memory"])
def run(request):
    """Runs ranks that exchange messages, ranks that share real memory, and ranks that share simulated memory.

    In simulated memory the work of different ranks interleaves at random.
    """
    from asyncoll import testing

    if request.param != "memory":
        return partial(testing.run_ranks, transport=request.param)
    weather = testing.Network(jitter_s=1e-3)
    return lambda size, main: testing.simulate(size, main, weather, shared_memory=True).results


@pytest.fixture(scope="session")
def template():
    """A process that has imported numpy, torch and asyncoll, and forks ranks and other programs."""
    command = [sys.executable, "-W", "error", SUPPORT / "template.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command)], env=os.environ | FORKED, **pipes) as process:
        yield process
        process.stdin.close()  # tells it to end


@pytest.fixture
def forked_world(template, tmp_path):
    """Starts `size` ranks that find each other by environment variables only: `forked_world(env, size, program, ...)`.

    Each is a process of its own. All are killed in the end.
    """
    from asyncoll.launch.rank_environment import reserve_port

    with contextlib.ExitStack() as stack:

        def start(env, size, *command):
            port = stack.enter_context(reserve_port()).getsockname()[1]
            place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks = []
            for rank in range(size):
                folder = tmp_path / f"rank {rank} at port {port}"
                folder.mkdir()
                ranks.append(ForkedRank(template, command, env | place | {"RANK": str(rank)}, folder))
                stack.callback(ranks[-1].kill)
                ranks[-1].world = ranks
            return ranks

        yield start


@pytest.fixture
def forked(template, tmp_path):
    """Runs a program that needs torch, without the import: `forked(env, program, ...)`.

    Returns its exit code, its output and its errors.
    """

    def run(env, *command):
        process = ForkedRank(template, command, env, Path(tempfile.mkdtemp(dir=tmp_path)))
        try:
            return process.end()
        finally:
            process.kill()

    return run


def pytest_unconfigure(config):
    """Limit the end of the interpreter, which waits for all threads, as pytest limits each test."""
    limit_s = float(config.getini("faulthandler_timeout"))
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)


def pytest_collection_modifyitems(items):
    """Leave out the SPARED sizes in real shared memory. Simulated memory runs every size."""
    items[:] = [item for item in items if not _is_spared(item)]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import and find all tests without garbage collections, which would take a fourth of the time.

    Later collections, which follow many tests, leave out all modules and items: they would take 0.2 s each.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _collect_and_exempt()
        gc.enable()


def _collect_and_exempt() -> None:
    """Remove garbage; later collections skip the objects that are alive now."""
    gc.collect()
    gc.freeze()


def _is_spared(item):
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    return chosen.get("run") == "shm" and chosen.get("size") in SPARED


# The tasks of all loops: those of one set until Python 3.11, of two since 3.12.
_TASKS = [vars(asyncio.tasks).get(name, ()) for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks")]


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def _state() -> dict[str, set]:
    return {
        "descriptors": _descriptors(),
        "threads": {thread.name for thread in threading.enumerate()},
        "children": children(),
        # Other programs of the machine use /dev/shm, too, so only names of this library count. Memory without a name
        # is found among the descriptors.
        "/dev/shm": {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")},
        "tasks": {repr(task) for kind in _TASKS for task in kind if not task.done()},
    }


def _left(before: dict[str, set]) -> dict[str, set]:
    after = _state()
    return {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}


def _await_threads(but: set[str]) -> None:
    """A thread that has given its result holds what it has used until it ends, a moment later."""
    for thread in threading.enumerate():
        if thread.daemon and thread.name not in but:
            thread.join(1)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No descriptor, thread, process, shared memory or pending task outlives a test."""
    before = _state()
    yield
    if _left(before):  # objects in a reference cycle are garbage, not a leak
        _await_threads(before["threads"])
        _collect_and_exempt()
    if _left(before):  # something that an earlier test kept alive may be garbage now
        gc.unfreeze()
        _collect_and_exempt()

    assert not _left(before), "the test leaked"
