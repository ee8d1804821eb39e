"""A timer that any thread may set and one loop waits for: Linux's timerfd.

`loop.call_soon_threadsafe(loop.call_later, ...)` would wake the thread of the loop to set the timer. A timerfd is set
by one system call in the caller's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

from asyncoll.transport.system_calls import needed

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL: the two system calls do not block


class Timer:
    """A file descriptor that becomes readable when the time is over. Any thread may call `set`.

    `__init__` raises OSError if the process has too many open files, and UsageError if the system refuses timerfds.
    """

    def __init__(self) -> None:
        with needed("timerfd_create"):
            self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def set(self, seconds: float) -> None:
        """Expire after `seconds`, in place of any earlier setting; 0 disarms the timer."""
        _libc.timerfd_settime(self._fd, 0, struct.pack("4q", 0, 0, *divmod(int(seconds * 1e9), 10**9)), None)

    def read(self) -> None:
        """Clear an expiry, so that the descriptor is not readable any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)
