"""A job that goes on after deaths: `asyncoll launch --min-ranks`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncoll.errors import UsageError
from asyncoll.launch import launch as launch_here
from asyncoll.launch.supervisor import SETTLE_S, Failure, Supervisor
from asyncoll.launch.verdict import explain, tell_deaths
from tests.launch.test_launch import LIGHT, Orders, await_ready, launch, start
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S

pytestmark = pytest.mark.slow

PROGRAM = SCRIPTS / "launch/ends_by_its_pipe.py"


class Job:
    """A job of ranks that end as they are told."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def pid(self, rank: int) -> int:
        return int((self._folder / f"pid-{rank}").read_text())

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), signum)

    def end(self, *ranks: int, how: str = "return") -> None:
        for rank in ranks:
            (self._folder / f"end-{rank}").write_text(how)

    def hears(self, start: str, end: str) -> None:
        """Wait for a line of the launcher."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith(start):
                assert line.endswith(f"{end}\n"), line
                return
        raise AssertionError(f"no line begins with {start!r}")

    def ended(self) -> tuple[int, str, dict[str, Any]]:
        """The exit code, the rest of stderr, and the report."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err, json.loads((self._folder / "report.json").read_text())


@contextmanager
def job(folder: Path, size: int, least: int, *where: object, env: Mapping[str, str] = LIGHT) -> Iterator[Job]:
    place = where or ("-n", size)
    with start(*place, "--min-ranks", least, "--json", folder / "report.json", PROGRAM, folder, env=env) as process:
        try:
            await_ready(process, size)
            yield Job(process, folder)
        finally:
            process.kill()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_job_goes_on_after_a_death_and_its_report_has_it(signum: signal.Signals, tmp_path: Path) -> None:
    with job(tmp_path, 3, 1) as it:
        it.kill(1, signum)
        it.hears(f"rank 1 (pid {it.pid(1)}) was killed by {signum.name} after ", " s; the job goes on with 2 ranks")
        it.kill(2, signum)
        it.hears(f"rank 2 (pid {it.pid(2)}) was killed by {signum.name} after ", " s; the job goes on with 1 rank")
        it.end(0)
        code, err, report = it.ended()
    assert (code, err, report["exit_code"], report["first"]) == (0, "", 0, None)
    told = [(each["rank"], each["pid"], each["kind"], each["error"]) for each in report["deaths"]]
    assert told == [(rank, it.pid(rank), "signal", f"was killed by {signum.name}") for rank in (1, 2)]
    ends = [(entry["exit_code"], entry["signal"]) for entry in report["ranks"]]
    assert ends == [(0, None), *[(128 + signum, signum.name)] * 2]


def test_a_job_ends_with_the_death_after_which_too_few_ranks_are_left(tmp_path: Path) -> None:
    with job(tmp_path, 3, 2) as it:
        it.kill(2)
        it.hears("rank 2 ", "; the job goes on with 2 ranks")
        it.kill(0, signal.SIGSEGV)
        code, err, report = it.ended()
    assert (code, report["first"]["rank"], [each["rank"] for each in report["deaths"]]) == (139, 0, [2, 0])
    assert "\nrank 0 was killed by SIGSEGV after " in err
    assert err.endswith("\nfewer than 2 ranks were left (--min-ranks)\nrank 1 was stopped because rank 0 failed\n")


@pytest.mark.parametrize(("how", "code", "kind"), [("raise", 1, "ValueError"), ("exit", 3, "SystemExit")])
def test_a_program_that_fails_ends_the_job_also_after_a_death(how: str, code: int, kind: str, tmp_path: Path) -> None:
    with job(tmp_path, 4, 1) as it:
        it.kill(1)
        it.hears("rank 1 ", "; the job goes on with 3 ranks")
        it.end(3, how=how)
        ended, err, report = it.ended()
    assert (ended, report["first"]["rank"], report["first"]["kind"]) == (code, 3, kind)
    assert [each["rank"] for each in report["deaths"]] == [1]
    assert err.endswith("\nranks 0, 2 were stopped because rank 3 failed\n")


def test_a_job_that_has_gone_on_is_interrupted_as_any_other(tmp_path: Path) -> None:
    with job(tmp_path, 2, 1) as it:
        it.kill(0)
        it.hears("rank 0 ", "; the job goes on with 1 rank")
        it.process.send_signal(signal.SIGINT)
        code, _, report = it.ended()
    assert (code, report["first"], [each["rank"] for each in report["deaths"]]) == (130, None, [0])


def test_a_rank_that_stays_stopped_when_all_others_have_ended_dies(tmp_path: Path) -> None:
    with job(tmp_path, 3, 1, env={**LIGHT, "ASYNCOLL_STOPPED_S": "0.1"}) as it:
        it.kill(1, signal.SIGSTOP)
        it.end(0, 2)
        it.hears(f"rank 1 (pid {it.pid(1)}) is stopped ", f"kill -CONT {it.pid(1)}")
        it.hears(f"rank 1 (pid {it.pid(1)}) was killed by SIGKILL ", "; the job goes on with 2 ranks")
        assert it.ended()[0] == 0


