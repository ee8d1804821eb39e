"""Shared memory between the ranks of a host: the contract, the lock, the memory of the host, and joining."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
import uvloop

from asyncoll import _core
from asyncoll.errors import ClosedError, DeadlineError, PeerLostError, ProtocolError, UsageError
from asyncoll.testing.contract import check_arena
from asyncoll.transport import joining
from asyncoll.transport.control_block import Wait
from asyncoll.transport.joining import Joining
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory import arena as arena_module
from asyncoll.transport.memory import fd_passing, inproc, mutex, pages
from asyncoll.transport.memory.arena import HostArena, local_world
from asyncoll.transport.memory.fd_passing import ArenaUnavailable
from asyncoll.transport.memory.mutex import LockPolicy, RobustMutex
from asyncoll.transport.memory.segment import HEAD_BYTES, make_segment
from asyncoll.transport.processes import is_ending
from asyncoll.transport.virtual_time import VirtualTimeLoop
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]
SCRIPT = SCRIPTS / "transport/memory/rank_with_an_arena_only.py"
MIB = 1 << 20
BOTH_LOOPS = pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])


@pytest.fixture
def two():
    with local_world(2) as arenas:
        yield arenas


# -- the contract ---------------------------------------------------------------------------------


@BOTH_LOOPS
def test_the_contract_between_processes(loop):
    check_arena(local_world, loop)


@BOTH_LOOPS
def test_the_contract_without_polling(loop, monkeypatch):
    monkeypatch.setattr(arena_module, "_POLLS", 0)
    monkeypatch.setattr(arena_module, "_POLLS_OVERSUBSCRIBED", 0)
    check_arena(local_world, loop)


def test_the_contract_without_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    check_arena(local_world)


@pytest.mark.parametrize("loop", [*LOOPS, VirtualTimeLoop], ids=["asyncio", "uvloop", "virtual"])
def test_the_contract_in_one_process(loop):
    check_arena(lambda size: contextlib.nullcontext(inproc.arenas(size)), loop)


def test_the_arena_of_one_process_has_no_view_of_memory_that_is_not_allocated():
    """Arenas of processes cannot notice it, so a fault must show here."""
    (arena,) = inproc.arenas(1)
    first, second = arena.allocate(64), arena.allocate(64)
    arena.view(first + 8, 56)[:] = 1
    arena.free(second)
    for address, nbytes in ((second, 64), (first, 65), (0, 1)):
        with pytest.raises(IndexError, match="not allocated"):
            arena.view(address, nbytes)
    with pytest.raises(KeyError):
        arena.free(second)


class Copying(inproc.InprocArena):
    """Its views are copies, so no rank sees its writes."""

    def view(self, address, nbytes):
        return super().view(address, nbytes).copy()


def test_the_contract_notices_a_broken_promise():
    def world(size):
        memory = inproc._InprocMemory(size)
        return contextlib.nullcontext([Copying(rank, memory, lambda: 0.0, tuple(range(size))) for rank in range(size)])

    with pytest.raises(AssertionError, match="all ranks read what one rank has written"):
        check_arena(world)


# -- the lock -------------------------------------------------------------------------------------


def make_lock(ranks=(5, 6)):
    memory = memoryview(bytearray(MUTEX_BYTES))
    RobustMutex.initialize(memory)
    return [RobustMutex(memory, local_rank, ranks) for local_rank in range(len(ranks))]


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def test_the_lock_excludes_and_waits():
    mine, other = make_lock()
    seen = []

    def take():
        other.acquire()
        seen.append("other")
        other.release()

    for _ in range(100):
        mine.acquire()
        thread = in_a_thread(take)
        assert seen == []
        mine.release()
        thread.join()
        assert seen.pop() == "other"


def test_a_thread_that_locks_twice_gets_an_error():
    lock, _ = make_lock()
    lock.acquire()
    with pytest.raises(PeerLostError, match="an exception interrupted it"):
        lock.acquire()


CORES = dict.fromkeys((None, _core.native))


@pytest.mark.parametrize("native", CORES, ids=lambda native: "core" if native else "python")
def test_a_lock_that_an_exception_has_lost_stays_lost_after_its_release(native):
    """A signal handler takes the lock that its thread has. The error of that ends the critical section in order."""
    with local_world(2, (native,)) as arenas:
        mine, other = (arena.control_block(1, 1) for arena in arenas)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="rank 0 is gone: an exception interrupted it"), mine, mine:
                pytest.fail("the lock is lost")
        with pytest.raises(PeerLostError, match="rank 0 is gone: an exception interrupted it"), other:
            pytest.fail("the lock is lost")


def test_the_lock_of_a_dead_owner_always_raises():
    mine, other = make_lock()
    in_a_thread(other.acquire).join()  # for a robust mutex, a thread that ends is an owner that dies
    for lock in (mine, other, mine, mine):
        with pytest.raises(
            PeerLostError, match="rank 6 is gone: it died while it was changing shared memory"
        ) as caught:
            lock.acquire()
        assert caught.value.rank == 6


HOLD_AND_STOP = """
import mmap, os, signal, sys
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory.mutex import RobustMutex
memory = mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE)
RobustMutex(memoryview(memory)[:MUTEX_BYTES], 1, (5, 6)).acquire()
os.kill(os.getpid(), signal.SIGSTOP)
os._exit(0)
"""


@pytest.mark.slow
def test_waiting_for_a_stopped_owner_raises():
    descriptor = os.memfd_create("lock")
    os.truncate(descriptor, mmap.PAGESIZE)
    view = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE))[:MUTEX_BYTES]
    RobustMutex.initialize(view)
    lock = RobustMutex(view, 0, (5, 6), LockPolicy(0.1))
    with subprocess.Popen([sys.executable, "-c", HOLD_AND_STOP, str(descriptor)], pass_fds=[descriptor]) as owner:
        os.close(descriptor)
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="rank 6 is gone: its process was stopped while") as caught:
                lock.acquire()
            assert caught.value.rank == 6
            assert caught.value.last_seen_s > 0
        owner.kill()


# A thread takes the lock and ends before it signs. The process lives on for as long as the kernel may take to end one.
DIE_UNSIGNED = """
import mmap, os, sys, threading, time
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory import mutex
memory = mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE)
lock = mutex.RobustMutex(memoryview(memory)[:MUTEX_BYTES], int(sys.argv[2]), ())
thread = threading.Thread(target=mutex._try_lock, args=(lock._mutex,))
thread.start()
thread.join()
print("dead", flush=True)
time.sleep(0.3)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 2), (4, 1), (5, 3)])
def test_a_death_between_taking_and_signing_is_never_blamed_on_a_rank_that_lives(size, victim):
    """Neither on the previous owner of the lock, nor on any other one, however long the dead process looks alive."""
    descriptor = os.memfd_create("lock")
    os.truncate(descriptor, mmap.PAGESIZE)
    view = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE))[:MUTEX_BYTES]
    RobustMutex.initialize(view)
    policy, ranks = LockPolicy(), range(10, 10 + size)
    locks = [RobustMutex(view, local_rank, ranks, policy) for local_rank in range(size)]
    previous = locks[(victim + 1) % size]
    previous.acquire()
    previous.release()
    with contextlib.ExitStack() as ends:
        command = [sys.executable, "-c", DIE_UNSIGNED, str(descriptor), str(victim)]
        dying = ends.enter_context(subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE))
        living = ends.enter_context(subprocess.Popen(["sleep", str(PATIENCE_S)]))
        ends.callback(living.kill)
        os.close(descriptor)
        pids = [dying.pid if rank == victim else living.pid for rank in range(size)]
        policy.processes = [np.array([pid]) for pid in pids]
        assert dying.stdout.readline() == b"dead\n"
        for _ in range(2):  # also for who finds it later
            with pytest.raises(PeerLostError, match="it died while it was changing shared memory") as caught:
                locks[0].acquire()
            assert caught.value.rank == 10 + victim


