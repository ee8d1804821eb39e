"""A rank that waits for a round is reminded of it now and then: the ranks that it has told may have stopped."""

from __future__ import annotations

from collections.abc import Callable

from asyncoll.algorithms.rounds.watch import LOOKS_MAX, PATIENCE_S


class Reminder:
    """The reminders of one rank, each after twice the time. A round that is over soon costs nothing.

    On the runtime's loop.
    """

    def __init__(
        self, waits_for: Callable[[int], bool], remind: Callable[[int, int], None], alarm: Callable[[float], None]
    ) -> None:
        """`waits_for(number)` is whether that round is not over.

        `remind(number, times)` is called if so, `times` counting from 1. `alarm(delay_s)` has `act` called after that
        time.
        """
        self._waits_for = waits_for
        self._remind = remind
        self._alarm = alarm
        self._is_waiting = False  # for `act`
        self._newest = 0  # the round that this rank has come to wait for
        self._number = 0  # the round of the next reminder
        self._times = 0  # reminders of that

    def begin(self, number: int) -> None:
        """This rank has told that it waits for round `number`."""
        self._newest = number
        if not self._is_waiting:
            self._wait(number, 0)

    def act(self) -> None:
        """The time is over."""
        self._is_waiting = False
        if self._waits_for(self._number):
            self._remind(self._number, self._times + 1)
            if self._times < LOOKS_MAX:
                self._wait(self._number, self._times + 1)
        elif self._waits_for(self._newest):
            self._wait(self._newest, 0)

    def _wait(self, number: int, times: int) -> None:
        self._number, self._times = number, times
        self._is_waiting = True
        self._alarm(PATIENCE_S * 2**times)
