"""Ranks that leave the world while other ranks go on.

Leaving in this way is not collective. A rank that leaves the world leaves all its communicators (see `lifetime`), and
then tells all ranks that its connections end (message Ending). It waits for their answers (message EndingSeen), so that
no rank takes the end of a connection for a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from asyncoll.errors import Reason
from asyncoll.runtime.failures import Failures
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.transport.wire import Ending, EndingSeen

# The time for the answers to an Ending. The runtime of a rank answers, also while its program computes.
_ANSWER_S = 2.0

# Calls end in any thread, and most without a message to this object. So two of the waits look at them now and then.
_PAUSE_S = 0.002

IN_ORDER = Reason("it has left: it makes no further call")


class CommunicatorLife(Protocol):
    """One communicator of this rank: its `lifetime.Lifetime`."""

    def is_settled(self) -> bool:
        """Whether no numbered call is pending, or all have failed."""

    def is_idle(self) -> bool:
        """Whether no call is under way."""

    def has_failed(self) -> bool:
        """Whether it, or the world, has failed."""

    def check(self) -> None:
        """Raise the error of that."""

    def returned(self) -> None:
        """The program of this rank has ended."""

    def leave_at_once(self, reason: Reason | None) -> None:
        """Leave, and end the calls under way. The others are told the `reason`; None: this is in order."""

    def ended(self, rank: int, ending: Ending) -> None:
        """World rank `rank` has left the world."""


class Departures:
    """The departures of this rank and of its peers.

    In: `opened`, in any thread; and on the runtime's loop `open`, from which `lifetime` takes a communicator, `ending`
    and `answered` (of the endpoint), and `leave_world`. Out: messages through the router, and the calls of
    `CommunicatorLife`.
    """

    def __init__(self, router: Router, membership: Membership, failures: Failures) -> None:
        self._router = router
        self._membership = membership
        self._failures = failures
        self.open: dict[int, CommunicatorLife] = {}  # those of this rank that are not forgotten, by number
        self._ended: dict[int, Ending] = {}  # by rank that has left the world
        self._unanswered: set[int] = set()  # ranks that have not answered the Ending of this rank
        self._all_answered = asyncio.Event()
        self.has_told = False  # the Ending of this rank is sent

    def opened(self, number: int, communicator: CommunicatorLife) -> None:
        """Add a communicator of this rank. Peers may have left the world already."""
        self.open[number] = communicator
        for rank, ending in list(self._ended.items()):
            communicator.ended(rank, ending)

    # -- this rank leaves -------------------------------------------------------------------------

    def is_settled(self) -> bool:
        """Whether no numbered call of this rank is pending on any communicator. In any thread."""
        return all(communicator.is_settled() for communicator in list(self.open.values()))

    def returned(self) -> None:
        """The program of this rank has ended, and the rank waits for the others to end theirs."""
        for communicator in list(self.open.values()):
            communicator.returned()

    def unsettled(self, *, has_begun: bool) -> list[CommunicatorLife]:
        """The communicators with a numbered call pending that have not failed. In any thread.

        With `has_begun`, a call may have begun that is not counted as pending yet: then all that have not failed.
        """
        return [
            each for each in list(self.open.values()) if not (each.has_failed() if has_begun else each.is_settled())
        ]

    async def settle(self) -> None:
        """Wait until no numbered call of this rank is pending on any communicator."""
        while not self.is_settled():
            await asyncio.sleep(_PAUSE_S)

    async def _idle(self) -> None:
        while not all(communicator.is_idle() for communicator in list(self.open.values())):
            await asyncio.sleep(_PAUSE_S)

    async def leave_world(self, reason: Reason | None) -> None:
        """Leave all communicators, and wait until the other ranks know, for a limited time.

        The other ranks are told the `reason`; None says that it is in order. A rank that does not know yet of a failure
        that this one knows hears of it first.
        """
        self._failures.pass_on()
        for communicator in list(self.open.values()):
            communicator.leave_at_once(reason)
        # Before the Ending: after it the others may use the memory of this rank again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle(), _ANSWER_S)
        await self.part_from_others(reason)

    def told(self, reason: Reason | None) -> tuple[str, int]:
        """The cause of the PeerLostError of the others if this rank leaves for `reason`, and its member number."""
        cause, number = reason or IN_ORDER
        numbers = self._membership.numbers
        # The error of an earlier world may name a rank that this one has not.
        return cause, number if number is not None and number in numbers else numbers[self._router.rank]

    async def part_from_others(self, reason: Reason | None) -> None:
        """Tell the other ranks that the connections of this one end, and wait for their answers, for a limited time.

        The end of a connection may be noticed before its last messages are read: those say why the rank has left.
        """
        # Last before the Ending: so a rank that knows of a failure has told all others when they hear that it has left.
        self._failures.pass_on()
        others = set(self._membership.members) - {self._router.rank} - self._membership.lost
        # A rank that has left needs no answer, and gives none.
        self._unanswered = others - self._membership.ended
        self.has_told = True
        ending = Ending(not reason, *self.told(reason))
        for rank in self._unanswered:
            self._router.tell(rank, ending)
        if self._unanswered:
            self._all_answered.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_answered.wait(), _ANSWER_S)

    # -- a peer leaves the world ------------------------------------------------------------------

    def ending(self, source: int, ending: Ending) -> None:
        """An Ending message: the end of the connection to `source` is no loss from now on."""
        # First: the connection may end while the communicators are told.
        self._membership.ended.add(source)
        self._ended[source] = ending
        for communicator in list(self.open.values()):
            communicator.ended(source, ending)
        # Otherwise that rank takes the Ending of this one for the answer.
        if source not in self._unanswered:
            self._router.tell(source, EndingSeen(source))
        self.answered(source)

    def answered(self, source: int) -> None:
        """`source` has answered an Ending, has left too, or is lost."""
        self._unanswered.discard(source)
        if not self._unanswered:
            self._all_answered.set()
