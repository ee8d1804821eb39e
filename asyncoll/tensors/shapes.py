"""Shapes on the wire: what ranks tell each other before tensors whose shapes differ, and memory for what will come."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncoll.errors import ProtocolError
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import DTYPES, HOST_BYTES, MAX_DIMENSIONS, Array, storage

SHAPE_WORDS = 1 + MAX_DIMENSIONS  # a shape as int64: the number of dimensions, then each


def blocks(operand: Operand, size: int) -> tuple[Array, list[Array]]:
    """Memory for `size` tensors like `operand`, and each of them flat."""
    each = operand.flat.size
    stacked = np.empty(size * each, operand.flat.dtype)
    return stacked, [stacked[place * each : (place + 1) * each] for place in range(size)]


def rows(count: int, columns: int = SHAPE_WORDS) -> list[Array]:
    """`count` arrays of int64, one after another in memory."""
    return list(np.zeros((count, columns), np.int64))


def receptacles(dtype: str, encoded: Sequence[Array]) -> tuple[list[Array], list[tuple[int, ...]]]:
    """Flat arrays for tensors of the shapes `encoded` there, and the shapes.

    Raises ProtocolError if there are no such tensors, or not so much memory.
    """
    shapes = [decode_shape(row) for row in encoded]
    counts = list(map(math.prod, shapes))
    nbytes = sum(counts) * storage(dtype).itemsize
    if nbytes > HOST_BYTES:
        raise ProtocolError(f"tensors of {nbytes} bytes are announced, and this host has {HOST_BYTES}: {shapes!s:.300}")
    return [np.empty(count, storage(dtype)) for count in counts], shapes


def encode_shape(shape: tuple[int, ...]) -> Array:
    return np.array([len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))], np.int64)


def decode_shape(row: Array) -> tuple[int, ...]:
    """Raises ProtocolError for what is no shape."""
    dimensions, *extents = map(int, row)
    if not 0 <= dimensions <= MAX_DIMENSIONS or min(extents) < 0:
        raise ProtocolError(f"no tensor has {dimensions} dimensions, {extents}")
    return tuple(extents[:dimensions])


def encode_head(operand: Operand) -> Array:
    """Dtype, kind and shape: all that a rank must know to build a tensor like `operand`."""
    return np.concatenate([[DTYPES.index(operand.dtype), operand.is_torch], encode_shape(operand.shape)])


def decode_head(head: Array) -> tuple[str, bool, Array, tuple[int, ...]]:
    """Dtype, whether it is torch's, memory for the tensor, and its shape. Raises ProtocolError for what is no head."""
    if not 0 <= head[0] < len(DTYPES):
        raise ProtocolError(f"there is no dtype number {head[0]}")
    dtype = DTYPES[head[0]]
    (flat,), (shape,) = receptacles(dtype, [head[2:]])
    return dtype, bool(head[1]), flat, shape