def test_a_signature_names_a_dead_owner_at_once_whatever_looks_alive():
    mine, other = make_lock()
    mine._policy.processes = [np.array([os.getpid()])] * 2
    in_a_thread(other.acquire).join()
    with pytest.raises(PeerLostError) as caught:
        mine.acquire()
    assert caught.value.rank == 6


def test_the_search_for_an_unsigned_owner_ends_where_another_loss_is_known():
    mine, other = make_lock()
    mine._policy.processes = [np.array([os.getpid()])] * 2
    in_a_thread(mutex._try_lock, other._mutex).join()
    mine._policy.report = lambda loss: PeerLostError(6, "its connection closed")
    timer = threading.Timer(0.05, lambda: setattr(mine._policy, "patience_s", 0.0))
    timer.start()
    with pytest.raises(PeerLostError, match="its connection closed"):
        mine.acquire()
    timer.join()


def test_a_rank_that_has_left_is_not_suspected(two):
    mine, other = two
    pids = mine.locks.processes
    assert [int(cell[0]) for cell in pids] == [os.getpid()] * 2
    other.close()
    assert [int(cell[0]) for cell in pids] == [os.getpid(), 0]


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_is_ending_once_it_cannot_go_on(ends):
    with subprocess.Popen(["sleep", str(PATIENCE_S)]) as process:
        if ends:
            process.send_signal(signal.SIGSTOP)  # a stopped process lives
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert not is_ending(process.pid)
        assert not is_ending(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(process.pid)
    assert is_ending(process.pid)


# -- memory ---------------------------------------------------------------------------------------


def held(arena):
    return os.fstat(arena._memory).st_blocks * 512


def test_freed_memory_returns_to_the_host(two):
    arena, _ = two
    before = held(arena)
    address = arena.allocate(64 * MIB + 1)
    assert held(arena) > before + 64 * MIB, "the pages exist before the first access"
    arena.free(address)
    assert held(arena) < before + 8 * MIB, "huge pages at the edges may remain"


def test_a_closed_arena_touches_no_other_file(two, tmp_path):
    """The numbers of its descriptors are those of files that the program has opened since."""
    arena, _ = two
    address = arena.allocate(8 * MIB)
    arena.close()
    path = tmp_path / "of the program"
    path.write_bytes(bytes(range(256)) * 8 * (MIB // 256))
    before = path.read_bytes()
    with contextlib.ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(path.open("r+b"))
        arena.free(address)
        with pytest.raises(ClosedError, match="has left the world"):
            arena.allocate(64 * MIB)
    assert path.read_bytes() == before


def test_a_freed_block_is_used_again(two):
    arena, _ = two
    address = arena.allocate(1000)
    arena.free(address)
    assert arena.allocate(900) == address


def test_a_segment_cannot_be_resized(two):
    for size in (0, 1 << 50):
        with pytest.raises(PermissionError):
            os.ftruncate(two[0]._memory, size)


def test_only_the_own_segment_is_located(two):
    mine, other = two
    address = other.allocate(100)
    assert mine.locate(mine.view(address, 100)) is None
    assert other.locate(other.view(address, 100)) == address


def test_views_outlive_the_arena():
    with local_world(1) as (arena,):
        view = arena.view(arena.allocate(100), 100)
        control_block = arena.control_block(1, 1)
    view[:] = 1
    with control_block:
        control_block.cells[0] = 1
    assert view.sum() == 100
    assert control_block.cells[0] == 1


def test_more_than_the_host_has_is_refused(two):
    with pytest.raises(UsageError, match=r"1,048,576\.0 MiB .* has .* MiB left; use smaller tensors.* --transport zmq"):
        two[0].allocate(1 << 40)


def test_more_than_is_left_is_refused(two, monkeypatch):
    monkeypatch.setattr(pages, "_left", lambda: (2 * MIB, "the control group /x"))
    before = held(two[0])
    with pytest.raises(UsageError, match=r"3\.0 MiB .*: the control group /x has 2\.0 MiB left"):
        two[0].allocate(3 * MIB)
    assert held(two[0]) == before
    two[0].allocate(2 * MIB)


def test_more_than_the_kernel_gives_is_refused(two, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = two[0].allocate(64)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UsageError, match="the kernel says 'No space left on device'"):
        two[0].allocate(64)
    monkeypatch.undo()
    assert two[0].allocate(64) == before + 64


def test_more_than_a_segment_holds_is_refused(two, monkeypatch):
    monkeypatch.setattr(pages, "_left", lambda: (1 << 60, "a host without limits"))
    with pytest.raises(UsageError, match="a rank's segment"):
        two[0].allocate(1 << 50)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/job/rank", "job/rank", ("memory.max", "memory.current", "inactive_file", "active_file")),
        (
            "4:cpu,memory:/job/rank",
            "memory/job/rank",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_the_memory_left_in_control_groups(tmp_path, line, folder, names):
    """The innermost has 1000 and uses 600, of which 150 are cached files; the one around it has no limit."""
    limit, usage, inactive, active = names
    for group, most in ((tmp_path / folder, "1000"), ((tmp_path / folder).parent, "max")):
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{most}\n")
        (group / usage).write_text("600\n")
        (group / "memory.stat").write_text(f"anon 1\n{inactive} 100\n{active} 50\n")
    groups = tmp_path / "groups"
    groups.write_text(f"7:pids:/\n{line}\n")
    left = list(pages._left_in_groups(tmp_path, groups))
    assert left == [(550, f"the control group {tmp_path / folder}")]


# -- control blocks ---------------------------------------------------------------------------


def test_a_control_block_of_another_size_is_refused(two):
    two[0].control_block(1, 4)
    for arena in two:
        with pytest.raises(ProtocolError, match="control block 1 has 4 cells, and not 5"):
            arena.control_block(1, 5)


def test_the_number_of_control_blocks_is_limited(two):
    most = arena_module._CONTROL_BLOCKS_MAX
    with two[0]._directory() as entries:
        assert arena_module._DIRECTORY + entries.nbytes <= HEAD_BYTES, "beyond it is the heap"
    for context in range(1, most + 1):
        two[context % 2].control_block(context, 1)
    for arena in two:
        with pytest.raises(UsageError, match=f"have {most} control blocks"):
            arena.control_block(most + 1, 1)
    assert not two[1].control_block(2, 1).created


# -- loops ----------------------------------------------------------------------------------------


def never():
    raise AssertionError("there was no recheck")


def until(arena, control_block, value):
    return arena.wait(Wait(control_block, lambda: control_block.cells[0] >= value), lambda: None, lambda: f"{value}")


def add_one(control_block):
    with control_block:
        control_block.cells[0] += 1
        control_block.wake()


async def asleep(arena, *names):
    while sorted(arena.waiting()) != sorted(names):
        await asyncio.sleep(0)


def test_waits_work_on_one_loop_after_another(two):
    """Each `run` makes a loop and closes it."""
    mine, other = (arena.control_block(1, 1) for arena in two)

    async def caller(value):
        task = asyncio.create_task(until(two[0], mine, value))
        await asleep(two[0], str(value))
        add_one(other)
        await task

    for value, run in enumerate([asyncio.run, uvloop.run, asyncio.run], 1):
        run(caller(value))
    assert mine.cells[0] == 3
    assert not two[0].waiting()


@BOTH_LOOPS
def test_several_loops_wait_at_once(two, loop):
    """The runtime's loop and those of two callers, each in its own thread, share two doorbells."""
    mine, other = (arena.control_block(1, 1) for arena in two)
    runtime = loop()
    two[0].runtime_loop = runtime

    def run(event_loop):
        with contextlib.closing(event_loop):
            for value in range(1, 11):
                event_loop.run_until_complete(until(two[0], mine, value))

    async def drive():
        for value in range(1, 11):
            await asleep(two[0], *[str(value)] * 3)
            add_one(other)

    threads = [in_a_thread(run, event_loop) for event_loop in (runtime, loop(), loop())]
    asyncio.run(drive())
    for thread in threads:
        thread.join()
    assert two[0].waiting() == []


@BOTH_LOOPS
def test_a_closed_loop_does_not_affect_other_waiters(two, loop):
    mine, other = (arena.control_block(1, 1) for arena in two)
    abandoned = loop()
    waiter = until(two[0], mine, 1)
    with contextlib.closing(abandoned):
        task = abandoned.create_task(waiter)
        abandoned.run_until_complete(asyncio.wait([task], timeout=0))
        abandoned.run_until_complete(asleep(two[0], "1"))

    async def caller():
        task = asyncio.create_task(until(two[0], mine, 1))
        await asleep(two[0], "1", "1")
        add_one(other)
        await task

    asyncio.run(caller())
    task._log_destroy_pending = False
    waiter.close()
    assert two[0].waiting() == []


def test_a_recheck_reaches_every_loop(two):
    """Even from a thread without a loop."""
    mine, _ = (arena.control_block(1, 1) for arena in two)
    stopped = []

    def check():
        if stopped:
            raise RuntimeError("stopped")

    async def wait():
        await two[0].wait(Wait(mine, lambda: False), check, str)

    def run(event_loop):
        with contextlib.closing(event_loop), pytest.raises(RuntimeError, match="stopped"):
            event_loop.run_until_complete(wait())

    loops = [asyncio.new_event_loop(), uvloop.new_event_loop()]
    two[0].runtime_loop = loops[0]
    threads = [in_a_thread(run, loop) for loop in loops]
    asyncio.run(asleep(two[0], "", ""))
    stopped.append(True)
    two[0].recheck()
    for thread in threads:
        thread.join()


# -- how ranks join -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The private folder of a host. It must be empty after the test."""
    private = tmp_path / "f"
    private.mkdir(0o700)
    yield private
    assert list(private.iterdir()) == []


def join_all(folder, size):
    """Join `size` ranks in threads of this process. Returns the arena or the error of each."""
    ranks = tuple(range(10, 10 + size))  # of the world: not local ranks

    def join(rank):
        try:
            return fd_passing.join(folder, rank, ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, ranks))


def all_alike(outcomes, kind):
    assert [type(outcome) for outcome in outcomes] == [kind] * len(outcomes)
    assert len(set(map(str, outcomes))) == 1
    return outcomes[0]


def check_joined(outcomes):
    try:
        assert [type(outcome) for outcome in outcomes] == [HostArena] * len(outcomes), outcomes
        address = outcomes[-1].allocate(10)
        outcomes[-1].view(address, 10)[:] = 3
        assert {int(arena.view(address, 10).sum()) for arena in outcomes} == {30}
        assert [arena.local_rank for arena in outcomes] == list(range(len(outcomes)))
        add_one(outcomes[-1].control_block(1, 1))
        assert {arena.control_block(1, 1).cells[0] for arena in outcomes} == {1}
    finally:
        for arena in outcomes:
            if isinstance(arena, HostArena):
                arena.close()


@pytest.fixture
def pretend(monkeypatch):
    """Replace fields of the hello of one rank."""

    def pretend(rank, **fields):
        introduce = fd_passing._introduce

        def other(stack, who, ranks):
            me = introduce(stack, who, ranks)
            return dataclasses.replace(me, **fields) if who == rank else me

        monkeypatch.setattr(fd_passing, "_introduce", other)

    return pretend


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_ranks_join(folder, size, monkeypatch):
    monkeypatch.setattr(fd_passing, "_BATCH", 4)  # several messages of descriptors, the last one not full
    check_joined(join_all(folder, size))


def test_ranks_join_without_memfd(folder, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    check_joined(join_all(folder, 3))


@pytest.mark.parametrize("rank", [10, 12])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": "0.0.9"}, r"runs (asyncoll )?0\.0\.9.*: install the same version"),
        ({"layout": 99}, "install the same version"),
        ({"boot": "another"}, "different kernels"),
        ({"capacity": 4096}, "another size of this host's memory|and not 4096"),
        ({"segment": None, "failure": "rank 12 has no memory"}, "rank 12 has no memory"),
        ({"segment": None}, "descriptors of rank 1. have not come"),
    ],
    ids=["version", "layout", "kernel", "size", "failure", "nothing"],
)
def test_no_rank_shares_memory_if_one_cannot(folder, pretend, rank, fields, reason):
    pretend(rank, **fields)
    with pytest.raises(ArenaUnavailable, match=reason):
        raise all_alike(join_all(folder, 3), ArenaUnavailable)


def damage(change):
    """Return a `make_segment` that applies `change` to the segment of local rank 1."""

    def make(local_rank, capacity):
        segment = make_segment(local_rank, capacity)
        if local_rank == 1:
            change(segment)
        return segment

    return make


def unsealed(segment):
    descriptor = os.memfd_create("asyncoll", os.MFD_CLOEXEC)
    os.truncate(descriptor, os.fstat(segment.memory).st_size)
    os.dup2(descriptor, segment.memory, inheritable=False)
    os.close(descriptor)


def small(segment):
    unsealed(segment)
    os.truncate(segment.memory, 4096)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda segment: os.pwrite(segment.memory, b"?", 3), "rank 10 cannot use the memory of rank 11: its header is"),
        (lambda segment: os.pwrite(segment.memory, b"\xff", 8), "its header is"),
        (unsealed, "its size is not sealed"),
        (small, "it has 4096 bytes, and not"),
    ],
    ids=["magic", "layout", "unsealed", "small"],
)
def test_a_malformed_segment_is_rejected(folder, monkeypatch, change, reason):
    monkeypatch.setattr(fd_passing, "make_segment", damage(change))
    with pytest.raises(ArenaUnavailable, match=reason):
        raise all_alike(join_all(folder, 3), ArenaUnavailable)


