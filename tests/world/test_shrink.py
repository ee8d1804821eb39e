"""Worlds that go on after deaths: as real processes, and by the public calls."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import asyncoll
from asyncoll.runtime.router import EARLY_MAX
from asyncoll.testing import run_ranks, simulate
from asyncoll.transport import processes, wire
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S, TRAINING

TRANSPORTS = ("shm", "zmq")


def launch(size, transport, script, *arguments, **more):
    """The exit code, the output and the report of a job that goes on after deaths."""
    report = more.pop("report")
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", size, "--min-ranks", 1]
    command += ["--transport", transport, "--json", report, SCRIPTS / "world" / script, *arguments]
    env = os.environ | LIGHT | more
    done = subprocess.run(
        [*map(str, command)], env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done, json.loads(report.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("size", "deaths"),
    [(4, ["1"]), (4, ["0"]), (5, ["0,1", "3"]), (4, ["1", "0", "3"]), (3, ["0,2"])],
    ids=["one", "the coordinator", "two and one", "one after another", "most"],
)
def test_survivors_go_on(tmp_path, transport, size, deaths):
    """In one process after another, among them the coordinator of the agreement, and more than half of the ranks."""
    done, report = launch(size, transport, "shrinks.py", *deaths, report=tmp_path / "report")
    dead = sum(len(each.split(",")) for each in deaths)
    assert (done.returncode, done.stdout.count("went on")) == (0, size - dead), done.stderr
    assert sum(rank["signal"] == "SIGKILL" for rank in report["ranks"]) == dead


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_survivors_and_a_newcomer_go_on_without_an_event_loop(tmp_path, transport):
    done, _ = launch(4, transport, "goes_on_without_a_loop.py", report=tmp_path / "report")
    assert (done.returncode, done.stdout.count("went on")) == (0, 4), done.stderr


@pytest.mark.slow
def test_a_training_is_made_anew(tmp_path):
    done, _ = launch(3, "shm", "trains_on.py", report=tmp_path / "report", **TRAINING)
    assert (done.returncode, done.stdout.count("trained on")) == (0, 2), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_does_not_come_back(tmp_path, transport):
    """It is refused, which is a death for the job; or it has ended where it could write to the memory of others."""
    done, report = launch(4, transport, "thaws.py", report=tmp_path / "report", ASYNCOLL_FREEZE_S="2")
    assert (done.returncode, done.stdout.count("went on")) == (0, 3), done.stderr
    assert [death["kind"] for death in report["deaths"]] == ["EvictedError" if transport == "zmq" else "signal"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_has_left_is_not_killed(tmp_path, transport):
    os.mkfifo(tmp_path / "pipe")
    done, report = launch(3, transport, "saves_after_an_error.py", tmp_path / "pipe", report=tmp_path / "report")
    assert (done.returncode, done.stdout) == (0, "1: saved\n"), done.stderr
    assert report["deaths"] == []


def test_a_process_that_is_killed_has_ended():
    with subprocess.Popen(["sleep", "1000"]) as sleeping:
        process = os.pidfd_open(sleeping.pid)
        try:
            assert not processes.is_traced(sleeping.pid)
            assert processes.kill(process, sleeping.pid, PATIENCE_S)
            assert sleeping.wait() == -signal.SIGKILL
            assert processes.kill(process, sleeping.pid, PATIENCE_S)
        finally:
            os.close(process)


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
def test_ranks_go_on_without_a_loss(transport):
    """All communicators of the epoch before end; the new one numbers its calls from 1 and has the functions."""

    async def main(comm):
        old, half = comm, await comm.split(comm.rank % 2)
        old.rpc.register(len)
        assert old.epoch == half.epoch == 1
        comm = await old.shrink()
        assert (comm.epoch, comm.size, comm.rank, comm.hosts) == (2, old.size, old.rank, old.hosts)
        with pytest.raises(asyncoll.ClosedError, match="go on in epoch 2: use the communicator that `shrink`"):
            await old.barrier()
        with pytest.raises(asyncoll.ClosedError, match="go on in epoch 2"):
            await half.allreduce(np.ones(3))
        assert await comm.rpc.call((comm.rank + 1) % comm.size, "len", [1, 2]) == 2
        await comm.barrier()
        comm.rpc.register(lambda values: -len(values), name="len")
        with pytest.raises(asyncoll.UsageError, match="registered already"):
            comm.rpc.register(len)
        await comm.barrier()
        assert await comm.rpc.call((comm.rank + 1) % comm.size, "len", [1, 2]) == -2
        assert [method.name for method in await comm.rpc.methods(0)] == ["len"]
        halves = [await half.shrink(), await half.shrink()]
        assert [part.epoch for part in halves] == [2, 2]
        await halves[0].barrier()
        await halves[1].barrier()
        assert (await old.shrink()).epoch == 2
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size

    run_ranks(3, main, transport)


def test_an_abort_is_no_end():
    async def main(comm):
        if comm.rank == 1:
            comm.abort("anew")
        with pytest.raises(asyncoll.AbortedError):
            await comm.barrier()
        comm = await comm.shrink()
        return int((await comm.allreduce(np.ones(1)))[0])

    assert simulate(5, main).results == [5] * 5


def test_a_cancelled_shrink_goes_on():
    async def main(comm):
        if comm.rank == 0:
            await asyncio.sleep(1.0)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(comm.shrink(), 0.1)
        comm = await comm.shrink()
        await comm.barrier()
        return comm.epoch

    assert simulate(4, main).results == [2] * 4


def test_what_no_rule_sends_is_a_breach_of_the_protocol():
    """Members out of order, or that the epoch has not; no decision of an earlier epoch is one."""

    async def main(comm):
        comm = await comm.shrink()
        succession = comm._core.member.endpoint.succession
        succession.heard(1, wire.Decided(2, wire.packed((0, 1, 7))))
        for numbers in ((0, 7), (1, 0), (0, 0)):
            with pytest.raises(asyncoll.ProtocolError, match="member"):
                succession.heard(1, wire.Decided(3, wire.packed(numbers)))
        with pytest.raises(asyncoll.ProtocolError, match="3 bytes"):
            succession.heard(1, wire.ReadyForNext(3, b"123", b"", b""))
        ready = wire.ReadyForNext(3, b"", b"", b"")
        for _ in range(EARLY_MAX):
            succession.heard(1, ready)
        with pytest.raises(asyncoll.ProtocolError, match=f"more than {EARLY_MAX}"):
            succession.heard(1, ready)
        await comm.barrier()

    simulate(2, main)


def test_a_deadline_names_the_ranks_that_have_not_called_it():
    async def main(comm):
        if comm.rank == 2:
            await asyncio.sleep(10.0)
        else:
            awaited = 0 if comm.rank else 2  # rank 0 is the coordinator
            with pytest.raises(asyncoll.DeadlineError, match=f"waits for rank {awaited}: all ranks") as raised:
                with asyncoll.deadline(1.0):
                    await comm.shrink()
            assert raised.value.missing == (awaited,)
        comm = await comm.shrink()
        await comm.barrier()

    simulate(4, main)


def test_without_a_store_it_says_how_to_get_one(forked_world):
    for rank in forked_world({}, 2, SCRIPTS / "world" / "shrinks_without_a_store.py"):
        code, out, err = rank.end()
        assert (code, out.startswith("shrink needs a store of epochs that outlives the ranks: start ")) == (0, True), (
            err
        )
