"""What can happen to a rank, and `fault`, which lets it happen at a named point of a program.

The faults of a simulated network (`Pause`, `Cut`, `Crash`) are given to it with their times; these strike real ranks.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from asyncoll.communicator import Communicator
from asyncoll.errors import UsageError
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing.faults.injection_points import InjectionPoints
from asyncoll.transport.messages.simulated import SimulatedTransport

Moment = Literal["before", "inside", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "inside", "after")

# From outside, for a process can neither continue itself nor stop only now and then. It lets go of whom it has stopped
# whatever happens to it, and ends with it. Started by a shell that ends at once, so it is nobody's child to wait for.
_STOP_AND_GO = """
(trap 'kill -CONT $0; exit' TERM
n=$1; while [ "$n" -gt 0 ] && kill -STOP $0; do sleep $2; kill -CONT $0; sleep $3; n=$((n - 1)); done) &
"""
_CONTINUE = """
(while kill -0 $0 && ! grep -q '^State:.T' /proc/$0/status; do sleep 0.001; done; sleep $1; kill -CONT $0) &
"""
_RUNNING_S = 0.005  # of a slow rank between two stops: so with factor 10 a stop is far shorter than a freeze


class Place:
    """Where a fault strikes: a rank, and the task that entered `fault` there."""

    def __init__(self, comm: Communicator) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.comm = comm
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._error: Exception | None = None
        self._interruption: asyncio.Handle | None = None
        self._is_cancelled = False

    def interrupt(self, error: Exception) -> None:
        """Let the task raise `error` where it waits. From any thread."""
        self._error = error
        self._interruption = self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True
        self._task.cancel()

    def crash(self, transport: SimulatedTransport) -> None:
        """Die as ranks of a simulated network do."""
        transport.crash()
        self._task.cancel()

    def settle(self) -> None:
        """Raise what the task was interrupted with, if it was."""
        if self._error is None:
            return
        assert self._interruption is not None
        self._interruption.cancel()
        if self._is_cancelled:
            self._task.uncancel()
        raise self._error


class Fault(Protocol):
    """Something that happens to a rank."""

    @property
    def of_process(self) -> bool:
        """Whether it strikes a whole process, and so all the ranks in it."""

    def strike(self, place: Place) -> None:
        """Let it happen, now; on any thread."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The process is gone at once, without a word (SIGKILL). In a simulated world, a `Crash`: the rank's task ends."""

    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        transport = place.comm._core.member.endpoint.transport
        if isinstance(transport, SimulatedTransport):
            place.crash(transport)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Orphan:
    """The process is gone at once (SIGKILL), and leaves a child that it has just forked, which has all that it had.

    The child does nothing, and ends after `lives_s`, if nobody has ended it before.
    """

    lives_s: int = 60
    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(self.lives_s)
        while True:
            signal.pause()


@dataclass(frozen=True, slots=True)
class Exit:
    """The process ends at once by itself (`os._exit`), as it would from C code."""

    code: int = 1
    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        os._exit(self.code)


@dataclass(frozen=True, slots=True)
class Signal:
    """The process gets a signal. If the program has a handler for it, that runs in the main thread, and may raise."""

    number: int = signal.SIGTERM
    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True, slots=True)
class Stop:
    """The whole process stands still (SIGSTOP), for `duration_s`, or until somebody sends it SIGCONT."""

    duration_s: float = math.inf
    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        if self.duration_s < math.inf:
            _start(_CONTINUE, self.duration_s)
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Slow:
    """The whole process gets a `factor`-th of the time for `duration_s`: it is stopped and continued in turn."""

    factor: float = 10.0
    duration_s: float = 1.0
    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        stopped_s = _RUNNING_S * (self.factor - 1)
        _start(_STOP_AND_GO, math.ceil(self.duration_s / (stopped_s + _RUNNING_S)), stopped_s, _RUNNING_S)


