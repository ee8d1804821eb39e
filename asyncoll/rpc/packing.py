"""Several arrays in one block of memory: a table of their lengths, then the arrays, each aligned for any dtype."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer

_ALIGNMENT = 64
_GAP = bytes(_ALIGNMENT)
_LENGTH = 8  # bytes of an entry of the table
_PIECE = 1 << 20  # bytes that are copied at a time


class Packing:
    """The layout of flat uint8 arrays in one block of `nbytes`."""

    __slots__ = ("_placed", "_table", "count", "nbytes")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.count = len(arrays)
        self._placed: list[tuple[Array, int]] = []  # with the byte at which each starts
        lengths, end = [], _LENGTH * len(arrays)
        for array in arrays:
            start = end + _ALIGNMENT - 1 & -_ALIGNMENT
            end = start + array.nbytes
            self._placed.append((array, start))
            lengths.append(array.nbytes)
        self._table = struct.pack(f"<{len(lengths)}q", *lengths)
        self.nbytes = end

    def joined(self) -> bytes:
        """The block as bytes."""
        parts: list[Buffer] = [self._table]
        end = len(self._table)
        for array, start in self._placed:
            parts += _GAP[: start - end], array
            end = start + array.nbytes
        return b"".join(parts)

    def fill(self, memory: Array) -> Iterator[bool]:
        """Write the block into `memory`, a flat uint8 array of `nbytes`.

        Yields before each part of at most _PIECE: whether it is the last one.
        """
        memory.data[: len(self._table)] = self._table
        parts = [(array, first, start) for array, first in self._placed for start in range(0, array.nbytes, _PIECE)]
        for number, (array, first, start) in enumerate(parts, 1):
            yield number == len(parts)
            piece = array[start : start + _PIECE]
            memory[first + start : first + start + piece.nbytes] = piece


def unpack(memory: Buffer, count: int) -> list[Array]:
    """The `count` arrays in a block, as views of `memory`. The table is untrusted; raises ProtocolError."""
    nbytes, end = len(memory), _LENGTH * count
    if end > nbytes:
        raise ProtocolError(f"{count} arrays in {nbytes} bytes")
    arrays = []
    for length in struct.unpack_from(f"<{count}q", memory):
        start = end + _ALIGNMENT - 1 & -_ALIGNMENT
        end = start + length
        if not start <= end <= nbytes:
            raise ProtocolError(f"{count} arrays, of which one has {length} bytes, in {nbytes}")
        arrays.append(np.frombuffer(memory, np.uint8, length, start))
    return arrays
