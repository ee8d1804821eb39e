"""Registered memory: tensors that peers of this host read and write where they are."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np

from asyncoll import tensors
from asyncoll.errors import UsageError
from asyncoll.transport import Arena


class Registry:
    """The registered tensors of one rank."""

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena
        self._unused: deque[int] = deque()  # addresses; a finalizer may run anywhere, so it must not do more than this

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """A numpy array, or for a torch dtype a torch tensor, with arbitrary content."""
        name, as_torch = _dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(extent < 0 for extent in extents):
            raise UsageError(f"a shape has no negative extents: {extents}")
        flat = self._allocate(math.prod(extents) * tensors.storage(name).itemsize).view(tensors.storage(name))
        return tensors.build(flat, name, extents, as_torch=as_torch)

    def _allocate(self, nbytes: int) -> tensors.Array:
        arena = self._arena
        if arena is None:
            return np.empty(nbytes, np.uint8)
        while self._unused:
            arena.free(self._unused.popleft())
        address = arena.allocate(nbytes)
        raw = arena.view(address, nbytes)
        weakref.finalize(raw, self._unused.append, address)  # as long as a view of it lives, so does it
        return raw


def _dtype(dtype: Any) -> tuple[str, bool]:
    name = str(dtype)
    as_torch = name.startswith("torch.")
    if not as_torch:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    name = name.removeprefix("torch.")
    if name not in tensors.DTYPES or (name == tensors.BFLOAT16 and not as_torch):
        raise UsageError(f"dtype {dtype} is not supported: use one of {', '.join(tensors.DTYPES)}")
    return name, as_torch
