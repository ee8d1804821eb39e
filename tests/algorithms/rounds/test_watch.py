"""Watching the other ranks of a round, the reminders of a rank that waits, and the attempts in the memory of a host."""

from __future__ import annotations

import numpy as np
import pytest

from asyncoll.algorithms.rounds.alarm import PATIENCE_S, TIMES_MAX, Alarm
from asyncoll.algorithms.rounds.attempts import ATTEMPTS_MAX, Attempts
from asyncoll.algorithms.rounds.reminder import Reminder
from asyncoll.algorithms.rounds.watch import Situation, Watch
from asyncoll.transport.virtual_time import VirtualTimeLoop


class Clock:
    """Rings alarms, by hand."""

    def __init__(self):
        self.delays, self.cancelled, self.now_s = [], 0, 0.0
        self.alarm = Alarm(self._ring_after)

    def _ring_after(self, delay_s, serial):
        self.delays.append(round(delay_s / PATIENCE_S, 3))
        self.serial = serial
        return self

    def cancel(self):
        self.cancelled += 1

    def ring(self, act):
        self.now_s += self.delays[-1] * PATIENCE_S
        act(self.serial)


class Watched(Clock):
    """A watch of the round `now`, and what it does."""

    def __init__(self, nbytes=1 << 25):
        super().__init__()
        self.now = Situation(7, 1, frozenset([2, 5]), is_incomplete=False)
        self.asked, self.again = [], []
        self.watch = Watch(
            lambda: self.now,
            lambda now: self.asked.append(now.number),
            lambda now, looks: self.again.append((now.attempt, looks)),
            lambda: self.now_s,
            self.alarm,
            nbytes,
        )
        self.watch.begin(7)

    def look(self):
        self.ring(self.watch.act)

    def hear(self, *ranks):
        for rank in ranks:
            self.watch.heard(rank, self.now.number)


def test_ranks_that_answer_are_asked_after_longer_and_longer_times():
    it = Watched()
    for _ in range(4):
        it.look()
        it.hear(5, 2)
    assert it.delays == [1, 1, 2, 4, 8]
    assert it.asked == [7] * 4
    assert not it.again


def test_one_that_does_not_answer_has_another_attempt_begun():
    it = Watched()
    it.look()
    it.hear(5)
    assert not it.again
    it.look()
    assert it.again == [(1, 1)]
    it.now = it.now._replace(attempt=2, awaited=frozenset([5]))
    it.look()  # the next attempt was not asked for yet
    it.hear(5)
    it.look()
    assert it.again == [(1, 1)]


def test_a_host_that_takes_no_part_has_another_attempt_begun():
    it = Watched()
    it.now = Situation(7, 1, frozenset(), is_incomplete=True)
    it.look()
    it.look()
    assert it.again == [(1, 1)]


def test_a_rank_that_waits_for_none_at_the_moment_looks_again():
    it = Watched()
    it.now = Situation(7, 1, frozenset(), is_incomplete=False)
    it.look()
    it.now = it.now._replace(awaited=frozenset([2]))
    it.look()
    it.look()
    assert it.again == [(1, 2)]


def test_a_watch_ends_with_the_round_and_after_many_looks():
    it = Watched()
    it.watch.begin(7)
    assert len(it.delays) == 1
    it.look()
    it.now = Situation(8, 0, frozenset(), is_incomplete=False)
    it.look()
    it.look()
    assert it.asked == [7]
    it.now = it.now._replace(attempt=1, is_incomplete=True)
    it.watch.begin(8)
    for _ in range(2 * TIMES_MAX):
        it.look()
    assert len(it.again) == TIMES_MAX - 1
    it.watch.begin(9)
    assert it.delays[-1] == 1  # a round has its own times, however long the one before took
    it.watch.begin(8)
    assert it.alarm.number == 9


def test_slow_answers_make_a_watch_patient_and_quick_ones_impatient_again():
    it = Watched()
    it.look()
    it.now_s += 6 * PATIENCE_S
    it.hear(2)  # while the round lasts: its data are slow
    it.watch.begin(8)
    assert it.delays[-1] == 12 * 15 / 16
    it.now = it.now._replace(number=8)
    it.look()
    it.now_s += 100
    it.watch.begin(9)
    it.watch.heard(2, 8)  # of an older round: that rank was stopped
    for number in range(10, 50):
        it.watch.begin(number)
    it.watch.begin(50, attempt=3)
    assert it.delays[-2:] == [1, 4]


@pytest.mark.parametrize(
    ("nbytes", "latency", "most"), [(0, 0, 1), (0, 4, 9), (10**6, 0, 3), (10**6, 1, 5), (10**9, 0, 40)]
)
def test_a_watch_is_no_more_patient_than_the_network_and_the_data_of_the_round_need(nbytes, latency, most):
    it = Watched(nbytes)
    it.watch.learn(2, latency * PATIENCE_S)
    for number in range(8, 11):
        it.watch.learn(2, 100)  # that rank was stopped
        it.watch.begin(number)
        assert it.delays[-1] == pytest.approx(max(1, most * 15 / 16), abs=1e-3)


def test_a_reminder_goes_on_with_the_newest_round():
    it, over, reminded = Clock(), 0, []
    reminder = Reminder(lambda number: number > over, lambda number, times: reminded.append((number, times)), it.alarm)
    reminder.begin(1)
    early = it.serial
    over = 1
    reminder.begin(2)
    reminder.act(early)  # it was on its way already
    for _ in range(3):
        it.ring(reminder.act)
    assert reminded == [(2, 1), (2, 2), (2, 3)]
    assert it.delays == [1, 1, 1, 2, 4]
    over = 2
    it.ring(reminder.act)
    it.ring(reminder.act)
    assert len(reminded) == 3


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
        given = second.given(number)
        assert (given.blocks.tolist(), given.ends.tolist()) == ([number, 0, 9], [0, 1, 2])
        assert given.times_s[1, 2] == 5.0 + number
    assert second.forget(4) == [4, 0, 9]
    assert not first.forget(4)
    assert first.given(4) is None
    assert first.given(5)


def test_a_timer_that_an_event_sets_comes_before_a_later_one():
    """The selector has looked for the next timer before it runs the event."""
    loop, came = VirtualTimeLoop(), []
    for _ in range(200):  # asyncio makes a new list of timers
        loop.call_later(20, loop.stop).cancel()
    loop.call_later(0.5, list)
    loop.call_later(10, loop.stop)
    loop.happen_at(1.0, lambda: loop.call_later(2, lambda: came.append(loop.time())))
    loop.happen_at(5.0, lambda: came.append(loop.time()))
    loop.run_forever()
    loop.close()
    assert came == [3.0, 5.0]
