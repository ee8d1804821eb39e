"""How much may be under way: the calls to one peer, in number and in bytes of arguments, and the items of a stream.

Each depth of nested calls has slots of its own. With common slots, calls that occupy all slots could wait for nested
calls that wait for a slot: a deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque

from asyncoll.errors import ProtocolError
from asyncoll.rpc.protocol import CALLS_MAX, ITEMS_MAX

BYTES_MAX = 1 << 26  # of arguments; a call with more is under way alone
_AHEAD_BYTES = 1 << 23  # items of a stream that have been sent and not taken


class Slots:
    """The slots of one peer at one depth. First come, first served."""

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._waiters: deque[tuple[asyncio.Future[None], int]] = deque()

    def take_nowait(self, nbytes: int) -> bool:
        """Take a slot for a call with `nbytes` of arguments if one is free and no caller waits; return whether so."""
        if self._waiters or not self._fits(nbytes):
            return False
        self._calls += 1
        self._bytes += nbytes
        return True

    async def take(self, nbytes: int) -> None:
        """Wait for a slot and take it. Cancelling it takes none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((turn, nbytes))
        try:
            await turn
        except BaseException:
            # The slot was assigned just before the cancellation.
            if turn.done() and not turn.cancelled():
                self.give_back(nbytes)
            else:
                # The next waiters may need fewer bytes than this one.
                self._wake()
            raise

    def give_back(self, nbytes: int) -> None:
        """Free the slot of a call with `nbytes` of arguments, and wake the waiters that fit."""
        self._calls -= 1
        self._bytes -= nbytes
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        while self._waiters and (self._waiters[0][0].done() or self._fits(self._waiters[0][1])):
            turn, wanted = self._waiters.popleft()
            if not turn.done():
                self._calls += 1
                self._bytes += wanted
                turn.set_result(None)

    def _fits(self, nbytes: int) -> bool:
        """Whether a call fits. The first one always does, whatever its size: it would otherwise wait for ever."""
        return self._calls < CALLS_MAX and (not self._calls or self._bytes + nbytes <= BYTES_MAX)


class StreamWindow:
    """Bounds the items of one stream that have been sent and not taken, in number and bytes."""

    def __init__(self) -> None:
        self._costs: deque[int] = deque()
        self._total = 0
        self.room = asyncio.Event()  # set while another item may be sent
        self.room.set()

    def count_sent(self, nbytes: int) -> None:
        """Count an item of `nbytes`."""
        self._costs.append(nbytes)
        self._total += nbytes
        if len(self._costs) >= ITEMS_MAX or self._total > _AHEAD_BYTES:
            self.room.clear()

    def count_taken(self, number: int) -> None:
        """Count off the oldest `number` items. Raises ProtocolError if fewer have been sent."""
        if number > len(self._costs):
            raise ProtocolError(f"{number} items of a stream taken, but {len(self._costs)} sent")
        for _ in range(number):
            self._total -= self._costs.popleft()
        if len(self._costs) < ITEMS_MAX and self._total <= _AHEAD_BYTES:
            self.room.set()
