"""The agreement of the ranks on the next epoch: pure functions, without I/O, clock or event loop.

An epoch is one membership of the world. After a loss, or when all programs want newcomers, the lowest living member is
the coordinator: it collects a `Ready` of every member that lives in its view. It proposes these members, and the
candidates that all of them are linked with, by one compare-and-set of the entry of the epoch in a store. What the entry
holds then is the decision, whoever has proposed it. docs/design/epochs.md argues for safety and liveness.

`step` takes the state of one rank and an event, and returns the state after it and the actions to carry out, in order.
The runtime, the simulator and the explorer of `asyncoll.testing.explore` call the same function. Ranks are member
numbers: world ranks that no later process is given again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, assert_never

Ranks: TypeAlias = frozenset[int]
_NONE: Final[Ranks] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """The members of an epoch, in order: what its entry in the store holds, and the message that tells it."""

    epoch: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The message of a member to the coordinator: it has left the calls of its epoch, and is ready for the next."""

    epoch: int  # the next one
    lost: Ranks  # members that the sender takes for lost: for the coordinator this is a report
    dead: Ranks  # those of `lost` that are certainly dead: their kernel or their launcher has said so
    linked: Ranks  # candidates that the sender is linked with


@dataclass(frozen=True, slots=True)
class Agreement:
    """What one rank knows. A rank that is not among `members` is a candidate, or evicted."""

    rank: int
    epoch: int  # that it has installed; of a candidate: the newest that it knows not to name it
    members: tuple[int, ...]
    newcomers: tuple[int, ...] = ()  # the members that were not in the epoch before
    lost: Ranks = _NONE  # also candidates; this rank itself if others take it for lost
    dead: Ranks = _NONE
    linked: Ranks = _NONE
    is_wanted: bool = False  # the program wants the next epoch, though no member is lost
    ready: tuple[tuple[int, Ready], ...] = ()  # the newest of each sender, by rank, without the losses
    told: tuple[int, Ready] | None = None  # the coordinator of this view, and what it was told
    is_asking: bool = False  # a compare-and-set is under way
    is_overdue: bool = False  # the change has lasted long enough for a smaller part of the members to go on
    is_evicted: bool = False

    @property
    def is_candidate(self) -> bool:
        return not self.is_evicted and self.rank not in self.members

    @property
    def is_changing(self) -> bool:
        """Whether the ranks agree on the next epoch. The runtime tells `ChangeOverdue` again and again meanwhile."""
        return not self.is_evicted and (
            self.is_candidate or self.is_wanted or any(member in self.lost for member in self.members)
        )

    @property
    def living(self) -> tuple[int, ...]:
        """The members that live in this rank's view, in which it lives itself."""
        return tuple(member for member in self.members if member == self.rank or member not in self.lost)


# -- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LostRank:
    """This rank has noticed, or was told, that `rank` is lost. The rank may live all the same, or be this one."""

    rank: int
    is_dead: bool = False  # for certain


@dataclass(frozen=True, slots=True)
class Linked:
    """This rank and a candidate are connected both ways."""

    rank: int


@dataclass(frozen=True, slots=True)
class Unlinked:
    """This rank does not count on its connection to a candidate any more. That may live."""

    rank: int


@dataclass(frozen=True, slots=True)
class WantedNext:
    """The program of this rank wants the epoch after `epoch`. All programs must want it, or a member be lost."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A message has come, perhaps from a rank that is lost or no member."""

    source: int
    message: Ready | Decision


@dataclass(frozen=True, slots=True)
class StoreAnswered:
    """The store has answered the compare-and-set: this is what the entry holds."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class StoreSilent:
    """The store has not answered the compare-and-set, and may have carried it out. It is repeated when overdue."""


@dataclass(frozen=True, slots=True)
class Found:
    """The store has answered a read of an entry that is there. One that is not there is no event."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class ChangeOverdue:
    """The agreement has lasted two times ASYNCOLL_FREEZE_S, or as long again. A candidate always waits."""


Event: TypeAlias = (
    LostRank | Linked | Unlinked | WantedNext | Heard | StoreAnswered | StoreSilent | Found | ChangeOverdue
)


# -- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    dest: int
    message: Ready | Decision


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Write the entry of the epoch if there is none; the answer is `StoreAnswered` or `StoreSilent`."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Read:
    """Read the entry of this epoch; the answer is `Found`, or none."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Another rank has told a loss that this one had not noticed: communicators fail, and the loss is passed on."""

    rank: int
    is_dead: bool


