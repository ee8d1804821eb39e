"""Which bytes of a rank's memory are in use: first fit, neighbours become one when they are free. Touches no memory."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


class Heap:
    """The extents of [start, end). Blocks of a page and more are whole pages, so that they can be given back."""

    def __init__(self, start: int, end: int, page: int) -> None:
        self._page = page
        self._free = [(start, end - start)]  # offset and bytes, in order; no two of them touch
        self._used: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least so many bytes. Raises MemoryError if there is none."""
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
        """The bytes of the block at `offset`."""
        return self._used[offset]

    def free(self, offset: int) -> None:
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
