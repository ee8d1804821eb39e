"""Watching the other ranks of a round, the reminders of a rank that waits, and the attempts in the memory of a host."""

from __future__ import annotations

import numpy as np
import pytest

from asyncoll.algorithms.rounds.attempts import ATTEMPTS_MAX, Attempts
from asyncoll.algorithms.rounds.reminder import Reminder
from asyncoll.algorithms.rounds.watch import LOOKS_MAX, PATIENCE_S, Situation, Watch
from asyncoll.transport.virtual_time import VirtualTimeLoop

OVER = Situation(8, 0, frozenset(), is_incomplete=False)


class Watched:
    """A watch of the round `now`, and what it does."""

    def __init__(self):
        self.now = Situation(7, 1, frozenset([2, 5]), is_incomplete=False)
        self.delays, self.asked, self.again = [], [], []
        self.watch = Watch(
            lambda: self.now,
            lambda now: self.asked.append(now.number),
            lambda now, looks: self.again.append((now.attempt, looks)),
            self.delays.append,
        )


def test_ranks_that_answer_are_asked_after_longer_and_longer_times():
    it = Watched()
    it.watch.begin()
    for _ in range(4):
        it.watch.act()
        it.watch.heard(5)
        it.watch.heard(2)
    assert it.delays == [PATIENCE_S * factor for factor in (1, 1, 2, 4, 8)]
    assert it.asked == [7] * 4
    assert not it.again


def test_one_that_does_not_answer_has_another_attempt_begun():
    it = Watched()
    it.watch.begin()
    it.watch.act()
    it.watch.heard(5)
    assert not it.again
    it.watch.act()
    assert it.again == [(1, 1)]
    it.now = it.now._replace(attempt=2, awaited=frozenset([5]))
    it.watch.act()  # the next attempt was not asked for yet
    assert it.again == [(1, 1)]
    it.watch.heard(5)
    it.watch.act()
    assert it.again == [(1, 1)]


def test_a_host_that_takes_no_part_has_another_attempt_begun():
    it = Watched()
    it.now = Situation(7, 1, frozenset(), is_incomplete=True)
    it.watch.begin()
    it.watch.act()
    it.watch.act()
    assert it.again == [(1, 1)]


def test_a_watch_ends_with_the_round_and_after_many_looks():
    it = Watched()
    it.watch.begin()
    it.watch.begin()
    assert len(it.delays) == 1
    it.watch.act()
    it.now = OVER
    it.watch.act()
    assert len(it.delays) == 2
    it.now = it.now._replace(is_incomplete=True)
    it.watch.begin()
    for _ in range(2 * LOOKS_MAX):
        it.watch.act()
    assert len(it.again) == LOOKS_MAX - 1
    assert it.delays[-1] == PATIENCE_S * 2 ** (LOOKS_MAX - 1)


def test_a_reminder_goes_on_with_the_newest_round():
    over, reminded, delays = 0, [], []
    reminder = Reminder(
        lambda number: number > over, lambda number, times: reminded.append((number, times)), delays.append
    )
    reminder.begin(1)
    over = 1
    reminder.begin(2)
    assert delays == [PATIENCE_S]
    reminder.act()
    reminder.act()
    reminder.act()
    assert reminded == [(2, 1), (2, 2)]
    assert delays == [PATIENCE_S * factor for factor in (1, 1, 2, 4)]
    over = 2
    reminder.act()
    assert len(delays) == 4


@pytest.fixture
def host():
    """The attempts of one host of three ranks, as each of them sees them."""
    cells = memoryview(np.zeros(5 + Attempts.cells(3), np.int64)).cast("B").cast("q")
    return [Attempts(cells, 5, 3, place) for place in range(3)]


def test_each_attempt_is_begun_by_one_rank_and_the_newest_counts(host):
    first, second, third = host
    assert first.open(4)
    assert not second.open(4)
    assert first.is_newest(4, 1)
    assert second.open_again(4, 1) == 2
    assert not third.open_again(4, 1)
    assert not first.is_newest(4, 1)
    assert first.in_charge(4) == (2, {1})
    assert first.in_charge(6) == (0, set())
    assert not first.open_again(6, 1)
    for attempt in range(2, ATTEMPTS_MAX - 1):
        assert third.open_again(4, attempt)
    assert not third.open_again(4, ATTEMPTS_MAX - 1)


def test_a_host_gives_the_same_in_each_attempt_until_the_round_is_forgotten(host):
    first, second, _ = host
    assert first.given(4) is None
    for number in (4, 5):
        first.give(number, [number, 0, 9], [0, 1, 2], np.arange(6.0).reshape(2, 3) + number)
    assert first.claim(4, 1)
    assert not second.claim(4, 1)
    assert second.claim(4, 3)
    assert not first.claim(4, 2)
    assert first.in_charge(4) == (3, {1})
    for number in (4, 5):
        blocks, ends, times_s = second.given(number)
        assert (blocks, ends, times_s[1, 2]) == ([number, 0, 9], (0, 1, 2), 5.0 + number)
    assert second.forget(4) == [4, 0, 9]
    assert not first.forget(4)
    assert first.given(4) is None
    assert first.given(5)


def test_a_timer_that_an_event_sets_comes_before_a_later_one():
    """The selector has looked for the next timer before it runs the event."""
    loop, came = VirtualTimeLoop(), []
    loop.call_later(10, loop.stop)
    loop.happen_at(1.0, lambda: loop.call_later(2, lambda: came.append(loop.time())))
    loop.happen_at(5.0, lambda: came.append(loop.time()))
    loop.run_forever()
    loop.close()
    assert came == [3.0, 5.0]
