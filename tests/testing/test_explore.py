"""The explorer finds what is wrong in a protocol, by the shortest way; ours has nothing that it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from asyncoll.runtime import epochs
from asyncoll.runtime.epochs import (
    Agreement,
    ChangeOverdue,
    CompareAndSet,
    Evict,
    Found,
    Heard,
    Install,
    LostRank,
    Read,
    StoreAnswered,
)
from asyncoll.testing.explore import BrokenError, CounterexampleError, NodeNetwork, explore, wander
from asyncoll.testing.explore.cases import SHORT
from asyncoll.testing.explore.epoch_program import AgreementProgram

# -- the explorer ---


@dataclass(frozen=True)
class Counter:
    """Counts up to `end` by one or by two; at 3 it may fall into a hole."""

    end: int = 5
    forbidden: int = -1
    hole: bool = False
    raises: bool = False

    def begin(self):
        return 0

    def moves(self, state):
        if state in ("hole", "pit"):
            yield "dig", False, "pit" if state == "hole" else "hole"
            return
        if self.raises and state == 3:
            raise BrokenError("to 4", "4 is not allowed")
        for step in (1, 2):
            if state + step <= self.end:
                yield f"add {step}", False, state + step
        if self.hole and state == 3:
            yield "fall", True, "hole"

    def words(self, what):
        return what

    def broken(self, state):
        return f"{state} is not allowed" if state == self.forbidden else ""

    def is_settled(self, state):
        return state == self.end


def test_it_counts_distinct_states():
    found = explore(Counter())
    assert (found.states, found.moves, found.depth, found.settled) == (6, 9, 3, 1)


def test_it_names_the_rule_and_the_shortest_trace():
    with pytest.raises(CounterexampleError) as error:
        explore(Counter(forbidden=3))
    assert str(error.value) == "broken: 3 is not allowed\n  1. add 1\n  2. add 2"


def test_a_move_may_break_a_rule():
    with pytest.raises(CounterexampleError) as error:
        explore(Counter(raises=True))
    assert str(error.value) == "broken: 4 is not allowed\n  1. add 1\n  2. add 2\n  3. to 4"


def test_a_state_that_waits_for_ever_is_found():
    """Both of a deadlock and of a circle."""
    with pytest.raises(CounterexampleError, match="nothing but a fault can end all waits") as error:
        explore(Counter(hole=True))
    assert str(error.value).endswith("1. add 1\n  2. add 2\n  3. fall")
    with pytest.raises(CounterexampleError, match="nothing but a fault can end all waits"):
        explore(never_settled())


def never_settled():
    class Never(Counter):
        def is_settled(self, state):
            return False

    return Never()


def test_a_model_that_is_too_large_is_an_error():
    with pytest.raises(ValueError, match="more than 3 states"):
        explore(Counter(), most=3)


@pytest.mark.parametrize("model", [Counter(forbidden=5), Counter(raises=True), never_settled()])
def test_one_way_finds_the_same(model):
    def walk():
        for seed in range(20):
            wander(model, np.random.default_rng(seed))

    with pytest.raises(CounterexampleError):
        walk()


# -- the network ---


@dataclass(frozen=True)
class Letters:
    """Node 0 sends two letters to node 1, which notes them."""

    mortal = (0,)
    seen: ClassVar = set()

    def begin(self):
        return "", ""

    def receive(self, node, state, source, message):
        return state + message, []

    def events(self, node, nodes):
        if node == 0 and not nodes[0]:
            yield "send", False

    def happen(self, node, state, event):
        return "sent", [(1, "a"), (1, "b")]

    def broken(self, nodes):
        self.seen.add(nodes)
        return ""

    def is_settled(self, nodes):
        return nodes[1] == "ab" or nodes[0] is None

    def words(self, node, event, source=None):
        return str(event)


def test_messages_keep_their_order_and_a_crash_loses_the_last_ones():
    program = Letters()
    program.seen.clear()
    explore(NodeNetwork(program, crashes=1))
    assert {nodes[1] for nodes in program.seen} == {"", "a", "ab"}
    assert (None, "a") in program.seen
    program.seen.clear()
    explore(NodeNetwork(program, crashes=0))
    assert {nodes[0] for nodes in program.seen} == {"", "sent"}


# -- the agreement on the next epoch ---


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_the_agreement_holds_in_every_order(case):
    assert explore(case.model).settled > 10


@pytest.mark.parametrize("seed", range(12))
def test_the_agreement_holds_in_larger_worlds(seed):
    """2 to 17 ranks, up to all but one of which die at any moment, also within the agreement."""
    draw = np.random.default_rng(seed)
    size = int(draw.choice([2, 3, 4, 5, 6, 7, 8, 9, 13, 17]))
    certain, suspects, fails = (bool(each) for each in draw.integers(2, size=3))
    program = AgreementProgram(size, int(draw.integers(3)), certain, suspects, fails)
    assert wander(NodeNetwork(program, int(draw.integers(1, size)), int(draw.integers(3))), draw)


def outcomes(program, crashes, faults=0):
    """What is true of the ends of some ways."""
    found = set()
    model = NodeNetwork(program, crashes, faults)
    check = model.is_settled

    def is_settled(state):
        nodes = model.nodes(state)
        found.update(node for node in nodes[:-1] if node is not None and check(state))
        return check(state)

    model.is_settled = is_settled
    explore(model)
    return found


def test_the_cases_reach_what_they_are_about():
    """Newcomers become members, ranks are evicted, and one rank is left of three."""
    joined = outcomes(AgreementProgram(2, candidates=1), 1)
    assert {(0, 1, 2), (0, 2), (0, 1)} <= {state.members for state in joined}
    assert {state.rank for state in joined if not state.is_evicted and 2 in state.members} == {0, 1, 2}
    assert any(state.is_evicted for state in outcomes(AgreementProgram(2, suspects=True), 0, 1))
    assert {(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)} < {state.members for state in outcomes(AgreementProgram(3), 2)}


# -- the explorer finds faults of the agreement ---


def without_the_store(state, event):
    """The coordinator decides by itself."""
    state, actions = epochs.step(state, event)
    asked = [action for action in actions if isinstance(action, CompareAndSet)]
    if asked:
        state, further = epochs.step(state, StoreAnswered(asked[0].decision))
        actions = [action for action in actions if action not in asked] + further
    return state, actions


def without_comparing(state, event):
    """The coordinator takes its proposal for the decision, whatever the entry holds."""
    if isinstance(event, StoreAnswered) and state.rank not in event.decision.members:
        event = StoreAnswered(replace(event.decision, members=state.living))
    return epochs.step(state, event)


def takes_all_for_its_eviction(state, event):
    """A candidate takes a decision that does not name it for its eviction."""
    after, actions = epochs.step(state, event)
    if state.is_candidate and isinstance(event, Found | Heard) and after.is_candidate:
        decision = event.decision if isinstance(event, Found) else event.message
        return replace(after, is_evicted=True), [Evict(decision)]
    return after, actions


def keeps_the_evicted(state, event):
    """An evicted rank stays in its epoch, and waits."""
    after, actions = epochs.step(state, event)
    return (state, []) if after.is_evicted else (after, actions)


def never_looks(state, event):
    return (state, []) if isinstance(event, ChangeOverdue) else epochs.step(state, event)


def names_who_is_not_linked(state, event):
    """A candidate that one member is linked with is proposed."""
    state, actions = epochs.step(state, event)
    linked = state.linked.union(*(ready.linked for _, ready in state.ready))
    named = [
        CompareAndSet(replace(action.decision, members=tuple(sorted({*state.living, *linked}))))
        if isinstance(action, CompareAndSet)
        else action
        for action in actions
    ]
    return state, named


def goes_back(state, event):
    """An older decision is installed."""
    if isinstance(event, Heard) and isinstance(event.message, epochs.Decision) and event.message.epoch < state.epoch:
        return replace(state, epoch=event.message.epoch), [Install(event.message)]
    return epochs.step(state, event)


def forgets_early_messages(state, event):
    """A member ignores who is ready for an epoch that it does not know, and never looks into the store."""
    if isinstance(event, ChangeOverdue):
        return state, []
    after, actions = epochs.step(state, event)
    return after, [action for action in actions if not isinstance(action, Read)]


@pytest.mark.parametrize(
    ("program", "faults", "rule"),
    [
        (AgreementProgram(3, step=without_the_store), (1, 0), "has no entry"),
        (AgreementProgram(2, suspects=True, step=without_comparing), (0, 1), "its entry is another"),
        (AgreementProgram(1, candidates=1, step=takes_all_for_its_eviction), (0, 0), "lives and is evicted"),
        (AgreementProgram(2, suspects=True, step=keeps_the_evicted), (0, 1), "can end all waits"),
        (AgreementProgram(2, is_certain=False, step=never_looks), (1, 0), "can end all waits"),
        (AgreementProgram(2, candidates=1, step=names_who_is_not_linked), (0, 0), "is not linked with"),
        (AgreementProgram(4, step=forgets_early_messages), (2, 0), "can end all waits"),
    ],
)
def test_a_fault_of_the_agreement_is_found(program, faults, rule):
    with pytest.raises(CounterexampleError, match=rule):
        explore(NodeNetwork(program, *faults), most=200_000)


@dataclass(frozen=True, slots=True)
class CutWorld(AgreementProgram):
    """Three members, the last one of which is cut off. No entry is needed before an epoch."""

    def begin(self):
        nodes = AgreementProgram.begin(self)
        lost = frozenset({2})
        return (*(replace(node, lost=lost) for node in nodes[:2]), nodes[2], nodes[3])

    def receive(self, node, state, source, message):
        if node == self._store and message.epoch > len(state) + 2:  # the entry before was lost with its writer
            return state, []
        return AgreementProgram.receive(self, node, state, source, message)

    def broken(self, nodes):
        rule = AgreementProgram.broken(self, nodes)
        return rule if "another" in rule else ""


def majority_without_the_dead(state, event):
    """Who has the majority of the members, without those that are certainly dead, decides at once."""
    state, actions = epochs.step(state, event)
    asked = [action for action in actions if isinstance(action, CompareAndSet)]
    if asked and 2 * len(state.living) > len(set(state.members) - state.dead):
        state, further = epochs.step(state, StoreAnswered(asked[0].decision))
        return state, [*actions, *further]
    return replace(state, is_asking=False), [action for action in actions if action not in asked]


def test_a_majority_of_those_that_are_not_certainly_dead_makes_two_worlds():
    """0 and 1 decide without 2, and die; 2 takes itself for all that are left."""
    with pytest.raises(CounterexampleError, match="its entry is another") as error:
        explore(NodeNetwork(CutWorld(3, step=majority_without_the_dead), 2), most=500_000)
    assert "epoch 2 has the members 0, 1" in str(error.value)


def test_a_trace_is_in_plain_words():
    with pytest.raises(CounterexampleError) as error:
        explore(NodeNetwork(AgreementProgram(2, suspects=True, step=without_comparing), 0, 1))
    first, *moves = str(error.value).splitlines()
    assert first.startswith("broken: rank ")
    assert moves[0].endswith(("takes rank 1 for lost", "takes rank 0 for lost"))
    assert not [move for move in moves if "(" in move]


def test_a_rank_that_goes_back_is_found():
    program = AgreementProgram(2, step=goes_back)
    state = Agreement(0, 3, (0, 1), lost=frozenset({1}))
    with pytest.raises(BrokenError, match="goes back from epoch 3 to 2"):
        program.receive(0, state, 1, epochs.Decision(2, (0, 1)))
    assert program.happen(0, state, LostRank(1)) is not None
