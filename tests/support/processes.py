"""Processes of tests: what they load, how long they may take, and ranks that are forked and have no launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

LIGHT = {"ASYNCOLL_PRELOAD": "numpy,asyncoll"}  # for launched ranks without torch, whose import takes two seconds
# The first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
TRAINING = {"ASYNCOLL_PRELOAD": "numpy,torch,torch._dynamo,asyncoll,asyncoll.torch.hooks,asyncoll.torch.process_group"}
FORKED = {"ASYNCOLL_PRELOAD": TRAINING["ASYNCOLL_PRELOAD"] + ",asyncoll.testing.faults"}  # of all that have no launcher
# For forked ranks in tests of how they end. Others end without the end of torch: see `tests/support/template.py`.
WHOLE_END = {"WHOLE_END": "1"}
# On a busy machine a process or a ZeroMQ thread may get no processor time for half a second. It must not count as
# frozen.
FREEZE_S = 20.0
DEBUG = {"PYTHONASYNCIODEBUG": "1"}  # makes loops check that calls from other threads are safe
# A busy machine makes joining report late ranks, and loops in development mode callbacks of more than 0.1 s.
_OF_BUSY_MACHINES = re.compile(r"^(?:.*: )?rank \d+: waiting for ranks? \d.*\n|^.*Executing <.*\n", re.MULTILINE)
_ASKING = threading.Lock()
PATIENCE_S = 300  # timeout of processes: a safety net, far beyond the need of the slowest machine


def processes_with(folder: str) -> list[str]:
    """The command lines of the processes whose temporary files are in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


class ForkedRank:
    """A rank that the template of `tests/support/template.py` has forked. It has no launcher."""

    def __init__(self, template, command, env, folder):
        self._template = template
        self.world = [self]  # all ranks of it
        out, self._err = folder / "out", folder / "err"
        os.mkfifo(out)
        self._err.touch()
        # The template opens it to write before it answers: neither waits for the other.
        self.stdout = os.fdopen(os.open(out, os.O_RDONLY | os.O_NONBLOCK))
        order = {"command": [*map(str, command)], "env": env, "folder": os.getcwd()}
        order |= {"out": str(out), "err": str(self._err)}
        self.pid = self._ask(order)
        os.set_blocking(self.stdout.fileno(), True)
        self.returncode = None

    def _ask(self, order):
        with _ASKING:  # threads may run worlds at the same time
            print(json.dumps(order), file=self._template.stdin, flush=True)
            return int(self._template.stdout.readline())

    def end(self, patience_s=PATIENCE_S):
        """Wait for the end of the rank: its exit code, its output and its errors, `without_delays`.

        Fails after `patience_s`, with what all ranks of its world have printed.
        """
        is_late = threading.Event()

        def give_up():
            is_late.set()
            self._kill()

        timeout = threading.Timer(patience_s, give_up)
        timeout.start()
        out = self.stdout.read()
        self.returncode = self._ask(self.pid)
        timeout.cancel()
        timeout.join()
        if is_late.is_set():
            errors = "\n".join(f"rank {rank}: {each.wrote()}" for rank, each in enumerate(self.world))
            pytest.fail(
                f"process {self.pid} has not ended in {patience_s} s; it has printed {out!r}; errors:\n{errors}"
            )
        return self.returncode, out, without_delays(self.wrote())

    def wrote(self):
        """Its errors so far."""
        return self._err.read_text()

    def kill(self):
        if self.returncode is None:
            self._kill()
            self.end()
        self.stdout.close()

    def _kill(self):
        """Kill its children, too: they hold its output, which `end` reads to the end."""
        for process in [*descendants(self.pid), self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def without_delays(errors: str) -> str:
    """What processes wrote to stderr, without the lines that only a busy machine makes them write."""
    return _OF_BUSY_MACHINES.sub("", errors)


def children(process: int | str = "self") -> set[str]:
    """The numbers of the processes that `process` has started and not waited for."""
    found = set()
    threads = f"/proc/{process}/task"
    for thread in os.listdir(threads):  # `glob` of pathlib would take three times as long, in every test
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"{threads}/{thread}/children") as file:
            found |= set(file.read().split())  # or that thread has ended
    return found


def descendants(process: int) -> list[int]:
    """The children of `process`, and theirs."""
    found = [int(child) for child in children(process)]
    return found + [each for child in found for each in descendants(child)]
