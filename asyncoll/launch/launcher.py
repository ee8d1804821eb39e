"""The launcher's process: one loop over the news of the hosts and the user's signals."""

from __future__ import annotations

import ipaddress
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import asyncoll._core  # noqa: F401 (raises UsageError for a wrong ASYNCOLL_CORE: here once, and not in each rank)
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.launch import report as reports
from asyncoll.launch.host import LaunchedHost, News, Sources
from asyncoll.launch.local import check, local_host, template_of
from asyncoll.launch.output import VERDICT, Output, OutputStream, coloured, open_output
from asyncoll.launch.placement import HERE, Placement
from asyncoll.launch.program import Program
from asyncoll.launch.rank_environment import (
    check_current_folder,
    check_encoding,
    job_folder,
    rank_environment,
    stopped_grace_s,
)
from asyncoll.launch.remote import remote_host, travelling
from asyncoll.launch.supervisor import (
    GIVE_UP_S,
    INTERRUPT_GRACE_S,
    STOP_GRACE_S,
    TIMEOUT_CODE,
    Failure,
    Outcome,
    Supervisor,
)
from asyncoll.launch.verdict import explain, signal_name, tell_deaths, tell_stopped, were
from asyncoll.transport import settings, standard_streams
from asyncoll.transport.keys import new_key
from asyncoll.transport.loopback import loopback
from asyncoll.world.environment import read_settings

if TYPE_CHECKING:
    from asyncoll.world.launcher_store import AnsweringStore

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SUSPENDING = signal.SIGTSTP  # Ctrl-Z
# The longest wait in one turn: `epoll` refuses a time-out of more than 24 days.
WAIT_MAX_S = 3600.0
LOOK_S = 0.5  # between two looks at the states of the ranks that run while others have ended


def launch(
    ranks: int | Mapping[str, int],
    argv: Sequence[str],
    *,
    module: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    transport: str | None = None,
    environment: Sequence[str] = (),
    report: str | os.PathLike[str] | None = None,
    min_ranks: int | None = None,
) -> int:
    """Run a Python program as `ranks` ranks on this host, or on the hosts of a map, and return the job's exit code.

    `argv` is a script and its arguments, or with `module` a module's name and its arguments. With `log_dir` the raw
    bytes of each rank are also written there, to `rank-R.out` and `rank-R.err`. `transport` is "shm" (shared memory,
    and messages for the rest) or "zmq" (messages alone); None leaves the choice to ASYNCOLL_TRANSPORT. `report` is a
    file for a JSON object that says how each rank has ended (docs/reference/commands.md); an old one is removed at the
    start, and the new one is there, whole, when the job has ended in any way.

    Returns when every process that the job has started is gone: 0 if all ranks have succeeded, otherwise the exit code
    of the rank that has failed first (128 plus the signal that has killed it), 124 after `timeout` seconds, 130 after
    Ctrl-C, 143 after SIGTERM. If a rank is stopped (SIGSTOP) when every other rank has ended well, it is killed after
    ASYNCOLL_STOPPED_S seconds (10; 0: never), and the exit code is 147. Raises UsageError, and starts nothing, if the
    program cannot be started, a file cannot be written, a setting in the environment is wrong, or the current folder
    has been deleted. Handles SIGINT, SIGTERM and SIGHUP while it runs, so call it from the main thread.

    The modules that the ranks will import are loaded once, before the ranks are forked: numpy, torch and asyncoll, or
    those in ASYNCOLL_PRELOAD (names separated by commas, or nothing).

    With `min_ranks` the job goes on after the death of a rank, by a signal or with its host, while at least `min_ranks`
    of the ranks have not died. Each death is told in a line on stderr. A rank that fails otherwise ends the job. The
    exit code is 0 if all ranks that have not died succeed.

    Several hosts: `ranks` has their names and the number of ranks on each, such as {"a": 4, "b": 4}. All are reached by
    `ssh`, this one too, which must run a program there without asking a question. Python, asyncoll, the program and the
    current folder must be at the same paths on all hosts. The ranks get a key of the job, the variables ASYNCOLL_* and
    PYTHON*, OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, and those that `environment` names. Rank 0's host serves the
    store, at the address at which ssh has reached it. A broken connection to a host ends the ranks there, and the job
    unless enough ranks are left.
    """
    check_current_folder()
    check_encoding(os.environ)
    read_settings(os.environ)  # its errors here once, and not in each rank
    settings.check_transport(transport)
    placement = Placement({HERE: ranks} if isinstance(ranks, int) else dict(ranks))
    if min_ranks is not None and not 1 <= min_ranks <= placement.size:
        raise UsageError(f"--min-ranks {min_ranks}: the job has {placement.size} ranks; give 1 to {placement.size}")
    if timeout is not None and not timeout > 0:
        raise UsageError(f"the timeout must be positive, not {timeout}")
    program = Program(tuple(argv), module)
    if placement.is_here:
        check(placement.size, program)
    grace_s = stopped_grace_s(os.environ)
    report_file = None if report is None else reports.clear(Path(report))
    standard_streams.fill_gaps()  # the ranks get these descriptors
    with ExitStack() as job:
        output = job.enter_context(open_output(placement.size, None if log_dir is None else Path(log_dir)))
        signals = job.enter_context(stop_signals())
        sources = Sources(job.enter_context(selectors.DefaultSelector()))
        launcher = Launcher(placement, timeout, grace_s, transport, output, signals, sources, min_ranks)
        if placement.is_here:
            hosts = {HERE: job.enter_context(_this_host(placement, program, sources, launcher.hear))}
        else:
            hosts = _other_hosts(placement, program, environment, sources, launcher.hear, job)
        outcome = launcher.run(hosts)
        _say(coloured(line, "" if number else VERDICT, sys.stderr) for number, line in enumerate(outcome.words))
        if report_file is not None:
            try:
                reports.write(report_file, outcome, placement)
            except UsageError as error:
                _say([str(error)])
        return outcome.exit_code


