"""Run a script in namespaces of its own, as `unshare` does: `in_namespaces.py RANKS PREPARE SCRIPT`.

RANKS has for each rank, as JSON, the kinds of its namespaces and its folder for temporary files. "proc" is a /proc of
the processes in its namespace. PREPARE is a shell command that is run there before.
"""

import ctypes
import json
import os
import runpy
import subprocess
import sys

FLAGS = {  # of unshare(2)
    "time": 0x80,
    "mount": 0x20000,
    "proc": 0x20000,
    "cgroup": 0x2000000,
    "uts": 0x4000000,
    "ipc": 0x8000000,
    "user": 0x10000000,
    "pid": 0x20000000,
}


def enter(kinds):
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(sum({FLAGS[kind] for kind in kinds})):
        raise OSError(ctypes.get_errno(), f"cannot have {kinds} of its own")
    if "user" in kinds:  # root there is this user
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{file}", "w") as settings:
                settings.write(text)
    if ("pid" in kinds or "time" in kinds) and (child := os.fork()):  # they begin with the next child
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if "mount" in kinds or "proc" in kinds:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if "proc" in kinds:
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)


kinds, os.environ["TMPDIR"] = json.loads(sys.argv[1])[int(os.environ["RANK"])]
if kinds:
    enter(kinds.split(","))
subprocess.run(["sh", "-ec", sys.argv[2]], check=True)
del sys.argv[:3]
runpy.run_path(sys.argv[0], run_name="__main__")
