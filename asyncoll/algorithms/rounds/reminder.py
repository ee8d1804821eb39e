"""A rank that waits for a round is reminded of it now and then: the ranks that it has told may have stopped."""

from __future__ import annotations

from collections.abc import Callable

from asyncoll.algorithms.rounds.alarm import Alarm


class Reminder:
    """The reminders of one rank. On the runtime's loop."""

    def __init__(self, waits_for: Callable[[int], bool], remind: Callable[[int, int], None], alarm: Alarm) -> None:
        """`waits_for(number)` is whether that round is not over.

        `remind(number, times)` is called if so, `times` counting from 1.
        """
        self._waits_for = waits_for
        self._remind = remind
        self._alarm = alarm

    def begin(self, number: int) -> None:
        """This rank has told that it waits for round `number`."""
        self._alarm.set(number)

    def act(self, serial: int) -> None:
        """The alarm rings."""
        number = self._alarm.number
        if not self._alarm.rings(serial):
            return
        if self._waits_for(number):
            self._remind(number, self._alarm.times)
        else:
            self._alarm.off()
