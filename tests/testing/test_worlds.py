"""The worlds of the test kit: `run_ranks` and `simulate`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from asyncoll import MIN, AbortedError, Communicator, DeadlockError, UsageError, connect, offload
from asyncoll.testing import Cut, Network, Pause, run_ranks, simulate
from tests.support.cases import SIZES
from tests.support.processes import PATIENCE_S


async def total(comm):
    await asyncio.sleep(0)
    return int((await comm.allreduce(np.array([comm.rank])))[0])


@pytest.mark.asyncio
async def test_worlds_run_inside_a_running_loop_too():
    assert run_ranks(4, total) == [6] * 4
    assert simulate(5, total).results == [10] * 5
    await asyncio.sleep(0)  # the outer loop still runs


def test_ranks_on_one_loop_do_not_poll():
    """No other rank acts meanwhile."""

    async def main(comm):
        looks, arena = [], comm._core.member.endpoint.arena
        arena.look(lambda: looks.append(comm.rank), patience=10)
        return arena.polls, len(looks)

    assert run_ranks(2, main, "shm") == [(0, 1)] * 2


@pytest.mark.asyncio
async def test_errors_come_out_of_the_inner_world():
    async def fail(comm):
        await comm.barrier()
        if comm.rank == 1:
            raise ValueError("rank 1")
        await comm.barrier()

    with pytest.raises(ValueError, match="rank 1"):
        run_ranks(3, fail)


@pytest.mark.parametrize("world", [run_ranks, simulate])
def test_a_cancellation_that_the_kit_has_not_made_comes_out(world):
    """A call may raise CancelledError by mistake."""

    async def main(comm):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        world(1, main)


@pytest.mark.parametrize("seconds", [0.0, 0.9])
def test_the_cause_of_an_abort_comes_out_however_late_its_rank_raises_it(seconds):
    async def main(comm):
        if comm.rank == 1:
            comm.abort("it fails soon")
            await asyncio.sleep(seconds)
            raise OSError("the cause")
        await comm.barrier()

    with pytest.raises(OSError, match="the cause"):
        simulate(3, main)


def test_a_rank_that_goes_on_after_its_abort_ends_with_the_others():
    async def main(comm):
        if comm.rank == 1:
            comm.abort("enough")
            await asyncio.sleep(1000)
        await comm.barrier()

    with pytest.raises(AbortedError, match="enough"):
        simulate(3, main)


def test_errors_have_no_context_of_the_test_kit():
    async def main(comm):
        try:
            raise LookupError
        except LookupError as error:
            return error.__context__

    assert run_ranks(2, main) == simulate(2, main).results == [None, None]


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_has_at_least_one_rank(size):
    for world in (run_ranks, simulate):
        with pytest.raises(UsageError, match="at least one rank"):
            world(size, total)


def test_unknown_transports_are_named():
    with pytest.raises(UsageError, match="unknown transport 'smoke': use one of inproc, zmq"):
        run_ranks(2, total, transport="smoke")


@pytest.mark.parametrize("world", [run_ranks, simulate])
def test_a_misspelt_variable_is_refused(monkeypatch, world):
    monkeypatch.setenv("ASYNCOLL_DEADLINE", "3")
    with pytest.raises(UsageError, match="ASYNCOLL_DEADLINE in the environment is not a variable of asyncoll"):
        world(2, total)


def test_virtual_time_costs_nothing_and_is_reported():
    async def main(comm):
        await asyncio.sleep(1e6)
        return await offload(lambda: comm.rank)

    report = simulate(3, main, Network(latency_s=0.25))
    assert report.results == [0, 1, 2]
    assert 1e6 < report.virtual_s < 1e6 + 10


def test_a_long_message_takes_its_bytes_over_the_bandwidth():
    async def main(comm):
        loop = asyncio.get_running_loop()
        start = loop.time()
        await comm.broadcast(np.zeros(250_000, "f4"))
        return loop.time() - start

    slow = simulate(2, main, Network(latency_s=0, bandwidth_bytes_per_s=1e6)).results[1]
    assert 1.0 <= slow < 1.1
    assert simulate(2, main, Network(latency_s=0)).results[1] < 0.01


def test_words_and_messages_are_counted():
    async def main(comm):
        if comm.rank == 0:
            await comm.send(np.zeros(1000, "f4"), 1)
        else:
            await comm.recv(np.zeros(1000, "f4"), 0)

    async def idle(comm):
        pass

    busy, nothing = simulate(2, main), simulate(2, idle)
    assert busy.words - nothing.words == 1000
    assert busy.messages - nothing.messages == 1
    assert len(busy.trace) == busy.messages


@pytest.mark.parametrize("size", [*SIZES, 1000])
def test_joining_and_leaving_take_three_barriers_and_no_message_more(size):
    """A message of each rank to each would be a million at a thousand ranks."""

    async def main(comm):
        pass

    assert simulate(size, main).messages == 3 * size * math.ceil(math.log2(size))


def test_faults_must_name_ranks_of_the_world():
    with pytest.raises(UsageError, match="outside a world of 2"):
        simulate(2, total, Network(faults=[Pause(2, at_s=0, duration_s=1)]))
    with pytest.raises(UsageError, match="latencies"):
        Network(latency_s=-1)


@pytest.mark.parametrize("call", ["allreduce", "solo_allreduce"])
def test_in_a_world_of_one_calls_may_be_made_on_a_loop_in_another_thread(call):
    async def main():
        async with connect() as comm:

            async def elsewhere():
                return await getattr(comm, call)(np.ones(3))

            await asyncio.to_thread(asyncio.run, elsewhere())
            return await getattr(comm, call)(np.ones(3))

    assert asyncio.run(main()) is not None


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_other_tasks_run_beside_a_loop_of_calls_that_are_over_at_once(size, transport):
    """Otherwise the loop would never turn, and Ctrl-C would have no effect."""

    async def main(comm: Communicator) -> None:
        async def other() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        task, calls = asyncio.create_task(other()), 0
        while not await comm.allreduce(np.array([task.done()]), op=MIN):
            calls += 1
            assert calls < 10_000

    run_ranks(size, main, transport)


KILLED = """
import asyncio, os, signal
from asyncoll.testing import run_ranks

