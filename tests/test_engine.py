"""The engine of rounds and its rules, as transcripts of events and answers."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from asyncoll import SUM
from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.engine import Call, Engine, Gathering, Told
from asyncoll.algorithms.rounds.operation import Opening, Operation


class Result(NamedTuple):
    number: int


def results(*numbers):
    return [Result(number) for number in numbers]


def no():
    return False


def yes():
    return True


# -- calls ----------------------------------------------------------------------------------------


def test_a_rank_in_time_waits_for_each_round():
    engine = Engine(history=0)
    for number in (1, 2, 3):
        assert engine.begin(latest=number - 1, late_call_opens=no) == Call(aim=number, number=number)
        assert engine.deliver(number, []) == Told([], 0, [])


def test_a_late_call_waits_for_nothing_and_skips_what_it_has_not_seen():
    engine = Engine(history=0)
    assert engine.begin(latest=4, late_call_opens=no) == Call(aim=1, number=0)
    assert engine.deliver(4, []) == Told([], 3, [])
    assert engine.begin(latest=4, late_call_opens=no) == Call(aim=5, number=5)


def test_a_late_call_that_opens_waits_for_the_next_round():
    engine = Engine(history=0)
    assert engine.begin(latest=2, late_call_opens=yes) == Call(aim=1, number=3)
    assert engine.deliver(3, []) == Told([], 2, [])


def test_history_turns_skipped_rounds_into_missed_ones():
    engine = Engine(history=2)
    assert engine.begin(latest=5, late_call_opens=no) == Call(aim=1, number=0)
    assert engine.first_missed(1, latest=4) == 3
    assert engine.deliver(5, results(3, 4)) == Told(results(3, 4), 2, [])


def test_an_answer_that_is_lost_is_owed_to_the_next_call():
    engine = Engine(history=2)
    engine.deliver(1, [])
    lost = Result(1)
    engine.take_back([lost], 0)
    assert engine.owes(lost)
    assert not engine.owes(Result(1)), "another result of the same number is other memory"
    assert engine.begin(latest=1, late_call_opens=no) == Call(aim=2, number=2), "the aim does not move"
    assert engine.deliver(2, []) == Told([lost], 0, [])
    assert not engine.owes(lost)


def test_without_history_a_lost_answer_counts_as_skipped():
    engine = Engine(history=0)
    engine.deliver(3, [])
    engine.take_back([], 1 + 2)  # its own round, and the two that it had skipped
    assert engine.deliver(4, []) == Told([], 3, [])


def test_a_result_owed_too_long_is_dropped_and_counted_as_skipped():
    engine = Engine(history=1)
    engine.deliver(1, [])
    engine.take_back(results(1), 0)
    assert engine.deliver(3, results(2)) == Told(results(2), 1, results(1))


def test_every_round_is_reported_once_although_answers_are_lost():
    engine, told = Engine(history=3), []
    for number, missed in [(1, []), (3, results(2)), (4, [])]:
        answer = engine.deliver(number, missed)
        if number == 3:
            engine.take_back([*answer.missed, Result(number)], answer.skipped)
        else:
            told += [*(result.number for result in answer.missed), number]
    assert sorted(told) == [1, 2, 3, 4]


# -- who may open a round -------------------------------------------------------------------------


def operation(opening=Opening.SOLO, **options):
    return Operation("g", (("float32", 3),), SUM, opening, **options)


def gathering(number=1, size=4, drawn=(2,), waiting=(), gone=()):
    view = Gathering(number, size, drawn)
    for rank in waiting:
        view.arrived(rank)
    for rank in gone:
        view.gone(rank)
    return view


MAJORITY, QUORUM = operation(Opening.MAJORITY), operation(Opening.QUORUM, quorum=3)
SYNCHRONOUS = operation(sync_every=2)


@pytest.mark.parametrize(
    ("what", "number", "waiting", "gone", "opens"),
    [
        (operation(), 1, [], [], False),
        (operation(), 1, [3], [], True),
        (operation(), 1, [], [0, 1, 2, 3], False),
        (MAJORITY, 1, [0, 1, 3], [], False),
        (MAJORITY, 1, [2], [], True),
        (MAJORITY, 1, [0], [2], True),
        (MAJORITY, 1, [], [2], False),
        (QUORUM, 1, [0, 1], [], False),
        (QUORUM, 1, [0, 1, 3], [], True),
        (QUORUM, 1, [0], [1, 3], True),
        (QUORUM, 1, [0, 1], [0, 1], False),
        (QUORUM, 1, [], [0, 1, 2], False),
        (SYNCHRONOUS, 1, [0], [], True),
        (SYNCHRONOUS, 2, [0, 1, 2], [], False),
        (SYNCHRONOUS, 2, [0, 1, 2, 3], [], True),
        (SYNCHRONOUS, 2, [0], [1, 2, 3], True),
    ],
)
def test_a_round_opens_when_its_condition_holds(what, number, waiting, gone, opens):
    assert rules.may_open(what, gathering(number, waiting=waiting, gone=gone)) is opens


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
def test_a_late_call_opens_for_waiting_ranks(what, number, rank, waiting, opens):
    assert rules.late_call_opens(what, gathering(number, waiting=waiting), rank) is opens


def test_a_contribution_is_included_if_it_was_taken():
    assert rules.is_included(operation(), ticket=2, taken=3), "contributions add up"
    assert not rules.is_included(operation(), ticket=4, taken=3)
    assert not rules.is_included(operation(group_size=2), ticket=2, taken=3), "a model that was replaced is in no round"
