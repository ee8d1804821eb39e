"""Waits for the end of a pytest process, and kills what it has started and left: `reaper.py PID`.

A test that hangs ends its pytest process at once, without any teardown (`faulthandler_exit_on_timeout`). Processes of
the tests are known by the variable TEST_PROCESS in their environment. They may be in any session or process group.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path


def left(pid: int) -> list[int]:
    mark, found = f"TEST_PROCESS={pid}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def reap(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    for _ in range(100):  # they may start others meanwhile
        for process in left(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        if not left(pid):
            return


if not os.fork():  # no child of pytest, where tests count them
    reap(int(sys.argv[1]))
