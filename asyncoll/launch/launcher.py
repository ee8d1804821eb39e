"""The launcher's process: one loop over the ranks' output, the template's messages and the user's signals."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import asyncoll._core  # noqa: F401 (raises UsageError for a wrong ASYNCOLL_CORE: here once, and not in each rank)
from asyncoll.errors import UsageError
from asyncoll.launch import control, template
from asyncoll.launch.environment import job_environment, job_folder, reserve_port, stopped_grace_s
from asyncoll.launch.output import Output, Stream, open_output
from asyncoll.launch.program import Program
from asyncoll.launch.supervisor import INTERRUPT_GRACE_S, STOP_GRACE_S, TIMEOUT_CODE, Failure, Supervisor
from asyncoll.launch.verdict import explain, signal_name, tell_stopped, were
from asyncoll.transport.processes import allow_files, state

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_S = 0.5  # between two looks at the states of the ranks that run while others have ended


def launch(
    size: int,
    argv: Sequence[str],
    *,
    module: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    transport: str | None = None,
) -> int:
    """Run `size` ranks of a Python program on this host and return the exit code of the job.

    `argv` is a script and its arguments, or with `module` a module's name and its arguments. With `log_dir` the raw
    bytes of each rank are also written there, to `rank-R.out` and `rank-R.err`. `transport` is "shm" (shared memory,
    and messages for the rest) or "zmq" (messages alone); None leaves the choice to ASYNCOLL_TRANSPORT.

    Returns when every process that the job has started is gone: 0 if all ranks have succeeded, otherwise the exit code
    of the rank that has failed first (128 plus the signal that has killed it), 124 after `timeout` seconds, 130 after
    Ctrl-C, 143 after SIGTERM. If a rank is stopped (SIGSTOP) when every other rank has ended well, it is killed after
    ASYNCOLL_STOPPED_S seconds (10; 0: never), and the exit code is 147. Raises UsageError, and starts nothing, if the
    program cannot be started. Handles SIGINT, SIGTERM and SIGHUP while it runs, so call it from the main thread.

    The modules that the ranks will import are loaded once, before the ranks are forked: numpy, torch and asyncoll, or
    those in ASYNCOLL_PRELOAD (names separated by commas, or nothing).
    """
    if size < 1:
        raise UsageError(f"a job has at least one rank, not {size}")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"the timeout must be positive, not {timeout}")
    files = 12 * size + 64
    if (limit := allow_files(files)) is not None:
        raise UsageError(f"{size} ranks need {files} open files, the limit is {limit}: raise it (ulimit -n)")
    program = Program(tuple(argv), module)
    program.check()
    grace_s = stopped_grace_s(os.environ)
    with ExitStack() as job:
        output = job.enter_context(open_output(size, None if log_dir is None else Path(log_dir)))
        signals = job.enter_context(_stop_signals())
        folder = job.enter_context(job_folder())
        port = job.enter_context(reserve_port()).getsockname()[1]
        environment = job_environment(size, port, folder, transport, os.environ)
        process, channel, death = job.enter_context(_template(program, environment))
        selector = job.enter_context(selectors.DefaultSelector())
        return _Launcher(size, timeout, grace_s, output, signals, process, channel, death, selector).run()


@contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """The user's signals: each byte that is read from this socket is the number of one.

    Signals that are ignored (nohup) stay ignored.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = {signum: signal.getsignal(signum) for signum in STOPPING}
        taken = [signum for signum in STOPPING if before[signum] is not signal.SIG_IGN]
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in taken:
            signal.signal(signum, lambda *_: None)
        try:
            yield reader
        finally:
            for signum in taken:
                signal.signal(signum, before[signum])
            signal.set_wakeup_fd(wakeup)


