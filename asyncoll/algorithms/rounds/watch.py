"""An agent watches those that it waits for in the middle of a round: a process that has stopped does not answer.

It asks now and then, and only as long as a round lasts. A round that is over soon costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Long for a process that runs, even if it waits for a processor, and short beside the time after which a stopped one
# counts as lost.
PATIENCE_S = 0.05
LOOKS_MAX = 16  # at one round, each after twice the time: a world in which nothing happens any more comes to rest


class Situation(NamedTuple):
    """A round that is not over, as an agent sees it."""

    number: int
    attempt: int
    awaited: frozenset[int]  # the ranks that it waits for
    is_incomplete: bool  # whether no rank of some host takes part yet, and further ranks of it could be told


class Watch:
    """The watch of one agent. On the runtime's loop."""

    def __init__(
        self,
        look: Callable[[], Situation],
        ask: Callable[[Situation], None],
        again: Callable[[Situation, int], None],
        alarm: Callable[[float], None],
    ) -> None:
        """`look` gives the newest round. `ask` asks the ranks that are awaited, which answer (`heard`).

        `again` is called if one does not, with the number of earlier looks. `alarm(delay_s)` has `act` called after
        that time.
        """
        self._look = look
        self._ask = ask
        self._again = again
        self._alarm = alarm
        self._is_waiting = False  # for `act`
        self._last: Situation | None = None
        self._looks = 0  # at that round
        self._silent: set[int] = set()  # the ranks that have not answered yet

    def begin(self) -> None:
        """A round has begun."""
        if not self._is_waiting:
            self._looks = 0
            self._wait()

    def heard(self, rank: int) -> None:
        """`rank` has answered."""
        self._silent.discard(rank)

    def act(self) -> None:
        """The time is over."""
        self._is_waiting = False
        now = self._look()
        if not (now.awaited or now.is_incomplete) or self._looks == LOOKS_MAX:
            self._last = None
            return
        if self._last is None or now.number != self._last.number:
            self._looks = 0
        elif now == self._last and (self._silent or now.is_incomplete):
            self._again(now, self._looks)
        self._last, self._silent = now, set(now.awaited)
        self._ask(now)
        self._wait()
        self._looks += 1

    def _wait(self) -> None:
        self._is_waiting = True
        self._alarm(PATIENCE_S * 2**self._looks)
