"""The calls of one rank on one operation, which run one after another in the order in which they began."""

from __future__ import annotations

from itertools import count

from asyncoll.transport.control_block import Turn, turn_of


class CallOrder:
    """The order of the calls, which may be made in several threads.

    The compiled core takes and ends turns, too (`CallOrder` in asyncoll/_core/whole_calls.c), so it has the attributes.
    """

    __slots__ = ("now", "numbers", "over", "waiting")

    def __init__(self) -> None:
        self.numbers = count()  # of calls; `next` of it is atomic
        self.now = [0]  # one item: the number of the call whose turn it is
        self.over: set[int] = set()  # calls that ended before their turn
        self.waiting: dict[int, Turn] = {}  # by call: those that wait for their turn

    def is_idle(self) -> bool:
        """Whether every call is over. Itself a call, which does nothing and is over at once."""
        turn = next(self.numbers)
        is_now = self.is_now(turn)
        self.end(turn)
        return is_now

    def is_now(self, turn: int) -> bool:
        """Whether it is the turn of call number `turn`."""
        return turn == self.now[0]

    async def wait(self, turn: int) -> None:
        """Wait until it is the turn of call number `turn`."""
        mine = self.waiting[turn] = Turn()
        try:
            # Compared after the entry is made: the call before may end in another thread. It either finds the entry or
            # has changed `now` before this line.
            if not self.is_now(turn):
                await turn_of(mine)
        finally:
            self.waiting.pop(turn, None)

    def end(self, turn: int) -> None:
        """Call number `turn` is over."""
        self.over.add(turn)
        self._pass_on(turn)

    def end_now(self) -> None:
        """The call that has the turn is over."""
        self.end(self.now[0])

    def _pass_on(self, turn: int) -> None:
        """Call `turn` is over. If it had the turn, the next call gets it. Two threads may do this at the same time."""
        if not self.is_now(turn):
            return
        following = turn
        while following in self.over:
            self.over.discard(following)
            following += 1
        self.now[0] = following
        # Again, after `now` is set: a call that ended just before did not have the turn, so it has passed nothing on.
        if following in self.over:
            self._pass_on(following)
        elif (waiting := self.waiting.pop(following, None)) is not None:
            waiting.set()
