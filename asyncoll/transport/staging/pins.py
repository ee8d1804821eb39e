"""Which memory of the host is pinned, in which pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive bytes, all of one pinned range or all of none."""

    start: int
    stop: int
    is_pinned: bool


class Pins:
    """The pinned ranges of addresses. A copy that touches two of them is two copies for a driver.

    `pieces` may run in any thread while another one changes the ranges.
    """

    def __init__(self) -> None:
        self._ranges: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # the starts, ascending, and the stops

    def add(self, start: int, nbytes: int) -> None:
        starts, stops = self._ranges
        index = bisect_right(starts, start)
        self._ranges = (*starts[:index], start, *starts[index:]), (*stops[:index], start + nbytes, *stops[index:])

    def remove(self, start: int) -> None:
        starts, stops = self._ranges
        index = starts.index(start)
        self._ranges = starts[:index] + starts[index + 1 :], stops[:index] + stops[index + 1 :]

    def within(self, start: int, nbytes: int) -> list[int]:
        """The starts of the ranges that begin in these bytes."""
        return [each for each in self._ranges[0] if start <= each < start + nbytes]

    def pieces(self, start: int, nbytes: int, longest: int) -> Iterator[Piece]:
        """These bytes, cut where pinned ranges begin or end, and to at most `longest` bytes; relative to `start`."""
        starts, stops = self._ranges
        at, end = start, start + nbytes
        while at < end:
            index = bisect_right(starts, at) - 1
            is_pinned = index >= 0 and at < stops[index]
            border = stops[index] if is_pinned else starts[index + 1] if index + 1 < len(starts) else end
            until = min(border, end, at + longest)
            yield Piece(at - start, until - start, is_pinned)
            at = until
