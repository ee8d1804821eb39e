"""Ranks that leave communicators, or the world, while other ranks go on.

Leaving in this way is not collective. A rank that leaves a communicator sends the number of its last completed call to
the other members (message Leave). They complete the calls up to that number without it, because it has sent all that
they need. A later call that waits for it fails, and with it the communicator, but no communicator without that rank.

A rank that leaves the world leaves all its communicators, and then tells all ranks that its connections end (message
Ending). It waits for their answers (message EndingSeen), so that no rank takes the end of a connection for a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from asyncoll.runtime.failures import Departed, Failures
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.transport.wire import Ending, EndingSeen, Leave

_ANSWER_S = 2.0  # time for the answers to an Ending. The runtime of a rank answers, also while the rank computes
_PAUSE_S = 0.002  # between two looks at the calls of this rank


class Members(Protocol):
    """The calls of this rank on one communicator; see `runtime.pending`."""

    communicator: int
    ranks: tuple[int, ...]  # of the world

    def completed(self) -> int:
        """The number of the last call up to which all are over."""

    def is_settled(self) -> bool:
        """Whether no numbered call is pending."""

    def left(self, rank: int, calls: int, failure: Departed) -> None:
        """World rank `rank` takes no part in calls after number `calls`. `failure` is that of a call that needs it.

        Without effect if it has left already.
        """

    def close(self) -> None:
        """This rank has left: end its pending calls."""


class Departures:
    """The departures of this rank and of its peers.

    In: `opened`, in any thread; and on the runtime's loop `told` (Leave messages), `ending` and `answered` (of the
    endpoint), `leave` and `leave_world`. Out: messages through the router, and `Members.left`.
    """

    def __init__(self, router: Router, failures: Failures, membership: Membership) -> None:
        self._router = router
        self._failures = failures
        self._membership = membership
        self._open: dict[int, Members] = {}  # the communicators of this rank
        self._left: dict[int, dict[int, Leave]] = {}  # by communicator: the ranks that have left it
        self._staying: dict[int, set[int]] = {}  # by communicator that this rank has left: the others in it
        self._ended: dict[int, str] = {}  # by rank that has left the world: the reason
        self._unanswered: set[int] = set()  # ranks that have not answered the Ending of this rank
        self._changed: asyncio.Event | None = None  # set with each answer

    def opened(self, members: Members) -> None:
        """Add a communicator of this rank. Peers may have left it already."""
        communicator = members.communicator
        self._open[communicator] = members
        for rank, leave in list(self._left.get(communicator, {}).items()):
            self._report(members, rank, leave)
        for rank, reason in list(self._ended.items()):
            self._report(members, rank, Leave(communicator, 0, reason))

    def told(self, source: int, leave: Leave) -> None:
        """A Leave message."""
        communicator = leave.communicator
        if communicator in self._staying:
            self._forget(communicator, source)
            return
        self._left.setdefault(communicator, {})[source] = leave
        members = self._open.get(communicator)
        if members is not None:
            self._report(members, source, leave)

    def _report(self, members: Members, rank: int, leave: Leave) -> None:
        if rank not in members.ranks:
            return
        process = self._membership.process(rank)
        members.left(rank, leave.calls, Departed(rank, leave.reason, process.host, process.pid))

    # -- this rank leaves -------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until no numbered call of this rank is pending on any communicator."""
        while not all(members.is_settled() for members in list(self._open.values())):
            await asyncio.sleep(_PAUSE_S)

    def leave(self, communicator: int, reason: str) -> None:
        """Leave `communicator`. Without effect if this rank has left it."""
        members = self._open.pop(communicator, None)
        if members is None:
            return
        gone = self._left.pop(communicator, {}).keys() | self._membership.ended
        staying = set(members.ranks) - gone - {self._router.rank}
        for rank in staying:
            self._router.tell(rank, Leave(communicator, members.completed(), reason))
        if staying:
            self._staying[communicator] = staying
        members.close()

    def _forget(self, communicator: int, rank: int) -> None:
        staying = self._staying[communicator]
        staying.discard(rank)
        if not staying:  # no further message can come
            del self._staying[communicator]

    async def leave_world(self, reason: str) -> None:
        """Leave all communicators, and wait until the other ranks know, for a limited time."""
        for communicator in list(self._open):
            self.leave(communicator, reason)
        others = set(range(self._router.size)) - {self._router.rank} - self._membership.lost
        self._unanswered = others - self._membership.ended
        for rank in self._unanswered:
            self._router.tell(rank, Ending(reason))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_answered(), _ANSWER_S)

    async def _all_answered(self) -> None:
        self._changed = asyncio.Event()
        while self._unanswered - self._membership.lost:
            await self._changed.wait()
            self._changed.clear()

    # -- a peer leaves the world ------------------------------------------------------------------

    def ending(self, source: int, ending: Ending) -> None:
        """An Ending message: the end of the connection to `source` is no loss from now on."""
        self._membership.ended.add(source)
        self._ended[source] = ending.reason
        for communicator, members in list(self._open.items()):  # those of which `source` was no member yet
            self._report(members, source, Leave(communicator, 0, ending.reason))
        for communicator in [each for each, staying in self._staying.items() if source in staying]:
            self._forget(communicator, source)
        self._router.tell(source, EndingSeen(source))
        self.answered(source)

    def answered(self, source: int) -> None:
        """`source` has answered an Ending, has left too, or is lost."""
        self._unanswered.discard(source)
        if self._changed is not None:
            self._changed.set()
