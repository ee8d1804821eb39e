"""Fixtures of worlds, helpers for many cases in one item, and the check that no test leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import uvloop
from hypothesis import HealthCheck, settings

from asyncoll import testing
from asyncoll.errors import AsyncollError
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.transport.messages import service_protocol

# On a busy machine a deadline for each example makes tests flaky, and so does a different draw in each run. So there is
# no deadline, every run draws the same examples, and no database of failures is needed.
settings.register_profile(
    "asyncoll", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("asyncoll")

# On a busy machine a process or a ZeroMQ thread may get no processor time for half a second. It must not count as
# frozen. Launched processes inherit the environment; transports that a test makes itself are given the limit. Tests of
# frozen ranks set a limit of their own.
FREEZE_S = 20.0
os.environ["ASYNCOLL_FREEZE_S"] = str(FREEZE_S)
service_protocol.FREEZE_S = FREEZE_S  # a service outside of a world reads no environment

# `nohup`, background jobs of a shell and some CI systems ignore SIGINT, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that hangs ends this process after a time limit (`faulthandler_timeout`). The reaper kills what the process has
# started.
os.environ["TEST_PROCESS"] = str(os.getpid())
subprocess.run(
    [sys.executable, "-IS", Path(__file__).parent / "scripts" / "reaper.py", str(os.getpid())],
    env={},
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
    check=True,
)

# The first loop of libuv opens descriptors that stay open. They are opened here, so that no test is charged for them.
uvloop.new_event_loop().close()

LIGHT = {"ASYNCOLL_PRELOAD": "numpy,asyncoll"}  # for launched ranks without torch, whose import takes two seconds
# The first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
TRAINING = {"ASYNCOLL_PRELOAD": "numpy,torch,torch._dynamo,asyncoll"}
# For forked ranks in tests of how they end. Others end without the end of torch: see `tests/scripts/template.py`.
WHOLE_END = {"WHOLE_END": "1"}
DEBUG = {"PYTHONASYNCIODEBUG": "1"}  # makes loops check that calls from other threads are safe
PATIENCE_S = 300  # timeout of processes: a safety net, far beyond the need of the slowest machine
SIZES = [*range(1, 10), 13, 17]  # numbers of ranks: bugs hide behind powers of two
SPARED = (4, 6, 7, 9, 17)  # sizes that real shared memory leaves out, because it takes longer than its simulation


@contextlib.contextmanager
def case(**values):
    """Names the values in the report of a failure inside the block. The block is one case of a test with many."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(f'{name}={value!r}' for name, value in values.items())}")
        raise


def looped(names, values):
    """As `pytest.mark.parametrize`, but one item runs all values one after another; the report names the failing one.

    The leak check and the fixtures cost more than a short test. A fixture has one value for all cases of an item;
    only `monkeypatch` is a new one, undone, for each.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)

    def decorate(test):
        @functools.wraps(test)
        def run_all(**arguments):
            for value in values:
                chosen = dict(zip(names, value if len(names) > 1 else [value], strict=True))
                with case(**chosen), pytest.MonkeyPatch.context() as patch:
                    own = {"monkeypatch": patch} if "monkeypatch" in arguments else {}
                    test(**{**arguments, **chosen, **own})

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in names]
        assert len(left) == len(signature.parameters) - len(names), f"{names} are not all parameters of {test}"
        run_all.__signature__ = signature.replace(parameters=left)
        return run_all

    return decorate


@pytest.fixture(params=["messages", "memory"])
def simulated(request):
    """`simulate` for ranks that exchange messages, and for ranks that share memory."""
    return partial(testing.simulate, shared_memory=request.param == "memory")


@pytest.fixture(params=["inproc", "shm", "memory"])
def run(request):
    """Runs ranks that exchange messages, ranks that share real memory, and ranks that share simulated memory.

    In simulated memory the work of different ranks interleaves at random.
    """
    if request.param != "memory":
        return partial(testing.run_ranks, transport=request.param)
    weather = testing.Network(jitter_s=1e-3)
    return lambda size, main: testing.simulate(size, main, weather, shared_memory=True).results


@pytest.fixture(scope="module")
def one_thread():
    """Limits torch to one thread: the models are tiny, and threads that spin for each other are slow on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Keeper:
    """Records messages and other events, and lets tests wait for them."""

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
        """Wait for `count` messages, then remove and return the first `count`."""
        await self.until(lambda: len(self.messages) >= count)
        taken, self.messages = self.messages[:count], self.messages[count:]
        return taken


