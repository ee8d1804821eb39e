"""The errors of the library. Each says what is wrong, and what to do.

Every error that this library raises on purpose derives from `AsyncollError`, so one `except` covers all of them. Any
other exception that comes out of it is a bug.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self


def describe(error: BaseException) -> str:
    """The type and the text of any exception, as valid Unicode that can be sent."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(thing: object) -> str:
    """The text of any object, as valid Unicode that can be sent. Its own `__str__` may fail."""
    try:
        text = str(thing)
    except BaseException as failure:  # `__str__` is the user's code, and may even raise SystemExit
        text = f"(its __str__ raised {type(failure).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


class AsyncollError(Exception):
    """The base class of all errors of this library. It is never raised itself.

    A note at the end of its traceback names the section of the page Troubleshooting that says what to do.
    """

    _section: ClassVar = ""  # of that page; one derived elsewhere has that of its base, or none

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls._section = cls.__name__.lower()

    def __new__(cls, *args: object, **_: object) -> Self:
        error = super().__new__(cls, *args)
        if cls._section:
            error.add_note(f"docs: troubleshooting#{cls._section}")
        return error


class UsageError(AsyncollError):
    """The caller has asked for something impossible; the message says what to do instead. Nothing was sent."""


class MismatchError(AsyncollError):
    """Ranks have made different calls where they must make the same; the message names both calls and their lines."""


class ProtocolError(AsyncollError):
    """A peer has sent bytes that the protocol forbids. This ends the world.

    Attributes:
        source: the rank of the peer in the world; -1 if it is not known.
    """

    def __init__(self, message: str, source: int = -1) -> None:
        super().__init__(message)
        self.source = source


class PeerLostError(AsyncollError):
    """A rank, or a whole host, is gone or frozen: its process has ended or is stopped, or the network to it is cut.

    Every survivor raises it, in every pending and later call. If one rank is lost, `rank`, `ranks`, `host` and `pid`
    are the same at all of them. The rest may differ: each survivor keeps the news that it has first, its own or that
    of another rank.

    Attributes:
        rank: the lost rank, in the world of the first epoch; of a host that is gone, its first one.
        ranks: all ranks of the host if all of them are lost, and it is not the host of this rank; else `rank` alone.
        cause: how the loss of `rank` was noticed.
        host: the host of its process; empty if it is not known.
        pid: its process; 0 if it is not known.
        last_seen_s: seconds between the last sign of life and the error.
        doing: the last call, and the last round, of the lost rank that are known; empty if none is.
        left_in_order: nothing is wrong with the rank: its program has ended, or it has closed the communicator, and
            this one has waited for a call of it.
    """

    def __init__(
        self,
        rank: int,
        cause: str,
        host: str = "",
        pid: int = 0,
        last_seen_s: float = 0.0,
        doing: str = "",
        ranks: tuple[int, ...] = (),
    ) -> None:
        if len(ranks) > 1:
            lost = f"host {host} (ranks {', '.join(map(str, ranks))})"
        else:
            place = [f"host {host}"] * bool(host) + [f"pid {pid}"] * bool(pid)
            lost = f"rank {rank}" + (f" ({', '.join(place)})" if place else "")
        what = f"; it was last heard of in {doing}" if doing else ""
        super().__init__(f"{lost} is gone: {cause}{what}")
        self.rank = rank
        self.ranks = ranks or (rank,)
        self.cause = cause
        self.host = host
        self.pid = pid
        self.last_seen_s = last_seen_s
        self.doing = doing
        self.left_in_order = False


class EvictedError(AsyncollError):
    """The other ranks have gone on without this one, which they took for lost. `shrink` raises it.

    This rank cannot go back: its process ends, or leaves the world and joins another one.
    """


