"""The agreement on the next epoch as a program for the explorer: `asyncoll.runtime.epochs.step` itself, and a store.

Beside messages, deaths and false suspicions, these come at any moment: each rank notices a death by itself; it is told
of a loss while a member lives that takes that rank for lost; a rank that is taken for lost finds its connections
closed; a candidate is linked with a member; the program of a member wants newcomers; a wait is overdue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncoll.runtime import epochs
from asyncoll.runtime.epochs import (
    Agreement,
    ChangeOverdue,
    CompareAndSet,
    Decision,
    Event,
    Evict,
    Found,
    Heard,
    Install,
    Linked,
    LostRank,
    Read,
    Ready,
    Send,
    StoreAnswered,
    StoreSilent,
    Unlinked,
    WantedNext,
)
from asyncoll.testing.explore.channels import Nodes, Outcome
from asyncoll.testing.explore.explorer import BrokenError

Entries: TypeAlias = tuple[Decision, ...]  # what the store holds: that of epoch 2 first
Rule: TypeAlias = Callable[[Agreement, Event], epochs.Step]


@dataclass(frozen=True, slots=True)
class _Look:
    """A rank's wait is overdue, and this is what the store holds then."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class AgreementProgram:
    """Ranks 0 to `size` - 1 are the members of epoch 1; `candidates` more want to join. The last node is the store."""

    size: int
    candidates: int = 0
    is_certain: bool = True  # who notices a death knows it for certain
    suspects: bool = False  # fault: a rank takes a living one for lost
    fails: bool = False  # fault: an answer of the store does not come
    unlinks: bool = False  # fault: a member counts no more on its connection to a candidate, which stays open
    step: Rule = epochs.step

    @property
    def mortal(self) -> Sequence[int]:
        return range(self.size + self.candidates)

    @property
    def _store(self) -> int:
        return self.size + self.candidates

    def begin(self) -> Nodes:
        members = tuple(range(self.size))
        candidates = range(self.size, self._store)
        return (
            *(Agreement(rank, 1, members) for rank in members),
            *(Agreement(rank, 1, ()) for rank in candidates),
            (),
        )

    # -- steps --

    def receive(self, node: int, state: Any, source: int, message: Any) -> Outcome:
        if node == self._store:
            entries: Entries = state
            if message.epoch > len(entries) + 1:
                entries = (*entries, message)
            return entries, [(source, entries[message.epoch - 2])]
        if source == self._store:
            return self._perform(state, StoreAnswered(message), ())
        return self._perform(state, Heard(source, message), ())

    def happen(self, node: int, state: Any, event: Any) -> Outcome:
        if isinstance(event, _Look):
            return self._perform(state, ChangeOverdue(), event.entries)
        return self._perform(state, event, ())

    def _perform(
        self, state: Agreement, event: Event, entries: Entries
    ) -> tuple[Agreement, list[tuple[int, Hashable]]]:
        """A step of the rule, and its actions. A read takes place at once: what an entry holds never changes."""
        after, actions = self.step(state, event)
        what = _words(state.rank, event)
        sent: list[tuple[int, Hashable]] = []
        for action in actions:
            match action:
                case Send(dest, message) if dest not in after.lost:  # else the connection is closed
                    sent.append((dest, message))
                case CompareAndSet(decision):
                    sent.append((self._store, decision))
                case Read(epoch) if 2 <= epoch <= len(entries) + 1:
                    after, further = self._perform(after, Found(entries[epoch - 2]), entries)
                    sent += further
                case Install(decision):
                    self._check_install(state, decision, what)
                case Evict(decision) if state.is_evicted or state.rank in decision.members:
                    raise BrokenError(what, f"rank {state.rank} is evicted twice, or by a decision that names it")
        return after, sent

    def _check_install(self, state: Agreement, decision: Decision, what: str) -> None:
        if decision.epoch <= state.epoch:
            raise BrokenError(what, f"rank {state.rank} goes back from epoch {state.epoch} to {decision.epoch}")
        if state.rank not in decision.members:
            raise BrokenError(what, f"rank {state.rank} installs epoch {decision.epoch}, which does not name it")
        if state.is_evicted:
            raise BrokenError(what, f"rank {state.rank} installs epoch {decision.epoch} after it was evicted")
        strange = set(decision.members) - set(state.members) - state.linked - state.lost
        if strange and not state.is_candidate and not self.unlinks:
            rule = f"rank {state.rank} installs epoch {decision.epoch}, and is not linked with {_list(strange)}"
            raise BrokenError(what, rule)

    # -- events --

    def events(self, node: int, nodes: Nodes) -> Iterator[tuple[Hashable, bool]]:
        if node == self._store:
            return
        state: Agreement = nodes[node]
        if state.is_evicted:
            return
        yield from self._losses(state, nodes)
        if not state.is_candidate:
            if state.epoch == 1 and self.candidates and not state.is_wanted:
                yield WantedNext(1), False
            for rank in range(self.size, self._store):
                if nodes[rank] is not None and nodes[rank].is_candidate and rank not in state.linked:
                    yield Linked(rank), False
                if self.unlinks and rank in state.linked:
                    yield Unlinked(rank), True
        # One that shows nothing new may as well come later: otherwise there are eight times as many states.
        if state.is_changing and (
            len(nodes[self._store]) >= state.epoch or len(self.step(state, ChangeOverdue())[1]) > 1
        ):
            yield _Look(nodes[self._store]), False
        if self.fails and state.is_asking:
            yield StoreSilent(), True

    def _losses(self, state: Agreement, nodes: Nodes) -> Iterator[tuple[Hashable, bool]]:
        lives = {rank for rank in self.mortal if nodes[rank] is not None}
        accused: set[int] = set()
        for rank in lives:
            its: Agreement = nodes[rank]
            if its.is_candidate:
                continue
            if its.epoch == state.epoch and not its.is_evicted:
                accused |= its.lost
            is_ahead = its.epoch > state.epoch and state.rank not in its.members
            # Its connection to this rank is closed, or its process ends, or joins again under another number.
            if its.is_evicted or state.rank in its.lost or (is_ahead and not state.is_candidate):
                accused.add(rank)
        for rank in sorted(set(self.mortal) - state.lost):
            if rank not in lives:
                yield LostRank(rank, self.is_certain), False
            elif rank in accused:
                yield LostRank(rank), False
            elif self.suspects and rank != state.rank and not nodes[rank].is_evicted and rank in state.members:
                yield LostRank(rank), True

    # -- rules --

    def broken(self, nodes: Nodes) -> str:
        entries: Entries = nodes[-1]
        for state in filter(None, nodes[:-1]):
            if state.epoch > 1 and not state.is_candidate and not state.is_evicted:
                if len(entries) < state.epoch - 1:
                    return f"rank {state.rank} is in epoch {state.epoch}, which has no entry"
                if state.members != entries[state.epoch - 2].members:
                    return f"rank {state.rank} is in epoch {state.epoch} of {state.members}, and its entry is another"
            if state.is_evicted and not self.suspects:
                return f"rank {state.rank} lives and is evicted, and no rank has taken it for lost"
        return ""

    def is_settled(self, nodes: Nodes) -> bool:
        """Every rank that lives is evicted, or a member of the newest epoch, or still a candidate; none is changing."""
        entries: Entries = nodes[-1]
        lives = [state for state in nodes[:-1] if state is not None and not state.is_evicted]
        inside = [state for state in lives if not state.is_candidate]
        if any(state.is_changing or state.epoch != len(entries) + 1 for state in inside):
            return False
        if any(nodes[member] is None for state in inside for member in state.members):
            return False
        named = {member for state in inside for member in state.members}
        return not any(state.rank in named for state in lives if state.is_candidate)

    def words(self, node: int, event: Any, source: int | None = None) -> str:
        if node == self._store:
            return f"the store receives the compare-and-set of rank {source}: {_text(event)}"
        if source == self._store:
            return _words(node, StoreAnswered(event))
        return _words(node, event if source is None else Heard(source, event))


def _words(rank: int, event: Any) -> str:
    match event:
        case LostRank(other, is_dead):
            return f"rank {rank} takes rank {other} for {'dead' if is_dead else 'lost'}"
        case Linked(other):
            return f"rank {rank} is linked with candidate {other}"
        case Unlinked(other):
            return f"rank {rank} counts no more on candidate {other}"
        case WantedNext(epoch):
            return f"the program of rank {rank} wants the epoch after {epoch}"
        case Heard(source, message):
            return f"rank {rank} hears of rank {source}: {_text(message)}"
        case StoreAnswered(decision):
            return f"the store answers rank {rank}: {_text(decision)}"
        case Found(decision):
            return f"rank {rank} finds in the store: {_text(decision)}"
        case StoreSilent():
            return f"the store does not answer rank {rank}"
        case _:
            return f"the wait of rank {rank} is overdue"


def _text(message: Ready | Decision) -> str:
    if isinstance(message, Decision):
        return f"epoch {message.epoch} has the members {_list(message.members)}"
    return f"ready for epoch {message.epoch}, lost {_list(message.lost)}, linked with {_list(message.linked)}"


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"
