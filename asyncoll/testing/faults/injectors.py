"""Faults that strike a rank, and `fault`, which injects one at a named point of a program.

These faults strike real ranks. The faults of a simulated network (`Pause`, `Cut`, `Crash`) are arguments of `Network`,
with their times.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from asyncoll import forks
from asyncoll.communicator import Communicator
from asyncoll.errors import UsageError
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing.faults.core_points import CorePoint, core_points
from asyncoll.testing.faults.injection_points import CountedPoints, InjectionPoints
from asyncoll.testing.faults.record_points import RECORD, RecordPoint
from asyncoll.testing.faults.staging_points import STAGING_POINTS, StagingPoint
from asyncoll.transport.messages.simulated import SimulatedTransport

Moment = Literal["before", "inside", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "inside", "after")

# A stopped process cannot continue itself, so a second process stops and continues it. That process continues its
# victim when it is terminated, and ends when the victim has ended. A shell that ends at once starts it in the
# background: so it is not a child of the victim, which would have to wait for it.
_STOP_AND_GO = """
(trap 'kill -CONT $0; exit' TERM
n=$1; while [ "$n" -gt 0 ] && kill -STOP $0; do sleep $2; kill -CONT $0; sleep $3; n=$((n - 1)); done) &
"""
_CONTINUE = """
(while kill -0 $0 && ! grep -q '^State:.T' /proc/$0/status; do sleep 0.001; done; sleep $1; kill -CONT $0) &
"""
_RUNNING_S = 0.005  # time between two stops of a slow rank: with factor 10 a stop is far shorter than a freeze


class FaultPlace:
    """The rank that a fault strikes, and the task that entered `fault` there; there is none without an event loop."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._task = _current_task()
        self._error: Exception | None = None
        self._interruption: asyncio.Handle | None = None
        self._is_cancelled = False

    def interrupt(self, error: Exception) -> None:
        """Make the task raise `error` at its current await, or a thread at the end of the block. Safe in any thread."""
        self._error = error
        if self._task is not None:
            self._interruption = self._task.get_loop().call_soon_threadsafe(self._cancel, self._task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._is_cancelled = True
        task.cancel()

    def settle(self) -> None:
        """Raise the error of `interrupt`, if it was called."""
        if self._error is None:
            return
        if self._interruption is not None:
            self._interruption.cancel()
        if self._task is not None and self._is_cancelled:
            self._task.uncancel()
        raise self._error


def _current_task() -> asyncio.Task[Any] | None:
    with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
        return asyncio.current_task()
    return None


class Fault(Protocol):
    """A fault that can strike a rank. Implement this protocol for one of your own."""

    @property
    def of_process(self) -> bool:
        """Whether the fault strikes a whole process, and so all the ranks in it."""

    def strike(self, place: FaultPlace) -> None:
        """Inject the fault now. Called in the thread that passes the injection point."""


class OfProcess:
    """The faults that strike a whole process."""

    of_process: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Kill(OfProcess):
    """Kill the process (SIGKILL). In a simulated world this is a `Crash`: the task of the rank ends."""

    def strike(self, place: FaultPlace) -> None:
        transport = place.comm._core.member.endpoint.transport
        if isinstance(transport, SimulatedTransport):
            transport.crash()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Orphan(OfProcess):
    """Kill the process (SIGKILL) and leave a child, forked just before, that holds copies of all its descriptors.

    The child does nothing. It ends after `lives_s` seconds if it is not killed before.
    """

    lives_s: int = 60

    def strike(self, place: FaultPlace) -> None:
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.lives_s)
        while True:
            signal.pause()


@dataclass(frozen=True, slots=True)
class Exit(OfProcess):
    """End the process at once from inside (`os._exit`), as C code may do."""

    code: int = 1

    def strike(self, place: FaultPlace) -> None:
        os._exit(self.code)


@dataclass(frozen=True, slots=True)
class Signal(OfProcess):
    """Send a signal to the process. A handler of the program runs in the main thread, and may raise."""

    number: int = signal.SIGTERM

    def strike(self, place: FaultPlace) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Stop(OfProcess):
    """Stop the whole process (SIGSTOP) for `duration_s` seconds; if that is infinite, until it gets SIGCONT."""

    duration_s: float = math.inf

    def strike(self, place: FaultPlace) -> None:
        if self.duration_s < math.inf:
            _start(_CONTINUE, self.duration_s)
        # To this thread: a signal to the process may reach another one, and this thread would go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Slow(OfProcess):
    """Slow the whole process down by `factor` for `duration_s` seconds: it is stopped and continued in turn."""

    factor: float = 10.0
    duration_s: float = 1.0

    def strike(self, place: FaultPlace) -> None:
        stopped_s = _RUNNING_S * (self.factor - 1)
        _start(_STOP_AND_GO, math.ceil(self.duration_s / (stopped_s + _RUNNING_S)), stopped_s, _RUNNING_S)