class ForkedRank:
    """A rank that the template of `tests/scripts/template.py` has forked. It has no launcher."""

    def __init__(self, template, command, env, folder):
        self._template = template
        self.world = [self]  # all ranks of it
        out, self._err = folder / "out", folder / "err"
        os.mkfifo(out)
        self._err.touch()
        # The template opens it to write before it answers: neither waits for the other.
        self.stdout = os.fdopen(os.open(out, os.O_RDONLY | os.O_NONBLOCK))
        order = {"command": [*map(str, command)], "env": env, "out": str(out), "err": str(self._err)}
        self.pid = self._ask(order)
        os.set_blocking(self.stdout.fileno(), True)
        self.returncode = None

    def _ask(self, order):
        print(json.dumps(order), file=self._template.stdin, flush=True)
        return int(self._template.stdout.readline())

    def end(self, patience_s=PATIENCE_S):
        """Wait for the end of the rank: its exit code, its output and its errors.

        Fails after `patience_s`, with what all ranks of its world have printed.
        """
        is_late = threading.Event()

        def give_up():
            is_late.set()
            self._kill()

        timeout = threading.Timer(patience_s, give_up)
        timeout.start()
        out = self.stdout.read()
        self.returncode = self._ask(self.pid)
        timeout.cancel()
        timeout.join()
        if is_late.is_set():
            errors = "\n".join(f"rank {rank}: {each.wrote()}" for rank, each in enumerate(self.world))
            pytest.fail(
                f"process {self.pid} has not ended in {patience_s} s; it has printed {out!r}; errors:\n{errors}"
            )
        return self.returncode, out, self._err.read_text()

    def wrote(self):
        """Its errors so far."""
        return self._err.read_text()

    def kill(self):
        if self.returncode is None:
            self._kill()
            self.end()
        self.stdout.close()

    def _kill(self):
        """Kill its children, too: they hold its output, which `end` reads to the end."""
        for process in [*descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="session")
def template():
    """A process that has imported numpy, torch and asyncoll, and forks ranks and other programs."""
    command = [sys.executable, "-W", "error", Path(__file__).parent / "scripts" / "template.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | TRAINING
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command)], env=environment, **pipes) as process:
        yield process
        process.stdin.close()  # tells it to end


@pytest.fixture
def forked_world(template, tmp_path):
    """Starts `size` ranks that find each other by environment variables only: `forked_world(env, size, program, ...)`.

    Each is a process of its own. All are killed in the end.
    """
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


def failures(size, act, run, survivors=0):
    """The errors of `act(comm)` by rank, in a world of `run(size, main)`. No rank leaves before all are done."""
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
    """Leave out the SPARED sizes in real shared memory. Simulated memory runs every size."""
    items[:] = [item for item in items if not _is_spared(item)]


def pytest_collection_finish():
    """Exempt all modules and items from later collections, which follow many tests and would take 0.2 s each."""
    _collect_and_exempt()


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


def children(process: int | str = "self") -> set[str]:
    """The numbers of the processes that `process` has started and not waited for."""
    found = set()
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # that thread has ended
            found |= set(task.read_text().split())
    return found


def descendants(process: int) -> list[int]:
    """The children of `process`, and theirs."""
    found = [int(child) for child in children(process)]
    return found + [each for child in found for each in descendants(child)]


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
