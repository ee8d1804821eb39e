"""The attempts at a round between hosts, in the memory of one host.

A round takes one attempt, unless a process that acts in it stops: then another one has the next attempt begun
(`agent`). In each attempt a host gives the same, so each has the same result. So what a host has given to a round stays
here until the next round is over. No other host can need it after that: it has given to the next round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncoll.tensors.reductions import Array

ATTEMPTS_MAX = 1 << 10  # at one round


class Given(NamedTuple):
    """What a host gives to a round: by place, as of `Taken`."""

    blocks: Array
    ends: Array
    times_s: Array


class _Cells(NamedTuple):
    """The cells of one round: these, and for each place of the host a block, an end, and two times."""

    opened: int  # the round, if a rank of this host has opened it for all hosts
    newest: int  # the newest attempt that a rank of this host has begun
    opener: int  # the place of the rank that has begun it
    given: int  # the round, once what is staged on this host is taken
    claimed: int  # the newest attempt in which this host takes part
    claimant: int  # the place of the rank that takes part in it
    blocks: int  # the first of [place]


_CELLS = _Cells(*range(len(_Cells._fields)))
_ROUNDS = 2  # a host may be in the next round while another is not done with the last one


class Attempts:
    """The attempts at the newest two rounds, as one rank of a host sees them. Under the lock of the host."""

    def __init__(self, cells: memoryview, first: int, size: int, place: int) -> None:
        """The cells begin with number `first`. This rank has this place among the `size` ranks of its host."""
        self._cells = cells
        self._place = place
        length = self.cells(size) // _ROUNDS
        self._rounds = [_Cells(*[first + nth * length + cell for cell in _CELLS]) for nth in range(_ROUNDS)]
        self._given = [_views(cells[at.blocks : at.blocks + 4 * size], size) for at in self._rounds]

    @staticmethod
    def cells(size: int) -> int:
        """How many cells a host of so many ranks needs."""
        return _ROUNDS * (_CELLS.blocks + 4 * size)

    # -- on the host whose agents open the round --------------------------------------------------

    def open(self, number: int) -> bool:
        """This rank begins the first attempt at round `number`. Returns False if another one has."""
        cells, at = self._cells, self._of(number)
        if cells[at.opened] >= number:
            return False
        cells[at.opened], cells[at.newest], cells[at.opener] = number, 1, self._place
        return True

    def open_again(self, number: int, attempt: int) -> int:
        """This rank begins the attempt at round `number` that follows `attempt`. Returns its number.

        0 if that attempt is not the newest one, or no further one is left.
        """
        cells, at = self._cells, self._of(number)
        if cells[at.opened] != number or cells[at.newest] != attempt or attempt + 1 == ATTEMPTS_MAX:
            return 0
        cells[at.newest], cells[at.opener] = attempt + 1, self._place
        return attempt + 1

    def is_newest(self, number: int, attempt: int) -> bool:
        """Whether no newer attempt at round `number` has begun than `attempt`, which a rank of this host has begun."""
        at = self._of(number)
        return self._cells[at.opened] == number and self._cells[at.newest] == attempt

    # -- on every host ----------------------------------------------------------------------------

    def give(self, number: int, blocks: Sequence[int], ends: Sequence[int], times_s: Array) -> None:
        """This host gives this to round `number`, as of `Given`. The caller lets it keep the blocks."""
        at, given = self._of(number), self._given[number % _ROUNDS]
        self._cells[at.given], self._cells[at.claimed] = number, 0
        given.blocks[:], given.ends[:], given.times_s[:] = blocks, ends, times_s

    def given(self, number: int) -> Given | None:
        """What this host has given to round `number`, until it forgets that; None if it has given nothing."""
        is_there = self._cells[self._of(number).given] == number
        return self._given[number % _ROUNDS] if is_there else None

    def forget(self, number: int) -> list[int]:
        """No host needs what this one has given to round `number` any more. Returns the blocks, to be dropped."""
        at = self._of(number)
        if self._cells[at.given] != number:
            return []
        self._cells[at.given] = 0
        blocks: list[int] = self._given[number % _ROUNDS].blocks.tolist()
        return blocks

    def claim(self, number: int, attempt: int) -> bool:
        """This rank takes part in `attempt` at round `number`, to which its host has given something.

        Returns False if another rank of this host takes part in that attempt, or in a newer one.
        """
        cells, at = self._cells, self._of(number)
        if cells[at.claimed] >= attempt:
            return False
        cells[at.claimed], cells[at.claimant] = attempt, self._place
        return True

    def in_charge(self, number: int) -> tuple[int, set[int]]:
        """The newest attempt at round `number` that is known here, and the places of the ranks here that act in it."""
        cells, at, attempt, places = self._cells, self._of(number), 0, set()
        if cells[at.opened] == number:
            attempt = cells[at.newest]
            places.add(cells[at.opener])
        if cells[at.given] == number:
            attempt = max(attempt, cells[at.claimed])
            places.add(cells[at.claimant])
        return attempt, places

    def _of(self, number: int) -> _Cells:
        return self._rounds[number % _ROUNDS]


def _views(cells: memoryview, size: int) -> Given:
    """What a host of so many ranks gives to a round, as views of its cells."""
    integers = np.frombuffer(cells[: 2 * size], np.int64).reshape(2, size)
    return Given(integers[0], integers[1], np.frombuffer(cells[2 * size :], np.float64).reshape(2, size))
