"""One rank, from the fork to the end of the user's program.

The program's exception leaves the process at the top, so the interpreter itself handles exit codes, threads, atexit and
flushing as always. On the way the rank reports the exception to the launcher.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable

from asyncoll.errors import reported_failure
from asyncoll.launch import control
from asyncoll.launch.program import Program

TRACEBACK_CHARACTERS_MAX = 8000  # up to 12 bytes each in JSON, and one message must hold all of them
SUMMARY_CHARACTERS_MAX = 300
MACHINERY = os.path.dirname(__file__)


def main() -> None:
    """The entry of a rank that is started anew, because the template could not be forked."""
    channel, module, *argv = sys.argv[2:]
    run(Program(tuple(argv), bool(int(module))).run, socket.socket(fileno=int(channel)))


def run(program: Callable[[], None], channel: socket.socket) -> None:
    """Run a program in this process: that of the user, or a function of the process that this one is a fork of.

    Returns or raises at its end; the caller must let either pass.
    """
    pid = os.getpid()
    os.set_inheritable(channel.fileno(), False)
    _settle_in()
    with channel:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            program()
        except BaseException as error:
            # Not in a child that the program has forked.
            if os.getpid() == pid:
                trace = error.__traceback__
                while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == MACHINERY:
                    trace = trace.tb_next
                _report(error.with_traceback(trace), channel)
            raise


def _settle_in() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    if "numpy" in sys.modules:
        # Otherwise all ranks would draw the same numbers: they are forks of one process.
        sys.modules["numpy"].random.seed()


def _report(error: BaseException, channel: socket.socket) -> None:
    """Report the failure to the launcher, which shows the traceback in place of the interpreter."""
    code = exit_code(error)
    if code == 0:
        return
    text = "" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error))
    cause = reported_failure(error)
    report = {
        "rank": int(os.environ["RANK"]),
        "code": code,
        "traceback": text[-TRACEBACK_CHARACTERS_MAX:],
        "summary": summary(error),
        "blames": None if cause is None else cause.rank,
        "kind": type(error).__name__,
        "place": place(error),
    }
    try:
        control.send(channel, report)
    except OSError:
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = lambda *_: None  # the launcher has the traceback


def place(error: BaseException) -> str:
    """The line at which the program has raised, as in "/home/me/train.py:12"; empty if it has not.

    It is the last one of the traceback that is not in Python's library, in a package, in asyncoll or in Cython.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    libraries = (os.path.dirname(MACHINERY), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
    trace = traceback.extract_tb(error.__traceback__)
    own = [each for each in trace if not each.filename.startswith(libraries) and not each.filename.endswith(".pyx")]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def summary(error: BaseException) -> str:
    """One line: the last of several for a SyntaxError, the first for an exception group."""
    line = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
    return line.partition("\n")[0][:SUMMARY_CHARACTERS_MAX]


def exit_code(error: BaseException) -> int:
    """The exit code that the interpreter will derive from `error`; negative: the signal that will end the process."""
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
