"""Queries to the kernel: the state of processes and threads of this host, and the file limit of this process."""

import contextlib
import os
import resource
from pathlib import Path


def is_gone(number: int) -> bool:
    """Whether the process or thread `number` has ended. A zombie has."""
    return state(number) in ("", "Z", "X")


def is_stopped(number: int) -> bool:
    """Whether the process or thread `number` is stopped, by SIGSTOP or by a debugger."""
    return state(number) in ("T", "t")


def state(number: int) -> str:
    """The state, as ps shows it: "T" if a signal has stopped the process, "t" if a debugger has. Empty if gone."""
    return "".join(status(number)[:1])


def status(number: int) -> list[str]:
    """The fields of /proc/NUMBER/stat from the state on: state, parent and so on; empty if the process is gone."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()  # the name before it, in parentheses, may contain anything


def allow_files(count: int) -> int | None:
    """Raise the limit of open files so that this process may open `count` more.

    Returns None on success, and otherwise the limit that this process cannot exceed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return None
    return soft if hard >= needed or hard == resource.RLIM_INFINITY else hard
