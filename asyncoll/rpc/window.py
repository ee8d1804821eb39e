"""How much may be under way to one peer: whoever wants to send more waits for its turn.

Calls that calls wait for have slots of their own at each depth. Otherwise as many calls as there are slots could wait
for each other's nested calls, which wait for a slot, for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque

from asyncoll.rpc.protocol import CALLS_MAX

BYTES_MAX = 1 << 26  # of arguments; a call with more of them is alone under way


class Slots:
    """Of one peer, at one depth. First come, first served."""

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    def take_nowait(self, nbytes: int) -> bool:
        """Take a slot for a call with arguments of so many bytes, if there is one and nobody waits for it."""
        if self._waiters or not self._fits(nbytes):
            return False
        self._calls += 1
        self._bytes += nbytes
        return True

    async def take(self, nbytes: int) -> None:
        """Wait for a slot."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((turn, nbytes))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # it has come, and nobody takes it
                self.give_back(nbytes)
            else:
                self._wake()  # those behind may need less
            raise

    def give_back(self, nbytes: int) -> None:
        """The call is over."""
        self._calls -= 1
        self._bytes -= nbytes
        self._wake()

    def _wake(self) -> None:
        while self._waiters and (self._waiters[0][0].done() or self._fits(self._waiters[0][1])):
            turn, wanted = self._waiters.popleft()
            if not turn.done():
                self._calls += 1
                self._bytes += wanted
                turn.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        return self._calls < CALLS_MAX and (not self._calls or self._bytes + nbytes <= BYTES_MAX)
