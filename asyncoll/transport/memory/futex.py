"""Waking threads that sleep in a futex of shared memory. Ranks with the compiled core sleep there for a short time."""

from __future__ import annotations

import ctypes
import platform

_CALLS = {"x86_64": 202, "aarch64": 98}  # the number of the system call `futex`; no other processor has the core
_WAKE = 1
_ALL = 0x7FFFFFFF


def wake_all(cell: memoryview) -> None:
    """Wake all threads that sleep at the low half of `cell`, 64 bits of shared memory."""
    number = _CALLS.get(platform.machine())
    if number is not None:
        address = ctypes.addressof(ctypes.c_int64.from_buffer(cell))
        ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)
