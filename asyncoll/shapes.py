"""Shapes on the wire: what ranks tell each other before tensors whose shapes differ, and memory for what will come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncoll.tensors import DTYPES, MAX_DIMENSIONS, Array, Operand, storage

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
    """Flat arrays for tensors of the shapes `encoded` there, and the shapes."""
    shapes = [decode_shape(row) for row in encoded]
    return [np.empty(count(shape), storage(dtype)) for shape in shapes], shapes


def encode_shape(shape: tuple[int, ...]) -> Array:
    return np.array([len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))], np.int64)


def decode_shape(row: Array) -> tuple[int, ...]:
    return tuple(int(extent) for extent in row[1 : 1 + int(row[0])])


def encode_head(operand: Operand) -> Array:
    """Dtype, kind and shape: all that a rank must know to build a tensor like `operand`."""
    return np.concatenate([[DTYPES.index(operand.dtype), operand.is_torch], encode_shape(operand.shape)])


def count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
