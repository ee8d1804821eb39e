"""Shapes as arrays: ranks exchange them before tensors whose shapes differ, and allocate memory for the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import DTYPES, HOST_BYTES, MAX_DIMENSIONS, Array, storage

SHAPE_WORDS = 1 + MAX_DIMENSIONS  # a shape as int64: the number of dimensions, then each


def blocks(operand: Operand, size: int) -> tuple[Array, list[Array]]:
    """Memory for `size` tensors like `operand`: one flat array, and a flat view of each."""
    each = operand.flat.size
    stacked = operand.room(size * each)
    return stacked, [stacked[rank * each : (rank + 1) * each] for rank in range(size)]


def rows(count: int, columns: int = SHAPE_WORDS) -> list[Array]:
    """`count` arrays of `columns` int64 each, contiguous in memory."""
    return list(np.zeros((count, columns), np.int64))


def receptacles(
    dtype: str, encoded: Sequence[Array], room: Callable[[int], Array] | None = None
) -> tuple[list[Array], list[tuple[int, ...]]]:
    """Flat arrays for tensors of `dtype` whose shapes are `encoded`, and the shapes.

    `room(count)` gives the array for so many elements; None: it is in ordinary memory.

    Raises ProtocolError if an entry is no shape, or if the tensors do not fit into the memory of this host. The shapes
    come from peers, so they are checked before memory is allocated.
    """
    shapes = [decode_shape(row) for row in encoded]
    counts = list(map(math.prod, shapes))
    nbytes = sum(counts) * storage(dtype).itemsize
    if nbytes > HOST_BYTES:
        raise ProtocolError(f"tensors of {nbytes} bytes are announced, and this host has {HOST_BYTES}: {shapes!s:.300}")
    return [np.empty(count, storage(dtype)) if room is None else room(count) for count in counts], shapes


def encode_shape(shape: tuple[int, ...]) -> Array:
    """`shape` as `SHAPE_WORDS` int64: the number of dimensions, the extents, and zeros."""
    return np.array([len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))], np.int64)


def decode_shape(row: Array) -> tuple[int, ...]:
    """The inverse of `encode_shape`. Raises ProtocolError if `row` is no shape."""
    dimensions, *extents = map(int, row)
    if not 0 <= dimensions <= MAX_DIMENSIONS or min(extents) < 0:
        raise ProtocolError(f"no tensor has {dimensions} dimensions, {extents}")
    return tuple(extents[:dimensions])


def encode_head(operand: Operand) -> Array:
    """Dtype, kind (numpy or torch) and shape: the description from which a rank builds a tensor like `operand`."""
    return np.concatenate([[DTYPES.index(operand.dtype), operand.is_torch], encode_shape(operand.shape)])


def decode_head(head: Array) -> tuple[str, bool, Array, tuple[int, ...]]:
    """Dtype, whether the tensor is torch's, flat memory for it, and its shape.

    Raises ProtocolError if `head` is none.
    """
    if not 0 <= head[0] < len(DTYPES):
        raise ProtocolError(f"there is no dtype number {head[0]}")
    dtype = DTYPES[head[0]]
    (flat,), (shape,) = receptacles(dtype, [head[2:]])
    return dtype, bool(head[1]), flat, shape
