"""Several arrays in one piece of memory: a table of their lengths, and then the arrays, each aligned for any dtype."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from asyncoll.errors import ProtocolError
from asyncoll.tensors import Array
from asyncoll.wire import Buffer

_ALIGNMENT = 64
_GAP = bytes(_ALIGNMENT)
_LENGTH = 8  # bytes of a length
_PIECE = 1 << 20  # bytes, after which somebody else may have a turn


class Packing:
    """How flat arrays of bytes are packed into `nbytes` of memory."""

    __slots__ = ("_arrays", "_starts", "_table", "nbytes")

    def __init__(self, arrays: Sequence[Array]) -> None:
        lengths = [array.nbytes for array in arrays]
        self._arrays = arrays
        self._table = struct.pack(f"<{len(lengths)}q", *lengths)
        self._starts, self.nbytes = _layout(lengths)

    def joined(self) -> bytes:
        parts: list[Buffer] = [self._table]
        end = len(self._table)
        for array, start in zip(self._arrays, self._starts, strict=True):
            parts += _GAP[: start - end], array
            end = start + array.nbytes
        return b"".join(parts)

    def fill(self, memory: Array) -> Iterator[None]:
        """Write it into `memory`, which is so long; whoever does may turn to something else at each step."""
        memory.data[: len(self._table)] = self._table
        for array, first in zip(self._arrays, self._starts, strict=True):
            for start in range(0, array.nbytes, _PIECE):
                piece = array[start : start + _PIECE]
                memory[first + start : first + start + piece.nbytes] = piece
                if piece.nbytes == _PIECE:
                    yield


def unpack(memory: Array, count: int) -> list[Array]:
    """`count` arrays, which lie in `memory` as somebody says who may be wrong: ProtocolError."""
    if _LENGTH * count > memory.nbytes:
        raise ProtocolError(f"{count} arrays in {memory.nbytes} bytes")
    lengths = struct.unpack_from(f"<{count}q", memory.data)
    starts, nbytes = _layout(lengths)
    if min(lengths, default=0) < 0 or nbytes != memory.nbytes:
        raise ProtocolError(f"arrays in {memory.nbytes} bytes whose lengths say {nbytes}")
    return [memory[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where arrays of such lengths begin, behind the table, and the bytes of all."""
    starts, end = [], _LENGTH * len(lengths)
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end
