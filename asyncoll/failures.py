"""What has ended a communicator, or the world. The first failure stays: it ends every wait and every later call.

A failure is the message that tells it. So whoever hears of one can pass it on as it was, and all ranks raise the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncoll import wire
from asyncoll.errors import (
    AbortedError,
    AsyncollError,
    ClosedError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    ProtocolError,
)

WORLD = 0  # instead of a communicator


@dataclass(frozen=True, slots=True)
class Closed:
    """This rank has left. Nobody else is told."""


Failure: TypeAlias = wire.Abort | wire.Broken | wire.Lost | wire.Mismatch | wire.Overdue | Closed


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

    def __init__(self) -> None:
        self._first: dict[int, Failure] = {}  # by communicator
        self._watched: dict[asyncio.Future[Any], tuple[int, str]] = {}
        self._listeners: list[tuple[int, Callable[[Failure], None]]] = []

    def enter(self, failure: Failure, communicator: int) -> bool:
        """End `communicator`. Returns whether it, and the world, had not ended before."""
        if WORLD in self._first or communicator in self._first:
            return False
        self._first[communicator] = failure
        for future, (owner, _) in self._watched.items():
            if communicator in (WORLD, owner):
                break_off(future, failure)
        for owner, listener in self._listeners:
            if communicator in (WORLD, owner):
                listener(failure)
        return True

    def on_failure(self, communicator: int, listener: Callable[[Failure], None]) -> None:
        """`listener` is told of what ends `communicator`, or the world; at once if something has."""
        self._listeners.append((communicator, listener))
        failure = self.of(communicator)
        if failure is not None:
            listener(failure)

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

    def all(self) -> tuple[Failure, ...]:
        """The first of each communicator that has ended."""
        return tuple(self._first.values())

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


def break_off(future: asyncio.Future[Any], failure: Failure) -> None:
    """End a wait."""
    if not future.done():
        future.set_exception(error_of(failure))
        future.exception()  # mark it as seen: its waiter may be gone
