"""Where the ranks of a communicator meet in shared memory: everybody shows memory, everybody looks, everybody leaves.

A call consists of one meeting or several. Meetings take turns in a few places on a board: two for each call that may be
under way, so that a rank can come to the next meeting while others are still at the one before. A place is free again
when all have left it, and so is the memory that was shown there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.errors import AsyncollError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena, Board
from asyncoll.transport.control_block import Turn, turn_of, until

# Words of a meeting, and of each rank's part in it.
_TAG, _ARRIVED, _DIRECT, _CLAIMED, _DONE, _LEFT, _FINGERPRINT, _FIRST, _WITHDRAWN = range(9)
_HEAD = 9
_PART = 3  # the address of what it shows, negative if it is the caller's own memory; how long it is; whether it reduces

_HALF = 1 << 63  # 64 bits without a sign, in a word that has one
_NUMBERS = 1 << 30
_LEAST = 1024  # bytes of a slot
_VIEWS_MAX = 1024  # kinds of short arrays whose views are kept
_NOTHING: Array = np.empty(0, np.uint8)


class DisagreementError(AsyncollError):
    """The rank at `place` has called something else under the same number."""

    def __init__(self, place: int) -> None:
        super().__init__(f"the rank at place {place} has called something else")
        self.place = place


def _tag(number: int, count: int) -> int:
    """Tells a meeting from all that may be in its place before or after it: a word that is never 0, even in years."""
    return (number % _NUMBERS + 1) << 32 | count


class Hall:
    """The meetings of one communicator, as one of its ranks sees them."""

    def __init__(self, arena: Arena, size: int, rank: int, context: int, sizes: Sizes) -> None:
        self.arena = arena
        self.size = size
        self.rank = rank
        self.sizes = sizes
        self._stride = _HEAD + _PART * size
        self._addresses = 2 * sizes.calls * self._stride  # words: of each rank's short arrays
        self._begun = self._addresses + size  # words: the newest call of each rank, of which nothing but an error tells
        self.board = arena.board(context, self._begun + size)
        self._slots: dict[int, tuple[int, Array]] = {}  # with their addresses, by turn
        self._short_arrays: dict[tuple[int, np.dtype[Any], int], list[Array | None]] = {}
        self._unfinished: set[int] = set()
        self._turns: dict[int, Turn] = {}  # by the call whose end they wait for
        self.known_free = 0  # the tag of a meeting whose place was seen to be free

    def begin(self, number: int) -> None:
        """Call `number` begins here."""
        self._unfinished.add(number)
        self.board.words[self._begun + self.rank] = number

    def begun(self, place: int) -> int:
        """The number of the newest call of the rank at `place`, if it has been seen by now."""
        return self.board.words[self._begun + place]

    def end(self, number: int) -> None:
        """Call `number` is over here."""
        self._unfinished.discard(number)
        turn = self._turns.pop(number, None)
        if turn is not None:
            turn.come()

    async def wait_for(self, number: int) -> None:
        """Wait until call `number` is over here, so that its place is free for another."""
        if self.is_over(number):
            return
        turn = self._turns[number] = Turn()
        if self.is_over(number):  # it has ended this moment, in another thread, and may not have seen the turn
            self._turns.pop(number, None)
        else:
            await turn_of(turn)

    def meeting(self, number: int, count: int, fingerprint: int) -> Meeting:
        """The meeting after `count` others of call `number`."""
        return Meeting(self, 2 * (number % self.sizes.calls) + count % 2, number, count, fingerprint)

    def look_ahead(self, number: int) -> None:
        """Under the lock: note whether the place of the first meeting of call `number` is free."""
        words, base, tag = self.board.words, self.base(2 * (number % self.sizes.calls)), _tag(number, 0)
        is_left = words[base + _LEFT] == self.size or words[base + _TAG] in (0, tag)
        if is_left and self.is_over(number - self.sizes.calls):  # which may come back to it otherwise
            self.known_free = tag

    def base(self, turn: int) -> int:
        return turn * self._stride

    def is_over(self, number: int) -> bool:
        """Whether call `number` is over here."""
        return number not in self._unfinished

    def slot(self, turn: int, nbytes: int) -> tuple[int, Array]:
        """This rank's own memory for what it shows at that turn, and its address."""
        address, slot = self._slots.get(turn) or (0, _NOTHING)
        if slot.size < max(nbytes, 1):
            if slot.size:
                self.arena.free(address)
            room = max(nbytes, _LEAST)
            address = self.arena.allocate(room)
            slot = self.arena.view(address, room)
            self._slots[turn] = address, slot
        return address, slot[:nbytes]

    def short_array(self, place: int, turn: int, dtype: np.dtype[Any], count: int) -> Array:
        """What the rank at `place` shows at that turn if it is short: always the same memory."""
        key = turn, dtype, count
        arrays = self._short_arrays.get(key)
        if arrays is None:
            if len(self._short_arrays) == _VIEWS_MAX:
                self._short_arrays.clear()
            arrays = self._short_arrays[key] = [None] * self.size
        array = arrays[place]
        if array is None:
            address = self._short_address(place) + turn * self.sizes.short
            array = arrays[place] = self.arena.view(address, count * dtype.itemsize).view(dtype)
        return array

    def _short_address(self, place: int) -> int:
        """Where that rank's short arrays lie: it says so before it first comes to a meeting with one."""
        word = self._addresses + place
        with self.board as board:
            if not board.words[word]:
                assert place == self.rank
                board.words[word] = self.arena.allocate(2 * self.sizes.calls * self.sizes.short)
            return board.words[word]


