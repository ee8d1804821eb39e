"""The ranks of another host: ssh, with an agent at its other end (`asyncoll/launch/host_agent.py`)."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncoll
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.launch import frames, host_agent
from asyncoll.launch.host import READ_BYTES, Hear, Sources, death_of
from asyncoll.launch.output import OutputStream
from asyncoll.launch.program import Program
from asyncoll.launch.rank_environment import THREADS

# It asks no questions. It ends 15 s after the host has stopped answering, and 20 s after it has not begun to.
SSH = (
    "ssh",
    "-T",
    "-oBatchMode=yes",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    "-oConnectTimeout=20",
    "--",
)
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from asyncoll.launch.host_agent import main; main()"
# The greeting, with what the shell of the host prints before it, has at most so many bytes.
GREETING_BYTES_MAX = 1 << 16
TRAVELLING = ("ASYNCOLL_", "PYTHON")
# Of one host, of one process, or of jobs with another key.
STAYING = ("ASYNCOLL_ADDRESS", "ASYNCOLL_FOLDER", "ASYNCOLL_LAUNCHER", "ASYNCOLL_RANK_OF", "ASYNCOLL_STORE")
SSH_FAILED, NO_PROGRAM = 255, (126, 127)


def travelling(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables that all hosts get: asyncoll's, Python's, the numbers of threads, and `names`.

    Raises UsageError if one of `names` is not set.
    """
    for name in names:
        if "=" in name:
            raise UsageError(f"--env {name}: give the name alone; the hosts get the value that the variable has here")
        if name not in environ:
            raise UsageError(f"--env {name}: {name} is not set here: export it, or leave out --env")
    chosen = {*THREADS, *names}
    return {
        name: value
        for name, value in environ.items()
        if name in chosen or (name.startswith(TRAVELLING) and name not in STAYING)
    }


