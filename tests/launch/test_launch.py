"""The launcher, with real processes: the environment of ranks, its output, failures, and the cleanup."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncoll.cli import main
from asyncoll.errors import UsageError
from asyncoll.launch import launch as launch_here
from asyncoll.launch.lines import LINE_BYTES_MAX, Lines
from asyncoll.launch.rank_environment import reserve_port, stopped_grace_s
from asyncoll.launch.supervisor import (
    BLAME_S,
    GIVE_UP_S,
    LOOK_GAP_MAX_S,
    SETTLE_S,
    STOP_GRACE_S,
    STOPPED_GRACE_S,
    Failure,
    Supervisor,
)
from asyncoll.launch.verdict import explain, tell_stopped
from asyncoll.transport.keys import KEY_BYTES
from tests.support.cases import case
from tests.support.places import ROOT, SCRIPTS
from tests.support.processes import PATIENCE_S, children, without_delays

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-X", "dev", "-W", "error", "-m", "asyncoll", "launch"]
KEPT = ("ASYNCOLL_FREEZE_S",)
LIGHT = {"ASYNCOLL_PRELOAD": "", "PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}
CALLS = {**LIGHT, "ASYNCOLL_PRELOAD": "numpy,asyncoll"}  # for ranks that join a world: loaded once, and not by each


def environment(more: Mapping[str, str]) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "OMP_", "OPENBLAS_", "ASYNCOLL_", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name in KEPT}
    return kept | dict(more)


def start(*arguments: object, env: Mapping[str, str] = LIGHT, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        **{
            "cwd": ROOT,
            "env": environment(env),
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "backslashreplace",
            **options,
        },
    )


def launch(*arguments: object, env: Mapping[str, str] = LIGHT, **options: object) -> subprocess.CompletedProcess[str]:
    with start(*arguments, env=env, **options) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, without_delays(err))


def await_ready(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    while count:
        line = process.stdout.readline()
        assert line, "it ended before it was ready"
        count -= line.endswith("ready\n")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ends right now
        return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def pids(folder: Path) -> list[int]:
    return [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()]


# What a rank finds.


def test_environment_is_the_one_of_torchrun() -> None:
    ours = launch("-n", 2, SCRIPTS / "launch/prints_environment.py")
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node=2"]
    with reserve_port() as holder:  # or it takes one that another program may have
        theirs = subprocess.run(
            [*torchrun, f"--master-port={holder.getsockname()[1]}", SCRIPTS / "launch/prints_environment.py"],
            env=environment({}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    found = {line.partition(": ")[2] for line in ours.stdout.splitlines()}
    assert (ours.returncode, ours.stderr, len(found)) == (0, "", 2)
    assert found == set(theirs.stdout.splitlines())


def test_a_reserved_port_is_given_to_no_program_at_another_address() -> None:
    """Rank 0 may bind it nevertheless, at one address or at all, as the store of torch does."""
    with reserve_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", port))
        for address in ("127.0.0.1", ""):
            with socket.socket() as store:
                store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                store.bind((address, port))
                store.listen()


def test_thread_settings_of_the_user_are_kept() -> None:
    run = launch("-n", 2, SCRIPTS / "launch/prints_environment.py", env={**LIGHT, "OMP_NUM_THREADS": "3"})
    assert run.stdout.count('"OMP_NUM_THREADS": "3"') == 2


def test_a_single_rank_has_no_thread_limit() -> None:
    run = launch("-n", 1, SCRIPTS / "launch/prints_environment.py")
    assert json.loads(run.stdout.removeprefix("0: "))["OMP_NUM_THREADS"] is None


def test_a_rank_looks_like_a_program_of_the_interpreter() -> None:
    run = launch("-n", 2, SCRIPTS / "launch/relies_on_the_interpreter.py", "-n", "3", "--help")
    assert (run.returncode, run.stderr) == (0, "")
    for rank in "01":
        said = [line[3:] for line in run.stdout.splitlines() if line.startswith(rank)]
        assert said == ["spawned [42]", "main done", "thread done", "atexit done"]


def test_module_with_arguments_of_its_own(tmp_path: Path) -> None:
    package = tmp_path / "parcel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import sys\nfrom . import __name__ as it\nprint(it, __spec__.name, sys.argv[1:], sys.path[0])\n"
    )
    run = launch("-n", 2, "-m", "parcel", "--help", "-n", cwd=tmp_path, env={**LIGHT, "PYTHONPATH": str(ROOT)})
    line = f"parcel parcel.__main__ ['--help', '-n'] {tmp_path}"
    assert sorted(run.stdout.splitlines()) == [f"0: {line}", f"1: {line}"]


def test_torch_distributed_gets_the_reserved_port() -> None:
    run = launch("-n", 2, SCRIPTS / "launch/sums_with_gloo.py", env={})
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0: sum 3 threads 1", "1: sum 3 threads 1"]


def test_forked_ranks_draw_different_random_numbers() -> None:
    run = launch("-n", 3, SCRIPTS / "launch/prints_a_draw.py", env={"ASYNCOLL_PRELOAD": "numpy"})
    assert len({line.partition(": ")[2] for line in run.stdout.splitlines()}) == 3, run.stderr


@pytest.mark.parametrize(
    ("preload", "how"),
    [("", "forked"), ("numpy", "forked"), ("import_with_a_thread", "afresh"), ("there_is_no_such_module", "afresh")],
)
def test_a_template_with_threads_or_a_failed_import_is_not_forked(preload: str, how: str) -> None:
    env = {"ASYNCOLL_PRELOAD": preload, "PYTHONPATH": str(SCRIPTS / "launch"), "OPENBLAS_NUM_THREADS": "2"}
    run = launch("-n", 2, SCRIPTS / "launch/prints_how_it_started.py", env=env)
    has_numpy = preload == "numpy"  # the launcher itself, and its template, start without
    assert sorted(run.stdout.splitlines()) == [f"{rank}: {how} __main__ {has_numpy} {rank}" for rank in range(2)]
    assert ("there_is_no_such_module" in run.stderr) == (preload == "there_is_no_such_module")


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0", "x.py"], "0 is not in the range"),
        (["-n", "-1", "x.py"], "-1 is not in the range"),
        (["-n", "x", "x.py"], "not a valid whole number"),
        (["-n", "2"], "Missing argument"),
        (["-n", "2", "nowhere.py"], "no such script: nowhere.py"),
        (["-n", "2", ""], "the name of the script is empty"),
        (["-n", "2", "tests"], "not a script: tests"),
        (["-n", "2", "-m", "nowhere.at.all"], "no module named nowhere"),
        (["-n", "2", "-m", "json.nowhere"], "no module named json.nowhere"),
        (["-n", "2", "-m", "asyncoll.launch"], "asyncoll.launch is a package without __main__"),
        (["-n", "2", "--log-dir", "/proc/nowhere", "tests/scripts/launch/prints_a_draw.py"], "cannot write logs"),
        (["-n", "2", "--timeout", "0", "x.py"], "0.0 is not in the range"),
        (["-n", "100000000", "tests/scripts/launch/prints_a_draw.py"], "open files"),
    ],
)
def test_impossible_jobs_are_refused(arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = CliRunner().invoke(main, ["launch", *arguments])
    assert (run.exit_code, run.stdout) == (2, "")
    assert complaint in " ".join(run.stderr.split())
    assert isinstance(run.exception, SystemExit)


def test_launch_function_refuses_impossible_jobs() -> None:
    with pytest.raises(UsageError, match="at least one rank"):
        launch_here(0, ["x.py"])
    with pytest.raises(UsageError, match="no such script"):
        launch_here(1, ["nowhere.py"])


def test_launch_function_returns_the_code_and_restores_the_handlers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCOLL_PRELOAD", "")
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch_here(2, [str(SCRIPTS / "launch/prints_environment.py")]) == 0
    assert launch_here(2, ["timeit", "--nonsense"], module=True) == 2
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert '0: {"RANK": "0"' in capfd.readouterr().out


# What is shown.


def test_output_of_any_bytes_and_lengths_is_complete(tmp_path: Path) -> None:
    run = launch("-n", 11, "--log-dir", tmp_path / "new" / "logs", SCRIPTS / "launch/prints_awkward_output.py")
    lines = run.stdout.splitlines()
    assert run.returncode == 0
    assert [line for line in lines if "no newline" in line].count("10: no newline") == 1
    assert " 0: binary \\xff\\xfe\x00 garbage" in lines
    assert " 0: carriage return and newline" in lines
    assert " 0: progress 100%" in lines
    assert sum(line.count("x") for line in lines if set(line[4:]) == {"x"}) == 200_000
    assert run.stderr == " 0: to stderr\n"
    assert (tmp_path / "new/logs/rank-10.out").read_bytes() == b"no newline"
    assert (tmp_path / "new/logs/rank-0.out").read_bytes().startswith(b"binary \xff\xfe\x00 garbage\n")
    assert (tmp_path / "new/logs/rank-0.err").read_bytes() == b"to stderr\n"


def test_colours_on_a_terminal_only() -> None:
    ours, terminal = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(terminal, "wb"):
        run = launch("-n", 1, SCRIPTS / "launch/prints_environment.py", stdout=terminal)
        assert run.returncode == 0
        assert screen.read(100).startswith(b"\x1b[36m0:\x1b[0m {")


@pytest.mark.parametrize(("no_color", "said"), [("", b"\x1b[1;31mrank 1 failed"), ("1", b"rank 1 failed")])
def test_the_line_that_names_the_failure_is_coloured_on_a_terminal(no_color: str, said: bytes) -> None:
    ours, terminal = pty.openpty()
    with open(ours, "rb", buffering=0) as screen, open(terminal, "wb"):
        environ = LIGHT | {"NO_COLOR": no_color}
        with start("-n", 2, SCRIPTS / "launch/ends_as_told.py", "status", stderr=terminal, env=environ) as process:
            assert process.wait(PATIENCE_S) == 7
        assert screen.read(1000).startswith(said)


def test_the_job_ends_when_its_output_is_no_longer_read() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = launch("-n", 2, SCRIPTS / "launch/ignores_signals.py", "SIGTERM", stdout=writer)
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def test_lines_of_a_progress_bar() -> None:
    lines = Lines()
    assert lines.feed(b"\r 1%", 0.0) == [b" 1%"]
    assert lines.feed(b"\r 2%", 0.5) == []
    assert lines.feed(b"\r 3%", 1.5) == [b" 3%"]
    assert lines.feed(b"\nnext\r\n\n", 1.6) == [b"next", b""]
    assert lines.feed(b"\r 4%", 1.7) == []
    assert lines.feed(b"\r 5%\nand", 1.8) == [b" 5%"]
    assert lines.end() == [b"and"]
    assert lines.end() == []


def test_lines_too_long_to_hold() -> None:
    lines = Lines()
    shown = lines.feed(b"x" * (2 * LINE_BYTES_MAX + 1), 0.0)
    assert [len(line) for line in shown] == [LINE_BYTES_MAX, LINE_BYTES_MAX]
    assert lines.end() == [b"x"]


# How a job fails.


ENDINGS = [
    ("raise", 1, ["rank 1 failed (exit code 1)", "Traceback", "ValueError: rank one is unwell"]),
    ("lingering", 1, ["rank 1 failed (exit code 1)", "ValueError: rank one is unwell"]),
    ("status", 7, ["rank 1 failed (exit code 7)"]),
    ("message", 1, ["rank 1 failed (exit code 1)", "rank one gives up"]),
    ("abrupt", 9, ["rank 1 failed (exit code 9)"]),
    ("kill", 137, ["rank 1 was killed by SIGKILL"]),
    ("crash", 139, ["rank 1 was killed by SIGSEGV", "Segmentation fault", "ends_as_told.py"]),
]


def at_once(act: Callable[..., None], cases: Sequence[tuple[object, ...]]) -> None:
    """Call `act` with each of the cases, in threads: for jobs that wait. The report of a failure names the case."""

    def run(values: tuple[object, ...]) -> None:
        with case(values=values):
            act(*values)

    with ThreadPoolExecutor(len(cases)) as pool:
        for ended in [pool.submit(run, values) for values in cases]:
            ended.result()


def test_a_failure_is_reported_once_and_stops_the_others(tmp_path: Path) -> None:
    """A lingering rank is killed after a while."""
    at_once(_is_reported, [(tmp_path / how, how, code, said) for how, code, said in ENDINGS])


def _is_reported(folder: Path, how: str, code: int, said: list[str]) -> None:
    run = launch("-n", 3, "--log-dir", folder, SCRIPTS / "launch/ends_as_told.py", how)
    assert run.returncode == code
    place = 0
    for words in said:
        place = run.stderr.index(words, place)
    assert run.stderr.endswith("\nranks 0, 2 were stopped because rank 1 failed\n")
    assert run.stderr.count("Traceback") == (how in ("raise", "lingering"))
    assert "asyncoll/launch" not in run.stderr or how == "crash"
    assert ("ValueError" in (folder / "rank-1.err").read_text()) == (how in ("raise", "lingering"))


def test_the_root_cause_is_reported_first_although_it_came_last() -> None:
    run = launch("-n", 3, SCRIPTS / "launch/fails_last.py")
    assert run.returncode == 1
    assert run.stderr.startswith("rank 2 failed (exit code 1)")
    assert run.stderr.count("Traceback") == 1
    assert "KeyError: 'the root of it all'" in run.stderr
    assert "rank 1 failed too: asyncoll.errors.AbortedError: rank 2 aborted: a rank gave up" in run.stderr


class Orders(list[tuple[int, list[int]]]):
    def __call__(self, signum: int, ranks: Sequence[int]) -> None:
        self.append((signum, list(ranks)))


def test_supervisor_waits_a_moment_for_the_blamed_rank() -> None:
    supervisor = Supervisor(3, 0.0, orders := Orders())
    supervisor.failed(Failure(0, 1, 1.0, blames=2))
    supervisor.tick(1.0 + SETTLE_S)
    assert (orders, supervisor.wake_at()) == ([], 1.0 + BLAME_S)
    supervisor.tick(1.0 + BLAME_S)
    assert orders == [(signal.SIGTERM, [1, 2])]
    assert supervisor.root is supervisor.failures[0]


def test_supervisor_takes_the_report_of_the_blamed_rank_also_when_it_comes_late() -> None:
    supervisor = Supervisor(3, 0.0, orders := Orders())
    supervisor.failed(Failure(0, 1, 1.0, blames=2))
    supervisor.tick(1.0 + BLAME_S)
    assert (orders, supervisor.stopped) == ([(signal.SIGTERM, [1, 2])], [1, 2])
    supervisor.failed(Failure(1, 1, 2.1, traceback="Traceback"))  # the signal has ended it
    supervisor.exited(2, -signal.SIGTERM, 2.1)
    assert supervisor.root is supervisor.failures[0]
    supervisor.failed(late := Failure(2, 1, 2.1, traceback="Traceback"))
    assert (supervisor.root, supervisor.stopped, list(supervisor.failures)) == (late, [1], [0, 2])


def test_supervisor_follows_chains_of_blamed_ranks() -> None:
    supervisor = Supervisor(4, 0.0, orders := Orders())
    supervisor.failed(Failure(0, 1, 1.0, blames=1))
    supervisor.failed(Failure(1, 1, 1.1, blames=2))
    supervisor.failed(Failure(2, 1, 1.2, blames=0))
    supervisor.tick(1.2)
    assert orders == [(signal.SIGTERM, [3])]
    assert supervisor.root is supervisor.failures[2]
    supervisor.tick(1.2 + STOP_GRACE_S)
    assert orders[1:] == [(signal.SIGKILL, [0, 1, 2, 3])]
    supervisor.tick(1.2 + STOP_GRACE_S + GIVE_UP_S)  # a host that has not done it is given up at the second order
    assert orders[2:] == orders[1:2]


def test_supervisor_takes_a_rank_killed_by_sigkill_for_the_root_cause() -> None:
    supervisor = Supervisor(3, 0.0, Orders())
    supervisor.failed(Failure(0, 1, 1.0, traceback="ConnectionResetError"))
    supervisor.exited(1, -signal.SIGKILL, 1.01)
    assert supervisor.root is supervisor.failures[1]


def test_a_rank_that_is_blamed_and_does_not_fail_is_the_root_cause() -> None:
    """It may be frozen. The first of the others is shown, which has failed only because of it."""
    supervisor = Supervisor(4, 0.0, Orders())
    lost = "asyncoll.errors.PeerLostError: rank 2 is gone: it has shown no sign of life"
    for rank in (1, 0):
        supervisor.failed(Failure(rank, 1, 1.0, traceback="Traceback\n", summary=lost, blames=2))
    supervisor.tick(1.0 + BLAME_S)
    assert list(explain(supervisor, [[]] * 4, {}, {})) == [
        f"rank 2 is the root cause, as the other ranks report: {lost}",
        "rank 1 failed (exit code 1) after 1.0 s:",
        "Traceback",
        f"rank 0 failed too: {lost}",
        "processes that had not ended yet were stopped: ranks 2, 3",
    ]


# How a job is stopped.


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_stop_signal_lets_ranks_finish(signum: signal.Signals, code: int, request: pytest.FixtureRequest) -> None:
    forwarded = "SIGINT" if signum == signal.SIGINT else "SIGTERM"
    # The launcher leaves a signal ignored that its parent ignores: `nohup make test` ignores SIGHUP.
    before = signal.signal(signum, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signum, before))
    with start("-n", 2, SCRIPTS / "launch/ignores_signals.py", forwarded) as process:
        await_ready(process, 2)
        process.send_signal(signum)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert sorted(out.splitlines()) == [f"{rank}: finished after {forwarded}" for rank in range(2)]
    assert err.startswith(signum.name)
    assert "Traceback" not in err


def check_suspends(folder: Path, *where: str, env: Mapping[str, str] = LIGHT) -> None:
    """Ctrl-Z stops a job of three ranks, and it goes on with the launcher."""
    with start(*where, SCRIPTS / "launch/calls_until_told_to_end.py", folder, env=env) as launcher:
        try:
            await_ready(launcher, 3)
            launcher.send_signal(signal.SIGTSTP)
            until(lambda: [state(pid) for pid in (launcher.pid, *pids(folder))] == ["T"] * 4)
            launcher.send_signal(signal.SIGCONT)
            (folder / "end").touch()
            assert launcher.wait(PATIENCE_S) == 0
        finally:
            launcher.kill()


def test_a_job_is_suspended_and_continued_with_its_launcher(tmp_path: Path) -> None:
    check_suspends(tmp_path, "-n", "3")


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    """As those of a daemon: at the launcher, and at a program without one."""
    program = [sys.executable, str(SCRIPTS / "launch/calls_until_told_to_end.py"), str(tmp_path)]
    (tmp_path / "end").touch()
    for command in ([*COMMAND, "-n", "2", *program[1:]], program):
        run = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
            env=environment(CALLS),
            cwd=ROOT,
            capture_output=True,
            timeout=PATIENCE_S,
        )
        assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("full", "other"), [("stdout", "stderr"), ("stderr", "stdout")])
def test_a_full_disk_for_its_output_does_not_end_a_job(full: str, other: str, tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    with open("/dev/full", "w") as sink:
        command = [*COMMAND, "-n", "2", str(SCRIPTS / "launch/calls_until_told_to_end.py"), str(tmp_path)]
        streams = {full: sink, other: subprocess.PIPE}
        run = subprocess.run(command, env=environment(LIGHT), cwd=ROOT, text=True, timeout=PATIENCE_S, **streams)
    assert run.returncode == 0
    said = "cannot be written (No space left on device)" if full == "stdout" else "0: ready"
    assert said in getattr(run, other)


def test_a_second_interrupt_kills_the_ranks() -> None:
    with start("-n", 2, SCRIPTS / "launch/ignores_signals.py") as process:
        assert process.stderr is not None
        await_ready(process, 2)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("SIGINT: the ranks get 10 s")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "killing the ranks\n")


def test_interrupt_while_the_template_loads() -> None:
    """The template sleeps in an import, so no rank exists."""
    with start(
        "-n",
        2,
        SCRIPTS / "launch/ignores_signals.py",
        env={"ASYNCOLL_PRELOAD": "import_without_end", "PYTHONPATH": str(SCRIPTS / "launch")},
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "SIGINT: no rank has started\n")


# What becomes of a rank that is stopped when every other rank has ended.


def test_a_rank_that_stays_stopped_when_every_other_rank_has_returned_normally_is_ended(tmp_path: Path) -> None:
    """It is lost; or late, without a limit of freezing, or with a long one. One that continues in time is not ended."""
    stays = [(_ends_a_stopped_rank, "2"), (_ends_a_stopped_rank, "0", 1), (_ends_a_stopped_rank, "3600", 1)]
    continues = [
        (_spares_a_rank_that_continues, tmp_path / "long", f"{PATIENCE_S}", "the launcher ends it"),
        (_spares_a_rank_that_continues, tmp_path / "for ever", "0", "the launcher waits"),
    ]
    at_once(lambda act, *values: act(*values), [*stays, *continues])


def _ends_a_stopped_rank(freeze_s: str, *deadline_s: int) -> None:
    env = {**CALLS, "ASYNCOLL_FREEZE_S": freeze_s, "ASYNCOLL_STOPPED_S": "1"}
    run = launch("-n", 3, SCRIPTS / "launch/returns_after_errors.py", *deadline_s, env=env)
    pid = next(line.removeprefix("1: stops as ") for line in run.stdout.splitlines() if line.startswith("1: "))
    told, *_, verdict, remedy = run.stderr.splitlines()
    assert run.returncode == 128 + signal.SIGSTOP
    assert sorted(run.stdout.splitlines()) == ["0: caught it", f"1: stops as {pid}", "2: caught it"]
    assert told == (
        f"rank 1 (pid {pid}) is stopped and every other rank has ended: the launcher ends it after 1 s "
        f"(ASYNCOLL_STOPPED_S). To continue it: kill -CONT {pid}"
    )
    assert verdict.startswith(f"rank 1 (pid {pid}) was stopped by a signal (SIGSTOP, say), and the launcher ended it")
    assert "kill -CONT" in remedy
    assert "ASYNCOLL_STOPPED_S" in remedy
    assert not runs(int(pid))


def _spares_a_rank_that_continues(path: Path, stopped_s: str, end: str) -> None:
    env = {**LIGHT, "ASYNCOLL_STOPPED_S": stopped_s}
    with start("-n", 3, SCRIPTS / "launch/stops_itself.py", path, env=env) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        pid = int(path.read_text())
        os.kill(pid, signal.SIGCONT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert said.startswith(f"rank 1 (pid {pid}) is stopped and every other rank has ended: {end}")
    assert (process.returncode, out, err) == (0, "1: it went on\n", "")


def test_supervisor_ends_a_stopped_rank_when_every_other_rank_has_ended() -> None:
    supervisor = Supervisor(3, 0.0, orders := Orders(), stopped_grace_s=3.0)
    assert supervisor.looked({0: "S", 1: "T", 2: "S"}, 0.5) == []
    supervisor.exited(0, 0, 1.0)
    supervisor.exited(2, 0, 1.0)
    assert supervisor.looked({1: "T"}, 2.0) == []  # it may be continued right now
    assert supervisor.looked({1: "T"}, 3.0) == [1]  # the user hears of it
    assert supervisor.looked({1: "T"}, 4.0) == []  # once
    supervisor.tick(4.0)
    assert (supervisor.root, orders) == (None, [])
    assert supervisor.looked({1: "T"}, 5.0) == []
    assert supervisor.root == Failure(1, -signal.SIGSTOP, 5.0)
    supervisor.tick(5.0 + SETTLE_S)
    supervisor.tick(5.0 + SETTLE_S + STOP_GRACE_S)
    assert orders == [(signal.SIGTERM, [1]), (signal.SIGKILL, [1])]
    supervisor.exited(1, -signal.SIGKILL, 11.0)
    assert supervisor.root.exit_code == 128 + signal.SIGSTOP


def test_supervisor_says_that_a_rank_is_stopped_before_it_ends_it() -> None:
    supervisor = Supervisor(2, 0.0, Orders(), stopped_grace_s=0.1)
    supervisor.exited(0, 0, 0.0)
    assert [supervisor.looked({1: "T"}, now) for now in (1.0, 2.0)] == [[], [1]]
    assert not supervisor.failures
    supervisor.looked({1: "T"}, 3.0)
    assert list(supervisor.failures) == [1]


def test_supervisor_gives_a_rank_that_continued_a_new_grace_period() -> None:
    supervisor = Supervisor(2, 0.0, Orders(), stopped_grace_s=2.0)
    supervisor.exited(0, 0, 0.0)
    assert [supervisor.looked({1: state}, now) for now, state in enumerate("TTRTT", 1)] == [[], [1], [], [], [1]]
    assert not supervisor.failures
    supervisor.looked({1: "T"}, 6.0)
    assert list(supervisor.failures) == [1]


def test_supervisor_gives_a_new_grace_period_after_the_launcher_was_stopped_too() -> None:
    """Ctrl-Z stops the launcher, a batch system stops the whole job; ranks may continue a little later."""
    supervisor = Supervisor(2, 0.0, Orders(), stopped_grace_s=2.0)
    supervisor.exited(0, 0, 0.0)
    assert [supervisor.looked({1: "T"}, now) for now in (1.0, 2.0)] == [[], [1]]
    later = 2.0 + LOOK_GAP_MAX_S + 0.1
    assert [supervisor.looked({1: "T"}, later + passed) for passed in (0.0, 1.0)] == [[], [1]]
    assert not supervisor.failures
    supervisor.looked({1: "T"}, later + 2.0)
    assert list(supervisor.failures) == [1]


@pytest.mark.parametrize(
    ("size", "ended", "states"),
    [
        pytest.param(1, [], {0: "T"}, id="it is the only rank of the job"),
        pytest.param(2, [], {0: "T", 1: "T"}, id="all ranks are stopped, none has ended"),
        pytest.param(3, [0], {1: "T", 2: "S"}, id="another rank runs"),
        pytest.param(3, [0], {1: "T"}, id="another rank is not forked yet"),
        pytest.param(2, [0], {1: "t"}, id="a debugger has stopped it"),
        pytest.param(3, [0], {1: "T", 2: "t"}, id="a debugger has stopped another one"),
        pytest.param(2, [0], {1: "D"}, id="it waits for a disk"),
        pytest.param(2, [0], {1: ""}, id="it is gone, and the news of it is on its way"),
    ],
)
def test_supervisor_leaves_a_stopped_rank_alone(size: int, ended: list[int], states: dict[int, str]) -> None:
    supervisor = Supervisor(size, 0.0, orders := Orders())
    for rank in ended:
        supervisor.exited(rank, 0, 0.0)
    for now in range(100):
        assert supervisor.looked(states, now) == []
        supervisor.tick(now)
    assert (supervisor.failures, orders) == ({}, [])


def test_supervisor_leaves_stopped_ranks_to_the_end_of_a_job_that_has_failed() -> None:
    supervisor = Supervisor(3, 0.0, orders := Orders())
    supervisor.exited(0, 0, 0.0)
    supervisor.exited(2, 7, 0.0)
    assert [supervisor.looked({1: "T"}, now) for now in range(20)] == [[]] * 20
    supervisor.tick(20.0)
    assert (list(supervisor.failures), orders[:1]) == ([2], [(signal.SIGTERM, [1])])


def test_supervisor_waits_for_ever_if_it_is_told_to() -> None:
    supervisor = Supervisor(2, 0.0, Orders(), stopped_grace_s=stopped_grace_s({"ASYNCOLL_STOPPED_S": "0"}))
    supervisor.exited(0, 0, 0.0)
    assert [now for now in range(1000) if supervisor.looked({1: "T"}, now)] == [1]
    assert not supervisor.failures


def test_verdict_on_ranks_that_were_left_stopped() -> None:
    pids = {0: 10, 1: 11, 2: 12}
    supervisor = Supervisor(3, 0.0, Orders(), stopped_grace_s=1.0)
    supervisor.exited(1, 0, 0.0)
    assert [supervisor.looked({0: "T", 2: "T"}, now) for now in (0.5, 1.0, 2.0)] == [[], [0, 2], []]
    assert list(explain(supervisor, [[]] * 3, pids, {})) == [
        "ranks 0 (pid 10), 2 (pid 12) were stopped by a signal (SIGSTOP, say), and the launcher ended them after 2.0 s"
        ": every other rank had ended, and they did not continue within 1 s",
        "find out who sent the signal; if that was intended, continue a stopped rank in time (kill -CONT PID), "
        "or set ASYNCOLL_STOPPED_S to more seconds (0: the launcher waits for ever)",
    ]
    assert tell_stopped([0, 2], pids, float("inf"), {}) == (
        "ranks 0 (pid 10), 2 (pid 12) are stopped and every other rank has ended: the launcher waits. "
        "To end them: kill -KILL 10 12. To continue them: kill -CONT 10 12"
    )


def test_grace_of_stopped_ranks_is_read_from_the_environment() -> None:
    assert stopped_grace_s({}) == stopped_grace_s({"ASYNCOLL_STOPPED_S": ""}) == STOPPED_GRACE_S
    assert stopped_grace_s({"ASYNCOLL_STOPPED_S": "0.5"}) == 0.5
    for text in ("-1", "nan", "inf", "soon"):
        with pytest.raises(UsageError, match=f"ASYNCOLL_STOPPED_S='{text}' in the environment: give a number"):
            stopped_grace_s({"ASYNCOLL_STOPPED_S": text})


def test_a_job_with_a_wrong_grace_of_stopped_ranks_is_refused() -> None:
    run = launch("-n", 2, SCRIPTS / "launch/prints_environment.py", env={**LIGHT, "ASYNCOLL_STOPPED_S": "soon"})
    assert (run.returncode, run.stdout) == (2, "")
    assert "ASYNCOLL_STOPPED_S='soon'" in run.stderr


def test_timeout() -> None:
    run = launch("-n", 2, "--timeout", "0.5", SCRIPTS / "launch/ignores_signals.py", "SIGTERM")
    assert run.returncode == 124
    assert run.stderr == "the job ran into its timeout of 0.5 s; ranks 0, 1 were still running\n"


# What is left behind: nothing.


@pytest.mark.parametrize("victim", ["launcher", "template"])
def test_killed_launcher_or_template_leaves_nothing(victim: str, tmp_path: Path) -> None:
    # Of a template that was killed nobody inherits the orphans: what is known of them is the rank's group.
    apart = "apart" if victim == "launcher" else ""
    with start("-n", 2, SCRIPTS / "launch/starts_a_child.py", tmp_path, apart) as process:
        await_ready(process, 2)
        template, rendezvous = int((tmp_path / "template").read_text()), (tmp_path / "rendezvous").read_text()
        assert os.stat(rendezvous).st_mode & 0o777 == 0o700
        assert os.stat(f"{rendezvous}/job").st_mode & 0o777 == 0o600
        assert os.path.getsize(f"{rendezvous}/job") == KEY_BYTES
        os.kill(process.pid if victim == "launcher" else template, signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert len(pids(tmp_path)) == 4
    until(lambda: not any(map(runs, [template, *pids(tmp_path)])))
    until(lambda: not os.path.exists(rendezvous))
    if victim == "template":
        assert process.returncode == 1
        assert "the process that starts the ranks died (killed by SIGKILL)" in err


@pytest.mark.parametrize("leave", [True, False])
def test_grandchildren_end_with_the_job(leave: bool, tmp_path: Path) -> None:
    with start("-n", 2, SCRIPTS / "launch/starts_a_child.py", tmp_path, "apart", "leave" if leave else "") as process:
        await_ready(process, 2)
        if not leave:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (0 if leave else 143)
    assert len(pids(tmp_path)) == 4
    assert not any(map(runs, pids(tmp_path)))
    assert not os.path.exists((tmp_path / "rendezvous").read_text())


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_rank_that_raises_with_a_call_under_way_prints_only_that_error(transport):
    done = launch("-n", 3, "--transport", transport, SCRIPTS / "launch/raises_during_a_call.py", env=CALLS)
    assert done.returncode == 1
    assert not [line for line in done.stderr.splitlines() if line.startswith("1:")]
    assert "RuntimeError: enough" in done.stderr


def test_a_template_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check for leaks after each test finds the process otherwise."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = children()  # of other tests
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        launch_here(1, [str(SCRIPTS / "world/joins_three_worlds.py")])
    assert children() == before