@dataclass(frozen=True, slots=True)
class Install:
    """This rank is in the next epoch."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Evict:
    """The others go on without this rank. Its process may join again, as a candidate with a new number."""

    decision: Decision


Action: TypeAlias = Send | CompareAndSet | Read | ReportLoss | Install | Evict
Step: TypeAlias = tuple[Agreement, list[Action]]


# -- the rule -------------------------------------------------------------------------------------


def step(state: Agreement, event: Event) -> Step:
    """The state of a rank after `event`, and what it has to do. An evicted rank does nothing more."""
    if state.is_evicted:
        return state, []
    match event:
        case LostRank(rank, is_dead):
            return _act(_without(state, {rank}, {rank} if is_dead else ()))
        case Linked(rank):
            is_new = rank not in state.members and rank not in state.lost
            return _act(replace(state, linked=state.linked | {rank}) if is_new else state)
        case Unlinked(rank):
            return _act(replace(state, linked=state.linked - {rank}))
        case WantedNext(epoch):
            return _act(replace(state, is_wanted=True) if epoch == state.epoch else state)
        case Heard(source, message):
            return _hear(state, source, message) if isinstance(message, Ready) else _learn(state, message, ())
        case Found(decision):
            return _find(state, decision)
        case StoreAnswered(decision):  # those that it names wait for this rank to tell it
            return _learn(state, decision, decision.members)
        case StoreSilent():
            return replace(state, is_asking=False), []
        case ChangeOverdue():
            return _overdue(state)
        case _:
            assert_never(event)


def _without(state: Agreement, lost: Iterable[int], dead: Iterable[int]) -> Agreement:
    gone = state.lost.union(lost)
    return replace(state, lost=gone, dead=state.dead.union(dead), linked=state.linked - gone)


def _hear(state: Agreement, source: int, ready: Ready) -> Step:
    if ready.epoch <= state.epoch and not state.is_candidate:  # the sender has missed the decision
        return state, [Send(source, Decision(state.epoch, state.members))]
    new: Ranks = _NONE
    if source not in state.lost:  # what a lost rank reports counts for nothing
        new = ready.lost - state.lost - {state.rank}
        state = _without(state, new, ready.dead - {state.rank})
    known = {**dict(state.ready), source: Ready(ready.epoch, _NONE, _NONE, ready.linked)}
    state, actions = _act(replace(state, ready=tuple((rank, known[rank]) for rank in sorted(known))))
    if ready.epoch > state.epoch + 1:  # the sender is in an epoch that this rank has not been told
        actions = [*actions, Read(state.epoch + 1)]
    return state, [*(ReportLoss(rank, rank in ready.dead) for rank in sorted(new)), *actions]


def _act(state: Agreement) -> Step:
    """Tell the coordinator what has changed; as the coordinator, propose once all have told that they are ready."""
    if state.is_candidate or not state.is_changing:
        return state, []
    living = state.living
    members = frozenset(state.members) - {state.rank}
    told = living[0], Ready(state.epoch + 1, state.lost & members, state.dead & members, state.linked)
    if told == state.told and living[0] != state.rank:
        return state, []
    is_new = state.told is None or state.told[0] != told[0]
    state = replace(state, told=told)
    if living[0] != state.rank:
        return state, [Send(*told)]
    ready = {rank: each for rank, each in state.ready if each.epoch == state.epoch + 1}
    actions: list[Action] = []
    if is_new:  # the coordinator before may have died before it has told the newcomers that they are members
        current = Decision(state.epoch, state.members)
        actions += [Send(rank, current) for rank in state.newcomers if rank in living[1:] and rank not in ready]
    if state.is_asking or not ready.keys() >= set(living[1:]) or _waits(state):
        return state, actions
    linked = state.linked.intersection(*(ready[rank].linked for rank in living[1:]))
    if linked != state.linked and not state.is_overdue:  # the others are soon linked with them, too
        return state, actions
    proposal = Decision(state.epoch + 1, (*living, *sorted(linked)))
    return replace(state, is_asking=True), [*actions, CompareAndSet(proposal)]


def _waits(state: Agreement) -> bool:
    """Whether the larger part of the members may live elsewhere, and is given the time to decide first."""
    missing = set(state.members) - set(state.living)
    return 2 * len(missing) >= len(state.members) and not missing <= state.dead and not state.is_overdue


def _learn(state: Agreement, decision: Decision, others: Iterable[int]) -> Step:
    """A decision: install it, or be evicted. Tell it to `others`, and to those that wait for this rank to tell it."""
    if decision.epoch <= state.epoch:
        return state, []
    waiting = (rank for rank, ready in state.ready if ready.epoch <= decision.epoch)
    actions: list[Action] = [Send(rank, decision) for rank in sorted({*others, *waiting} - {state.rank})]
    if state.rank not in decision.members:
        if state.is_candidate:
            return state, []
        return replace(state, is_evicted=True, ready=(), told=None), [Evict(decision), *actions]
    before = set(state.members)
    state = Agreement(
        state.rank,
        decision.epoch,
        decision.members,
        newcomers=tuple(member for member in decision.members if before and member not in before),
        # Numbers are never given again, so those of former members are never named again.
        lost=state.lost - (before - set(decision.members)) - {state.rank},
        dead=state.dead - (before - set(decision.members)),
        linked=state.linked.difference(decision.members),
        ready=tuple((rank, ready) for rank, ready in state.ready if ready.epoch > decision.epoch),
    )
    state, further = _act(state)
    return state, [Install(decision), *actions, *further]


def _find(state: Agreement, decision: Decision) -> Step:
    if state.is_candidate and state.rank not in decision.members and decision.epoch == state.epoch + 1:
        return replace(state, epoch=decision.epoch), [Read(decision.epoch + 1)]  # perhaps a later one names it
    return _learn(state, decision, ())


def _overdue(state: Agreement) -> Step:
    """Look whether others have decided; a smaller part of the members may decide now."""
    if not state.is_changing:
        return state, []
    state, actions = _act(replace(state, is_overdue=True))
    return state, [Read(state.epoch + 1), *actions]
