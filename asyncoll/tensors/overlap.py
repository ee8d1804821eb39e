"""Whether elements of a tensor overlap in memory: the elements of a result would overwrite each other there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided


def overlaps(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether two elements of a tensor share a byte. Strides are in bytes, and may be negative."""
    if 0 in shape:  # without elements any strides are allowed: `torch.from_numpy` gives them zeros
        return False
    axes = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    end = nbytes = itemsize  # `end`: bytes from the first to the last one, of the axes so far
    is_nested = True  # each axis steps over all that the ones before it reach, as in every view without `as_strided`
    for stride, size in axes:
        is_nested = is_nested and stride >= end
        end += (size - 1) * stride
        nbytes *= size
    return not is_nested and (nbytes > end or _collide(axes, itemsize))


def _collide(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """The same, for any strides and sizes. It takes longer.

    Take two elements whose indices differ first in axis k. They overlap if and only if two elements do that have index
    0 in the axes before k, and one of them in axis k, too. numpy knows whether two such views share memory.
    """
    view = as_strided(np.empty(1, (np.void, itemsize)), [size for _, size in axes], [stride for stride, _ in axes])
    for _ in axes:
        if np.shares_memory(view[:1], view[1:]):  # from the addresses alone: no element is read
            return True
        view = view[0]
    return False