class Meeting:
    """All ranks at one point of one call. Every rank that takes part calls `free`, `arrive`, `everybody`, `leave`."""

    __slots__ = ("_base", "_fingerprint", "_hall", "_number", "_words", "tag", "turn")

    def __init__(self, hall: Hall, turn: int, number: int, count: int, fingerprint: int) -> None:
        self._hall = hall
        self._words = hall.board.words
        self._base = hall.base(turn)
        self._fingerprint = fingerprint - _HALF
        self._number = number
        self.turn = turn
        self.tag = _tag(number, count)

    @property
    def board(self) -> Board:
        return self._hall.board

    async def free(self) -> None:
        """Wait until all have left the meeting before it in the same place. My memory for it is then free, too."""
        words, base, tag, size = self._words, self._base, self.tag, self._hall.size
        if self._hall.known_free != tag:
            await until(self.board, lambda: words[base + _TAG] in (0, tag) or words[base + _LEFT] == size)

    def arrive_shortly(self) -> bool:
        """Show one's short array. Returns whether all the others have; then they wait for this rank to reduce it."""
        arrived = self._base + _ARRIVED
        with self._hall.board:
            self._enter()
            self._words[arrived] += 1
            return self._words[arrived] == self._hall.size

    def arrive(self, address: int, nbytes: int, *, direct: bool = False, helpers: int = sys.maxsize) -> None:
        """Show memory: `direct` if it is the caller's own. The last to come wakes so many of those who wait for that.

        Raises DisagreementError if others have come for another call.
        """
        words, base = self._words, self._base
        with self.board as board:
            self._enter()
            part = base + _HEAD + _PART * self._hall.rank
            words[part] = -address if direct else address
            words[part + 1] = nbytes
            words[part + 2] = 0
            words[base + _DIRECT] += direct
            words[base + _ARRIVED] += 1
            if words[base + _ARRIVED] == self._hall.size:
                board.wake(helpers)

    def _enter(self) -> None:
        """Under the lock. Whoever comes first opens the meeting."""
        words, base = self._words, self._base
        if words[base + _TAG] == self.tag:
            if words[base + _FINGERPRINT] != self._fingerprint:
                raise DisagreementError(words[base + _FIRST])
            return
        for word in range(base, base + _HEAD):
            words[word] = 0
        words[base + _TAG] = self.tag
        words[base + _FINGERPRINT] = self._fingerprint
        words[base + _FIRST] = self._hall.rank

    async def everybody(self) -> None:
        """Wait until all ranks are here."""
        words, arrived, size = self._words, self._base + _ARRIVED, self._hall.size
        await until(self.board, lambda: words[arrived] == size)

    # -- what is shown: once everybody is here ----------------------------------------------------

    def shown(self) -> list[tuple[int, int, bool]]:
        """By rank: the address of what it shows, its length, and whether that is its caller's own memory."""
        first = self._base + _HEAD
        words = self._words[first : first + _PART * self._hall.size].tolist()
        return [(abs(words[i]), words[i + 1], words[i] < 0) for i in range(0, len(words), _PART)]

    def is_direct(self) -> bool:
        """Whether all ranks show their callers' own memory."""
        return self._words[self._base + _DIRECT] == self._hall.size

    # -- reducing together ------------------------------------------------------------------------

    def claim(self, chunk: int, total: int) -> int | None:
        """The first byte of a chunk for this rank to reduce; None if all of `total` bytes are claimed."""
        words, claimed = self._words, self._base + _CLAIMED
        with self._hall.board:
            first = words[claimed]
            if first >= total:
                return None
            words[claimed] = first + chunk
            words[self._base + _HEAD + _PART * self._hall.rank + 2] = 1
        return first

    def done(self, nbytes: int, total: int) -> None:
        """This rank has reduced so many bytes."""
        words, done = self._words, self._base + _DONE
        with self._hall.board as board:
            words[done] += nbytes
            words[self._base + _HEAD + _PART * self._hall.rank + 2] = 0
            if words[done] == total or words[self._base + _CLAIMED] == total:
                board.wake()

    async def reduced(self, total: int) -> None:
        """Wait until all of `total` bytes are."""
        words, done = self._words, self._base + _DONE
        await until(self.board, lambda: words[done] == total)

    async def withdraw(self, total: int, is_lost: Callable[[int], bool]) -> None:
        """After a failure: nobody claims any more, and who has read what this rank showed cannot rely on it.

        Wait until those who have claimed are done, or gone.
        """
        words, first = self._words, self._base + _HEAD + 2
        with self.board:
            if words[self._base + _TAG] != self.tag:
                return
            words[self._base + _WITHDRAWN] = 1
            words[self._base + _CLAIMED] = total
            words[first + _PART * self._hall.rank] = 0

        def is_busy(place: int) -> bool:
            return words[self._base + _TAG] == self.tag and words[first + _PART * place] > 0 and not is_lost(place)

        await until(self.board, lambda: not any(map(is_busy, range(self._hall.size))))

    # -- leaving ----------------------------------------------------------------------------------

    def leave(self, reduced: int = 0) -> bool:
        """Look at nothing any more. With `reduced`: so many bytes, which are all, have been reduced by this rank.

        Returns whether what was seen can be relied on.
        """
        hall, words, left = self._hall, self._words, self._base + _LEFT
        with hall.board as board:
            words[left] += 1
            if reduced:
                words[self._base + _DONE] = reduced
                board.wake()
            elif words[left] == hall.size:
                board.wake()
            hall.look_ahead(self._number + 1)
            return not words[self._base + _WITHDRAWN]

    async def everybody_left(self) -> None:
        """Wait until nobody looks at what this rank has shown."""
        words, base = self._words, self._base
        await until(self.board, lambda: words[base + _TAG] != self.tag or words[base + _LEFT] == self._hall.size)
