"""The engine of rounds and its rules, as transcripts of events and answers."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from asyncoll import SUM
from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.engine import (
    ARRIVED,
    GONE,
    JOINED,
    LATE,
    ActivatedRound,
    Begin,
    CoordinatedRound,
    Engine,
    Tell,
)
from asyncoll.algorithms.rounds.operation import Opening, Operation


class Result(NamedTuple):
    number: int
    taken: int = 1


def results(*numbers):
    return [Result(number) for number in numbers]


def operation(opening=Opening.SOLO, **options):
    return Operation("g", (("float32", 3),), SUM, opening, **options)


def calls(history=0):
    return Engine(operation(history=history))


def deliver(engine, number, missed=()):
    """The result of round `number`, which includes the contribution of the call."""
    return shown(engine.deliver(1, (*missed, Result(number))))


def shown(delivery):
    *missed, _ = delivery.results
    return missed, *delivery[1:]


def told(missed=(), skipped=0, lag=None):
    return list(missed), True, skipped, len(missed) + skipped if lag is None else lag


def no():
    return False


def yes():
    return True


# -- calls ----------------------------------------------------------------------------------------


def test_a_rank_in_time_waits_for_each_round():
    engine = calls()
    for number in (1, 2, 3):
        assert engine.aim == number
        assert engine.begin(latest=number - 1, late_call_opens=no) == number
        assert deliver(engine, number) == told()


def test_a_late_call_waits_for_nothing_and_skips_what_it_has_not_seen():
    engine = calls()
    assert engine.begin(latest=4, late_call_opens=no) == 0
    assert deliver(engine, 4) == told(skipped=3)
    assert engine.begin(latest=4, late_call_opens=no) == 5


def test_a_late_call_that_opens_waits_for_the_next_round():
    engine = calls()
    assert engine.begin(latest=2, late_call_opens=yes) == 3
    assert deliver(engine, 3) == told(skipped=2)


def test_history_turns_skipped_rounds_into_missed_ones():
    engine = calls(history=2)
    assert engine.begin(latest=5, late_call_opens=no) == 0
    assert engine.first_missed(latest=4) == 3
    assert deliver(engine, 5, results(3, 4)) == told(results(3, 4), skipped=2)


def test_after_an_answer_that_is_lost_the_next_call_is_late_and_takes_it_at_once():
    engine = calls(history=2)
    deliver(engine, 1)
    engine.take_back(newest=1, lag=0, rounds=1)
    assert engine.begin(latest=1, late_call_opens=no) == 0
    assert engine.aim == 1
    assert deliver(engine, 1) == told()
    assert engine.begin(latest=1, late_call_opens=no) == 2


def test_a_lost_answer_is_told_with_a_newer_one():
    engine = calls(history=2)
    deliver(engine, 1)
    engine.take_back(newest=1, lag=0, rounds=1)
    assert engine.begin(latest=2, late_call_opens=no) == 0
    assert engine.first_missed(latest=1) == 1
    assert deliver(engine, 2, results(1)) == told(results(1))


def test_without_history_a_lost_answer_counts_as_skipped():
    engine = calls()
    deliver(engine, 3)
    engine.take_back(newest=3, lag=2, rounds=3)  # its own round, and the two that it had skipped
    assert engine.begin(latest=4, late_call_opens=no) == 0
    assert deliver(engine, 4) == told(skipped=3)


def test_an_answer_that_is_lost_while_the_next_call_waits_is_told_by_that_call():
    engine = calls(history=2)
    deliver(engine, 1)
    assert engine.begin(latest=1, late_call_opens=no) == 2
    engine.take_back(newest=1, lag=0, rounds=1)
    assert engine.step_back()
    assert engine.first_missed(latest=1) == 1
    assert deliver(engine, 2, results(1)) == told(results(1))


def test_an_answer_that_is_lost_after_a_newer_one_was_given_counts_as_skipped():
    engine = calls(history=4)
    deliver(engine, 1)
    deliver(engine, 2)
    engine.take_back(newest=1, lag=0, rounds=1)
    assert engine.begin(latest=2, late_call_opens=no) == 3, "round 1 would come after round 2"
    assert not engine.step_back()
    assert deliver(engine, 3) == told(skipped=1, lag=0)
    engine.take_back(newest=3, lag=0, rounds=2)
    assert engine.begin(latest=3, late_call_opens=no) == 0
    assert deliver(engine, 3) == told(skipped=1, lag=0), "it was lost again"


def test_answers_are_lost_in_any_order():
    engine = calls(history=4)
    for number in (1, 2, 3, 4):
        deliver(engine, number)
    for number in (3, 1, 4):
        engine.take_back(newest=number, lag=0, rounds=1)
    assert engine.begin(latest=4, late_call_opens=no) == 0
    assert engine.first_missed(latest=3) == 3, "round 2 has reached its caller"
    assert deliver(engine, 4, results(3)) == told(results(3), skipped=1, lag=1)


def test_every_round_is_reported_once_although_answers_are_lost():
    engine, reported = calls(history=3), []
    for number, missed in [(1, []), (3, results(2)), (4, results(2, 3))]:
        engine.step_back()
        before, _, skipped, lag = deliver(engine, number, missed)
        if number == 3:
            engine.take_back(number, lag, rounds=2 + skipped)
        else:
            reported += [*(result.number for result in before), number]
    assert reported == [1, 2, 3, 4]


def test_a_contribution_is_included_if_it_was_taken():
    gradients, models = calls(), Engine(operation(group_size=2))
    assert gradients.deliver(2, (Result(1, taken=3),)).included, "contributions add up"
    assert not gradients.deliver(4, (Result(2, taken=3),)).included
    assert models.deliver(3, (Result(1, taken=3),)).included
    assert not models.deliver(2, (Result(2, taken=3),)).included, "a model that was replaced is in no round"


def test_calls_are_counted_by_their_lag_and_by_their_inclusion():
    engine = calls()
    engine.deliver(1, (Result(1, taken=1),))
    engine.deliver(2, (Result(4, taken=1),))
    totals = engine.statistics(rounds=4, active={2: 3, 1: 1}, waits_s=[0.5, 0.0], late_s=[0.0, 0.25])
    assert (totals.rounds, totals.calls, totals.lag, totals.stale) == (4, 2, {0: 1, 2: 1}, 0.5)
    assert (list(totals.active), totals.waits_s, totals.late_s) == ([1, 2], (0.5, 0.0), (0.0, 0.25))


# -- the opening of a round by message ------------------------------------------------------------


def drawing(rank, opening, **options):
    """An operation that draws `rank` of four ranks for round 1."""
    specs = (operation(opening, seed=seed, **options) for seed in itertools.count())
    return next(spec for spec in specs if spec.drawn(1, 4) == (rank,))


SOLO = operation()
MAJORITY = drawing(2, Opening.MAJORITY)
QUORUM = drawing(2, Opening.QUORUM, quorum=3)


def by_tree(spec, rank, number=1):
    return ActivatedRound(spec, number, 4, rank)


def by_coordinator(spec, rank):
    return CoordinatedRound(spec, 1, 4, rank)


def test_by_tree_the_first_caller_of_a_solo_opens_the_round_and_tells_its_edges():
    armed = by_tree(SOLO, rank=3)
    assert armed.here(LATE) == []
    assert not armed.has_begun
    assert armed.here(ARRIVED) == [Tell(0, 0), Tell(1, 1), Begin()]
    assert armed.has_begun
    assert armed.here(ARRIVED) == [], "another call, after a cancelled one"
    assert armed.signalled(0, 1) == [], "another rank has opened it too"


def test_by_tree_a_rank_that_is_told_passes_it_on_and_begins():
    armed = by_tree(SOLO, rank=3)
    assert armed.signalled(2, 0) == [Tell(1, 1), Begin()]
    assert armed.here(ARRIVED) == [], "the round runs; the caller only waits"
    assert armed.here(GONE) == []


def test_by_tree_a_majority_opens_at_the_drawn_rank():
    asking, drawn = by_tree(MAJORITY, rank=0), by_tree(MAJORITY, rank=2)
    assert asking.here(ARRIVED) == [Tell(2, ARRIVED)]
    assert asking.here(ARRIVED) == [], "told once"
    assert drawn.signalled(0, ARRIVED) == []
    assert not drawn.late_call_opens()
    assert drawn.signalled(1, ARRIVED) == []
    assert drawn.late_call_opens(), "half of the ranks wait for this one"
    assert drawn.here(ARRIVED) == [Tell(3, 0), Tell(0, 1), Begin()]
    assert asking.signalled(2, 1) == [Begin()]


def test_by_tree_a_majority_opens_without_a_drawn_rank_that_is_gone():
    drawn = by_tree(MAJORITY, rank=2)
    assert drawn.here(GONE) == [], "no caller waits"
    assert drawn.signalled(0, ARRIVED) == [Tell(3, 0), Tell(0, 1), Begin()]


def test_by_tree_the_drawn_rank_of_a_quorum_counts_ranks_that_arrived_and_ranks_that_are_gone():
    gone, drawn = by_tree(QUORUM, rank=1), by_tree(QUORUM, rank=2)
    assert gone.here(GONE) == [Tell(2, GONE)]
    assert drawn.signalled(1, GONE) == []
    assert drawn.signalled(0, ARRIVED) == []
    assert drawn.signalled(0, ARRIVED) == [], "counted once"
    assert drawn.signalled(3, ARRIVED) == [Tell(3, 0), Tell(0, 1), Begin()]


def test_by_tree_the_drawn_rank_is_told_once_that_a_rank_arrives_and_once_that_it_leaves():
    armed = by_tree(QUORUM, rank=0)
    assert armed.here(ARRIVED) == [Tell(2, ARRIVED)]
    assert armed.here(ARRIVED) == []
    assert armed.here(GONE) == [Tell(2, GONE)]
    assert armed.here(GONE) == []


@pytest.mark.parametrize("event", [ARRIVED, GONE])
@pytest.mark.parametrize("opening", list(Opening))
def test_by_tree_a_synchronous_round_begins_when_every_rank_has_come(opening, event):
    armed = by_tree(operation(opening, sync_every=2, quorum=2), rank=0, number=2)
    assert armed.signalled(3, 0) == [], "this rank has not come"
    assert armed.here(event) == [Tell(1, 0), Tell(2, 1)]
    assert not armed.has_begun
    assert armed.here(event) == []
    assert armed.signalled(2, 1) == [Begin()]


def test_at_a_coordinator_every_rank_tells_it_of_every_event():
    for rank in (0, 2):  # the coordinator tells itself too
        armed = by_coordinator(MAJORITY, rank)
        assert armed.here(LATE) == [Tell(2, LATE)]
        assert armed.here(ARRIVED) == [Tell(2, ARRIVED)]
        assert armed.here(GONE) == [Tell(2, GONE)]


def test_a_coordinator_opens_a_round_once():
    armed = by_coordinator(SOLO, rank=SOLO.drawn(1, 4)[0])
    assert armed.signalled(0, GONE) == []
    assert armed.signalled(3, LATE) == [], "it contributes, and waits for nothing"
    assert armed.signalled(1, ARRIVED) == [Begin()]
    assert armed.has_begun
    assert armed.signalled(2, ARRIVED) == []


def test_a_coordinator_opens_a_majority_for_its_late_call_if_half_of_the_ranks_wait():
    armed = by_coordinator(MAJORITY, rank=2)
    assert armed.signalled(0, ARRIVED) == []
    assert armed.signalled(2, LATE) == []
    assert armed.signalled(1, ARRIVED) == []
    assert armed.signalled(3, LATE) == [], "it is not drawn"
    assert armed.signalled(2, LATE) == [Begin()]


def test_a_coordinator_counts_a_quorum():
    armed = by_coordinator(QUORUM, rank=2)
    assert armed.signalled(0, ARRIVED) == []
    assert armed.signalled(0, GONE) == [], "counted once"
    assert armed.signalled(1, GONE) == []
    assert armed.signalled(3, ARRIVED) == [Begin()]


# -- the last round ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [SOLO, MAJORITY, QUORUM])
def test_a_coordinator_opens_the_last_round_when_all_ranks_are_gone_and_one_has_joined(what):
    armed = by_coordinator(what, rank=what.drawn(1, 4)[0])
    assert [armed.signalled(rank, event) for rank, event in enumerate([JOINED, GONE, JOINED])] == [[]] * 3
    assert armed.signalled(3, GONE) == [Begin()]


@pytest.mark.parametrize("what", [SOLO, MAJORITY, QUORUM])
def test_by_tree_the_first_drawn_rank_opens_the_last_round(what):
    drawn = what.drawn(1, 4)[0]
    other = (drawn + 1) % 4
    armed, joined = by_tree(what, drawn), by_tree(what, other)
    assert joined.here(JOINED) == [Tell(drawn, JOINED)]
    assert joined.here(JOINED) == [], "told once"
    assert armed.here(GONE) == []
    assert armed.signalled(other, JOINED) == []
    assert armed.signalled((drawn + 2) % 4, GONE) == []
    assert Begin() in armed.signalled((drawn + 3) % 4, GONE)


def test_by_tree_a_rank_in_groups_tells_no_rank_that_it_is_gone():
    spec = operation(group_size=2)
    assert by_tree(spec, (spec.drawn(1, 4)[0] + 1) % 4).here(GONE) == []


def test_the_last_answer_tells_the_rounds_since_the_last_call():
    engine = calls(history=2)
    deliver(engine, 1)
    assert not engine.has_news(1)
    assert engine.has_news(4)
    assert shown(engine.tell(1, (*results(2, 3), Result(4)))) == told(results(2, 3))
    assert not engine.has_news(4)
    assert engine.statistics(4, {}, [], []).calls == 1, "it ends no call"


def test_the_last_answer_tells_the_newest_round_again_if_it_was_lost():
    engine = calls(history=2)
    deliver(engine, 2, results(1))
    engine.take_back(newest=2, lag=1, rounds=2)
    assert engine.has_news(2)
    assert shown(engine.tell(1, (*results(1), Result(2)))) == told(results(1))


def test_a_lost_round_before_one_that_was_told_is_no_news():
    engine = calls(history=2)
    deliver(engine, 1)
    deliver(engine, 2)
    engine.take_back(newest=1, lag=0, rounds=1)
    assert not engine.has_news(2)


# -- the rank that may open a round ---------------------------------------------------------------


class View(NamedTuple):
    """A `rules.RoundView` for tests."""

    number: int
    drawn: tuple[int, ...]
    arrived_ranks: frozenset[int]
    gone: frozenset[int]
    size: int = 4

    @property
    def arrived(self):
        return len(self.arrived_ranks)

    def count(self):
        return len(self.arrived_ranks | self.gone)

    def has(self, rank):
        return rank in self.arrived_ranks | self.gone


def view(number, waiting, gone=()):
    return View(number, (2,), frozenset(waiting), frozenset(gone))


SYNCHRONOUS = operation(sync_every=2)


@pytest.mark.parametrize(
    ("what", "number", "waiting", "gone", "opens"),
    [
        (SOLO, 1, [3], [], True),
        (MAJORITY, 1, [0, 1, 3], [], False),
        (MAJORITY, 1, [2], [], True),
        (MAJORITY, 1, [0], [2], True),
        (QUORUM, 1, [0, 1], [], False),
        (QUORUM, 1, [0, 1, 3], [], True),
        (QUORUM, 1, [0], [1, 3], True),
        (QUORUM, 1, [0, 1], [0, 1], False),
        (SYNCHRONOUS, 1, [0], [], True),
        (SYNCHRONOUS, 2, [0, 1, 2], [], False),
        (SYNCHRONOUS, 2, [0, 1, 2, 3], [], True),
        (SYNCHRONOUS, 2, [0], [1, 2, 3], True),
    ],
)
def test_a_round_opens_when_its_condition_holds(what, number, waiting, gone, opens):
    assert rules.may_open(what, view(number, waiting, gone)) is opens


@pytest.mark.parametrize("what", [SOLO, MAJORITY, QUORUM])
def test_a_round_for_which_no_caller_waits_does_not_open(what):
    armed = by_coordinator(what, rank=2)
    assert [armed.signalled(rank, GONE) for rank in range(4)] == [[]] * 4


@pytest.mark.parametrize(
    "what", [SOLO, MAJORITY, QUORUM, SYNCHRONOUS, operation(Opening.QUORUM, quorum=1), operation(group_size=2)]
)
def test_the_first_caller_opens_every_round_or_not(what):
    opens = all(rules.may_open(what, view(number, [rank])) for number in (1, 2) for rank in range(4))
    assert what.first_caller_opens is opens


@pytest.mark.parametrize(
    ("what", "number", "rank", "waiting", "opens"),
    [
        (MAJORITY, 1, 2, [0, 1], True),
        (MAJORITY, 1, 2, [0], False),
        (MAJORITY, 1, 3, [0, 1], False),
        (QUORUM, 1, 2, [0, 1], False),
        (operation(Opening.MAJORITY, sync_every=2), 2, 2, [0, 1, 3], False),
    ],
)
def test_a_late_call_opens_for_arrived_ranks(what, number, rank, waiting, opens):
    assert rules.late_call_opens(what, view(number, waiting), rank) is opens
