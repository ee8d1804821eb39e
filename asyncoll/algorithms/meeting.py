"""Where the ranks of a communicator meet in shared memory: everybody shows memory, everybody looks, everybody leaves.

A call consists of one meeting or several. Meetings take turns in a few places on a board: two for each call that may be
under way, so that a rank can come to the next meeting while others are still at the one before. A place is free again
when all have left it, and so is the memory that was shown there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from asyncoll.errors import AsyncollError
from asyncoll.tensors import Array
from asyncoll.transport import Arena
from asyncoll.transport.board import until

# Words of a meeting, and of each rank's part in it.
_TAG, _ARRIVED, _DIRECT, _CLAIMED, _DONE, _LEFT, _FINGERPRINT, _FIRST = range(8)
_HEAD = 8
_PART = 3  # the address of what it shows, negative if it is the caller's own memory; how long it is; whether it reduces

_HALF = 1 << 63


class Sizes(NamedTuple):
    """How arrays are cut up; measured by `asyncoll bench tune`."""

    window: int = 1 << 19  # bytes that a rank shows in one meeting
    chunk: int = 1 << 16  # bytes that one rank reduces at a time
    calls: int = 4  # under way at once in a communicator


class DisagreementError(AsyncollError):
    """The rank at `place` has called something else under the same number."""

    def __init__(self, place: int) -> None:
        super().__init__(f"the rank at place {place} has called something else")
        self.place = place


class Hall:
    """The meetings of one communicator, as one of its ranks sees them."""

    def __init__(self, arena: Arena, size: int, rank: int, context: int, sizes: Sizes) -> None:
        self.arena = arena
        self.size = size
        self.rank = rank
        self.sizes = sizes
        self._stride = _HEAD + _PART * size
        self.board = arena.board(context, 2 * sizes.calls * self._stride)
        self._slots: dict[int, tuple[int, int]] = {}  # address and bytes, by turn
        self._unfinished: set[int] = set()

    def begin(self, number: int) -> None:
        """Call `number` begins here."""
        self._unfinished.add(number)

    def end(self, number: int) -> None:
        """Call `number` is over here."""
        self._unfinished.discard(number)
        if self._unfinished:
            with self.board as board:
                board.wake()  # calls of this rank may wait for its place

    def meeting(self, number: int, count: int, fingerprint: int) -> Meeting:
        """The meeting after `count` others of call `number`."""
        turn = 2 * (number % self.sizes.calls) + count % 2
        return Meeting(self, turn, number << 32 | count, fingerprint)

    def base(self, turn: int) -> int:
        return turn * self._stride

    def is_over(self, number: int) -> bool:
        """Whether call `number` is over here, so that its place is free for another."""
        return number not in self._unfinished

    def slot(self, turn: int, nbytes: int) -> tuple[int, Array]:
        """This rank's own memory for what it shows at that turn, and its address."""
        address, room = self._slots.get(turn, (0, 0))
        if room < nbytes or not room:
            if room:
                self.arena.free(address)
            room = max(nbytes, 64)
            address = self.arena.allocate(room)
            self._slots[turn] = address, room
        return address, self.arena.view(address, nbytes)


