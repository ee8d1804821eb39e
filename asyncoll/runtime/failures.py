"""Failures of communicators and of the world: how a rank records them, reports them and raises them.

A failure ends every wait of its communicator and every later call on it. The first failure of a communicator is kept;
later ones are ignored. A failure is stored as the control message that reports it (`wire.Lost`, `wire.Abort`, ...). So
a rank can forward a failure unchanged, and all ranks raise the same error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncoll import errors
from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.transport import wire

WORLD = 0  # in place of a communicator: the failure ends all communicators
logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class Closed:
    """This rank has left the world. Other ranks are not told."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """This rank goes on in a later epoch, and the others do."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A rank that takes part in a call of this communicator has left it. All members know, so nothing is sent."""

    rank: int
    cause: str
    host: str
    pid: int
    in_order: bool


Reported: TypeAlias = (
    wire.Abort | wire.Broken | wire.Deadlock | wire.Lost | wire.Mismatch | wire.Overdue
)  # sent to other ranks
Failure: TypeAlias = Reported | Closed | Departed | Succeeded


def error_of(failure: Failure) -> AsyncollError:
    """A new exception for `failure`: each waiter raises its own object, because a traceback belongs to one raise."""
    match failure:
        case wire.Abort():
            return errors.AbortedError(failure.rank, failure.reason)
        case wire.Broken():
            return errors.ProtocolError(failure.text, failure.source)
        case wire.Lost():
            rank, cause, host, pid, last_seen_ms, doing, ranks = failure
            return errors.PeerLostError(rank, cause, host, pid, last_seen_ms / 1000, doing, ranks_in(ranks))
        case wire.Mismatch():
            return errors.MismatchError(failure.text)
        case wire.Overdue():
            return errors.DeadlineError(failure.text, ranks_in(failure.arrived), ranks_in(failure.missing))
        case wire.Deadlock():
            return errors.DeadlockError(failure.text)
        case Departed():
            left = errors.PeerLostError(failure.rank, failure.cause, failure.host, failure.pid)
            left.left_in_order = failure.in_order
            return left
        case Closed():
            return errors.ClosedError("this communicator is closed")
        case Succeeded():
            return errors.ClosedError(
                f"its ranks go on in epoch {failure.epoch}: use the communicator that `shrink` or `grow` has returned"
            )


def ranks_in(listed: str) -> tuple[int, ...]:
    """The ranks in a text of a message, which separates them by commas."""
    return tuple(int(rank) for rank in listed.split(",") if rank.isdecimal())


