"""The descendants of a process: settings of Linux that Python has no functions for."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

from asyncoll.transport.processes import status
from asyncoll.transport.system_calls import needed

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, a descendant whose parent dies becomes a child of this process, not of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as `parent` is dead, also if it is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_descendants() -> None:
    """Kill every descendant of this process, and wait until all are gone. Needs `adopt_orphans` first."""
    while True:
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:  # each look for children reads the states of all processes
                pass
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with needed("prctl"):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl({option})")


def children() -> list[int]:
    """The pids of this process's children."""
    entries = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in entries if status(pid)[1:2] == [str(os.getpid())]]
