"""Forks ranks that know of no launcher: one import of torch serves all of them.

Each line on the standard input orders one rank as JSON: its program (as the arguments of an interpreter), its
environment, its current folder, and files for its output. The answer is its pid. A line with a pid waits for the end
of that rank; the answer is its exit code.

To tear down torch takes a rank a quarter of a second of processor time. So it ends without that, unless its environment
has `WHOLE_END`, for tests of how ranks end.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import tempfile
import threading
import weakref

from asyncoll.launch import process_tree
from asyncoll.launch.template import preload


def serve() -> list[str]:
    """In a process that has become a rank, return the arguments of its program. At the end of the input, exit."""
    template = os.getpid()
    while line := sys.stdin.buffer.raw.readline():  # a buffer would be copied into the ranks
        order = json.loads(line)
        if isinstance(order, int):
            print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
            continue
        streams = [os.open(os.devnull, os.O_RDONLY), *(os.open(order[name], os.O_WRONLY) for name in ("out", "err"))]
        if pid := os.fork():
            for stream in streams:
                os.close(stream)
            print(pid, flush=True)
        else:
            process_tree.die_with_parent(template)
            os.environ.clear()
            os.environ.update(order["env"])
            os.chdir(order["folder"])
            tempfile.tempdir = None
            for descriptor, stream in enumerate(streams):
                os.dup2(stream, descriptor)
                os.close(stream)
            return order["command"]
    sys.exit()


def run(command: list[str]) -> None:
    """Nothing of the program is alive afterwards, unless modules or threads keep it."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(command[0])
        runpy.run_path(command[0], run_name="__main__")


def fail(error: Exception) -> None:
    """Print the error as the interpreter does, which notes it until it clears modules."""
    sys.last_value = error
    sys.excepthook(type(error), error, error.__traceback__)


def end_shortly(code: int) -> None:
    """As the interpreter, up to where it would clear modules. Objects that are not closed warn here as there.

    torch would take back each of its operators.
    """
    threading._shutdown()
    for finalizer in INHERITED:
        finalizer.atexit = False
    atexit._run_exitfuncs()
    sys.last_value = None
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


assert preload()
INHERITED = [*weakref.finalize._registry]
order, code = serve(), 0
try:
    run(order)
except Exception as error:
    if "WHOLE_END" in os.environ:
        raise
    fail(error)
    code = 1
if "WHOLE_END" not in os.environ:  # `sys.exit` and signals end the rank as any other
    end_shortly(code)
