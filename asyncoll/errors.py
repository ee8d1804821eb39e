"""What can go wrong: you, the peer, or the world.

Every error that this library raises on purpose derives from `AsyncollError`, so one `except` covers it. Anything else
that escapes is a bug in the library.
"""

from __future__ import annotations


def describe(error: BaseException) -> str:
    """The type and the text of any exception, in characters that can be sent."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(thing: object) -> str:
    """The text of any object, in characters that can be sent. Its own `__str__` may fail."""
    try:
        text = str(thing)
    except BaseException as failure:  # `__str__` is the user's code, and may even raise SystemExit
        text = f"(its __str__ raised {type(failure).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


class AsyncollError(Exception):
    """The base of every error below; never raised itself."""


class UsageError(AsyncollError):
    """You asked for something that cannot be done; the message says what to do instead. Nothing was sent."""


class MismatchError(AsyncollError):
    """Ranks called different things; the message names both sides and both call sites."""


class ProtocolError(AsyncollError):
    """A peer sent bytes that the protocol forbids.

    `source` is its rank, or -1 while it is unknown.
    """

    def __init__(self, message: str, source: int = -1) -> None:
        super().__init__(message)
        self.source = source


class PeerLostError(AsyncollError):
    """A rank of the world is gone, or frozen: its process is stopped, or the network to it is cut.

    Raised by every pending and later call of every survivor. `rank` is the lost one in the world, `cause` says how it
    was noticed, and `last_seen_s` how many seconds before the error it was last known to live. `host` and `pid` are its
    process, empty and 0 where that is unknown, and `doing` is the last call of it that the survivor heard of, if any.
    """

    def __init__(
        self, rank: int, cause: str, host: str = "", pid: int = 0, last_seen_s: float = 0.0, doing: str = ""
    ) -> None:
        where = f" (host {host}, pid {pid})" if host else ""
        what = f"; it was last heard of in {doing}" if doing else ""
        super().__init__(f"rank {rank}{where} is gone: {cause}{what}")
        self.rank = rank
        self.cause = cause
        self.host = host
        self.pid = pid
        self.last_seen_s = last_seen_s
        self.doing = doing


class DeadlineError(AsyncollError):
    """A call was not over in time. The message says who has come to it, who has not, and where these are.

    Of a collective: raised at every rank, and its communicator has ended. `arrived` and `missing` are ranks of the
    world; a rank that does not answer is missing.
    """

    def __init__(self, message: str, arrived: tuple[int, ...] = (), missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.arrived = arrived
        self.missing = missing


class NonFiniteError(AsyncollError):
    """A tensor holds NaN or infinity. Raised at every rank; nothing was changed, and the next call may follow.

    `ranks` of the world are those whose tensors do, or one of them.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        whose = "tensor of rank" if len(ranks) == 1 else "tensors of ranks"
        super().__init__(
            f"NaN or infinity in the {whose} {', '.join(map(str, ranks))}: nothing has changed, so take it out of the "
            "tensor there, and skip this step at every rank"
        )
        self.ranks = ranks


class AbortedError(AsyncollError):
    """Some rank gave up. `rank` is that rank, `reason` its words."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} aborted: {reason}")
        self.rank = rank
        self.reason = reason


class RemoteError(AsyncollError):
    """A function that you called raised where it ran.

    `rank` is where (of a service outside of a world, -1); `type_name`, `message` and `traceback` are those of its
    exception, as text.
    """

    def __init__(self, rank: int, type_name: str, message: str, traceback: str = "") -> None:
        where = f"rank {rank}" if rank >= 0 else "the service"
        super().__init__(f"{type_name} at {where}: {message}" + (f"\n\n{traceback}" if traceback else ""))
        self.rank = rank
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class ServiceLostError(AsyncollError):
    """A service outside of a world cannot be reached, or is gone. What was called there may or may not have run."""


class ClosedError(AsyncollError):
    """The communicator was used after it was closed."""


class DeadlockError(AsyncollError):
    """In the simulated world everything waits and no timer is set; the message lists who waits for what."""
