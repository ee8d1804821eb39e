"""Pages of a memfd: taken before they are touched, refused before the kernel kills for them, given back to the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from asyncoll.errors import UsageError

_LARGE = 1 << 20  # a block from here on is checked against what is left, and given back when it is freed
_PIECE = 1 << 26  # is allocated at once: a signal makes the kernel undo all of such a piece and begin again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_punch = ctypes.CDLL(None).fallocate  # lets go of the GIL
_punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


def commit(memory: int, offset: int, nbytes: int) -> None:
    """Make the kernel provide the pages now, so that whoever touches them is never killed for it.

    Raises UsageError if it cannot.
    """
    try:
        for start in range(offset, offset + nbytes, _PIECE):
            if start > offset:
                check_room(min(_PIECE, offset + nbytes - start))  # other ranks take memory at the same time
            os.posix_fallocate(memory, start, min(_PIECE, offset + nbytes - start))
    except OSError as error:
        raise too_much(nbytes, f"the kernel says {error.strerror!r}") from error


def give_back(memory: int, offset: int, nbytes: int) -> None:
    """To the host, if it is much. A file system that cannot do it keeps the pages."""
    if nbytes >= _LARGE:
        _punch(memory, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)


def too_much(nbytes: int, why: str) -> UsageError:
    return UsageError(
        f"cannot allocate {mib(nbytes)} of memory that the ranks of this host share: {why}; use smaller tensors, "
        "fewer ranks on this host or more memory, or start with --transport zmq"
    )


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def check_room(nbytes: int) -> None:
    """Raises UsageError if much is asked for and not left: the kernel might kill a process to provide it."""
    if nbytes < _LARGE:
        return
    left, where = _left()
    if nbytes > left:
        raise too_much(nbytes, f"{where} has {mib(left)} left")


def _left() -> tuple[int, str]:
    """The bytes that the host and our control groups have left, and which of them has the least."""
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    host = int(known["MemAvailable"].split()[0]) * 1024
    return min([(host, "this host"), *_left_in_groups()])


def _left_in_groups(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, str]]:
    """In either version of the interface, from our group up to the root; a container sees its own as the root."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", _V1) if controllers else (root, _V2)
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                with contextlib.suppress(OSError, LookupError, ValueError):  # no such group here, or no limit
                    yield _left_in_group(folder, *files), f"the control group {folder}"


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def _left_in_group(folder: Path, limit: str, usage: str, *reclaimable: str) -> int:
    """Cached files count as used, but give way."""
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(statistics[name]) for name in reclaimable)
    return int((folder / limit).read_text()) - int((folder / usage).read_text()) + cached
