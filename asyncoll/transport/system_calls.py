"""System calls that some containers and sandboxes refuse, by a seccomp profile for instance."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator

from asyncoll.errors import UsageError

_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL of Linux 6.3, which Python 3.11 does not export


@contextlib.contextmanager
def needed(calls: str) -> Iterator[None]:
    """Nothing replaces the system calls that are made here. Raises UsageError if the system refuses them."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise UsageError(
            f"the system refuses {calls} ({os.strerror(error.errno)}), which asyncoll needs: allow it in the seccomp "
            "profile of the container, or in the settings of the sandbox"
        ) from error


def anonymous_file(name: str) -> int:
    """The descriptor of a memfd; where the system does not allow one, of an unlinked temporary file in memory.

    The caller closes it. Raises OSError.
    """
    for flags in (_NOEXEC_SEAL, 0):
        with contextlib.suppress(OSError, AttributeError):
            return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(prefix="asyncoll-", dir=folder) as file:
        return os.dup(file.fileno())