@contextmanager
def _this_host(
    placement: Placement, program: Program, sources: Sources, hear: Callable[[str, News], None]
) -> Iterator[LaunchedHost]:
    with job_folder() as folder:
        environ = {**os.environ, "ASYNCOLL_FOLDER": str(folder)}
        start = template_of(placement.size, program, folder, environ)
        with local_host(start, loopback(), sources, partial(hear, HERE)) as host:
            yield host


def _other_hosts(
    placement: Placement,
    program: Program,
    names: Sequence[str],
    sources: Sources,
    hear: Callable[[str, News], None],
    job: ExitStack,
) -> dict[str, LaunchedHost]:
    key, variables = new_key(), travelling(os.environ, names)
    return {
        name: job.enter_context(remote_host(name, size, program, key, variables, sources, partial(hear, name)))
        for name, size in placement.hosts.items()
    }


@contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """The user's signals: each byte that is read from this socket is the number of one.

    Signals that are ignored (nohup) stay ignored.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = {signum: signal.getsignal(signum) for signum in (*STOPPING, SUSPENDING)}
        taken = [signum for signum in before if before[signum] is not signal.SIG_IGN]
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in taken:
            signal.signal(signum, lambda *_: None)
        try:
            yield reader
        finally:
            for signum in taken:
                signal.signal(signum, before[signum])
            signal.set_wakeup_fd(wakeup)


def is_reachable(address: str, addresses: Sequence[str]) -> bool:
    """Whether the hosts that ssh has reached at `addresses` reach `address`, one of them. A loopback address: no.

    If all of them are, the hosts are containers that share the network of one.
    """
    is_inner = [ipaddress.ip_address(each).is_loopback for each in (address, *addresses)]
    return all(is_inner) or not is_inner[0]


@dataclass(eq=False)
class Launcher:
    placement: Placement
    timeout: float | None  # seconds for the whole job
    grace_s: float  # for a rank that is stopped when all others have ended
    transport: str | None
    output: Output
    signals: socket.socket  # of the user
    sources: Sources
    min_ranks: int | None = None  # the job goes on after a death while so many have not died; None: it ends

    def __post_init__(self) -> None:
        self._deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self._hosts: Mapping[str, LaunchedHost] = {}
        self._addresses: dict[str, tuple[str, int]] = {}  # of the hosts that are ready: an address, and a free port
        self._refusals: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._states: dict[int, str] = {}  # at the last look
        self._last_words: list[str] = []
        self._store: AnsweringStore | None = None
        self._stopped_by: int | None = None
        self._give_up_at: float | None = None  # when hosts that have not ended are given up
        self._look_at: float | None = None  # the time of the next look at the states of the ranks that still run
        size, now = self.placement.size, time.monotonic()
        self._supervisor = Supervisor(size, now, self._order, self.grace_s, self.min_ranks)
        self.sources.watch(self.signals, self._hear_user)

    def run(self, hosts: Mapping[str, LaunchedHost]) -> Outcome:
        """Run the job. Raises UsageError if a host cannot start its ranks."""
        supervisor, self._hosts = self._supervisor, hosts
        while len(self._addresses) < len(hosts) and not self._refusals and not supervisor.stopping:
            self._turn()
        if not self._refusals and not supervisor.stopping:
            self._check_reachable()
        if not self._refusals and not supervisor.stopping:
            self._start()
            while supervisor.running:
                self._turn()
        self._end(hosts.values())
        for name, why in self._refusals.items():
            raise UsageError(f"host {name}: {why}")
        last_lines = [stream.last for stream in self.output.err]
        words = [*explain(supervisor, last_lines, self._pids, self._host_names()), *self._last_words]
        exit_code = supervisor.exit_code
        if exit_code is None:
            exit_code = supervisor.root.exit_code if supervisor.root else 0
        seconds = time.monotonic() - supervisor.started_at
        ends, deaths = supervisor.ends, [*supervisor.deaths.values()]
        return Outcome(exit_code, words, supervisor.root, self._stopped_by, self._pids, ends, deaths, seconds)

    def _end(self, hosts: Collection[LaunchedHost]) -> None:
        """End all hosts. One that does not answer is given up."""
        for host in hosts:
            host.end()
        self._give_up_at = time.monotonic() + GIVE_UP_S
        while not all(host.has_ended for host in hosts):
            self._turn()

    def _check_reachable(self) -> None:
        first = self.placement.host_of(0)
        address, _ = self._addresses[first]
        if not is_reachable(address, [place for place, _ in self._addresses.values()]):
            self._refusals[first] = (
                f"ssh reaches it at {address}, which other hosts do not reach, and rank 0 serves the store there: give "
                "its address, or a name that means the same address on all hosts"
            )

    def _start(self) -> None:
        """Ask for all ranks. Templates fork them when they have loaded."""
        address, port = self._addresses[self.placement.host_of(0)]
        for name, host in self._hosts.items():
            for rank in self.placement.ranks_of(name):
                variables = rank_environment(rank, self.placement, address, port, self.transport)
                host.tell({"fork": rank, "environment": variables})

    def _turn(self) -> None:
        """Wait until an event comes or is due, and handle it."""
        times = self._deadline, self._look_at, self._give_up_at, self._supervisor.wake_at()
        due = [at for at in times if at is not None]
        self.sources.wait(min(max(0.0, min(due) - time.monotonic()), WAIT_MAX_S) if due else None)
        self._look()
        self._supervisor.tick(time.monotonic())
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self._time_out()
        if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
            self._give_up_at = None
            self._kill_the_rest()

    def _time_out(self) -> None:
        supervisor = self._supervisor
        if supervisor.running and not supervisor.stopping:
            supervisor.stop(signal.SIGTERM, TIMEOUT_CODE, time.monotonic())
            late = f"{were(supervisor.stopped)} still running"
            self._last_words.append(f"the job ran into its timeout of {self.timeout:g} s; {late}")

    def _look(self) -> None:
        """Ask for the states of the ranks that still run while others have ended.

        If all of them are stopped, none will end by itself.
        """
        now = time.monotonic()
        if not self._supervisor.has_stragglers:
            self._look_at = None
        elif self._look_at is None:
            self._look_at = now + LOOK_S
        elif now >= self._look_at:
            self._look_at = now + LOOK_S
            self._states.clear()
            for name, host in self._hosts.items():
                # Fast ranks may end before the last ones are forked.
                if ranks := [rank for rank in self._running_on(name) if rank in self._pids]:
                    host.tell({"look": ranks})

    def _take_states(self, states: Sequence[tuple[int, str]]) -> None:
        """Report to the supervisor the states of the stragglers, once all hosts have told theirs."""
        self._states.update(states)
        if self._supervisor.running - self._states.keys():
            return
        grace_s = self._supervisor.stopped_grace_s
        if stopped := self._supervisor.looked(self._states, time.monotonic()):
            _say([tell_stopped(stopped, self._pids, grace_s, self._host_names())])

    def _host_names(self) -> dict[int, str]:
        """The host of each rank; nothing in a job of this host alone."""
        return {} if self.placement.is_here else {rank: self.placement.host_of(rank) for rank in self._pids}

    def _running_on(self, name: str) -> list[int]:
        return sorted(self._supervisor.running.intersection(self.placement.ranks_of(name)))

    def _hear_user(self) -> None:
        for signum in self.signals.recv(64):
            if signum == SUSPENDING:
                self._suspend()
                continue
            if self._supervisor.stopping:
                _say(["killing the ranks"])
            else:
                self._stopped_by = signum
                grace = INTERRUPT_GRACE_S if signum == signal.SIGINT else STOP_GRACE_S
                graced = f"the ranks get {grace:.0f} s; a second signal kills them"
                _say([f"{signal_name(signum)}: {graced if self._pids else 'no rank has started'}"])
            self._supervisor.stop(signum, 128 + signum, time.monotonic())
            if not self._supervisor.running:
                self._kill_the_rest()

    def _suspend(self) -> None:
        """Stop all ranks, and this process until the user continues it; and then continue them.

        They are in sessions of their own, which Ctrl-Z does not reach, and where SIGTSTP stops nothing.
        """
        self._order(signal.SIGSTOP, [*self._supervisor.running])
        os.kill(os.getpid(), signal.SIGSTOP)
        self._order(signal.SIGCONT, [*self._supervisor.running])

    def _kill_the_rest(self) -> None:
        """What is left are descendants of the ranks, or hosts that do not answer."""
        for host in self._hosts.values():
            host.tell({"signal": signal.SIGKILL, "ranks": []})

    def hear(self, name: str, news: News) -> None:
        """Take the news of the host `name`. Raises ProtocolError if they are of a rank that is not on it."""
        now = time.monotonic()
        for word in ("output", "started", "exited", "rank"):
            if word in news and news[word] not in self.placement.ranks_of(name):
                raise ProtocolError(f"news of rank {news[word]}, which is not on it")
        match news:
            case {"output": rank, "error": is_error, "data": data}:
                self._show((self.output.err if is_error else self.output.out)[rank], data)
            case {"ready": port, "address": address}:
                self._addresses[name] = address, port
            case {"refused": why}:
                self._refusals.setdefault(name, why)
            case {"started": rank, "pid": pid}:
                if not self._pids:
                    self._supervisor.started_at = now
                self._pids[rank] = pid
            case {"exited": rank, "code": code}:
                self._tell_deaths(self._supervisor.exited(rank, code, now))
            case {"states": states}:
                self._take_states(states)
            case {"asked": number, "question": question}:
                self._hosts[name].tell({"answered": number, "answer": self._answer(question)})
            case {"ended": why}:
                self._lose(name, why)
            case _:
                self.output.log_error(news["rank"], news["traceback"])
                self._supervisor.failed(Failure(after_s=now - self._supervisor.started_at, **news))

    def _answer(self, question: bytes) -> bytes:
        """The answer of the store of epochs, which ranks of other hosts ask after a death."""
        if self._store is None:
            from asyncoll.world.launcher_store import AnsweringStore  # a part of the start otherwise

            self._store = AnsweringStore()
        return self._store.answer(question)

    def _show(self, stream: OutputStream, data: bytes) -> None:
        """Show output. If the reader of it is gone (`| head`), stop the job. A full disk stops the output alone."""
        try:
            stream.show(data, time.monotonic())
        except BrokenPipeError:
            stream.abandon()
            self._supervisor.stop(signal.SIGTERM, 128 + signal.SIGPIPE, time.monotonic())
        except OSError as error:
            stream.abandon()
            _say([f"the output of the ranks cannot be written ({error.strerror}): the job goes on without it"])

    def _lose(self, name: str, why: str) -> None:
        """A host has ended, and with it the ranks that ran there."""
        if name not in self._addresses and not self._supervisor.stopping:
            self._refusals.setdefault(name, why)
        of_host = "" if name == HERE else f"host {name}: "
        self._tell_deaths(self._supervisor.lost(self._running_on(name), f"{of_host}{why}", time.monotonic()))

    def _tell_deaths(self, deaths: Sequence[Failure]) -> None:
        """Report deaths after which the job goes on."""
        if deaths:
            _say([tell_deaths(deaths, self._supervisor.living, self._pids, self._host_names())])

    def _order(self, signum: int, ranks: Sequence[int]) -> None:
        for name, host in self._hosts.items():
            if chosen := sorted(set(ranks).intersection(self.placement.ranks_of(name))):
                host.tell({"signal": signum, "ranks": chosen})


def _say(lines: Iterable[str]) -> None:
    if sys.stderr is None:
        return
    with suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()