@pytest.mark.parametrize("local_rank", [0, 2])
def test_a_rank_that_cannot_map_the_others(folder, monkeypatch, local_rank):
    class Cramped(HostArena):
        def __init__(self, mine, *more):
            if mine == local_rank:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(mine, *more)

    monkeypatch.setattr(fd_passing, "HostArena", Cramped)
    with pytest.raises(ArenaUnavailable, match=f"rank {10 + local_rank} cannot map .* Cannot allocate memory"):
        raise all_alike(join_all(folder, 3), ArenaUnavailable)


def test_a_host_that_cannot_share(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "eventfd", refuse)
    with pytest.raises(ArenaUnavailable, match=r"rank 10 cannot make memory to share: .*not implemented"):
        raise all_alike(join_all(folder, 2), ArenaUnavailable)


def test_missing_ranks_are_named_at_the_time_limit(folder, monkeypatch):
    """A fake clock stands still until the third rank has come, and then jumps beyond the limit."""
    clock = [0]
    greet = fd_passing._greet

    def greet_and_wait(*args):
        clock.append(1000)
        return greet(*args)

    monkeypatch.setattr(fd_passing, "_greet", greet_and_wait)
    monkeypatch.setattr(joining, "_now_s", lambda: clock[-1])
    waits = {0: Joining(0, 4), 2: Joining(2, 4, math.inf)}
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fd_passing.join, folder, rank, (0, 1, 2, 3), wait) for rank, wait in waits.items()]
        errors = [future.exception() for future in futures]
    with pytest.raises(DeadlineError, match=r"1000\.0 s; missing: ranks 1, 3 ") as raised:
        raise all_alike(errors, DeadlineError)
    assert raised.value.missing == (1, 3)