async def main(comm):
    await comm.barrier()
    os.kill(os.getpid(), signal.{signum})
    await asyncio.sleep({seconds})

run_ranks(2, main, "zmq")
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", ["SIGTERM", "SIGHUP", "SIGKILL"])
def test_the_next_world_removes_the_folder_of_a_killed_one(tmp_path, signum, monkeypatch):
    program = KILLED.format(signum=signum, seconds=PATIENCE_S)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` ignores it
    try:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", program], env=environment, timeout=PATIENCE_S)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.returncode == -getattr(signal, signum)
    assert [*tmp_path.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main(comm):
        await comm.barrier()

    run_ranks(2, main, "zmq")
    assert not [*tmp_path.iterdir()]


async def _sleep(seconds):
    await asyncio.sleep(seconds)


async def _call_at(seconds):
    event = asyncio.Event()
    asyncio.get_running_loop().call_at(seconds, event.set)
    await event.wait()


async def _timeout(seconds):
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


async def _wait_for(seconds):
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


_WAITS = [_sleep, _call_at, _timeout, _wait_for]


@pytest.mark.parametrize("wait", _WAITS)
@pytest.mark.parametrize("seconds", [math.inf, sys.float_info.max])
def test_a_timer_at_infinity_is_a_deadlock(wait, seconds):
    async def main(comm):
        if comm.rank == 0:
            await wait(seconds)
        await comm.barrier()

    with pytest.raises(DeadlockError, match="rank 1: barrier #1"):
        simulate(2, main)


@pytest.mark.parametrize("wait", _WAITS)
@pytest.mark.parametrize("seconds", [1e6, 1e8, 1e300])
def test_virtual_time_goes_on_to_a_timer_at_once_however_late_it_is(wait, seconds):
    async def main(comm):
        await wait(seconds)
        await comm.barrier()
        return asyncio.get_running_loop().time()

    assert simulate(2, main).results == [pytest.approx(seconds)] * 2


# -- records -------------------------------------------------------------------------------------


def recorded(file):
    head, *messages = map(json.loads, file.read_text().splitlines())
    return head, messages


@pytest.mark.parametrize("size", SIZES)
def test_a_record_has_every_message_of_a_world(size, tmp_path):
    async def main(comm):
        await comm.allreduce(np.ones(3))
        await asyncio.sleep(comm.rank / 1000)
        await comm.solo_allreduce(np.ones(2), name="x")
        await comm.barrier()

    network = Network(latency_s=1e-4, jitter_s=1e-3)
    files = [tmp_path / "one.jsonl", str(tmp_path / "two.jsonl")]
    report, again = [simulate(size, main, network, seed=3, record=file) for file in files]
    assert files[0].read_bytes() == Path(files[1]).read_bytes()
    assert report.trace == again.trace
    head, messages = recorded(files[0])
    assert head == {"asyncoll": "simulate", "format": 1, "ranks": size, "seed": 3}
    arrivals = [(each["arrives_s"], each["from"], each["to"], each["bytes"]) for each in messages]
    assert set(report.trace) <= set(arrivals)
    assert all(each["arrives_s"] > each["departs_s"] for each in messages)
    assert [each["departs_s"] for each in messages] == sorted(each["departs_s"] for each in messages)
    if size > 1:
        calls = {(each["call"].partition(" at ")[0], each["round"]) for each in messages}
        assert {("allreduce #1 of 3 float64, SUM", 0), ("solo allreduce 'x'", 1), ("barrier #2", 0)} <= calls
        assert {"data", "announce", "signal"} <= {each["kind"] for each in messages}


def test_the_record_of_a_world_that_fails_ends_there(tmp_path):
    async def main(comm):
        await comm.barrier()

    file = tmp_path / "world.jsonl"
    with pytest.raises(DeadlockError):
        simulate(2, main, Network(faults=[Cut(0, 1, at_s=0.0)]), record=file)
    _, messages = recorded(file)
    assert messages
    assert {each["arrives_s"] for each in messages} == {None}


def test_a_record_that_cannot_be_written_is_an_error_before_the_run(tmp_path):
    async def main(comm):
        raise AssertionError("the world runs")

    for file in (tmp_path, tmp_path / "missing" / "world.jsonl"):
        with pytest.raises(UsageError, match="record: cannot write"):
            simulate(2, main, record=file)