@contextmanager
def remote_host(
    name: str,
    size: int,
    program: Program,
    key: bytes,
    environment: Mapping[str, str],
    sources: Sources,
    hear: Hear,
) -> Iterator[RemoteHost]:
    """The host `name`, with an agent that gets `environment` and the job's `key`, and runs `size` ranks of `program`.

    Raises UsageError if there is no ssh.
    """
    root = str(Path(__file__).parent.parent.parent)
    command = shlex.join([sys.executable, "-P", "-c", BOOT, root])
    with ExitStack() as opened:
        try:
            process = subprocess.Popen(
                [*SSH, name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise UsageError(f"cannot start ssh: {error.strerror}; --hosts needs OpenSSH's client") from error
        opened.enter_context(process)  # which closes its pipes, and waits for its end
        opened.callback(process.kill)
        death = opened.enter_context(death_of(process))
        job = {
            "argv": program.argv,
            "module": program.module,
            "folder": os.getcwd(),
            "size": size,
            "key": key,
            "environment": dict(environment),
        }
        host = RemoteHost(name, process, death, job, sources, hear)
        opened.callback(host.close)
        yield host


@dataclass(eq=False)
class RemoteHost:
    """Implements `LaunchedHost` for another host. The connection is a child process: its death ends the host."""

    name: str
    ssh: subprocess.Popen[bytes]
    death: socket.socket  # of ssh
    job: dict[str, Any]  # the first message to the agent
    sources: Sources
    hear: Hear
    has_ended: bool = False

    def __post_init__(self) -> None:
        assert self.ssh.stdin is not None
        assert self.ssh.stdout is not None
        assert self.ssh.stderr is not None
        self._stdin, self._stdout, self._stderr = self.ssh.stdin, self.ssh.stdout.fileno(), self.ssh.stderr.fileno()
        self._messages = OutputStream(f"{self.name}: ".encode(), sys.stderr.buffer)  # of ssh and the agent
        self._unshown = b""  # messages before the greeting: the error of a connection that fails has one of them
        self._greeting: bytes | None = b""  # what has arrived of it; None once it is complete
        self._frames = frames.Frames()
        self._why = ""  # why the host has ended, if its agent has said it, or has said what cannot be understood
        self._is_ending = False
        self._is_last = False  # it has been told to kill its ranks
        for pipe, read in ((self._stdout, self._read), (self._stderr, self._read_messages)):
            os.set_blocking(pipe, False)
            self.sources.watch(pipe, read)
        self.sources.watch(self.death, self._bury)

    def tell(self, order: dict[str, Any]) -> None:
        kills = order.get("signal") == signal.SIGKILL
        # It is not connected, and orders before that are to end it; or it has not done as it was told.
        if self._greeting is not None or (kills and self._is_last):
            self.ssh.kill()
            return
        self._is_last = self._is_last or kills
        # The process may be gone, which `_bury` deals with, or be told to end.
        with suppress(OSError, ValueError):
            frames.send(self._stdin.fileno(), order)

    def end(self) -> None:
        self._is_ending = self._is_last = True
        self._stdin.close()
        if self._greeting is not None:
            self.ssh.kill()

    def close(self) -> None:
        for source in (self._stdout, self._stderr, self.death):
            self.sources.unwatch(source)

    def _read(self) -> bool:
        """Take what the agent has written. False at its end. Raises BlockingIOError if there is nothing."""
        data = os.read(self._stdout, READ_BYTES)
        if not data:
            self.sources.unwatch(self._stdout)
        try:
            for news in self._frames.feed(data if self._greeting is None else self._greet(data)):
                if "ended" in news:
                    self._why = news["ended"]
                elif news:
                    self.hear(news)
        except ProtocolError as error:
            self._why = f"what comes from it is not of an agent: {error}"
            self.sources.unwatch(self._stdout)
            self.ssh.kill()
            return False
        return bool(data)

    def _greet(self, data: bytes) -> bytes:
        """Look for the greeting of the agent, and give it the job. Returns what follows the greeting."""
        assert self._greeting is not None
        self._greeting += data
        before, found, rest = self._greeting.partition(host_agent.GREETING[: host_agent.GREETING.rindex(b" ") + 1])
        version, ended, after = rest.partition(b"\n")
        if not (found and ended):
            if len(self._greeting) > GREETING_BYTES_MAX:
                raise ProtocolError("it has not begun with its greeting")
            return b""
        self._greeting = None
        self._show(self._unshown + before)
        self._unshown = b""
        if version.decode(errors="replace") != asyncoll.__version__:
            told = version.decode(errors="replace")
            self.hear(
                {"refused": f"it has asyncoll {told}, and this host has {asyncoll.__version__}: install the same"}
            )
        else:
            self.tell(self.job)
        return after

    def _read_messages(self) -> bool:
        data = os.read(self._stderr, READ_BYTES)
        if not data:
            self.sources.unwatch(self._stderr)
        if self._greeting is None:
            self._show(data)
        else:
            self._unshown += data
        return bool(data)

    def _show(self, data: bytes) -> None:
        with suppress(BrokenPipeError):
            self._messages.show(data, time.monotonic())

    def _bury(self) -> None:
        """The connection has ended: tell what is left to tell."""
        code = self.ssh.wait()
        for read in (self._read_messages,) if self._why else (self._read, self._read_messages):
            # A master connection that ssh has started keeps its stderr open.
            with suppress(BlockingIOError):
                while read():
                    pass
        self.close()
        self.has_ended = True
        why = "" if self._is_ending else self._why or self._what_failed(code)
        unsaid = [line for line in self._unshown.splitlines(keepends=True) if _text(line) not in why]
        self._show(b"".join(unsaid))
        self.hear({"ended": why})

    def _what_failed(self, code: int) -> str:
        heard = [*self._messages.last, *self._unshown.splitlines()]
        said = f": {_text(heard[-1])}" if heard else ""
        if self._greeting is None:
            return f"the connection to it ended (ssh: exit code {code}{said})"
        if code == SSH_FAILED:
            return (
                f"ssh cannot run a program there{said}; it must do so without a question, as in "
                f"`ssh -o BatchMode=yes {self.name} true`"
            )
        if code in NO_PROGRAM:
            return f"it has no {sys.executable}{said}; Python must be at the same path on all hosts"
        root = Path(host_agent.__file__).parent.parent.parent
        return (
            f"{sys.executable} cannot import asyncoll from {root} there{said}; it must be at the same path on all hosts"
        )


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()