class Failures:
    """The failures that one rank knows, and the waits and listeners that they end.

    In, failures that this rank notices: `give_up`, `abort`, `mismatch` and `broken`, which also send the failure to the
    members. In, failures that other ranks report: `fail`. Out: control messages through the router; exceptions in the
    futures of `watch`; calls of the listeners of `on_failure`, in this order.

    All of it runs on the runtime's loop, except `record`, `of`, `check` and `has_failed`: calls in shared memory use
    these in any thread. They need no lock: entries are added to a dict by one atomic step, and never changed.
    """

    def __init__(self, router: Router, membership: Membership) -> None:
        self._router = router
        self._membership = membership
        self._first: dict[int, Failure] = {}  # by communicator
        self._told: set[int] = set()  # communicators whose waits have ended, and whose listeners were called
        self._passed_on: set[int] = set()  # communicators whose failure `pass_on` has sent
        self.any = False  # whether anything has failed
        self._watched: dict[asyncio.Future[Any], tuple[int, str]] = {}  # communicator and description of each wait
        self._listeners: list[tuple[int, Callable[[Failure, int], None]]] = []

    def record(self, failure: Failure, communicator: int = WORLD) -> Failure:
        """Keep `failure` if it is the first of `communicator` and of the world. Returns the first. From any thread.

        Every later call raises the error of the first failure. `fail` or `give_up` must follow, with the same object:
        only they end the waits.
        """
        # One atomic step: of two threads that come with a failure at once, both get the same one as the first.
        first = self.of(communicator) or self._first.setdefault(communicator, failure)
        # After the entry: a thread that sees this finds the failure.
        self.any = True
        return first

    def fail(self, failure: Failure, communicator: int = WORLD) -> None:
        """End every wait of `communicator` and every later call on it. Sends nothing.

        Does nothing if the communicator or the world has failed before, of another failure.
        """
        if self.record(failure, communicator) is not failure or communicator in self._told:
            return
        self._told.add(communicator)
        # A future wakes its task in a later turn of the loop. So no context of `watch` ends during this iteration.
        for future, (owner, _) in self._watched.items():
            if communicator in (WORLD, owner):
                break_off(future, failure)
        for owner, listener in self._listeners:
            if owner in (WORLD, communicator) or communicator == WORLD:
                listener(failure, communicator)

    def on_failure(self, communicator: int, listener: Callable[[Failure, int], None]) -> None:
        """Call `listener(failure, communicator)` for each failure of `communicator` and of the world.

        WORLD means the failures of all communicators. Calls it at once if `communicator` has failed already.
        """
        self._listeners.append((communicator, listener))
        failure = self.of(communicator)
        if failure is not None:
            listener(failure, communicator)

    def forget(self, communicator: int) -> None:
        """Forget the failure of `communicator` and its listeners: it is not used any more."""
        self._first.pop(communicator, None)
        self._told.discard(communicator)
        self._passed_on.discard(communicator)
        self._listeners = [(owner, listener) for owner, listener in self._listeners if owner != communicator]
        self.any = bool(self._first)
        # Again: another thread may have recorded a failure between the last two steps.
        if self._first:
            self.any = True

    def of(self, communicator: int) -> Failure | None:
        """The failure that ended `communicator`, or None. Its own failure precedes that of the world."""
        return self._first.get(communicator) or self._first.get(WORLD)

    def check(self, communicator: int) -> None:
        """Raise the error of `communicator` if it or the world has failed."""
        # The common case costs one test.
        if self._first:
            failure = self.of(communicator)
            if failure is not None:
                raise error_of(failure)

    def has_failed(self, communicator: int) -> bool:
        """Whether `communicator` or the world has failed."""
        return self.of(communicator) is not None

    @contextlib.contextmanager
    def watch(self, communicator: int, what: str) -> Iterator[asyncio.Future[Any]]:
        """A future that a failure of `communicator` ends; for the duration of the context.

        `what` describes the wait, for the report of a deadlock.
        """
        # A failure ends the futures that it finds. It would not end one that is made afterwards.
        self.check(communicator)
        future = asyncio.get_running_loop().create_future()
        self._watched[future] = (communicator, what)
        try:
            yield future
        finally:
            del self._watched[future]

    def watched(self) -> list[str]:
        """The descriptions of the futures of `watch`."""
        return [what for _, what in self._watched.values()]

    # -- reports to other ranks -------------------------------------------------------------------

    def give_up(self, failure: Reported, communicator: int, members: Iterable[int]) -> None:
        """Fail `communicator`, and send the failure to `members` (world ranks), unless it has failed before."""
        # The others are told before the waits end here: this rank may leave as soon as its program has the error.
        if self.record(failure, communicator) is failure:
            self._report(failure, members)
            self.fail(failure, communicator)

    def abort(self, communicator: int, members: Iterable[int], reason: str) -> None:
        """Fail `communicator` at all `members` with an AbortedError of this rank."""
        number = self._membership.numbers[self._router.rank]
        self.give_up(wire.Abort(communicator, number, reason), communicator, members)

    def mismatch(self, communicator: int, members: Iterable[int], text: str) -> None:
        """Fail `communicator` at all `members` with a MismatchError."""
        self.give_up(wire.Mismatch(communicator, text), communicator, members)

    def broken(self, source: int, error: ProtocolError) -> None:
        """Fail the world at all ranks, because `source` sent bytes that the protocol forbids and cannot be trusted."""
        number = self._membership.numbers[source]
        text = f"rank {number} broke the protocol: {error}"
        logger.error(text)
        self.give_up(wire.Broken(number, text), WORLD, self._membership.members)

    def pass_on(self) -> None:
        """Send each failure that this rank knows to all other ranks, once and unchanged, as the rank leaves the world.

        Without this, a rank that does not know the failure yet would see this rank leave and report it as the lost one.
        """
        for communicator, failure in tuple(self._first.items()):
            if communicator not in self._passed_on and not isinstance(failure, Closed | Departed | Succeeded):
                self._passed_on.add(communicator)
                self._report(failure, self._membership.members)

    def _report(self, failure: Reported, members: Iterable[int]) -> None:
        for member in members:
            if member != self._router.rank:
                self._router.tell(member, failure)


def break_off(future: asyncio.Future[Any], failure: Failure) -> None:
    """End a wait with the error of `failure`."""
    if not future.done():
        future.set_exception(error_of(failure))
        future.exception()  # mark it as seen: its waiter may be gone
