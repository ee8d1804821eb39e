"""Numbers for the messages of each tag between two ranks: exact, in little memory, for any number of tags.

The sender and the receiver number the messages of a tag independently. So neither may forget a tag: the other end may
be ahead by any number of messages.
"""

from __future__ import annotations

import numpy as np

from asyncoll.tensors.reductions import Array

_RECENT_MAX = 256


class Numbering:
    """Numbers the messages of one direction, from 1 for each tag.

    A dict holds the recent tags, with about 150 bytes for each. Older tags are merged into sorted runs, with 24 bytes
    for each: a run is a range of consecutive tags that were used equally often. Tags that count steps, each used once,
    form one run.
    """

    def __init__(self, recent_max: int = _RECENT_MAX) -> None:
        """`recent_max` is the number of recent tags in the dict."""
        self._recent_max = recent_max
        self._recent: dict[int, int] = {}
        self._first, self._last, self._count = (np.empty(0, np.int64) for _ in range(3))  # of each run; inclusive

    def next(self, tag: int) -> int:
        """The number of the next message of `tag`, a signed 64-bit integer."""
        number = self.peek(tag)
        self._recent[tag] = number
        if len(self._recent) > self._recent_max + self._first.size // 8:  # proportional, because a merge reads all runs
            self._merge()
        return number

    def peek(self, tag: int) -> int:
        """The number that `next` would give."""
        return (self._recent.get(tag) or self._older(tag)) + 1

    def _older(self, tag: int) -> int:
        run = int(self._first.searchsorted(tag, "right")) - 1
        return int(self._count[run]) if run >= 0 and tag <= self._last[run] else 0

    def _merge(self) -> None:
        """Move the recent tags into the runs."""
        tags = np.array(sorted(self._recent), np.int64)
        counts = np.array([self._recent[tag] for tag in tags.tolist()], np.int64)
        first, last, count = self._without(tags)
        first, last, count = (np.concatenate(pair) for pair in ((first, tags), (last, tags), (count, counts)))
        order = np.argsort(first)
        self._first, self._last, self._count = _joined(first[order], last[order], count[order])
        self._recent.clear()

    def _without(self, tags: Array) -> tuple[Array, Array, Array]:
        """The runs without the sorted `tags`: a run with a tag inside is cut in two."""
        if not self._first.size:
            return self._first, self._last, self._count
        run = self._first.searchsorted(tags, "right") - 1
        inside = (run >= 0) & (tags <= self._last[run])
        tags, run = tags[inside], run[inside]
        kept, kept_last = np.isin(self._first, tags, invert=True), np.isin(self._last, tags, invert=True)
        first = np.sort(np.concatenate([self._first[kept], tags[tags < self._last[run]] + 1]))
        last = np.sort(np.concatenate([self._last[kept_last], tags[tags > self._first[run]] - 1]))
        count = self._count[self._first.searchsorted(first, "right") - 1]
        non_empty = first <= last  # two adjacent tags that were both removed leave an empty run between them
        return first[non_empty], last[non_empty], count[non_empty]


def _joined(first: Array, last: Array, count: Array) -> tuple[Array, Array, Array]:
    """Join adjacent runs with equal counts; the input is sorted and disjoint."""
    starts = np.ones(first.size, bool)
    starts[1:] = (first[1:] - 1 != last[:-1]) | (count[1:] != count[:-1])
    return first[starts], last[np.append(starts[1:], True)], count[starts]
