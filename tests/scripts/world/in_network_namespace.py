"""Run a script as on the host that is the network namespace NAMESPACE, named HOST, with HOSTS as its /etc/hosts.

With AHEAD_S its monotonic clock is as many seconds ahead.
"""

import ctypes
import os
import runpy
import socket
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET, CLONE_NEWTIME = 0x20000, 0x4000000, 0x40000000, 0x80
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
libc = ctypes.CDLL(None, use_errno=True)


def succeed(code):
    if code:
        raise OSError(ctypes.get_errno(), "a namespace could not be entered")


succeed(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
with open(f"/run/netns/{os.environ['NAMESPACE']}") as namespace:
    succeed(libc.setns(namespace.fileno(), CLONE_NEWNET))
socket.sethostname(os.environ["HOST"])
succeed(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
succeed(libc.mount(os.environ["HOSTS"].encode(), b"/etc/hosts", None, MS_BIND, None))
if ahead_s := os.environ.get("AHEAD_S"):
    succeed(libc.unshare(CLONE_NEWTIME))
    with open("/proc/self/timens_offsets", "w") as offsets:
        offsets.write(f"monotonic {ahead_s} 0\n")
    with open("/proc/self/ns/time_for_children") as namespace:
        succeed(libc.setns(namespace.fileno(), CLONE_NEWTIME))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
