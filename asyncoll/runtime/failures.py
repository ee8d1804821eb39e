"""What has ended a communicator, or the world, and who is told. The first failure stays.

It ends every wait of that communicator and every later call on it. A failure is the message that tells it. So whoever
hears of one can pass it on as it was, and all ranks raise the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncoll.errors import (
    AbortedError,
    AsyncollError,
    ClosedError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    ProtocolError,
)
from asyncoll.runtime.router import Router
from asyncoll.transport import wire

WORLD = 0  # instead of a communicator
logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class Closed:
    """This rank has left. Nobody else is told."""


Told: TypeAlias = wire.Abort | wire.Broken | wire.Lost | wire.Mismatch | wire.Overdue  # failures that others hear of
Failure: TypeAlias = Told | Closed


def error_of(failure: Failure) -> AsyncollError:
    """A new error that tells it."""
    match failure:
        case wire.Abort():
            return AbortedError(failure.rank, failure.reason)
        case wire.Broken():
            return ProtocolError(failure.text, failure.source)
        case wire.Lost():
            last_seen_s = failure.last_seen_ms / 1000
            return PeerLostError(failure.rank, failure.cause, failure.host, failure.pid, last_seen_s, failure.doing)
        case wire.Mismatch():
            return MismatchError(failure.text)
        case wire.Overdue():
            return DeadlineError(failure.text, _ranks(failure.arrived), _ranks(failure.missing))
        case Closed():
            return ClosedError("this communicator is closed")


def _ranks(listed: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in listed.split(",") if rank.isdecimal())


class Failures:
    """The failures that one rank has heard of, and who of it waits for what they may end."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._first: dict[int, Failure] = {}  # by communicator
        self.any = False  # whether anything has failed
        self._watched: dict[asyncio.Future[Any], tuple[int, str]] = {}
        self._listeners: list[tuple[int, Callable[[Failure], None]]] = []
        self._of_any: list[Callable[[Failure, int], None]] = []

    def fail(self, failure: Failure, communicator: int = WORLD) -> None:
        """End every wait of `communicator`, and every later call on it, unless it or the world has ended."""
        if self.has_failed(communicator):
            return
        self._first[communicator] = failure
        self.any = True
        for future, (owner, _) in self._watched.items():
            if communicator in (WORLD, owner):
                break_off(future, failure)
        for owner, listener in self._listeners:
            if communicator in (WORLD, owner):
                listener(failure)
        for hear in self._of_any:
            hear(failure, communicator)

    def on_failure(self, communicator: int, listener: Callable[[Failure], None]) -> None:
        """`listener` is told of what ends `communicator`, or the world; at once if something has."""
        self._listeners.append((communicator, listener))
        failure = self.of(communicator)
        if failure is not None:
            listener(failure)

    def on_any(self, listener: Callable[[Failure, int], None]) -> None:
        """`listener` is told of every failure from now on, and of which communicator it is."""
        self._of_any.append(listener)

    def of(self, communicator: int) -> Failure | None:
        """What has ended `communicator`: its own failure came first, if it has one."""
        return self._first.get(communicator) or self._first.get(WORLD)

    def check(self, communicator: int) -> None:
        """Raise what has ended `communicator`, if anything has."""
        if self._first:
            failure = self.of(communicator)
            if failure is not None:
                raise error_of(failure)

    def has_failed(self, communicator: int) -> bool:
        """Whether `communicator`, or the world, has."""
        return self.of(communicator) is not None

    @contextlib.contextmanager
    def watch(self, communicator: int, what: str) -> Iterator[asyncio.Future[Any]]:
        """A future that a failure of `communicator` ends; `what` says what it waits for, in case it waits for ever."""
        self.check(communicator)
        future = asyncio.get_running_loop().create_future()
        self._watched[future] = (communicator, what)
        try:
            yield future
        finally:
            del self._watched[future]

    def watched(self) -> list[str]:
        """What the futures that are watched wait for."""
        return [what for _, what in self._watched.values()]

    # -- who is told ------------------------------------------------------------------------------

    def give_up(self, failure: Told, communicator: int, members: Iterable[int]) -> None:
        """Fail, and tell the members, unless that has happened. Local, immediate, idempotent."""
        if not self.has_failed(communicator):
            self._spread(failure, members)
            self.fail(failure, communicator)

    def abort(self, communicator: int, members: Iterable[int], reason: str) -> None:
        """Give up for a reason of this rank's own."""
        self.give_up(wire.Abort(communicator, self._router.rank, reason), communicator, members)

    def mismatch(self, communicator: int, members: Iterable[int], text: str) -> None:
        """Ranks called different things: tell every member, and fail the communicator here."""
        self.give_up(wire.Mismatch(communicator, text), communicator, members)

    def broken(self, source: int, error: ProtocolError) -> None:
        """`source` broke the protocol: nothing it says can be trusted, so the world ends, and everybody hears why."""
        text = f"rank {source} broke the protocol: {error}"
        logger.error(text)
        self.give_up(wire.Broken(source, text), WORLD, range(self._router.size))

    def pass_on(self) -> None:
        """Tell everybody what has failed, as this rank has heard it.

        It leaves because of that, and others who have not heard of it yet would take this rank for the first to go.
        """
        for failure in tuple(self._first.values()):
            if not isinstance(failure, Closed):
                self._spread(failure, range(self._router.size))

    def _spread(self, failure: Told, members: Iterable[int]) -> None:
        for member in members:
            if member != self._router.rank:
                self._router.tell(member, failure)


def break_off(future: asyncio.Future[Any], failure: Failure) -> None:
    """End a wait."""
    if not future.done():
        future.set_exception(error_of(failure))
        future.exception()  # mark it as seen: its waiter may be gone
