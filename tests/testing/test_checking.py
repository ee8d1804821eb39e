"""Processes that check; Ctrl-C in commands that take long: exit code 130, what is done, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncoll import UsageError
from asyncoll.testing.checking import answers
from tests.support.processes import LIGHT, PATIENCE_S, processes_with

A_STEP_IS_DONE = re.compile(rb"[1-9]\d*/\d+")  # in a bar
COMMANDS = {  # and what they print when at least one step is done
    "laws --kind solo,dense --seeds 100000 --jobs 2": r"solo +\d+ worlds .* all laws hold",
    "laws --kind solo --seeds 100000 --jobs 1 --transport shm-processes --json": '"kind": "solo", "worlds": ',
    "faults --cells raise/*/after -n 2 --seeds 1000 --jobs 2": r"(?s)median/max in ms.*\d+ cells, \d+ broken, \d+ late",
    "faults --cells gil/allreduce/after -n 2 --seeds 1000 --json": '"kind": "gil"',
    "bench allreduce --sizes 4:100M": r"(?s)size \(B\).*\n +4 +1 +float32",
    "bench solo --iterations 50 --skew 10ms --sizes 4:16M --transport inproc": r"(?s)mean wait.*\n +4 +full",
    "bench suite --quick --claim waiting --claim training": "A late rank costs microseconds: solo, times less: ",
}
PROCESSES_OF_TRAINING = 7  # a keeper, a launcher, a template and four ranks


@contextlib.contextmanager
def bar_of(command: str, environ: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, and the other end of the terminal that is its stderr."""
    ours, its = pty.openpty()
    words = [sys.executable, "-m", "asyncoll", *command.split()]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=its, env=os.environ | environ, text=True, start_new_session=True
    )
    os.close(its)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def shown(terminal: int) -> bytes:
    """What comes next on the terminal; empty if its other end is closed."""
    with contextlib.suppress(OSError):
        return os.read(terminal, 4096)
    return b""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_prints_what_is_done_and_leaves_nothing(command: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # its path is shorter than that of `tmp_path`: sockets are in it
        memory = {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")}
        environ = LIGHT | {"TMPDIR": folder, "TERM": "xterm"}
        with bar_of(command, environ) as (process, terminal):
            told = b""
            while not A_STEP_IS_DONE.search(told):
                more = shown(terminal)
                assert more, told
                told += more
            os.killpg(process.pid, signal.SIGINT)
            while more := shown(terminal):
                told += more
            out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130, told
        assert re.search(COMMANDS[command], out), out
        assert re.search(rb"interrupted: \d+ of \d+ done", told)
        assert b"Traceback" not in told
        assert (os.listdir(folder), processes_with(folder)) == ([], [])
        assert {name for name in os.listdir("/dev/shm") if name.startswith("asyncoll")} <= memory
        if "--json" in command:
            assert all(map(json.loads, out.splitlines()))


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_of_a_measurement() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environ = LIGHT | {"TMPDIR": folder, "TERM": "xterm"}
        with bar_of("bench suite --quick --claim training", environ) as (process, terminal):
            told = b""
            while sum("late_ranks" in line for line in processes_with(folder)) < PROCESSES_OF_TRAINING:
                more = shown(terminal)  # a bar shows the time, again and again
                assert more, told
                told += more
            os.killpg(process.pid, signal.SIGINT)
            while more := shown(terminal):
                told += more
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert b"interrupted: 0 of 1 done" in told
        assert (os.listdir(folder), processes_with(folder)) == ([], [])


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environ = LIGHT | {"TMPDIR": folder, "TERM": "xterm"}
        with bar_of("laws --kind solo --seeds 100000 --jobs 2", environ) as (process, terminal):
            told = b""
            while not A_STEP_IS_DONE.search(told):
                told += shown(terminal)
            keepers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            ends = [os.pidfd_open(int(keeper)) for keeper in keepers]
            process.kill()
            process.communicate()
            for end in ends:
                select.select([end], [], [], PATIENCE_S)
                os.close(end)
        assert (os.listdir(folder), processes_with(folder)) == ([], [])


WORKER = """
import os
from asyncoll import UsageError
from asyncoll.testing.checking import serve

def work(question):
    print("seen on stderr")
    if question == "end":
        os._exit(3)
    if question == "refuse":
        raise UsageError("not this one")
    return [question]

serve(work)
"""


def test_questions_are_answered_refused_or_left_by_a_process_that_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker_of_a_test.py").write_text(WORKER)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert sorted(answers("worker_of_a_test", range(5), 2, environ)) == [[each] for each in range(5)]
    assert capfd.readouterr().err.count("seen on stderr") == 5
    with pytest.raises(UsageError, match="not this one"):
        list(answers("worker_of_a_test", ["refuse"], 1, environ))
    with pytest.raises(SystemExit, match="Error: a process that checks has ended with exit code 3"):
        list(answers("worker_of_a_test", ["end"], 1, environ))