@pytest.mark.parametrize(
    ("least", "complaint"), [(4, "--min-ranks 4: the job has 3 ranks; give 1 to 3"), (0, "0 is not")]
)
def test_impossible_numbers_are_refused(least: int, complaint: str) -> None:
    run = launch("-n", 3, "--min-ranks", least, PROGRAM)
    assert (run.returncode, run.stdout) == (2, "")
    assert complaint in " ".join(run.stderr.split())
    with pytest.raises(UsageError, match=f"--min-ranks {least}: the job has 3 ranks"):
        launch_here(3, [str(PROGRAM)], min_ranks=least)


# The rule, without processes.


def supervisor(size: int, least: int) -> tuple[Supervisor, Orders]:
    orders = Orders()
    return Supervisor(size, 0.0, orders, 1.0, least), orders


def test_programs_that_do_not_go_on_after_a_death_have_it_as_their_root_cause() -> None:
    it, orders = supervisor(4, 2)
    assert it.exited(1, -signal.SIGSEGV, 1.0) == [Failure(1, -signal.SIGSEGV, 1.0)]
    it.tick(5.0)
    assert (it.root, it.failures, orders, it.wake_at()) == (None, {}, [], None)
    it.failed(Failure(0, 1, 5.0, "Traceback", "PeerLostError: rank 1", blames=1))
    assert it.root is it.deaths[1]
    assert it.wake_at() == 5.0 + SETTLE_S
    it.tick(5.0 + SETTLE_S)
    assert orders == [(signal.SIGTERM, [2, 3])]
    assert list(explain(it, [[]] * 4, {}, {})) == [
        "rank 1 was killed by SIGSEGV after 1.0 s",
        "rank 0 failed too: PeerLostError: rank 1",
        "ranks 2, 3 were stopped because rank 1 failed",
    ]


def test_a_death_after_a_failure_is_none_that_the_job_goes_on_after() -> None:
    it, _ = supervisor(3, 1)
    it.failed(Failure(0, 1, 1.0, "Traceback", "PeerLostError: rank 1", blames=1))
    assert it.exited(1, -signal.SIGKILL, 1.01) == []
    assert it.root == Failure(1, -signal.SIGKILL, 1.01)


def test_ranks_that_the_launcher_ends_have_not_died() -> None:
    it, _ = supervisor(3, 1)
    it.stop(signal.SIGTERM, 124, 1.0)
    for rank in range(3):
        assert it.exited(rank, -signal.SIGTERM, 1.1) == []
    assert (it.deaths, it.failures) == ({}, {})


def test_an_interrupted_program_has_failed_and_has_not_died() -> None:
    """The interpreter ends itself by SIGINT then."""
    it, _ = supervisor(3, 1)
    it.failed(Failure(2, -signal.SIGINT, 1.0, "Traceback", "KeyboardInterrupt"))
    assert it.exited(2, -signal.SIGINT, 1.1) == []
    assert (list(it.failures), it.deaths) == ([2], {})


def test_a_job_goes_on_after_the_loss_of_a_host_as_long_as_enough_ranks_are_left() -> None:
    it, _ = supervisor(5, 2)
    why = "host b: the connection to it ended"
    deaths = it.lost([1, 2], why, 1.0)
    assert [death.rank for death in deaths] == [1, 2]
    assert (
        tell_deaths(deaths, it.living, {}, {})
        == f"ranks 1, 2 were lost after 1.0 s: {why}; the job goes on with 3 ranks"
    )
    assert it.lost([3, 4], "host c: the same", 2.0) == []
    it.tick(3.0)
    assert list(explain(it, [[]] * 5, {}, {})) == [
        "ranks 3, 4 were lost after 2.0 s: host c: the same",
        "fewer than 2 ranks were left (--min-ranks)",
        "rank 0 was stopped because rank 3 was lost",
    ]


def test_all_ranks_of_a_lost_host_are_the_root_cause_of_programs_that_do_not_go_on() -> None:
    it, _ = supervisor(4, 1)
    it.exited(0, -signal.SIGKILL, 0.5)
    it.lost([2, 3], "host b: the connection to it ended", 1.0)
    it.failed(Failure(1, 1, 2.0, "Traceback", "PeerLostError: host b (ranks 2, 3) is gone", blames=2))
    assert list(explain(it, [[]] * 4, {}, {})) == [
        "ranks 2, 3 were lost after 1.0 s: host b: the connection to it ended",
        "rank 1 failed too: PeerLostError: host b (ranks 2, 3) is gone",
    ]


def test_ranks_that_have_returned_are_not_missing() -> None:
    it, _ = supervisor(3, 2)
    it.exited(0, 0, 1.0)
    it.exited(1, 0, 1.0)
    assert len(it.exited(2, -signal.SIGKILL, 2.0)) == 1
    assert (it.living, it.root) == (2, None)
