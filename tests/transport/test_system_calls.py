"""Programs in containers and sandboxes that refuse system calls: older ones than what asyncoll stands on allow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.places import SCRIPTS
from tests.support.processes import LIGHT, PATIENCE_S

LAUNCH = (sys.executable, "-m", "asyncoll", "launch", "-n", "2")
REPLACED = (
    "pidfd_open",
    "pidfd_send_signal",
    "memfd_create",
    "process_vm_readv",
    "io_uring_setup",
    "signalfd4",
)
NOTEBOOK = """
import numpy as np
import asyncoll.notebook

async def main(comm):
    x = np.full(1, comm.rank + 1.0)
    await comm.allreduce(x)
    return float(x[0])

print(asyncoll.notebook.run(main, ranks=2))
"""


def run_refusing(error: str, calls: tuple[str, ...], *command: object) -> subprocess.CompletedProcess[str]:
    refusing = [sys.executable, SCRIPTS / "transport/with_refused_system_calls.py", error, *calls, "--"]
    if subprocess.run([*refusing, "true"], capture_output=True, check=False, timeout=PATIENCE_S).returncode:
        pytest.skip("this system gives processes no seccomp filter")
    return subprocess.run(
        [*refusing, *command], env=os.environ | LIGHT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_calls_that_others_replace_may_be_refused(error):
    done = run_refusing(error, REPLACED, *LAUNCH, SCRIPTS / "world/joins_three_worlds.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: three worlds", "1: three worlds"]
    assert done.stderr == ""


def test_a_notebook_needs_none_of_them_either():
    done = run_refusing("EPERM", REPLACED, sys.executable, "-c", NOTEBOOK)
    assert (done.returncode, done.stdout) == (0, "[3.0, 3.0]\n"), done.stderr


@pytest.mark.parametrize("call", ["timerfd_create", "eventfd2", "prctl"])
@pytest.mark.parametrize(("error", "text"), [("EPERM", "Operation not permitted"), ("ENOSYS", "not implemented")])
def test_what_nothing_replaces_is_named_with_what_to_do(call, error, text):
    done = run_refusing(error, (call,), *LAUNCH, SCRIPTS / "world/joins_three_worlds.py")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "the system refuses" in line and "failed too" not in line][
        -1:
    ]
    assert "UsageError" in line
    assert call in line
    assert text in line
    assert "allow it in the seccomp profile of the container" in line
