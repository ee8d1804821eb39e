"""The tensors of a rank's calls: arrays of numpy, or tensors of a device, on which the rank only queues its work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array, build
from asyncoll.testing.devices import FakeDevice


class ContributionLayout(NamedTuple):
    """Of a contribution: some tensors, each with the counts of all calls of all ranks behind a padding."""

    buckets: int  # tensors
    padding: int  # elements
    calls: int
    ranks: int
    dtypes: tuple[str, ...] = ("int64", "float64")  # of the tensors; the counts have the first


class Tensors:
    """Makes the contributions of a rank, and reads its results."""

    def __init__(self, layout: ContributionLayout, comm: Communicator, device: FakeDevice | None) -> None:
        """`device` has the tensors of two calls of three; None: of no call."""
        self._layout = layout
        self._comm = comm
        self._device = device

    def contribution(self, index: int) -> Any:
        """Zeros with a 1 in the element of call `index`, behind the padding."""
        layout = self._layout
        own = layout.padding + index * layout.ranks + self._comm.rank
        buckets = [self._zeros(index, dtype) for dtype in layout.dtypes[: layout.buckets]]
        for bucket in buckets:
            self._work(partial(_set, own), bucket)
        return buckets if layout.buckets > 1 else buckets[0]

    def counts(self, x: Any, less: Array | int = 0) -> Array:
        """The contributions in `x`, minus `less`, by [bucket, number of the call, rank].

        If `x` is on a device, they are there once that has done its work.
        """
        layout, buckets = self._layout, _listed(x)
        found = np.full((len(buckets), layout.calls, layout.ranks), -1, layout.dtypes[0])
        less = np.broadcast_to(less, found.shape)
        for into, bucket, subtrahend in zip(found, buckets, less, strict=True):
            self._work(partial(_count, layout.padding, into, subtrahend), bucket, writes=False)
        return found

    def scribble(self, x: Any) -> None:
        """Overwrite the tensors of a call that is over, as their caller may: they belong to the caller again."""
        for bucket in _listed(x):
            self._work(partial(_set, slice(None), value=-7), bucket)

    def stream(self, index: int) -> contextlib.AbstractContextManager[None]:
        """In it, the work for call `index` is queued: on a stream of its own, at times."""
        if self._device is None or index % 2 == 0:
            return contextlib.nullcontext()
        return self._device.stream("aside")

    def _zeros(self, index: int, dtype: str) -> Any:
        """On a device, every second tensor has gaps; elsewhere, it is in registered memory."""
        layout = self._layout
        count = layout.padding + layout.calls * layout.ranks
        if self._device is None or index % 3 == 2:
            bucket = (self._comm.empty if index % 2 else np.empty)(count, dtype)
            bucket.fill(0)
            return bucket
        spacing = 1 + index % 2
        whole = np.zeros(spacing * count, dtype)
        return self._device.tensor(build(whole, dtype, whole.shape, as_torch=True))[::spacing]

    def _work(self, function: Callable[[Array], object], x: Any, *, writes: bool = True) -> None:
        if isinstance(x, np.ndarray):
            function(x)
            return
        assert self._device is not None
        self._device.compute(function, *([x] if writes else []), reads=[] if writes else [x])


def _listed(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


def _set(which: int | slice, x: Array, value: int = 1) -> None:
    x[which] = value


def _count(padding: int, into: Array, less: Array, x: Array) -> None:
    into[...] = x[padding:].reshape(into.shape).astype(into.dtype) - less