def test_a_missing_first_rank_is_named(folder):
    with pytest.raises(DeadlineError, match="missing: rank 0 "):
        fd_passing.join(folder, 1, (0, 1), Joining(1, 2, 0.0))


def test_a_first_rank_that_died_while_it_listened(folder):
    with fd_passing._listen(folder / "arena", 1):
        (folder / "arena").rename(folder / "kept")
    (folder / "kept").rename(folder / "arena")
    with pytest.raises(PeerLostError, match=r"rank 0 is gone: it closed its connection .*refused"):
        fd_passing.join(folder, 1, (0, 1))
    (folder / "arena").unlink()


@contextlib.contextmanager
def early_connection(folder):
    """A connection to the first rank as soon as it listens, before the other ranks connect."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        while True:
            with contextlib.suppress(OSError):
                connection.connect(str(folder / "arena"))
                break
            os.sched_yield()
        yield connection


HELLO = ["asyncoll arena", 1, "0", 11, "boot", 4096, ""]
UNAUTHENTICATED = {
    "silent": b"",
    "noise": b"\xc1 not msgpack",
    "truncated": msgpack.packb(HELLO)[:-8],
    "endless": msgpack.packb([*HELLO, "x" * 10_000]),
    "another magic": msgpack.packb(["asyncoll", *HELLO[1:]]),
    "another rank": msgpack.packb([*HELLO[:3], 17, *HELLO[4:]]),
    "no list": msgpack.packb(17),
    "few fields": msgpack.packb(HELLO[:3]),
}


@pytest.mark.parametrize("message", UNAUTHENTICATED.values(), ids=UNAUTHENTICATED)
def test_unauthenticated_connections_are_rejected(folder, caplog, message):
    ranks = (10, 11)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "asyncoll"):
        first = pool.submit(fd_passing.join, folder, 10, ranks)
        with early_connection(folder) as connection:
            if message:
                connection.send(message)
        second = pool.submit(fd_passing.join, folder, 11, ranks)
        check_joined([first.result(), second.result()])
    assert "rejected an unauthenticated connection" in caplog.text


def test_connections_of_other_users_are_rejected(folder, caplog, monkeypatch):
    asked = []

    def uid(link):
        asked.append(link)
        return os.getuid() + (len(asked) == 1)

    monkeypatch.setattr(fd_passing, "user_of", uid)
    with ThreadPoolExecutor(2) as pool, caplog.at_level(logging.WARNING, "asyncoll"):
        first = pool.submit(fd_passing.join, folder, 10, (10, 11))
        with early_connection(folder) as connection:
            assert connection.recv(1) == b"", "it gets no data"
        second = pool.submit(fd_passing.join, folder, 11, (10, 11))
        check_joined([first.result(), second.result()])
    assert f"a process of user {os.getuid() + 1}" in caplog.text


def test_a_rank_that_ends_while_it_joins_is_reported_to_all(folder, monkeypatch):
    """The error of all other ranks names it."""
    send = fd_passing._Link.send

    def send_and_leave(link, message, descriptors=()):
        send(link, message, descriptors)
        if isinstance(message, list) and message[3:4] == [11]:
            raise OSError("killed")

    monkeypatch.setattr(fd_passing._Link, "send", send_and_leave)
    first, gone, third = join_all(folder, 3)
    assert isinstance(gone, PeerLostError)
    with pytest.raises(PeerLostError, match="rank 11 is gone: it closed its connection"):
        raise all_alike([first, third], PeerLostError)


def test_a_first_rank_that_ends_while_it_joins_is_reported(folder, monkeypatch):
    def leave(*_):
        raise MemoryError

    monkeypatch.setattr(fd_passing, "_hand_over", leave)
    first, second = join_all(folder, 2)
    assert isinstance(first, MemoryError)
    with pytest.raises(PeerLostError, match="rank 10 is gone: it closed its connection"):
        raise second


def test_the_limit_of_open_files_is_reported(folder, monkeypatch):
    """The kernel drops received descriptors above the limit of the process."""
    receive = fd_passing._Link.receive

    def receive_less(link, check, descriptors_max=0):
        message, descriptors = receive(link, check, descriptors_max)
        return message, descriptors[:3]

    monkeypatch.setattr(fd_passing._Link, "receive", receive_less)
    with pytest.raises(ArenaUnavailable, match="may not have 6 more files open: raise the limit"):
        raise all_alike(join_all(folder, 2), ArenaUnavailable)


def test_a_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(UsageError, match="set TMPDIR to a shorter folder"):
        fd_passing.join(tmp_path / ("x" * 100), 0, (0, 1))


# -- real processes -------------------------------------------------------------------------------


def run_ranks(folder, size, what):
    """Run the ranks as processes. Returns the exit status, output and errors of each."""
    command = [sys.executable, "-X", "dev", "-W", "error", str(SCRIPT), str(folder)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(size):
            process = subprocess.Popen(
                [*command, str(rank), str(size), what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=PATIENCE_S) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_count_together(folder, size):
    assert run_ranks(folder, size, "count") == [(0, f"{2000 * size} {50 * size}\n", "")] * size


@pytest.mark.slow
def test_a_process_killed_while_it_holds_the_lock(folder):
    *others, killed = run_ranks(folder, 3, "die")
    assert killed == (-signal.SIGKILL, "", "")
    lost = "rank 12 is gone: it died while it was changing shared memory\n"
    assert others == [(0, f"{lost}{lost}56\n", "")] * 2
