"""The pages of a memfd: provided by the kernel in advance, within the memory that is left, and returned to the host.

A write to a page of a memfd that the kernel cannot provide kills the process, with SIGBUS or by the out-of-memory
killer. This module makes that a UsageError at the allocation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from asyncoll.errors import UsageError

_LARGE = 1 << 20  # bytes of a block from which on it is checked against the memory left, and given back when freed
_PIECE = 1 << 26  # bytes of one fallocate call; a signal makes the kernel undo all of a call, and the call starts again
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
_punch = ctypes.CDLL(None).fallocate  # CDLL releases the GIL during the call
_punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]


def commit(memory: int, offset: int, nbytes: int) -> None:
    """Make the kernel provide these pages now, so that no access to them fails later.

    Raises UsageError if the kernel cannot.
    """
    try:
        for start in range(offset, offset + nbytes, _PIECE):
            if start > offset:
                # Other ranks may have allocated memory since.
                check_room(min(_PIECE, offset + nbytes - start))
            os.posix_fallocate(memory, start, min(_PIECE, offset + nbytes - start))
    except OSError as error:
        raise too_much(nbytes, f"the kernel says {error.strerror!r}") from error


def give_back(memory: int, offset: int, nbytes: int) -> None:
    """Return the pages of a large block to the host. A file system that does not support this keeps them."""
    if nbytes >= _LARGE:
        _punch(memory, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)


def too_much(nbytes: int, why: str) -> UsageError:
    """The error of an allocation that fails."""
    return UsageError(
        f"cannot allocate {mib(nbytes)} of memory that the ranks of this host share: {why}; use smaller tensors, "
        "fewer ranks on this host or more memory, or start with --transport zmq"
    )


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def check_room(nbytes: int) -> None:
    """Raise UsageError if a large allocation exceeds the memory left: the kernel might kill a process to provide it."""
    if nbytes < _LARGE:
        return
    left, where = _left()
    if nbytes > left:
        raise too_much(nbytes, f"{where} has {mib(left)} left")


def _left() -> tuple[int, str]:
    """The bytes left, and the name of the limit: the host, or that control group of this process that has the least."""
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    host = int(known["MemAvailable"].split()[0]) * 1024
    return min([(host, "this host"), *_left_in_groups()])


def _left_in_groups(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, str]]:
    """The bytes left in each control group of this process, from its own up to the root, for cgroup v1 and v2.

    A container sees its own group as the root.
    """
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", _V1) if controllers else (root, _V2)
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                # The group may not be visible here, or have no limit.
                with contextlib.suppress(OSError, LookupError, ValueError):
                    yield _left_in_group(folder, *files), f"the control group {folder}"


# The files of the limit and of the use, and the fields of memory.stat for cached files.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def _left_in_group(folder: Path, limit: str, usage: str, *reclaimable: str) -> int:
    """The bytes left in one group. The kernel counts cached files as used, but reclaims them on demand."""
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(statistics[name]) for name in reclaimable)
    return int((folder / limit).read_text()) - int((folder / usage).read_text()) + cached
