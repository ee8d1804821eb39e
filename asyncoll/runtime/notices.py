"""How the news of a loss reaches every member: with about four messages for each of them, instead of one for each pair.

A member that knows of a loss, because it has noticed it or was told, tells it once to the next two members and to the
first, as far as it takes these for living; the first one tells all. So the news comes to all ranks in two steps, also
if one rank alone has noticed the loss. If one other rank has stopped, the first member or a neighbour, and no rank has
noticed that yet, the neighbours bring the news past it.

- A neighbour, or the first member, that turns out to be lost or has left is replaced by the next one, which is told.
- A rank that leaves has told all others what it knows before (`Failures.pass_on`), so that nothing is left to be done.
- A first member from which nothing comes for a while may have stopped, and no rank that would notice that may live.
  Then the next one takes its place.

So if any member that lives knows of a loss, all members hear of one. Whichever ranks die, stop and leave meanwhile, in
the end one that knows is the first member that lives, or takes itself for that, and it tells all. `begin` and `step`
are pure functions, which tests explore in every order of messages, deaths and stops.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, assert_never

from asyncoll.runtime.membership import Membership
from asyncoll.runtime.router import Router
from asyncoll.transport.wire import Lost

_NEIGHBOURS: Final = 2  # if one has stopped, the other one brings the news on
_SILENCE_S: Final = 0.5  # the first member answers in a thread that does not wait for its program

Ranks: TypeAlias = frozenset[int]


@dataclass(frozen=True, slots=True)
class Knowing:
    """What a rank that knows of a loss knows of the other members."""

    rank: int
    members: tuple[int, ...]
    gone: Ranks  # lost, or have left
    heard: Ranks  # have told this rank
    told: Ranks = frozenset()
    silent: Ranks = frozenset()  # were the first member, and have not told this rank for a while
    is_over: bool = False  # all members were told


@dataclass(frozen=True, slots=True)
class NoticeHeard:
    """Another member has told this rank of a loss."""

    source: int


@dataclass(frozen=True, slots=True)
class MembersLost:
    """More members are lost."""

    ranks: Ranks


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """A member has left the world, after its last message."""

    rank: int


@dataclass(frozen=True, slots=True)
class FirstSilent:
    """This rank has waited for the first member for a while (`waits`)."""


Event: TypeAlias = NoticeHeard | MembersLost | MemberLeft | FirstSilent
Step: TypeAlias = tuple[Knowing, tuple[int, ...]]  # the state after an event, and the ranks to tell, in order


def begin(rank: int, members: tuple[int, ...], gone: Ranks, source: int | None) -> Step:
    """This rank knows of the first loss. `gone` are lost or have left; `source` has told it; None: noticed here."""
    return _tell(Knowing(rank, members, gone, frozenset() if source is None else frozenset({source})))


def step(state: Knowing, event: Event) -> Step:
    """The state of a rank that knows of a loss after `event`, and the ranks that it has to tell of it."""
    match event:
        case NoticeHeard(source):
            state = replace(state, heard=state.heard | {source})
        case MembersLost(ranks):
            state = replace(state, gone=state.gone | ranks)
        case MemberLeft(rank):
            state = replace(state, gone=state.gone | {rank}, is_over=state.is_over or rank in state.heard)
        case FirstSilent():
            if waits(state):
                state = replace(state, silent=state.silent | {_first(state)})
        case _:
            assert_never(event)
    return _tell(state)


def waits(state: Knowing) -> bool:
    """Whether this rank waits for the first member to tell it: then that one lives, and tells all."""
    first = _first(state)
    return not state.is_over and first != state.rank and first not in state.heard


def _first(state: Knowing) -> int:
    own = state.rank
    return next(rank for rank in state.members if rank == own or rank not in state.gone | state.silent)


def _tell(state: Knowing) -> Step:
    if state.is_over:
        return state, ()
    first, at = _first(state), state.members.index(state.rank)
    others = (rank for rank in (*state.members[at + 1 :], *state.members[:at]) if rank not in state.gone)
    if first == state.rank:  # also to those that have told it: they wait for its word
        targets = [rank for rank in others if rank not in state.told]
    else:
        wanted = dict.fromkeys((first, *(rank for rank, _ in zip(others, range(_NEIGHBOURS), strict=False))))
        targets = [rank for rank in wanted if rank not in state.told and rank not in state.heard]
    return replace(state, told=state.told.union(targets)), tuple(targets)


class Notices:
    """The notices of one rank, on the runtime's loop.

    In: `know`, once, with the first loss; `happened`, for all that comes later; `close`. Out: the message through the
    router.
    """

    def __init__(self, router: Router, membership: Membership) -> None:
        self._router = router
        self._membership = membership
        self._state: Knowing | None = None  # None: no loss is known
        self._timer: asyncio.TimerHandle | None = None

    def know(self, news: Lost, source: int | None) -> None:
        """This rank has noticed the loss, or was told by rank `source`."""
        self._news = news
        self._carry_out(begin(self._router.rank, self._membership.members, self._membership.gone(), source))

    def happened(self, event: Event) -> None:
        """Something has happened, perhaps before this rank knows of a loss."""
        if self._state is not None:
            self._carry_out(step(self._state, event))

    def close(self) -> None:
        """Tell nothing more."""
        self._state = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _carry_out(self, outcome: Step) -> None:
        self._state, targets = outcome
        for rank in targets:
            self._router.tell(rank, self._news)
        if self._timer is None and waits(self._state):
            self._timer = asyncio.get_running_loop().call_later(_SILENCE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self.happened(FirstSilent())
