"""The caller's tensor in a round: it gives its largest elements, and becomes the residual.

A tensor of a device is copied to the host as a whole, or stays there: then the device selects the elements, and only
these are fetched. Both ways have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncoll.algorithms.sparse import selection
from asyncoll.algorithms.sparse.parts import Chosen, SparseMethod, SparseOutcome, Wanted
from asyncoll.algorithms.sparse.selection import Part
from asyncoll.tensors import device_operations, reductions
from asyncoll.tensors.operands import Operand, Resident, as_operand, staged_parts
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Arriving, CopiesBack, Work


class ToldTensors(NamedTuple):
    """What the caller gets of an `SparseOutcome`, as tensors of its kind."""

    indices: Any
    values: Any
    included: Any
    lost_indices: Any
    lost_values: Any
    dense: Any = None

    @classmethod
    def of(cls, outcome: SparseOutcome, tensor: Callable[[Array], Any]) -> ToldTensors:
        """`tensor` makes a flat array such a tensor."""
        return cls(*map(tensor, (*outcome.total, outcome.included, *outcome.lost)))


class Accumulator(Protocol):
    """The caller's tensor in one round."""

    nbytes: int  # of the elements that it gives, where that is known when the call is made

    @property
    def staged(self) -> Sequence[Arriving]:
        """What has to arrive before `chosen`."""

    def chosen(self) -> Chosen:
        """The elements that it gives."""

    def become_residual(self, outcome: SparseOutcome, *, dense: bool) -> ToldTensors:
        """Put 0 where elements are in the sum. With `dense`, the sum is told as a whole tensor, too."""


def accumulator(method: SparseMethod, x: Operand | Resident) -> Accumulator:
    """The accumulator `x` for the next round of `method`. Begins to select, in the caller's thread."""
    if isinstance(x, Operand):
        return HostTensor(method, x)
    wanted = method.wanted()
    return OnDevice(wanted, x) if wanted and _pays(wanted, x) else HostTensor(method, x.mirrored())


def _pays(wanted: Wanted, x: Resident) -> bool:
    """Whether the elements that are wanted are shorter than the whole tensor."""
    element_bytes = selection.index_dtype(x.elements).itemsize + np.dtype(_wide(x)).itemsize
    return wanted.k * element_bytes < x.elements * reductions.storage(x.dtype).itemsize


def _wide(x: Resident) -> str:
    """The dtype in which the elements of `x` are given."""
    return "float64" if x.dtype == "float64" else "float32"


class HostTensor:
    """A tensor in memory of the host, or the mirror of one that is on a device."""

    def __init__(self, method: SparseMethod, operand: Operand) -> None:
        self._method = method
        self._operand = operand
        self._chosen = self._choose() if operand.staged is None else None
        self.nbytes = 0 if self._chosen is None else self._chosen.part.values.nbytes

    @property
    def staged(self) -> Sequence[Arriving]:
        return staged_parts([self._operand])

    def _choose(self) -> Chosen:
        return self._method.choose(reductions.widened(self._operand.flat, self._operand.dtype))

    def chosen(self) -> Chosen:
        return self._chosen or self._choose()

    def become_residual(self, outcome: SparseOutcome, *, dense: bool) -> ToldTensors:
        total, operand = outcome.total, self._operand
        operand.flat[outcome.included] = 0
        operand.write_back()
        told = ToldTensors.of(outcome, lambda flat: operand.like(flat, flat.shape, flat.dtype.name))
        if dense:
            whole = np.zeros(operand.flat.size, total.values.dtype)
            whole[total.indices] = total.values
            told = told._replace(dense=operand.like(whole, operand.shape, whole.dtype.name))
        return told


class OnDevice:
    """A tensor that stays on its device, which selects its elements. Implements `Arriving`."""

    nbytes = 0

    def __init__(self, wanted: Wanted, x: Resident) -> None:
        self._wanted = wanted
        self._x = x
        self._index, self._value = selection.index_dtype(x.elements), np.dtype(_wide(x))
        self._back: CopiesBack | None = None
        if wanted.threshold:
            self._made = [self._room("int64", 1)]
            self._least = selection.least_magnitude(wanted.threshold, self._value)
            self._queue(partial(device_operations.count, dtype=self._value.name, least=self._least))
        else:
            self._made = [*self._rooms(wanted.k), self._room(self._value.name, 1)]
            self._queue(device_operations.top_k)
        # This mirror knows the stream on which the program has made the call.
        self._first = staged_parts(self._made)[0]

    @property
    def staged(self) -> Sequence[Arriving]:
        return [self]

    def begin(self, back: CopiesBack) -> None:
        self._back = back
        for part in staged_parts(self._made):
            part.begin(back)

    @property
    def awaited(self) -> str:
        return next(filter(None, (part.awaited for part in staged_parts(self._made))), "")

    @property
    def has_arrived(self) -> bool:
        return not self._wanted.threshold and all(part.has_arrived for part in staged_parts(self._made))

    async def arrived(self) -> None:
        await self._all_arrived()
        if self._wanted.threshold:  # how many elements reach it is known now, and so memory for them
            assert self._back is not None, "the call has begun"
            with self._first.aside():
                self._made = self._rooms(int(self._made[0].flat[0]))
                self._queue(partial(device_operations.select, least=self._least))
                self.begin(self._back)
            await self._all_arrived()

    def join(self) -> None:
        for part in (self._first, *staged_parts(self._made)):
            part.join()

    def chosen(self) -> Chosen:
        indices, values, *threshold = (operand.flat for operand in self._made)
        part = Part(indices, values).slice(0, int(np.count_nonzero(indices >= 0)))
        return Chosen(part, float(threshold[0][0]) if threshold else self._wanted.threshold)

    def become_residual(self, outcome: SparseOutcome, *, dense: bool) -> ToldTensors:
        x = self._x

        def tensor(flat: Array) -> Any:
            return self._first.like(flat, flat.dtype.name, flat.shape)

        told = ToldTensors.of(outcome, tensor)
        self._first.queue(device_operations.clear, x.source, reads=[told.included])
        if dense:
            reads = [told.indices, told.values]
            told = told._replace(dense=self._first.made(device_operations.scatter, self._value.name, x.shape, reads))
        return told

    async def _all_arrived(self) -> None:
        for part in staged_parts(self._made):
            await part.arrived()

    def _room(self, dtype: str, count: int) -> Operand:
        """A new tensor on the device, and its mirror."""
        return as_operand(self._x.stager.empty(dtype, (count,)), may_stage=True)

    def _rooms(self, count: int) -> list[Operand]:
        """For indices and values."""
        return [self._room(self._index.name, count), self._room(self._value.name, count)]

    def _queue(self, work: Work) -> None:
        """`work` on what is made, and on the accumulator."""
        self._x.stager.queue(work, *(operand.source for operand in self._made), reads=[self._x.source])
