"""The folder for the sockets by which the ranks of one host meet, if no launcher has made one.

The process that makes it has it locked. The kernel ends the lock with the process, so a folder without a lock is one
that a killed process has left, and the next world of this user on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncoll.errors import UsageError

_PREFIX = "asyncoll-join-"


@contextlib.contextmanager
def meeting_folder() -> Iterator[Path]:
    """A folder that only this user can enter, until the end of this context. Removes those of killed processes."""
    for left in temporary_folder().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as lock:  # locked, another user's, or gone meanwhile
            lock.callback(os.close, _locked(left))
            shutil.rmtree(left)
    with contextlib.ExitStack() as lock:
        folder, descriptor = _made()
        lock.callback(os.close, descriptor)
        lock.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def temporary_folder() -> Path:
    """The folder for temporary files, as TMPDIR has it. Raises UsageError if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise _no_room(str(error.strerror)) from None


def _no_room(reason: str) -> UsageError:
    return UsageError(
        f"the ranks of a host meet in a folder for temporary files, and none can be made ({reason}): make room, or set "
        "TMPDIR to a folder that this user can write"
    )


def _made() -> tuple[Path, int]:
    """A new folder, and the descriptor that has its lock."""
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_folder()))  # with mode 0700
        except OSError as error:
            raise _no_room(f"{error.filename}: {error.strerror}") from None
        # Another process removes it as one without lock.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            return folder, _locked(folder)


def _locked(folder: Path) -> int:
    """Lock `folder`, and return the descriptor that has the lock.

    Raises OSError if another process has it, or this one may not, or the folder is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
