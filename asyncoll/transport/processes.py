"""Queries to the kernel: the state of processes and threads of this host, and the file limit of this process."""

import contextlib
import os
import resource
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asyncoll.errors import UsageError

WITHOUT_PROC = "a rank needs /proc, which shows processes: mount it (mount -t proc proc /proc)"
# Fields of /proc/NUMBER/stat, counted from the state on, and bits in them.
_FLAGS = 6  # of the kernel's main thread of the process
_EXITING = 4  # PF_EXITING: set before the kernel releases the locks of the thread
_SIGNALS = 28  # pending for that thread: the end of a process sends SIGKILL to each of its threads
_KILL_PENDING = 1 << (signal.SIGKILL - 1)


def is_gone(number: int) -> bool:
    """Whether the process or thread `number` has ended. A zombie has."""
    return state(number) in ("", "Z", "X")


def kill(process: int, number: int, patience_s: float) -> bool:
    """Kill a process, by its pidfd and its number, and wait for its end, for a limited time. Returns whether it ends.

    One that a debugger traces is left alone.
    """
    if is_traced(number):
        return False
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:  # it has ended
        return True
    except PermissionError:
        return False
    ending = select.poll()  # not `select.select`, which takes no descriptor above 1023
    ending.register(process, select.POLLIN)
    return bool(ending.poll(round(1000 * patience_s)))


def is_traced(number: int) -> bool:
    """Whether a debugger traces the process `number`."""
    try:
        lines = Path(f"/proc/{number}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


def is_ending(number: int) -> bool:
    """Whether the process `number` has ended or cannot escape its end: the kernel ends it, or SIGKILL is pending."""
    fields = status(number)
    if len(fields) <= _SIGNALS or fields[0] in "ZX":
        return True
    return bool(int(fields[_FLAGS]) & _EXITING or int(fields[_SIGNALS]) & _KILL_PENDING)


def has_thread(process: int, thread: int) -> bool:
    """Whether `thread` is one of the threads of `process`."""
    return os.path.exists(f"/proc/{process}/task/{thread}")


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
    # The name before it, in parentheses, may contain anything.
    return stat.rpartition(")")[2].split()


class Thread(NamedTuple):
    """What the kernel shows of a thread at one moment."""

    state: str  # as ps shows it: "R" if it runs, or waits for a processor
    switches: tuple[str, ...]  # how often it has left a processor, on its own account and not


def threads(pid: int) -> dict[int, Thread]:
    """The threads of the process `pid` by number; empty if it is gone, or cannot be seen from here."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/task"):
            # This thread may have ended since the folder was listed.
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{entry}/status").read_text(errors="replace")
                fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
                switches = tuple(value for name, value in fields.items() if name.endswith("_ctxt_switches"))
                found[int(entry)] = Thread(fields["State"].split()[0], switches)
    return found


def runnable_s() -> float:
    """The seconds that the threads of this process have computed, or waited for a core, added up."""
    total_ns = 0
    for schedstat in Path("/proc/self/task").glob("*/schedstat"):
        # This thread may have ended since the folder was listed.
        with contextlib.suppress(OSError):
            running, waiting, _ = schedstat.read_text().split()
            total_ns += int(running) + int(waiting)
    return total_ns / 1e9


def is_frozen(before: Mapping[int, Thread], after: Mapping[int, Thread], *, woken: bool) -> bool:
    """Whether a process that gives no answer cannot run: `before` and `after` are its threads at two moments.

    It is stopped, by a signal or by a debugger; or none of its threads has run between the moments, nor waits for a
    processor, although it has been `woken` meanwhile, as with the freezer of a container. Otherwise it is slow. A
    process that cannot be seen counts as frozen: nothing speaks for it.
    """
    if all(thread.state in ("T", "t") for thread in after.values()):
        return True
    has_moved = any(thread.state == "R" or before.get(number) != thread for number, thread in after.items())
    return woken and not has_moved


def allow_files(count: int) -> int | None:
    """Raise the limit of open files so that this process may open `count` more.

    Returns None on success, and otherwise the limit that this process cannot exceed. Raises UsageError without /proc.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + count
    except FileNotFoundError:
        raise UsageError(WITHOUT_PROC) from None
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
            return None
    return soft if hard >= needed or hard == resource.RLIM_INFINITY else hard
