"""Registered memory: tensors that the ranks of this host read and write in place."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol, SupportsIndex

import numpy as np

from asyncoll import forks
from asyncoll.arguments import whole
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.staged import Devices, Stager

_current: ContextVar[RegisteredMemory | None] = ContextVar("registry", default=None)
_of_process: list[RegisteredMemory] = []  # that of a world which all threads of this process are in, if there is one


class SharedMemory(Protocol):
    """The methods of an `Arena` that are used here."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def view(self, address: int, nbytes: int) -> reductions.Array: ...


OpenStager = Callable[[Any, Callable[[int], reductions.Array], str], Stager]


class RegisteredMemory:
    """The registered tensors of one rank, and the devices of its other ones.

    Without an arena, registered tensors are in ordinary memory.
    """

    def __init__(self, arena: SharedMemory | None, open_stager: OpenStager, owner: str = "") -> None:
        """`open_stager(x, self.pages, owner)` is used as that of `staged.Devices`, and so is `owner`."""
        self._arena = arena
        self.devices = Devices(lambda x: open_stager(x, self.pages, owner), owner)
        # Addresses of tensors that are gone. Their finalizers only append: they may run in any thread, also while that
        # has the lock which freeing takes.
        self.unused: deque[int] = deque()

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the result of `current` in this context, and in tasks and threads that inherit the context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def of_process(self) -> Iterator[None]:
        """Make this the result of `current` wherever the context has no other."""
        _of_process.append(self)
        try:
            yield
        finally:
            _of_process.remove(self)

    def empty(self, shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any, device: object = None) -> Any:
        """A numpy array, or for a torch dtype a torch tensor, with undefined content; on `device`, if one is named."""
        name, as_torch = _dtype(dtype)
        extents = tuple(whole(extent, "an extent of a shape") for extent in _extents(shape))
        if any(extent < 0 for extent in extents):
            raise UsageError(f"a shape has no negative extents: {extents}")
        if device is not None and str(device) != "cpu":
            if not as_torch:
                raise UsageError(f"a tensor on {device} is one of torch: pass a torch dtype instead of {dtype!r:.60}")
            return self.devices.stager_named(device).empty(name, extents)
        memory = self._allocate(math.prod(extents) * reductions.storage(name).itemsize)
        if self._arena is not None:
            forks.copy_for_children(memory)
        return reductions.build(memory.view(reductions.storage(name)), name, extents, as_torch=as_torch)

    def pages(self, nbytes: int) -> reductions.Array:
        """Whole pages: `nbytes` bytes, a multiple of the size of a page, with undefined content.

        Forked children get no copies of them. Raises UsageError if there are too few.
        """
        if self._arena is None:
            try:
                return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # shared: a fork does not move pinned pages
            except (OSError, ValueError, OverflowError) as error:
                raise _too_much(nbytes, error) from None
        block = self._allocate(nbytes)
        if forks.address_of(block) % mmap.PAGESIZE:  # the ranks of one process have memory of numpy
            block = self._allocate(nbytes + mmap.PAGESIZE)
        first = -forks.address_of(block) % mmap.PAGESIZE
        return block[first : first + nbytes]

    def give_back(self) -> None:
        """Free the memory of tensors that are gone. Each call of the rank does this first.

        The finalizer of a tensor cannot: it may run in any thread, also in one that holds the arena's lock.
        """
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            while self.unused and self._arena is not None:
                self._arena.free(self.unused.popleft())

    def _allocate(self, nbytes: int) -> reductions.Array:
        arena = self._arena
        if arena is None:
            try:
                return np.empty(nbytes, np.uint8)
            except (MemoryError, ValueError) as error:
                raise _too_much(nbytes, error) from None
        self.give_back()
        if not nbytes:
            return np.empty(0, np.uint8)
        address = arena.allocate(nbytes)
        # numpy makes a view of a view refer to the first array. `owner` must be that first array, and not the arena's,
        # so that its end is the end of the last view.
        owner = np.frombuffer(arena.view(address, nbytes).data, np.uint8)
        weakref.finalize(owner, self.unused.append, address)
        return owner


def _too_much(nbytes: int, error: Exception) -> UsageError:
    return UsageError(f"cannot allocate {nbytes} bytes: {error}; use smaller tensors")


def _extents(shape: Any) -> Sequence[Any]:
    try:
        return tuple(shape)
    # An array without dimensions comes here, too: it looks like a sequence.
    except TypeError:
        return (shape,)


def current() -> RegisteredMemory:
    """The registered memory of the world that this task is in; outside of a world, one that gives ordinary memory."""
    return _current.get() or next(iter(_of_process), None) or _OUTSIDE


@contextlib.asynccontextmanager
async def of_context(open_stager: OpenStager) -> AsyncIterator[None]:
    """Tensors may be on devices in this context, and in tasks that inherit it: outside of a world, too.

    `open_stager(x, pages, owner)` opens the device of the first tensor of each. They are closed at its end.
    """
    if current() is not _OUTSIDE:
        yield
        return
    memory = RegisteredMemory(None, open_stager)
    with memory.as_current():
        try:
            yield
        finally:
            await memory.devices.close()


def stager_of(x: Any) -> Stager:
    """What stages the torch tensor `x`, which is on a device, for the rank that this task is in.

    Raises UsageError if the device cannot be used, or `x` has no plain memory on it.
    """
    return current().devices.stager_of(x)


def naming() -> contextlib.AbstractContextManager[None]:
    """Errors of devices that are raised in it name the rank that this task is in."""
    return current().devices.naming()


def _refuse(x: Any, _pages: Callable[[int], reductions.Array], _owner: str) -> Stager:
    if x.device.type not in ("cpu", "cuda"):
        raise UsageError(f"tensors on {x.device} are not supported: use those of the CPU or of CUDA")
    raise UsageError(
        f"a tensor on {x.device}, and this thread does not know the world: run what it does by the `run` of a context "
        "that `contextvars.copy_context()` has made in a task of the world, or pass x.cpu()"
    )


_OUTSIDE = RegisteredMemory(None, _refuse)


def _dtype(dtype: Any) -> tuple[str, bool]:
    name = reductions.dtype_name(dtype)
    as_torch = name != str(dtype)
    if not as_torch:
        with contextlib.suppress(TypeError, UnicodeError):  # it is no dtype of numpy
            name = np.dtype(dtype).name
    if name not in reductions.DTYPES or (name == reductions.BFLOAT16 and not as_torch):
        raise UsageError(f"dtype {dtype!r:.60} is not supported: use one of {', '.join(reductions.DTYPES)}")
    return name, as_torch
