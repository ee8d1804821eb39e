"""Refuse system calls, as the seccomp profile of a container does, and run a program.

with_refused_system_calls.py ERRNO CALL... -- COMMAND...: a CALL is a name of `NUMBERS`; ERRNO is a name, such as EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {  # of x86_64, and of aarch64
    "prctl": (157, 167),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "signalfd4": (289, 74),
    "process_vm_readv": (310, 270),
    "memfd_create": (319, 279),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434),
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def refuse(numbers: list[int], error: int) -> None:
    """Let each of these system calls fail, in this process and in all its descendants."""
    load = struct.pack("HBBI", _LOAD, 0, 0, 0)  # the number of the call
    tests = [
        struct.pack("HBBI", _EQUAL, 0, 1, number) + struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | error)
        for number in numbers
    ]
    program = ctypes.create_string_buffer(load + b"".join(tests) + struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program.raw) // 8, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    split = sys.argv.index("--")
    machine = ("x86_64", "aarch64").index(platform.machine())
    refuse([NUMBERS[name][machine] for name in sys.argv[2:split]], getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])
