"""Ranks that run a function of this process, as forks of it: for a notebook, whose functions are in no file.

    this process (launcher) ── control socket ── fork (template) ── fork ── rank 0, rank 1, …

A fork has what the function refers to, so nothing is pickled. It has none of the other threads of this process, and the
template stays single-threaded, so that its ranks are as sound as it is.
"""

from __future__ import annotations

import builtins
import gc
import getpass
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from asyncoll.errors import UsageError
from asyncoll.launch import process_tree, rank
from asyncoll.launch.host import Sources
from asyncoll.launch.launcher import Launcher, stop_signals
from asyncoll.launch.local import Start, check_files, local_host
from asyncoll.launch.output import open_output
from asyncoll.launch.placement import HERE, Placement
from asyncoll.launch.rank_environment import THREADS, job_folder, stopped_grace_s, threads
from asyncoll.launch.supervisor import Outcome
from asyncoll.launch.template import LEFT_TO_THE_LAUNCHER, Template
from asyncoll.transport.loopback import loopback


def check_function(size: int) -> None:
    """Raise UsageError if `launch_function` cannot be called: outside of the main thread, or if files are too few."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("call it in the main thread: it handles the signals of this process while ranks run")
    check_files(size)


def launch_function(size: int, act: Callable[[], None]) -> Outcome:
    """Call `act()` at `size` ranks, which are forks of this process, with the environment of ranks. Show their output.

    Returns when all ranks and all processes that they have started are gone. Handles SIGINT, SIGTERM and SIGHUP
    meanwhile. The caller has called `check_function`.
    """
    grace_s = stopped_grace_s(os.environ)
    with ExitStack() as job:
        output = job.enter_context(open_output(size, None))
        signals = job.enter_context(stop_signals())
        sources = Sources(job.enter_context(selectors.DefaultSelector()))
        launcher = Launcher(Placement({HERE: size}), None, grace_s, None, output, signals, sources)
        start = _fork_of(size, act, job.enter_context(job_folder()))
        host = job.enter_context(local_host(start, loopback(), sources, partial(launcher.hear, HERE)))
        return launcher.run({HERE: host})


class _Fork:
    """Implements `Process` for a fork."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _fork_of(size: int, act: Callable[[], None], folder: Path) -> Start:
    def fork(channel: socket.socket, of_launcher: socket.socket) -> _Fork:
        pid = os.fork()
        if pid:
            return _Fork(pid)
        try:
            of_launcher.close()
            _serve(size, act, channel, folder)
        finally:
            os._exit(1)

    def start(channel: socket.socket, of_launcher: socket.socket) -> _Fork:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The fork of a new thread has nothing of this one: no running event loop, and no pool of OpenMP, whose threads
        # a fork would wait for in vain.
        with ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            # Python 3.12 warns of locks that other threads hold: docs/howto/notebooks.md says what that means.
            warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
            return thread.submit(fork, channel, of_launcher).result()

    return start


def _serve(size: int, act: Callable[[], None], channel: socket.socket, folder: Path) -> None:
    """Be the template, and then, in a fork of it, a rank. Does not return."""
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, LEFT_TO_THE_LAUNCHER)
    # As in a program that is started anew.
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    os.environ.update({**threads(size, os.environ), "ASYNCOLL_FOLDER": str(folder)})
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    process_tree.adopt_orphans()
    gc.collect()
    gc.freeze()  # what the notebook has left to collect is not finalized here
    template = Template(channel, str(folder))
    if not template.serve():
        os._exit(0)
    _be_rank(act, template.channel)


def _be_rank(act: Callable[[], None], channel: socket.socket) -> None:
    """Run `act`. The process ends without the interpreter's end, which would run what the notebook has registered."""
    of_kernel = sys.stdout, sys.stderr
    # `closefd`: a program that replaces one of them must not close it, or its next socket would take that descriptor.
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in enumerate("rww"))  # noqa: SIM115
    _redirect_logging(of_kernel, (sys.stdout, sys.stderr))
    builtins.input = getpass.getpass = _refuse_input  # a kernel's own would wait for an answer to the kernel
    if "torch" in sys.modules and (count := os.environ.get(THREADS[0])):  # torch has read it before
        sys.modules["torch"].set_num_threads(int(count))
    code = 0
    try:
        rank.run(act, channel)
    except BaseException as error:
        code = rank.exit_code(error) & 0xFF
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _redirect_logging(before: tuple[object, object], now: tuple[IO[Any], IO[Any]]) -> None:
    """Let handlers that the notebook has configured write to the output of this rank, and not to that of the kernel."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            # Not by `setStream`, which would flush the stream of the kernel.
            handler.stream = now[before.index(handler.stream)]


def _refuse_input(*_: object, **__: object) -> str:
    raise EOFError("a rank has no standard input: ask in the notebook, and pass the answer to main")
