"""The wait-avoiding operations of one communicator that one rank knows, by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from asyncoll.algorithms.rounds.engine import Delivery, Result
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Contribution
from asyncoll.algorithms.seam.backend import Backend
from asyncoll.errors import MismatchError
from asyncoll.runtime.member import Member
from asyncoll.runtime.signature import Site
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena

AtOnce = Callable[[Array], Coroutine[Any, Any, Reduction] | Exception | None]
Begin = Callable[[Contribution], Delivery | Coroutine[Any, Any, Delivery]]


class Rounds(Protocol):
    """The rounds of one wait-avoiding operation at one rank, however they are carried out."""

    @property
    def operation(self) -> Operation: ...

    @property
    def arena(self) -> Arena | None:
        """Where a call that `begin` has begun waits; None if it never waits."""

    def describe(self) -> str:
        """The operation and the place of its first call, for error messages."""

    @property
    def begin(self) -> Begin | None:
        """`begin(contribution)` begins a call now, in the caller's thread; None if calls do not begin there.

        Returns the answer if the call needs no other rank for it, otherwise a coroutine that waits for it.
        """

    @property
    def at_once(self) -> AtOnce | None:
        """`at_once(array)` is a whole call of a contribution that is a flat array; None if there are no such calls.

        Returns an awaitable `Reduction`, with the result in the array; until it is awaited, that is its attribute
        `result`. Returns None, and has done nothing, if the call would have to wait, or is not one of the frequent
        cases. If the awaitable is not awaited, its round is told to the next call. Returns the exception if the rounds
        have failed.
        """

    async def call(self, contribution: Contribution) -> Delivery:
        """Contribute once the calls before are over, and wait for the round that this call aims at.

        Cancelling it leaves the contribution in. The results may be used until `release`.
        """

    async def join(self) -> Delivery | None:
        """Contribute no more, and wait until no rank does.

        Then one more round takes all that is still staged. Returns the rounds that this rank was not told of; None if
        there are none. In groups, which have no result of all ranks, it waits for nothing and returns None. Cancelling
        it leaves the operation in an undefined state.
        """

    def end(self) -> tuple[int, int]:
        """After a `join` without news: the newest round that this rank was told of, and how many count as skipped."""

    def release(self, delivery: Delivery) -> None:
        """The results of `delivery` have been read."""

    def take_back(self, delivery: Delivery) -> None:
        """The caller does not get `delivery`, and has been handed it over: the next call reports its rounds.

        It reports the results that `history` still has as missed, and counts the others as skipped; all of them, if
        this rank has been given a newer answer. Takes no lock, because a finalizer may call this, in any thread.
        """

    def statistics(self) -> OperationStatistics:
        """Totals so far. In any thread."""

    def last_round(self, rank: int) -> int:
        """The newest round that group rank `rank` is known to have taken part in; 0: none. In any thread."""

    # What is left once the epoch has ended, read at each survivor; and while it goes on, at any moment.

    @property
    def newest(self) -> int:
        """The newest round whose result this rank could be given; 0: none."""

    def taken(self, number: int) -> Sequence[int]:
        """How many contributions of each group rank are in the rounds up to `number`, which is `newest` at some rank.

        By message only that rank knows it.
        """

    def kept(self, first: int, last: int) -> Sequence[Result]:
        """The results of rounds `first` to `last` that this rank still has, oldest first."""


class Directory:
    """Operations by name. The first call with a name, at any rank, fixes the operation of that name."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.known: dict[str, Rounds] = {}  # by name
        member.knows_rounds(self.last_round)

    def last_round(self, rank: int) -> tuple[int, str]:
        """The last round that world rank `rank` is known to have taken part in, and its operation; 0 for none.

        Of several operations, the one with the most rounds, and of equal ones the newest.
        """
        ranks = self._member.group.ranks
        if rank not in ranks:
            return 0, ""
        known = [(rounds.last_round(ranks.index(rank)), rounds) for rounds in self]
        number, rounds = max(reversed(known), key=lambda each: each[0], default=(0, None))
        return number, rounds.describe() if rounds else ""

    def find(self, operation: Operation, caller: int, site: Site | str) -> Rounds | None:
        """The rounds of `operation`, which rank `caller` has called at `site`; None if there are none here yet.

        Raises MismatchError, and ends the communicator, if its name stands for another operation.
        """
        known = self.known.get(operation.name)
        if known is not None and known.operation != operation:
            text = f"rank {caller} called {operation} at {site}, but it exists as {known.describe()}"
            self._member.mismatch(text)
            raise MismatchError(text)
        return known

    def add(self, rounds: Rounds) -> None:
        """Make `rounds` known under the name of its operation."""
        self.known[rounds.operation.name] = rounds

    def __iter__(self) -> Iterator[Rounds]:
        """Iterate over a copy: another thread may add an operation meanwhile."""
        return iter(list(self.known.values()))


class RoundsBackend(Backend, Protocol):
    """A `Backend` that carries out wait-avoiding operations, too."""

    @property
    def operations(self) -> Directory:
        """The wait-avoiding operations that this rank knows."""

    async def open(self, operation: Operation, site: Site) -> Rounds:
        """Make `operation`, which `operations` does not have, and add it there; `site` is that of its first call.

        Raises MismatchError if another rank knows a different operation of that name. Raises UsageError if this host
        has no room for it: then nothing has been made or sent, and the communicator can be used. If another host has no
        room, a rank of that host aborts the communicator.
        """