@contextmanager
def _template(
    program: Program, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, int]]:
    """Start a template for `program`, in a session of its own, so that the terminal's Ctrl-C does not reach it.

    Yields its process, a channel to it, whose end ends the job, and a descriptor that becomes readable at its death.
    """
    ours, its = control.pair()
    with ours:
        with its:
            process = subprocess.Popen(
                template.command("template", its.fileno(), program),
                env=environment,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            death = os.pidfd_open(process.pid)
            try:
                yield process, ours, death
            finally:
                os.close(death)
        finally:
            ours.close()  # ends the template
            process.wait()


class _Launcher:
    def __init__(
        self,
        size: int,
        timeout: float | None,
        grace_s: float,
        output: Output,
        signals: socket.socket,
        template: subprocess.Popen[bytes],
        channel: socket.socket,
        death: int,
        selector: selectors.BaseSelector,
    ) -> None:
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._output = output
        self._signals = signals
        self._template = template
        self._channel = channel
        self._selector = selector
        self._pids: dict[int, int] = {}
        self._last_words: list[str] = []
        self._look_at: float | None = None  # the time of the next look at the states of the ranks that still run
        self._supervisor = Supervisor(size, time.monotonic(), self._order, grace_s)
        self._watch(signals, self._hear_user)
        self._watch(channel, self._hear_template)
        self._watch(death, lambda: None)
        for stream in self._streams():
            self._watch(stream.reader, partial(self._show, stream, stream.read))

    def run(self) -> int:
        supervisor = self._supervisor
        # Ask for all ranks. The template forks them when it has loaded.
        for rank, (out, err) in enumerate(zip(self._output.out, self._output.err, strict=True)):
            self._tell_template(out.writer, err.writer, fork=rank)
            out.close_writer()
            err.close_writer()
            self._hear_template()  # read its messages, so that both sides never block on sending to each other
        while supervisor.running and self._template.poll() is None:
            self._turn()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._deadline = None
                if not supervisor.stopping:
                    supervisor.stop(signal.SIGTERM, TIMEOUT_CODE, time.monotonic())
                    late = f"{were(supervisor.stopped)} still running"
                    self._last_words.append(f"the job ran into its timeout of {self._timeout:g} s; {late}")
        self._end_template()
        for stream in self._streams():
            self._show(stream, stream.drain)
        _say(explain(supervisor, [stream.last for stream in self._output.err], self._pids))
        _say(self._last_words)
        if supervisor.exit_code is not None:
            return supervisor.exit_code
        return supervisor.root.exit_code if supervisor.root else int(bool(supervisor.running))

    def _turn(self) -> None:
        """Wait until an event comes or is due, and handle it."""
        due = [at for at in (self._deadline, self._look_at, self._supervisor.wake_at()) if at is not None]
        for key, _ in self._selector.select(max(0.0, min(due) - time.monotonic()) if due else None):
            key.data()
        self._look()
        self._supervisor.tick(time.monotonic())

    def _look(self) -> None:
        """Report to the supervisor the states of the ranks that still run while others have ended.

        If all of them are stopped, none will end by itself.
        """
        now = time.monotonic()
        if not self._supervisor.has_stragglers:
            self._look_at = None
        elif self._look_at is None:
            self._look_at = now + LOOK_S
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            # Fast ranks may end before the last ones are forked.
            forked = self._supervisor.running & self._pids.keys()
            stopped = self._supervisor.looked({rank: state(self._pids[rank]) for rank in forked}, now)
            if stopped:
                _say([tell_stopped(stopped, self._pids, self._supervisor.stopped_grace_s)])

    def _end_template(self) -> None:
        """Let the template kill all descendants of the ranks.

        If it has been killed itself, kill the ranks' process groups.
        """
        self._hear_template()
        if self._supervisor.running and not self._supervisor.stopping:
            code = self._template.poll() or 0
            fate = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            self._last_words.append(f"the process that starts the ranks died ({fate}), so all were stopped")
        for rank in self._supervisor.running & self._pids.keys():
            with suppress(ProcessLookupError):
                os.killpg(self._pids[rank], signal.SIGKILL)
        self._unwatch(self._channel)
        self._channel.close()
        while self._template.poll() is None:
            self._turn()

    def _streams(self) -> list[Stream]:
        return [*self._output.out, *self._output.err]

    def _watch(self, source: Any, callback: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _unwatch(self, source: Any) -> None:
        with suppress(KeyError):
            self._selector.unregister(source)

    def _show(self, stream: Stream, read: Callable[[float], object]) -> None:
        """Show output of `stream` by its method `read`. If the reader of it is gone (`| head`), stop the job."""
        try:
            if not read(time.monotonic()):
                self._unwatch(stream.reader)
        except BrokenPipeError:
            stream.abandon()
            self._supervisor.stop(signal.SIGTERM, 128 + signal.SIGPIPE, time.monotonic())

    def _hear_user(self) -> None:
        for signum in self._signals.recv(64):
            if self._supervisor.stopping:
                _say(["killing the ranks"])
            else:
                grace = INTERRUPT_GRACE_S if signum == signal.SIGINT else STOP_GRACE_S
                _say([f"{signal_name(signum)}: the ranks get {grace:.0f} s; a second signal kills them"])
            self._supervisor.stop(signum, 128 + signum, time.monotonic())

    def _hear_template(self) -> None:
        with suppress(BlockingIOError):
            while news := control.receive(self._channel):
                self._take(news)
            self._unwatch(self._channel)

    def _tell_template(self, *files: int, **message: object) -> None:
        with suppress(OSError):  # it is gone, and its death ends the loop
            control.send(self._channel, message, files)

    def _take(self, news: dict[str, Any]) -> None:
        now = time.monotonic()
        if "started" in news:
            if not self._pids:
                self._supervisor.started_at = now
            self._pids[news["started"]] = news["pid"]
        elif "exited" in news:
            self._supervisor.exited(news["exited"], news["code"], now)
        else:
            self._output.log_error(news["rank"], news["traceback"])
            self._supervisor.failed(Failure(after_s=now - self._supervisor.started_at, **news))

    def _order(self, signum: int, ranks: Sequence[int]) -> None:
        if not self._pids:
            self._template.kill()  # it still loads, and there is no rank yet
        elif ranks:
            self._tell_template(signal=signum, ranks=ranks)


def _say(lines: Iterable[str]) -> None:
    with suppress(BrokenPipeError):
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()
