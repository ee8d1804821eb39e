"""How many messages of each tag have passed between two ranks: exact, in little memory, for any number of tags.

Both ends number the messages of a tag on their own, so neither may ever forget a tag: the other end may be ahead.
"""

from __future__ import annotations

import numpy as np

from asyncoll.tensors.reductions import Array

_RECENT_MAX = 256


class Numbering:
    """Messages of one direction, numbered from 1 by tag.

    Recent tags are in a dict, which takes about 150 bytes for each. Older ones are in sorted runs of consecutive tags
    that were used equally often, of 24 bytes each: tags that count steps, used once each, are a single run.
    """

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._first, self._last, self._count = (np.empty(0, np.int64) for _ in range(3))  # of each run; inclusive

    def next(self, tag: int) -> int:
        """The number of the next message of `tag`, which fits into 64 bits."""
        number = (self._recent.get(tag) or self._older(tag)) + 1
        self._recent[tag] = number
        if len(self._recent) > _RECENT_MAX + self._first.size // 8:  # in proportion, as merging takes all runs
            self._merge()
        return number

    def _older(self, tag: int) -> int:
        place = int(self._first.searchsorted(tag, "right")) - 1
        return int(self._count[place]) if place >= 0 and tag <= self._last[place] else 0

    def _merge(self) -> None:
        """Turn the recent tags into runs."""
        tags = np.array(sorted(self._recent), np.int64)
        counts = np.array([self._recent[tag] for tag in tags.tolist()], np.int64)
        first, last, count = self._without(tags)
        first, last, count = (np.concatenate(pair) for pair in ((first, tags), (last, tags), (count, counts)))
        order = np.argsort(first)
        self._first, self._last, self._count = _joined(first[order], last[order], count[order])
        self._recent.clear()

    def _without(self, tags: Array) -> tuple[Array, Array, Array]:
        """The runs, cut in two where one of the sorted `tags` lies inside."""
        if not self._first.size:
            return self._first, self._last, self._count
        run = self._first.searchsorted(tags, "right") - 1
        inside = (run >= 0) & (tags <= self._last[run])
        tags, run = tags[inside], run[inside]
        kept, kept_last = np.isin(self._first, tags, invert=True), np.isin(self._last, tags, invert=True)
        first = np.sort(np.concatenate([self._first[kept], tags[tags < self._last[run]] + 1]))
        last = np.sort(np.concatenate([self._last[kept_last], tags[tags > self._first[run]] - 1]))
        count = self._count[self._first.searchsorted(first, "right") - 1]
        some = first <= last  # nothing is left between two neighbours that were both cut out
        return first[some], last[some], count[some]


def _joined(first: Array, last: Array, count: Array) -> tuple[Array, Array, Array]:
    """Sorted disjoint runs, where one begins after the end of the one before, and counts the same, as one."""
    starts = np.ones(first.size, bool)
    starts[1:] = (first[1:] - 1 != last[:-1]) | (count[1:] != count[:-1])
    return first[starts], last[np.append(starts[1:], True)], count[starts]