class Meeting:
    """All ranks at one point of one call. Every rank that takes part calls `free`, `arrive`, `everybody`, `leave`."""

    __slots__ = ("_base", "_fingerprint", "_rank", "_size", "_tag", "_words", "board", "turn")

    def __init__(self, hall: Hall, turn: int, tag: int, fingerprint: int) -> None:
        self.board = hall.board
        self.turn = turn
        self._words = hall.board.words
        self._base = hall.base(turn)
        self._rank = hall.rank
        self._size = hall.size
        self._tag = tag
        self._fingerprint = fingerprint - _HALF  # 64 bits without a sign, in a word that has one

    async def free(self) -> None:
        """Wait until all have left the meeting before it in the same place. My memory for it is then free, too."""
        words, base, tag = self._words, self._base, self._tag
        await until(self.board, lambda: words[base + _TAG] in (0, tag) or words[base + _LEFT] == self._size)

    def arrive(self, address: int, nbytes: int, *, direct: bool = False) -> None:
        """Show memory: `direct` if it is the caller's own. Raises DisagreementError if others have come for another."""
        words, base = self._words, self._base
        with self.board as board:
            if words[base + _TAG] != self._tag:
                self._open()
            elif words[base + _FINGERPRINT] != self._fingerprint:
                raise DisagreementError(words[base + _FIRST])
            part = base + _HEAD + _PART * self._rank
            words[part] = -address if direct else address
            words[part + 1] = nbytes
            words[part + 2] = 0
            words[base + _DIRECT] += direct
            words[base + _ARRIVED] += 1
            if words[base + _ARRIVED] == self._size:
                board.wake()

    def _open(self) -> None:
        words, base = self._words, self._base
        for word in range(base, base + _HEAD):
            words[word] = 0
        words[base + _TAG] = self._tag
        words[base + _FINGERPRINT] = self._fingerprint
        words[base + _FIRST] = self._rank

    async def everybody(self) -> None:
        """Wait until all ranks are here."""
        words, arrived, size = self._words, self._base + _ARRIVED, self._size
        await until(self.board, lambda: words[arrived] == size)

    # -- what is shown: once everybody is here ----------------------------------------------------

    def shown(self) -> list[tuple[int, int, bool]]:
        """By rank: the address of what it shows, its length, and whether that is its caller's own memory."""
        first = self._base + _HEAD
        words = self._words[first : first + _PART * self._size].tolist()
        return [(abs(words[i]), words[i + 1], words[i] < 0) for i in range(0, len(words), _PART)]

    def is_direct(self) -> bool:
        """Whether all ranks show their callers' own memory."""
        return self._words[self._base + _DIRECT] == self._size

    # -- reducing together ------------------------------------------------------------------------

    def claim(self, chunk: int, total: int) -> int | None:
        """The first byte of a chunk for this rank to reduce; None if all of `total` bytes are claimed."""
        words, claimed = self._words, self._base + _CLAIMED
        with self.board:
            first = words[claimed]
            if first >= total:
                return None
            words[claimed] = first + chunk
            words[self._base + _HEAD + _PART * self._rank + 2] = 1
        return first

    def done(self, nbytes: int, total: int) -> None:
        """This rank has reduced so many bytes."""
        words, done = self._words, self._base + _DONE
        with self.board as board:
            words[done] += nbytes
            words[self._base + _HEAD + _PART * self._rank + 2] = 0
            if words[done] == total or words[self._base + _CLAIMED] == total:
                board.wake()

    async def reduced(self, total: int) -> None:
        """Wait until all of `total` bytes are."""
        words, done = self._words, self._base + _DONE
        await until(self.board, lambda: words[done] == total)

    async def withdraw(self, total: int, is_lost: Callable[[int], bool]) -> None:
        """Nobody claims any more; wait until those who have are done, or gone."""
        words, first = self._words, self._base + _HEAD + 2
        with self.board:
            words[self._base + _CLAIMED] = total
            words[first + _PART * self._rank] = 0

        def is_busy(place: int) -> bool:
            return words[self._base + _TAG] == self._tag and words[first + _PART * place] > 0 and not is_lost(place)

        await until(self.board, lambda: not any(map(is_busy, range(self._size))))

    # -- leaving ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Look at nothing any more."""
        words, left = self._words, self._base + _LEFT
        with self.board as board:
            words[left] += 1
            if words[left] == self._size:
                board.wake()

    async def everybody_left(self) -> None:
        """Wait until nobody looks at what this rank has shown."""
        words, base = self._words, self._base
        await until(self.board, lambda: words[base + _TAG] != self._tag or words[base + _LEFT] == self._size)
