"""What the kernel says of a process, or a thread, of this host, and allows this one."""

import contextlib
import os
import resource
from pathlib import Path


def is_gone(number: int) -> bool:
    """Whether it has ended, be it that nobody has taken note of its end."""
    return _state_of(number) in ("", "Z", "X")


def is_stopped(number: int) -> bool:
    """Whether it has been stopped, as by SIGSTOP or a debugger."""
    return _state_of(number) in ("T", "t")


def _state_of(number: int) -> str:
    """The letter that ps shows; empty if there is none of that number."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def allow_files(count: int) -> int | None:
    """See to it that this process may open so many more files. Returns its limit if it may not, else None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return None
    return soft if hard >= needed or hard == resource.RLIM_INFINITY else hard
