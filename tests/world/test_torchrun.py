"""torchrun: earlier processes have left entries in the store of its agent, restarts, and its report of failures."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

import asyncoll
from asyncoll.errors import AbortedError, DeadlineError, PeerLostError, UsageError
from asyncoll.launch.rank_environment import reserve_port
from asyncoll.transport.joining import Joining
from asyncoll.transport.keys import Key, write_key
from asyncoll.world.sealed_store import SealedStore
from tests.support.places import SCRIPTS
from tests.support.processes import ForkedRank

PATIENCE = timedelta(seconds=60)


def processes(store, size, job="job", limit_s=60.0):
    """The ranks of a job as new processes see them: a sealed store each."""
    return [
        SealedStore(store, job, rank, size, Key(b"job"), Joining(rank, size, limit_s), serves=False)
        for rank in range(size)
    ]


def form(sealed):
    sealed.begin_turn()
    return sealed.begin_session().derive("x")


@pytest.mark.parametrize(
    ("old", "has_formed", "new"),
    [(2, True, 2), (2, False, 2), (3, False, 2), (2, True, 3), (2, False, 3)],
)
def test_a_world_consists_of_living_processes(old, has_formed, new):
    """Processes of an earlier world have left entries. The last rank of the new world comes before its rank 0."""
    store = HashStore()
    store.set_timeout(PATIENCE)
    with ThreadPoolExecutor(max_workers=6) as threads:
        earlier = processes(store, old)
        if has_formed:
            list(threads.map(form, earlier))
        else:  # all but rank 0 were ended before they came
            earlier[0].begin_turn()
            earlier[0].post("nonce", "", "", "", "", "", str(old))
        first, *others = processes(store, new)
        waiting = [threads.submit(form, sealed) for sealed in others]
        has_been_there = has_formed and new <= old
        if not has_been_there:
            store.wait([f"job/1/nonce/{new - 1}"], PATIENCE)
        sessions = [form(first), *(session.result() for session in waiting)]
    assert len(set(sessions)) == 1


def test_a_rank_that_meets_another_job_is_told():
    store = HashStore()
    processes(store, 2, "first")[0].begin_turn()
    with pytest.raises(UsageError, match=r"another job .*'first', where rank 1 of 'second' .* a port of its own"):
        processes(store, 2, "second", limit_s=0.0)[1].begin_turn()


def test_a_rank_that_finds_another_process_in_its_place_names_it(monkeypatch):
    store = HashStore()
    for sealed in processes(store, 2):
        sealed.begin_turn()
    with pytest.raises(DeadlineError, match=r"(?m)rank 0 \(not in the store yet\)$"):  # it has been there itself
        processes(store, 2, limit_s=0.0)[1].begin_turn()
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with pytest.raises(DeadlineError, match=r"world rank 1 is process \d+ on host \S+, so two jobs may use"):
        processes(store, 2, limit_s=0.0)[1].begin_turn()


def test_a_second_process_of_a_rank_is_refused_and_the_first_goes_on(monkeypatch):
    """Rank 1 of the first job waits for its rank 2 as that of the second one comes."""
    store = HashStore()
    store.set_timeout(PATIENCE)
    first = processes(store, 3)
    with ThreadPoolExecutor(max_workers=3) as threads:
        sessions = [threads.submit(form, sealed) for sealed in first[:2]]
        store.wait(["job/1/nonce/0", "job/1/nonce/1"], PATIENCE)
        with monkeypatch.context() as second:
            second.setattr(os, "getpid", lambda: 7)
            with pytest.raises(UsageError, match=r"rank 1 of the world .* is process \d+ on host \S+ already, and not"):
                processes(store, 3)[1].begin_turn()
        sessions.append(threads.submit(form, first[2]))
        assert len({session.result() for session in sessions}) == 1


@pytest.mark.slow
def test_a_world_on_two_hosts_is_restarted(template, tmp_path):
    """The agents count a different number of restarts."""
    write_key(tmp_path / "key")
    common = os.environ | {"ASYNCOLL_KEY_FILE": str(tmp_path / "key"), "JOB": "job"}
    command = [
        SCRIPTS / "world/under_torchrun.py",
        1,
        1,
        SCRIPTS / "world/restarts_under_two_agents.py",
        tmp_path / "struck",
    ]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserve_port()).getsockname()[1]
        agents = []
        for host in ("a", "b"):
            folder = tmp_path / host
            folder.mkdir()
            place = {"ENDPOINT": f"127.0.0.1:{port}", "TMPDIR": str(folder)}
            agents.append(ForkedRank(template, command, common | place, folder))
            stack.callback(agents[-1].kill)
        ends = [agent.end() for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sorted(out for _, out, _ in ends) == ["rank 0 of 2, restart 0\n", "rank 1 of 2, restart 1\n"]


# -- the report of torchrun ------------------------------------------------------------------------


def failed(tmp_path, error, local_rank=0, run=asyncoll.run):
    """What torchrun finds of a rank whose `main` has raised `error`."""
    path = str(tmp_path / f"{local_rank}.json")

    async def main(comm):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", path)
        with pytest.raises(type(error)):
            run(main)
    return ProcessFailure(local_rank, os.getpid(), 1, path)


@pytest.mark.parametrize("run", [asyncoll.run, record(asyncoll.run)], ids=["alone", "in record"])
@pytest.mark.parametrize(
    "report",
    [
        AbortedError(2, "ValueError: seven"),
        PeerLostError(2, "its connection closed", "far", 7),
        ExceptionGroup("two tasks", [PeerLostError(2, "its connection closed", "far", 7)]),
    ],
)
def test_the_root_cause_is_the_failure_that_others_report(tmp_path, monkeypatch, report, run):
    """It comes first although torchrun notices it later, and where it is not known, the message names the rank."""
    monkeypatch.setattr(time, "time", lambda: 1000.98)
    reported = failed(tmp_path, report, run=run)
    assert "rank 2" in reported.message["message"]
    monkeypatch.setattr(time, "time", lambda: 1001.9)
    killed = ProcessFailure(2, 7, -9, "no file")
    assert ChildFailedError("program", {0: reported, 2: killed}).get_first_failure() == (2, killed)
    assert "Root Cause (first observed failure):\n[0]" in str(ChildFailedError("program", {0: reported}))


def test_a_root_cause_is_shown_with_its_traceback(tmp_path):
    raised, reported = failed(tmp_path, ValueError("seven"), 2), failed(tmp_path, AbortedError(2, "ValueError: seven"))
    shown = str(ChildFailedError("program", {0: reported, 2: raised}))
    root = shown.partition("Root Cause")[2]
    assert "ValueError: seven" in root
    assert "raise error" in root


def test_the_last_failure_of_a_program_that_goes_on_is_shown(tmp_path, monkeypatch):
    failed(tmp_path, ValueError("six"))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    async def main(comm):
        raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        asyncoll.run(main)
    assert "seven" in (tmp_path / "0.json").read_text()


def test_a_failure_that_cannot_be_written_is_raised(tmp_path):
    assert failed(tmp_path / "no folder", ValueError("seven")).error_file == "<N/A>"