@dataclass(frozen=True, slots=True)
class HoldGil:
    """Hold the GIL for `duration_s` seconds, as C code may do: no thread of the process runs Python meanwhile."""

    duration_s: float
    of_process: ClassVar[bool] = False

    def strike(self, place: FaultPlace) -> None:
        ctypes.PyDLL(None).usleep(round(self.duration_s * 1e6))  # PyDLL, unlike CDLL, does not release the GIL


@dataclass(frozen=True, slots=True)
class Raise:
    """Make the task that entered `fault` raise `error` at its current await. The awaited call is cancelled.

    In a thread without an event loop no call is cancelled, and `error` is raised at the end of the block.
    """

    error: Exception
    of_process: ClassVar[bool] = False

    def strike(self, place: FaultPlace) -> None:
        place.interrupt(self.error)


@dataclass(frozen=True, slots=True)
class Disconnect(OfProcess):
    """Shut down all connections of this rank to its peers, in both directions. The process lives on."""

    def strike(self, place: FaultPlace) -> None:
        transport: Any = place.comm._core.member.endpoint.transport
        peers = getattr(transport, "_inner", transport).peers  # a SlottedTransport wraps the one with peers
        addresses = set(map(forks.canonical, peers))
        # All are found before the first is shut: this rank may not take a peer for lost, and tell the others meanwhile.
        ends = {descriptor: list(forks.ends_of(descriptor)) for descriptor in map(int, os.listdir("/proc/self/fd"))}
        # A socket that listens has one end.
        for descriptor in [each for each in ends if len(ends[each]) == 2 and addresses.intersection(ends[each])]:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # fails if it is shut already


@contextlib.contextmanager
def fault(
    comm: Communicator, what: Fault, *, rank: int, at: Moment | str = "inside", injection_point: int = 1
) -> Iterator[None]:
    """A context manager that injects `what` at rank `rank`: before, inside or after the block. Every rank enters it.

        with fault(comm, Kill(), rank=2):
            await comm.allreduce(x)

    Programs without an event loop (`asyncoll.init`) use it, too. With `at="inside"` the fault strikes when the rank
    passes its `injection_point`-th injection point in the block, counted from 1. A rank passes one when it sends a
    message, when it receives one, before it takes a lock of shared memory, and after it has taken it. So the fault
    strikes in the middle of a call, in the thread that does the work, which may be another one than the caller's. If
    the block has fewer injection points, the fault strikes at its end.
    It does not strike if the block raises or is cancelled before.

    `at` may also be the name of an injection point of the compiled core (`asyncoll._core.native.points`). The fault
    then strikes when the process passes this point for the `injection_point`-th time. A lock of shared memory may be
    held there, and an exception cannot be raised: an exception of `Signal`'s handler is lost.

    With `at="record"` it strikes at the `injection_point`-th step of Python in the record of rounds in shared memory,
    in the caller's thread. The compiled core makes no such steps.

    With `at="begun"` or `at="landed"` it strikes when the copy of a tensor from its device has been queued, or has
    arrived, for the `injection_point`-th time.

    Raises UsageError if `what` strikes whole processes and all ranks share this process: in `run_ranks`, and in
    `simulate` for faults other than `Kill`.
    """
    if at not in (*MOMENTS, *STAGING_POINTS, RECORD, *core_points()) or injection_point < 1:
        raise UsageError(
            f"a fault strikes {', '.join((*MOMENTS, *STAGING_POINTS, RECORD))} or at a point of the compiled core, "
            f"at injection point 1 or later; not {at!r} at {injection_point}"
        )
    shares_process = comm.size > 1 and isinstance(comm._core.member.runner, SharedLoop)
    crashes = isinstance(what, Kill) and isinstance(comm._core.member.endpoint.transport, SimulatedTransport)
    if what.of_process and shares_process and not crashes:
        raise UsageError(f"{what} strikes a process, and this one holds all ranks: use processes (asyncoll launch)")
    if comm.rank != rank:
        yield
        return
    place = FaultPlace(comm)
    if at == "before":
        what.strike(place)
        place.settle()
        yield
        return

    def passed(number: int) -> None:
        if number == injection_point:
            what.strike(place)

    points: CountedPoints
    if at in MOMENTS:
        points = InjectionPoints(comm, passed)
    elif at in STAGING_POINTS:
        points = StagingPoint(comm, at, passed)
    else:
        points = RecordPoint(passed) if at == RECORD else CorePoint(at, passed)
    try:
        with points if at != "after" else contextlib.nullcontext():
            yield
    except asyncio.CancelledError:
        place.settle()
        raise
    if points.count < injection_point:
        what.strike(place)
    place.settle()


def _start(script: str, *arguments: float) -> None:
    """Start a shell script that acts on this process and is not its child."""
    words = [str(os.getpid()), *(f"{argument:g}" for argument in arguments)]
    quiet = subprocess.DEVNULL
    subprocess.run(["sh", "-c", script, *words], stdin=quiet, stdout=quiet, stderr=quiet, check=True)
