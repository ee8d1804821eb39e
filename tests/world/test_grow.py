"""Worlds that processes join later: as real processes, and by the public calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import asyncoll
from asyncoll.runtime.epochs import Decision
from asyncoll.testing import run_ranks, simulate
from asyncoll.transport.joining import in_daemon_thread
from asyncoll.transport.keys import Key, write_key
from asyncoll.world.environment import Environment
from asyncoll.world.newcomers import Newcomer, Newcomers, WorldOverError
from asyncoll.world.write_once import MemoryStore, SealedOnce
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

TRANSPORTS = ("shm", "zmq")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("steps", "epoch", "size"),
    [
        ("+2 -0,1,4", 3, 2),
        ("-1 +1 +1 -0 +1", 6, 4),
        ("! +1", None, 4),
        ("? -0", 4, 2),
    ],
    ids=["two at once", "one after another", "one dies as it waits", "a member dies"],
)
def test_newcomers_are_ranks_as_all_others(tmp_path, transport, steps, epoch, size):
    command = [sys.executable, "-W", "error", "-m", "asyncoll", "launch", "-n", 3, "--min-ranks", 1]
    command += ["--transport", transport, SCRIPTS / "world" / "grows.py", steps]
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | LIGHT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    text = f"{size} ranks: grown" if epoch is None else f"epoch {epoch}, {size} ranks: grown"
    assert (done.returncode, done.stdout.count(text)) == (0, size), done.stdout + done.stderr


def test_without_newcomers_the_ranks_go_on():
    async def main(comm):
        comm.rpc.register(lambda: "here", name="where")
        before = comm
        assert comm.waiting == 0
        comm = await comm.grow()
        assert await comm.rpc.call(0, "where") == "here"
        with pytest.raises(asyncoll.ClosedError, match="go on in epoch 2"):
            await before.barrier()
        return comm.epoch, comm.rank, comm.size

    for ranks in run_ranks(3, main), simulate(3, main).results, run_ranks(3, main, transport="shm"):
        assert ranks == [(2, rank, 3) for rank in range(3)]


@pytest.mark.parametrize("given", [{"ASYNCOLL_JOIN": "1"}, {"ASYNCOLL_JOIN": "yes", "ASYNCOLL_FOLDER": "/tmp"}])
def test_a_newcomer_needs_the_folder_of_a_job(given):
    with pytest.raises(asyncoll.UsageError, match="ASYNCOLL_JOIN=1, and ASYNCOLL_FOLDER as the ranks of the job"):
        Environment.read(given)


def newcomer(folder):
    return Newcomer(Environment.read({"ASYNCOLL_JOIN": "1", "ASYNCOLL_FOLDER": str(folder)}), PATIENCE_S)


def test_a_job_without_a_world_has_no_newcomers(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(asyncoll.UsageError, match="cannot read the key"):
        newcomer(tmp_path)
    write_key(tmp_path / "job")
    one = newcomer(tmp_path)
    one.cancel()
    with pytest.raises(asyncoll.ClosedError):
        one.seat()


@pytest.fixture
def job(tmp_path):
    """The folder of a job whose first world has begun."""
    tmp_path.chmod(0o700)
    write_key(tmp_path / "job")
    (tmp_path / "1").mkdir()
    return tmp_path


def members(job, entries):
    return Newcomers(Environment.read({"RANK": "0", "WORLD_SIZE": "2", "ASYNCOLL_FOLDER": str(job)}), entries, 2)


def test_those_that_wait_are_in_one_attempt_each(job):
    entries = SealedOnce(MemoryStore(), Key(b"k"))
    its = members(job, entries)
    assert (its.count(), its.begin(2, (0, 1))) == (0, None)
    for index in range(3):
        entries.write(f"newcomer-{index}", str(os.getpid()), asyncoll.__version__, "shm", "token")
    assert its.count() == 3
    attempt = its.begin(2, (0, 1))
    assert (attempt.number, attempt.epoch, attempt.members) == (0, 2, (0, 1, 2, 3, 4))
    assert its.begin(2, (0, 1)) is None
    # Another coordinator, after the death of the first one, knows it too.
    other = members(job, entries)
    entries.write("newcomer-3", str(os.getpid()), asyncoll.__version__, "shm", "token")
    assert other.begin(3, (1,)).members == (1, 5)


def test_one_that_has_died_or_is_set_up_in_another_way_is_in_no_attempt(job):
    its = members(job, entries := SealedOnce(MemoryStore(), Key(b"k")))
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    entries.write("newcomer-0", str(died.pid), asyncoll.__version__, "shm", "token")
    entries.write("newcomer-1", str(os.getpid()), "0.0.1", "shm", "token")
    entries.write("newcomer-2", str(os.getpid()), asyncoll.__version__, "zmq", "token")
    assert its.begin(2, (0, 1)) is None
    assert "version 0.0.1 of asyncoll" in entries.read("refusal-1")[0]
    assert "ASYNCOLL_TRANSPORT=zmq" in entries.read("refusal-2")[0]


def test_one_that_has_given_up_is_in_no_attempt(job):
    one = newcomer(job)
    one.cancel()
    with pytest.raises(asyncoll.ClosedError):
        one.seat()
    assert members(job, one.decisions.entries).begin(2, (0, 1)) is None


def test_a_newcomer_is_told_that_the_world_is_over_or_refuses_it(job):
    late, refused = newcomer(job), newcomer(job)
    late._enter_newest_world()
    late.decisions.entries.write("refusal-0", "install the same")
    with pytest.raises(asyncoll.UsageError, match="install the same"):
        refused.seat()
    members(job, late.decisions.entries).end()
    with pytest.raises(WorldOverError, match="the world has ended"):
        late.seat()


def test_a_newcomer_of_a_job_that_ends_meanwhile(job):
    one = newcomer(job)
    shutil.rmtree(job)
    with pytest.raises(WorldOverError, match="the job has ended"):
        one.seat()


def test_a_newcomer_joins_the_newest_world_of_its_job(job):
    """Its ranks have left the first one, or could not form it."""
    one = newcomer(job)
    waits = in_daemon_thread(one.seat)
    while one._world != 1 or one.decisions.entries.read("newcomer-0") is None:
        assert not waits.done()
    (job / "2").mkdir()
    second = newcomer(job)
    second._enter_newest_world()
    second.decisions.entries.write("attempt-0", "2", "0,1,2", "2")
    assert waits.result(PATIENCE_S).attempt.members == (0, 1, 2)


def test_a_newcomer_waits_for_the_decision_on_its_attempt(job):
    one = newcomer(job)
    one._enter_newest_world()
    entries = one.decisions.entries
    entries.write("attempt-0", "2", "0,1,2", "2")
    attempt = one.seat().attempt
    assert (attempt.members, one.first_size) == ((0, 1, 2), 2)
    assert not one.is_admitted(attempt, lambda: True)  # it has failed before the decision
    one.decisions.decide(Decision(2, (0, 1)))
    assert not one.is_admitted(attempt, lambda: False)
    entries.write("attempt-1", "3", "0,1,3", "2")
    attempt = one.seat().attempt
    one.decisions.decide(Decision(3, attempt.members))
    assert one.is_admitted(attempt, lambda: False)


def test_a_process_that_comes_too_late_ends_in_good_order(job):
    late = newcomer(job)
    late._enter_newest_world()
    members(job, late.decisions.entries).end()
    env = os.environ | LIGHT | {"ASYNCOLL_JOIN": "1", "ASYNCOLL_FOLDER": str(job)}
    command = [sys.executable, SCRIPTS / "world" / "grows.py", "+1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "the world has ended: this process has nothing to join" in done.stderr