@dataclass(frozen=True, slots=True)
class HoldGil:
    """No thread of the process runs any Python for `duration_s`, as in C code that does not let go of the GIL."""

    duration_s: float
    of_process: ClassVar[bool] = False

    def strike(self, place: Place) -> None:
        ctypes.PyDLL(None).usleep(round(self.duration_s * 1e6))


@dataclass(frozen=True, slots=True)
class Raise:
    """The task that entered `fault` raises `error` where it waits, and what it awaits there is cancelled."""

    error: Exception
    of_process: ClassVar[bool] = False

    def strike(self, place: Place) -> None:
        place.interrupt(self.error)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """All connections of this rank to its peers are shut, in both directions; the process lives on."""

    of_process: ClassVar[bool] = True

    def strike(self, place: Place) -> None:
        transport: Any = place.comm._core.member.endpoint.transport
        addresses = set(getattr(transport, "_inner", transport).peers)  # slots go over another transport
        for connection in _connections():
            with connection, contextlib.suppress(OSError):  # it is shut already
                if addresses & set(_ends(connection)):
                    connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def fault(
    comm: Communicator, what: Fault, *, rank: int, at: Moment = "inside", injection_point: int = 1
) -> Iterator[None]:
    """Let `what` happen at rank `rank`, before, inside or after the block; at all others the block is as ever.

        with fault(comm, Kill(), rank=2):
            await comm.allreduce(x)

    "inside" is when the rank passes for the `injection_point`-th time: when it sends or is handed a message, is about
    to take a lock of shared memory, or holds it. So it strikes in the middle of whatever the block calls, in the thread
    that does it, which need not be the caller's. If there are not so many injection points, it strikes at the end of
    the block. What raises, other than `Raise`, or cancels the block before is not followed by the fault.

    Raises UsageError if `what` strikes whole processes, and all ranks are in this one (`run_ranks`; `simulate`, but for
    `Kill`).
    """
    _check(comm, what, at, injection_point)
    if comm.rank != rank:
        yield
        return
    place = Place(comm)
    if at == "before":
        what.strike(place)
        place.settle()
        yield
        return
    injection_points = InjectionPoints(comm, lambda number: what.strike(place) if number == injection_point else None)
    try:
        with injection_points if at == "inside" else contextlib.nullcontext():
            yield
    except asyncio.CancelledError:
        place.settle()
        raise
    if injection_points.count < injection_point:
        what.strike(place)
    place.settle()


def _check(comm: Communicator, what: Fault, at: str, injection_point: int) -> None:
    if at not in MOMENTS or injection_point < 1:
        raise UsageError(
            f"a fault strikes {', '.join(MOMENTS)}, at injection point 1 or later; not {at!r} at {injection_point}"
        )
    shares_process = comm.size > 1 and isinstance(comm._core.member.runner, SharedLoop)
    crashes = isinstance(what, Kill) and isinstance(comm._core.member.endpoint.transport, SimulatedTransport)
    if what.of_process and shares_process and not crashes:
        raise UsageError(f"{what} strikes a process, and this one holds all ranks: use processes (asyncoll launch)")


def _start(script: str, *arguments: float) -> None:
    """A process that does something to this one, and is not its child."""
    words = [str(os.getpid()), *(f"{argument:g}" for argument in arguments)]
    quiet = subprocess.DEVNULL
    subprocess.run(["sh", "-c", script, *words], stdin=quiet, stdout=quiet, stderr=quiet, check=True)


def _connections() -> Iterator[socket.socket]:
    """The connected stream sockets of this process: copies of their descriptors, for the caller to close."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(name)))
                if connection.type == socket.SOCK_STREAM and _ends(connection):
                    yield connection
                else:
                    connection.close()


def _ends(connection: socket.socket) -> list[str]:
    """Both addresses of a connection, as transports write them; none if it is not connected."""
    try:
        ends = connection.getpeername(), connection.getsockname()
    except OSError:
        return []
    return [f"ipc://{end}" if isinstance(end, str) else "tcp://{}:{}".format(*end) for end in ends if len(end) > 1]
