"""Schedules of consumable operations, and the activation tree that is built on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncoll.algorithms.rounds.activation import OPEN, REDUCE, ActivationStep, activation, edges, heard, synchronous
from asyncoll.runtime.schedule import Schedule
from tests.support.properties import st


def test_an_operation_fires_after_all_or_after_any_predecessor():
    schedule: Schedule[str] = Schedule()
    for op in "ab":
        schedule.add(op)
    schedule.add("both", after=["a", "b"])
    schedule.add("either", after_any=["a", "b"])
    assert schedule.fire("a") == ["a", "either"]
    assert schedule.fire("b") == ["b", "both"]


def test_an_operation_fires_once():
    schedule: Schedule[str] = Schedule()
    schedule.add("a")
    schedule.add("b", after=["a"])
    assert schedule.fire("b") == ["b"]  # a caller may fire an operation before its predecessors
    assert schedule.fire("a") == ["a"]
    assert schedule.fire("a") == schedule.fire("b") == []


def test_fire_returns_all_operations_that_become_ready():
    schedule: Schedule[int] = Schedule()
    schedule.add(0)
    for op in range(1, 50):
        schedule.add(op, after=[op - 1])
    assert schedule.fire(0) == list(range(50))
    assert schedule.fired == set(range(50))


def test_bad_graphs_are_refused():
    schedule: Schedule[str] = Schedule()
    schedule.add("a")
    with pytest.raises(ValueError, match="already in the schedule"):
        schedule.add("a")
    with pytest.raises(ValueError, match="not both"):
        schedule.add("b", after=["a"], after_any=["a"])
    for how in ("after", "after_any"):
        with pytest.raises(ValueError, match="'c', which is not in the schedule"):
            schedule.add("b", **{how: ["a", "c"]})
    assert "b" not in schedule
    schedule.add("b", after=["a"])  # a refused operation leaves no state
    assert schedule.fire("a") == ["a", "b"]


def test_a_predecessor_named_twice_counts_once():
    schedule: Schedule[str] = Schedule()
    schedule.add("a")
    schedule.add("b", after=["a", "a"])
    assert schedule.fire("a") == ["a", "b"]


def test_fresh_schedules_fire_independently():
    plan = activation(5)
    first, second = plan.fresh(), plan.fresh()
    assert REDUCE in first.fire(OPEN)
    assert first.fire(OPEN) == []
    assert REDUCE in second.fire(OPEN)
    with pytest.raises(AssertionError, match="has been used"):
        first.fresh()
    assert plan.fired == set()


# -- the activation tree -------------------------------------------------------------------------

Partner = Callable[[int, int], int]


@pytest.mark.parametrize("size", range(1, 34))
def test_in_a_synchronous_round_no_rank_reduces_before_every_rank_has_opened_it(size):
    for seed in range(20):
        draw = random.Random(seed)
        ranks = [synchronous(size).fresh() for _ in range(size)]
        flying = [(rank, OPEN) for rank in range(size)]
        while flying:
            rank, step = flying.pop(draw.randrange(len(flying)))
            for fired in ranks[rank].fire(step):
                if fired.kind == "forward":
                    flying.append(((rank + (1 << fired.edge)) % size, heard(fired.edge)))
            if any(OPEN not in schedule.fired for schedule in ranks):
                assert not any(REDUCE in schedule.fired for schedule in ranks)
        assert all(REDUCE in schedule.fired for schedule in ranks)


def spread(size: int, initiators: list[int], seed: int, partner: Partner) -> tuple[set[int], Counter]:
    """Open a round at `initiators` and deliver messages in random order.

    Returns the ranks that take part, and the number of messages by edge.
    """
    draw = random.Random(seed)
    ranks = [activation(size).fresh() for _ in range(size)]
    flying = [(rank, OPEN) for rank in initiators]
    sent: Counter = Counter()
    while flying:
        rank, step = flying.pop(draw.randrange(len(flying)))
        for fired in ranks[rank].fire(step):
            if fired.kind == "forward":
                sent[rank, fired.edge] += 1
                if (dest := partner(rank, fired.edge)) < size:
                    flying.append((dest, heard(fired.edge)))
    return {rank for rank in range(size) if REDUCE in ranks[rank].fired}, sent


@pytest.mark.parametrize("size", range(1, 34))
def test_activation_reaches_all_ranks_with_one_message_per_edge(size):
    for seed in range(20):
        draw = random.Random(seed)
        initiators = draw.sample(range(size), draw.randint(1, size) if seed % 2 else 1)
        reached, sent = spread(size, initiators, seed, lambda rank, edge: (rank + (1 << edge)) % size)
        assert reached == set(range(size)), (seed, initiators)
        assert set(sent.values()) <= {1}
        assert len(sent) <= size * len(edges(size))


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_the_partners_of_the_paper_reach_all_ranks_on_powers_of_two(size):
    for seed in range(20):
        reached, _ = spread(size, [seed % size], seed, lambda rank, edge: rank ^ (1 << edge))
        assert reached == set(range(size))


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 13, 17, 33])
def test_the_partners_of_the_paper_miss_ranks_on_other_sizes(size):
    """The reason why this library uses another tree.

    Of 3 ranks, rank 2 would send to rank 3, which does not exist, and to rank 0, which sends to no other.
    """
    lost = [
        set(range(size)) - spread(size, [root], 0, lambda rank, edge: rank ^ (1 << edge))[0] for root in range(size)
    ]
    assert any(lost)
    if size == 3:
        assert lost == [set(), set(), {1}]


# -- state machines --------------------------------------------------------------------------------


class AnySchedule(RuleBasedStateMachine):
    """Any graph, and copies of it that fire in any order, compared with a model of plain sets."""

    @initialize(data=st.data(), count=st.integers(1, 12))
    def build(self, data: st.DataObject, count: int) -> None:
        self.plan: Schedule[int] = Schedule()
        self.rules: list[tuple[bool, frozenset[int]]] = []  # by operation: whether it needs all predecessors, and these
        self.copies: list[tuple[Schedule[int], set[int]]] = []  # and the operations that have fired in it by the model
        for op in range(count):
            before = data.draw(st.frozensets(st.integers(0, op - 1))) if op else frozenset()
            needs_all = data.draw(st.booleans())
            self.plan.add(op, **{"after" if needs_all else "after_any": before})
            self.rules.append((needs_all, before))
        self.copy()

    @rule()
    def copy(self) -> None:
        self.copies.append((self.plan.fresh(), set()))

    @rule(data=st.data())
    def fire(self, data: st.DataObject) -> None:
        schedule, fired = data.draw(st.sampled_from(self.copies))
        op = data.draw(st.integers(0, len(self.rules) - 1))
        effects = schedule.fire(op)
        assert effects[:1] == ([op] if op not in fired else [])
        for effect in effects:
            assert effect not in fired, "it was consumed"
            assert effect == op or self.is_ready(effect, fired)
            fired.add(effect)

    def is_ready(self, op: int, fired: set[int]) -> bool:
        needs_all, before = self.rules[op]
        return bool(before) and (before <= fired if needs_all else bool(before & fired))

    @invariant()
    def what_is_ready_has_fired_and_nothing_else(self) -> None:
        for schedule, fired in self.copies:
            assert schedule.fired == fired
            assert not [op for op in range(len(self.rules)) if self.is_ready(op, fired) and op not in fired]

    @invariant()
    def the_plan_never_fires(self) -> None:
        assert self.plan.fired == set()


class Activation(RuleBasedStateMachine):
    """A round among any number of ranks, with random initiators and a random order of messages."""

    @initialize(size=st.integers(2, 17), opener=st.integers(0, 16))
    def begin(self, size: int, opener: int) -> None:
        self.ranks = [activation(size).fresh() for _ in range(size)]
        self.flying: list[tuple[int, int]] = []  # (rank, edge)
        self.sent: Counter[tuple[int, int]] = Counter()
        self.joined: Counter[int] = Counter()
        self.fire(opener % size, OPEN)

    def fire(self, rank: int, step: ActivationStep) -> None:
        for fired in self.ranks[rank].fire(step):
            if fired == REDUCE:
                self.joined[rank] += 1
            elif fired.kind == "forward":
                self.sent[rank, fired.edge] += 1
                self.flying.append(((rank + (1 << fired.edge)) % len(self.ranks), fired.edge))

    @rule(rank=st.integers(0, 16))
    def open(self, rank: int) -> None:
        self.fire(rank % len(self.ranks), OPEN)

    @precondition(lambda self: self.flying)
    @rule(which=st.randoms(use_true_random=False))
    def deliver(self, which: random.Random) -> None:
        rank, edge = self.flying.pop(which.randrange(len(self.flying)))
        self.fire(rank, heard(edge))

    @invariant()
    def nothing_happens_twice(self) -> None:
        assert {*self.joined.values(), *self.sent.values()} == {1}

    def teardown(self) -> None:
        """Once all messages have arrived, all ranks take part."""
        while self.flying:
            rank, edge = self.flying.pop()
            self.fire(rank, heard(edge))
        self.nothing_happens_twice()
        assert self.joined == Counter(range(len(self.ranks)))


TestAnySchedule = AnySchedule.TestCase
TestActivation = Activation.TestCase