class DeadlineError(AsyncollError):
    """A call was not over in time. The message says which ranks have arrived, which are missing, and what these do.

    For a collective or a round, it is raised at every rank, and ends the communicator. A rank is also missing if its
    tensor has not arrived from its device, such as a GPU; the message names the device.

    Attributes:
        arrived: the ranks, in the world, that have made the call.
        missing: the other ranks that it concerns, including those that do not answer.
    """

    def __init__(self, message: str, arrived: tuple[int, ...] = (), missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.arrived = arrived
        self.missing = missing


class NonFiniteError(AsyncollError):
    """A tensor holds NaN or infinity. Nothing was changed, and the next call may follow.

    A sparse allreduce raises it at every rank; a training, at the rank whose gradient it is.

    Attributes:
        ranks: ranks of the world whose tensors hold them; at least one of those, if several do.
    """

    def __init__(self, ranks: tuple[int, ...], message: str = "") -> None:
        whose = "tensor of rank" if len(ranks) == 1 else "tensors of ranks"
        super().__init__(
            message
            or f"NaN or infinity in the {whose} {', '.join(map(str, ranks))}: nothing has changed, so take it out of "
            "the tensor there, and skip this step at every rank"
        )
        self.ranks = ranks


class AbortedError(AsyncollError):
    """A rank has ended the communicator, or its program, for a reason of its own.

    It has called `abort`, has cancelled a collective, or has left the world with an exception.

    Attributes:
        rank: that rank, in the world.
        reason: the text that it gave.
    """

    def __init__(self, rank: int, reason: str) -> None:
        named = f"rank {rank}: "  # begins the reason of a device's error, for instance
        super().__init__(f"rank {rank} aborted: {reason.removeprefix(named)}")
        self.rank = rank
        self.reason = reason


class DeviceError(AsyncollError):
    """A device, such as a GPU, has failed to copy a tensor to the host or back; the message names the rank and it."""


class RemoteError(AsyncollError):
    """A function called by RPC, or `main` at a rank of `asyncoll.notebook.run` or `asyncoll.ray.run`, has raised.

    Attributes:
        rank: the rank where it ran, in the world; -1 for a service outside of a world.
        type_name: the type of the exception.
        message: its text.
        traceback: its traceback, as text.
    """

    def __init__(self, rank: int, type_name: str, message: str, traceback: str = "") -> None:
        where = f"rank {rank}" if rank >= 0 else "the service"
        super().__init__(f"{type_name} at {where}: {message}" + (f"\n\n{traceback}" if traceback else ""))
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class ServiceLostError(AsyncollError):
    """A service outside of a world cannot be reached, or is gone. Calls under way may or may not have been executed."""


class ClosedError(AsyncollError):
    """The communicator, service or connection was used after it was closed."""


class DeadlockError(AsyncollError):
    """All ranks wait for each other in different calls, and nothing can make the call that one of them lacks.

    The message lists each rank, the call that it is in, its line, and for how long. Every rank raises it after five
    seconds. It is raised only where that is certain: if all threads of all ranks wait for calls, without a limit of
    their own, and no signal handler is set. Otherwise the lowest rank logs a warning. In a simulated world `simulate`
    raises it at once when all ranks wait and no timer is set.
    """


class Reason(NamedTuple):
    """Why a rank leaves that does not leave in order."""

    cause: str  # that of the PeerLostError of the others
    rank: int | None = None  # of that PeerLostError: another rank, which has left before; None: the rank that leaves


def reason_to_leave(error: BaseException | None) -> Reason | None:
    """Why a rank leaves that does so with `error`; None: it leaves in order.

    The departure of another rank is told on. Otherwise a rank that hears of it later would name this one.
    """
    if error is None:
        return None
    left = reported_failure(error)
    if isinstance(left, PeerLostError):
        return Reason(left.cause, left.rank)
    return Reason("it has left: " + (text_of(error) if isinstance(error, ClosedError) else f"after {describe(error)}"))


def reported_failure(error: BaseException) -> AbortedError | PeerLostError | None:
    """The failure of a rank that `error`, or an exception of its chain or group, reports; None if it reports none.

    A rank that has left in order has not failed.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        if isinstance(link, AbortedError) or (isinstance(link, PeerLostError) and not link.left_in_order):
            return link
        seen.add(id(link))
        pending += [link.__context__, link.__cause__]
        if isinstance(link, BaseExceptionGroup):
            pending += link.exceptions
    return None
