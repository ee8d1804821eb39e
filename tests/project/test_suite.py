"""The suite itself: no test waits for ever, whatever it waits for, and nothing survives one that has tried to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.processes import PATIENCE_S

HANGS = """
import signal, subprocess, sys, threading

def test_that_leaves_a_thread():
    threading.Thread(target=threading.Event().wait).start()

def test_that_hangs():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(child.pid, file=sys.__stderr__, flush=True)
    child.wait()
"""


def run_hanging(folder, test):
    """Run this test of HANGS, with SIGINT ignored, as by `nohup` and in background jobs of a shell."""
    (folder / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "tests.conftest", "-s"]
    run = subprocess.run(
        ["env", "--ignore-signal=INT", *command, "-o", "faulthandler_timeout=2", folder, "-k", test],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (run.returncode, "Timeout" in run.stderr) == (1, True), run
    return run


@pytest.mark.slow
def test_a_thread_that_does_not_end_fails_its_test_and_ends_with_the_suite(tmp_path):
    run = run_hanging(tmp_path, "test_that_leaves_a_thread")
    assert "the test leaked" in run.stdout, run
    assert "in _shutdown" in run.stderr, run


@pytest.mark.slow
def test_a_test_that_hangs_fails_with_stacks_and_leaves_no_process(tmp_path):
    run = run_hanging(tmp_path, "test_that_hangs")
    assert "in test_that_hangs" in run.stderr, run
    child = int(next(line for line in run.stderr.splitlines() if line.isdigit()))
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline, f"{child} survives"
        time.sleep(0.01)


WAITS = """
import subprocess, sys, threading

print("waits in", file=sys.stderr, flush=True)
subprocess.Popen(["sleep", "1000"])  # which holds the output
print("waiting", flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_forked_rank_that_does_not_end_is_a_failure_with_what_its_world_has_printed(forked_world, tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    ranks = forked_world({}, 2, script)
    for rank in ranks:
        assert rank.stdout.readline() == "waiting\n"
    for rank in ranks:
        with pytest.raises(
            pytest.fail.Exception, match=r"has not ended in 0.1 s(?s:.*)rank 0: waits(?s:.*)rank 1: waits"
        ):
            rank.end(patience_s=0.1)
        assert rank.returncode == -signal.SIGKILL
