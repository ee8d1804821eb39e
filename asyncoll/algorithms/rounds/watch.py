"""An agent watches those that it waits for in the middle of a round: a process that has stopped does not answer.

It asks now and then, and only as long as a round lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncoll.algorithms.rounds.alarm import PATIENCE_S, Alarm

_PATIENCE_MAX_S = 2.0  # learnt from answers
_SLOWEST_BYTES_S = 1e7  # on slower networks rounds may take superfluous attempts


class Situation(NamedTuple):
    """A round that is not over, as an agent sees it."""

    number: int
    attempt: int  # 0 if the round has not begun
    awaited: frozenset[int]  # the ranks that it waits for
    is_incomplete: bool  # whether no rank of some host takes part yet, and further ranks of it could be told
    progress: int = 0  # what it has exchanged with other hosts: as long as that changes, none of them has stopped


@dataclass(eq=False)
class Watch:
    """The watch of one agent. On the runtime's loop."""

    _look: Callable[[], Situation]  # gives the newest round
    _ask: Callable[[Situation], None]  # asks the ranks that are awaited, which answer (`heard`)
    _again: Callable[[Situation, int], None]  # is called if one does not, with the number of earlier looks
    _now_s: Callable[[], float]
    _alarm: Alarm
    _nbytes: int  # the size of a contribution
    _patience_s: float = PATIENCE_S
    _least_s: dict[int, float] = field(default_factory=dict)  # by rank: its quickest answer, the network's latency
    _last: Situation | None = None
    _silent: dict[int, float] = field(default_factory=dict)  # when each rank was asked first that has not answered yet

    def begin(self, number: int, attempt: int = 1) -> None:
        """An attempt at round `number` has begun."""
        # A late signal of an older round must not end the watch of this one.
        if self._alarm.number < number:
            # Less patience in each round: a process that was stopped, and has gone on, has answered late, too.
            self._patience_s = max(PATIENCE_S, self._patience_s * 15 / 16)
            self._alarm.set(number, self._patience_s * 2 ** (attempt - 1))

    def heard(self, rank: int, number: int) -> None:
        """`rank` has answered to the question of round `number`."""
        asked_s = self._silent.pop(rank, None)
        if asked_s is not None and number == self._alarm.number:
            self.learn(rank, self._now_s() - asked_s)

    def learn(self, rank: int, delay_s: float) -> None:
        """An answer of `rank` has come after that time, while the round lasts.

        In a slow network an answer waits behind the data of the round. It must not be taken for a stopped process
        again and again: each attempt would send all data once more. An answer that is later than those data and the
        latency of the network allow was not delayed by them: its process was stopped.
        """
        least_s = self._least_s[rank] = min(delay_s, self._least_s.get(rank, delay_s))
        data_s = self._nbytes / _SLOWEST_BYTES_S  # how long the data of a round may delay an answer
        most_s = min(PATIENCE_S + 2 * least_s + data_s, _PATIENCE_MAX_S)
        self._patience_s = max(self._patience_s, min(2 * delay_s, most_s))

    def act(self, serial: int) -> None:
        """The alarm rings."""
        if not self._alarm.rings(serial):
            return
        now = self._look()
        if now.number != self._alarm.number or not now.attempt:
            self._alarm.off()
            self._last = None
            # The next round has begun meanwhile.
            if now.attempt:
                self.begin(now.number, now.attempt)
            return
        if now == self._last and (self._silent or now.is_incomplete):
            self._again(now, self._alarm.times - 1)
        self._last = now
        asked_s = self._now_s()
        self._silent = {rank: self._silent.get(rank, asked_s) for rank in now.awaited}
        self._ask(now)
