"""The ranks of this host: the template that forks them, and the pipes of their output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.launch import control, template
from asyncoll.launch.host import READ_BYTES, Hear, Process, Sources, death_of
from asyncoll.launch.program import Program
from asyncoll.launch.rank_environment import reserve_port, threads
from asyncoll.launch.verdict import signal_name
from asyncoll.transport.processes import allow_files, state

# Starts a template, which gets the first end of its channel. The launcher keeps the second, which no child may hold.
Start = Callable[[socket.socket, socket.socket], Process]


def check(size: int, program: Program) -> None:
    """Raise UsageError if this host cannot run `size` ranks of `program`."""
    check_files(size)
    program.check()


def check_files(size: int) -> None:
    """Raise UsageError if this process may not open the files that `size` ranks need."""
    files = 12 * size + 64
    if (limit := allow_files(files)) is not None:
        raise UsageError(f"{size} ranks need {files} open files, the limit is {limit}: raise it (ulimit -n)")


def template_of(size: int, program: Program, folder: Path, environ: Mapping[str, str]) -> Start:
    """Starts the template of `size` ranks of `program`, whose environment is `environ`.

    It has a session of its own, so that the terminal's Ctrl-C does not reach it. It removes `folder` in the end.
    """

    def start(channel: socket.socket, _: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            template.command("template", channel.fileno(), program, str(folder)),
            env={**threads(size, environ), **environ},
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    return start


@contextmanager
def local_host(start: Start, address: str, sources: Sources, hear: Hear) -> Iterator[LocalHost]:
    """This host, with the template that `start` starts.

    `hear` is told of a free port at `address`, which is held until the host has ended.
    """
    with ExitStack() as opened:
        port = opened.enter_context(reserve_port(address)).getsockname()[1]
        ours, its = control.pair()
        opened.enter_context(ours)
        with its:
            process = start(its, ours)
        opened.callback(process.wait)
        opened.callback(ours.close)  # ends the template
        death = opened.enter_context(death_of(process))
        host = LocalHost(process, ours, death, sources, hear)
        opened.callback(host.close)
        hear({"ready": port, "address": address})
        yield host


class LocalHost:
    """Implements `LaunchedHost` for this host."""

    def __init__(
        self, process: Process, channel: socket.socket, death: socket.socket, sources: Sources, hear: Hear
    ) -> None:
        self.has_ended = False
        self._template = process
        self._channel = channel
        self._death = death
        self._sources = sources
        self._hear = hear
        self._is_ending = False
        self._pids: dict[int, int] = {}  # of all ranks that have started
        self._running: set[int] = set()
        self._pipes: dict[int, tuple[int, bool]] = {}  # by descriptor: the rank, and whether it is its stderr
        sources.watch(channel, self._hear_template)
        sources.watch(death, self._bury)

    def tell(self, order: dict[str, Any]) -> None:
        if "fork" in order:
            self._fork(order)
        elif "look" in order:
            self._hear({"states": [[rank, state(self._pids[rank])] for rank in order["look"] if rank in self._pids]})
        elif self._pids:
            self._tell_template(order)
        else:
            # It still loads, and there is no rank yet.
            self._template.kill()

    def end(self) -> None:
        self._is_ending = True
        self._sources.unwatch(self._channel)
        self._channel.close()

    def close(self) -> None:
        """Let go of all descriptors, whether the host has ended or not."""
        for source in (self._channel, self._death):
            self._sources.unwatch(source)
        for reader in list(self._pipes):
            self._close(reader)

    def _fork(self, order: dict[str, Any]) -> None:
        """Have the template fork a rank, once it has loaded."""
        writers = []
        for is_error in (False, True):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._pipes[reader] = order["fork"], is_error
            self._sources.watch(reader, partial(self._read, reader))
            writers.append(writer)
        self._tell_template(order, *writers)
        for writer in writers:
            os.close(writer)
        self._hear_template()  # read its messages, so that both sides never block on sending to each other

    def _tell_template(self, order: dict[str, Any], *files: int) -> None:
        # The process may be gone. `_bury` deals with that.
        with suppress(OSError):
            control.send(self._channel, order, files)

    def _hear_template(self) -> None:
        with suppress(BlockingIOError, OSError):
            while news := control.receive(self._channel):
                if "started" in news:
                    self._pids[news["started"]] = news["pid"]
                    self._running.add(news["started"])
                elif "exited" in news:
                    self._running.discard(news["exited"])
                self._hear(news)
            self._sources.unwatch(self._channel)

    def _read(self, reader: int) -> bool:
        """Tell the output that has arrived. False at its end. Raises BlockingIOError if there is none."""
        data = os.read(reader, READ_BYTES)
        rank, is_error = self._pipes[reader]
        if not data:
            self._close(reader)
        self._hear({"output": rank, "error": is_error, "data": data})
        return bool(data)

    def _close(self, reader: int) -> None:
        self._sources.unwatch(reader)
        del self._pipes[reader]
        os.close(reader)

    def _bury(self) -> None:
        """The template has ended: tell what is left to tell."""
        code = self._template.wait()
        if not self._is_ending:
            self._hear_template()
        # Of a template that was killed nobody inherits the descendants of the ranks: what is known is the rank's group.
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self._pids[rank], signal.SIGKILL)
        for reader in list(self._pipes):
            self._drain(reader)
        self.close()
        self.has_ended = True
        fate = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
        why = "" if self._is_ending else f"the process that starts the ranks died ({fate})"
        self._hear({"ended": why})

    def _drain(self, reader: int) -> None:
        """Tell all output that is there, and its end."""
        try:
            while self._read(reader):
                pass
        except BlockingIOError:
            rank, is_error = self._pipes[reader]
            self._close(reader)
            self._hear({"output": rank, "error": is_error, "data": b""})
