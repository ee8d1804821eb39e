"""The allocator of a rank's segment: first fit, with adjacent free extents merged. It touches no memory itself."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


class Heap:
    """Divides the offsets [start, end) into blocks.

    Blocks of at least a page start at a page and consist of whole pages, so that the host can have these pages back.
    """

    def __init__(self, start: int, end: int, page: int) -> None:
        self._page = page
        self._free = [(start, end - start)]  # (offset, bytes), ascending; no two extents are adjacent
        self._used: dict[int, int] = {}  # the bytes of each block, by offset

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a new block of at least `nbytes` bytes. Raises MemoryError if no free extent fits."""
        size = _round_up(max(nbytes, 1), ALIGNMENT)
        alignment = self._page if size >= self._page else ALIGNMENT
        size = _round_up(size, alignment)
        for index, (offset, free) in enumerate(self._free):
            begin, end = _round_up(offset, alignment), offset + free
            if begin + size <= end:
                rest = [(offset, begin - offset), (begin + size, end - begin - size)]
                self._free[index : index + 1] = [extent for extent in rest if extent[1]]
                self._used[begin] = size
                return begin
        raise MemoryError

    def extent(self, offset: int) -> int:
        """The size in bytes of the block at `offset`."""
        return self._used[offset]

    def free(self, offset: int) -> None:
        """Free the block at `offset`. Raises KeyError if there is none."""
        begin, end = offset, offset + self._used.pop(offset)
        first = last = bisect_left(self._free, (offset, 0))
        if first > 0 and sum(self._free[first - 1]) == begin:
            first -= 1
            begin = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = sum(self._free[last])
            last += 1
        self._free[first:last] = [(begin, end - begin)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
