"""Registered memory: tensors that peers of this host read and write where they are."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, SupportsIndex

import numpy as np

from asyncoll import forks
from asyncoll.arguments import whole
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import build

_current: ContextVar[RegisteredMemory | None] = ContextVar("registry", default=None)


class SharedMemory(Protocol):
    """What is needed here of an `Arena`."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def view(self, address: int, nbytes: int) -> reductions.Array: ...


class RegisteredMemory:
    """The registered tensors of one rank."""

    def __init__(self, arena: SharedMemory | None) -> None:
        self._arena = arena
        self.unused: deque[int] = deque()  # addresses; a finalizer may run anywhere, so it must not do more than this

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Who asks for registered memory without naming a communicator gets it here. Tasks and threads inherit it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Any:
        """A numpy array, or for a torch dtype a torch tensor, with arbitrary content."""
        name, as_torch = _dtype(dtype)
        extents = tuple(whole(extent, "an extent of a shape") for extent in _extents(shape))
        if any(extent < 0 for extent in extents):
            raise UsageError(f"a shape has no negative extents: {extents}")
        flat = self._allocate(math.prod(extents) * reductions.storage(name).itemsize).view(reductions.storage(name))
        return build(flat, name, extents, as_torch=as_torch)

    def give_back(self) -> None:
        """Free the memory of tensors that are gone. Said now and then: their end may come anywhere."""
        while self.unused and self._arena is not None:
            self._arena.free(self.unused.popleft())

    def _allocate(self, nbytes: int) -> reductions.Array:
        arena = self._arena
        if arena is None:
            return _ordinary(nbytes)
        self.give_back()
        if not nbytes:
            return np.empty(0, np.uint8)
        address = arena.allocate(nbytes)
        # numpy refers views of views to the first array of all: not to the arena's own, but to one that goes with them.
        owner = np.frombuffer(arena.view(address, nbytes).data, np.uint8)
        weakref.finalize(owner, self.unused.append, address)
        forks.copy_for_children(owner)
        return owner


def _extents(shape: Any) -> Sequence[Any]:
    try:
        return tuple(shape)
    except TypeError:  # also of an array without dimensions, which looks like a sequence
        return (shape,)


def _ordinary(nbytes: int) -> reductions.Array:
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise UsageError(f"cannot allocate {nbytes} bytes: {error}; use smaller tensors") from None


def current() -> RegisteredMemory:
    """The registry of the world that this task is in; outside of any, one of ordinary memory."""
    return _current.get() or RegisteredMemory(None)


def _dtype(dtype: Any) -> tuple[str, bool]:
    name = str(dtype)
    as_torch = name.startswith("torch.")
    if not as_torch:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    name = name.removeprefix("torch.")
    if name not in reductions.DTYPES or (name == reductions.BFLOAT16 and not as_torch):
        raise UsageError(f"dtype {dtype} is not supported: use one of {', '.join(reductions.DTYPES)}")
    return name, as_torch
