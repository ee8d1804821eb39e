"""Parts of a vector, which the sparse allreduces exchange: how they are packed, and how they are added up.

Terms: n elements, k of them wanted, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncoll import _core
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse.selection import Part, select, top_k
from asyncoll.tensors.reductions import Array

_SORTING = 9  # sorting one element takes as long as a pass over so many elements of a vector


class Chosen(NamedTuple):
    """The elements that one rank gives to a round."""

    part: Part
    threshold: float  # the magnitude that its elements had to reach

    @property
    def is_finite(self) -> bool:
        """Whether the whole vector is finite.

        NaN and infinity exceed any threshold, so they are among the first selected.
        """
        return bool(np.isfinite(self.part.values).all())

    @property
    def finite(self) -> Part:
        """The elements; none if they are not finite, because the rank refuses to take part in a sum then."""
        return self.part if self.is_finite else nothing(self.part)


class SparseOutcome(NamedTuple):
    """The result of a round at one rank."""

    total: Part  # the sum, the same bits at every rank
    included: Array  # those of the indices that this rank gave whose values are in the sum
    threshold: float  # the magnitude that the sums had to reach; 0.0 if there is no such threshold
    lost: Part  # partial sums that this rank has dropped, of elements that are in the sum
    threshold_words: float = 0.0  # received to find the threshold


class Wanted(NamedTuple):
    """A selection that a device can make, too: the `k` largest elements, or all that reach a `threshold` above 0."""

    k: int
    threshold: float = 0.0

    def choose(self, x: Array) -> Chosen:
        """Select these elements of `x`."""
        if not self.threshold:
            return Chosen(*top_k(x, self.k))
        return Chosen(select(x, self.threshold, 2 * self.k), self.threshold)


class SparseMethod(Protocol):
    """A sparse allreduce of vectors of one length, with its state from round to round."""

    def wanted(self) -> Wanted | None:
        """What `choose` selects in the next round; None if it has to see all elements."""

    def choose(self, x: Array) -> Chosen:
        """Select the elements of `x`, float32 or float64, for the next round. Sends nothing."""

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        """Carry out the round, at every rank.

        Raises NonFiniteError at every rank, and keeps nothing of the round, if any rank's choice is not finite.
        """

    def state(self) -> dict[str, Any]:
        """What the next rounds take from the past ones, as plain values; empty if they take nothing."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the round at which `state` was taken."""


class Stateless:
    """A method whose rounds do not depend on each other."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        del state


# -- packing ------------------------------------------------------------------------------------


class SparsePacking:
    """Indices and values in one array of bytes; the wider of them first, so that both are aligned."""

    def __init__(self, part: Part) -> None:
        """For parts with the dtypes of `part`."""
        self._dtypes = part.indices.dtype, part.values.dtype
        self._values_first = part.values.itemsize > part.indices.itemsize
        self.element_bytes = part.indices.itemsize + part.values.itemsize

    def room(self, count: int) -> Array:
        """Memory for `count` elements."""
        return np.empty(count * self.element_bytes, np.uint8)

    def pack(self, part: Part) -> Array:
        """A copy of `part`, packed."""
        raw = self.room(part.size)
        into = self.unpack(raw)
        into.indices[...] = part.indices
        into.values[...] = part.values
        return raw

    def unpack(self, raw: Array) -> Part:
        """The part that is packed in `raw`, as views of it."""
        index, value = self._dtypes
        count = raw.size // self.element_bytes
        edge = count * (value if self._values_first else index).itemsize
        if self._values_first:
            return Part(raw[edge:].view(index), raw[:edge].view(value))
        return Part(raw[:edge].view(index), raw[edge:].view(value))


# -- sums ----------------------------------------------------------------------------------------


def sum_parts(parts: Sequence[Part], first: int, end: int) -> Part:
    """The sum of `parts`, added in their order, whose indices are from `first` to below `end`.

    Elements whose sum is 0 are left out. Raises ValueError for an index that is not in that range.
    """
    if _core.native is None:
        return _sum_in_python(parts, first, end)
    room, like = sum(part.size for part in parts), parts[0]
    total = Part(np.empty(room, like.indices.dtype), np.empty(room, like.values.dtype))
    indices, values = zip(*parts, strict=True)
    return total.slice(0, _core.native.sum_parts(indices, values, first, end, *total))


def _sum_in_python(parts: Sequence[Part], first: int, end: int) -> Part:
    whole = join(parts)
    if whole.size and not (first <= whole.indices.min() and whole.indices.max() < end):
        raise ValueError("a part has an index in another region")
    # Adding into a vector takes a pass over all of it, which does not pay for few elements. Measured: 4 parts of 62,500
    # among 6 million elements: 21 ms, and 9 ms by sorting; 32 parts of 7,800 among 780,000: 3 ms, and 11 ms by sorting.
    is_dense = whole.size * _SORTING > end - first
    with np.errstate(over="ignore", invalid="ignore"):  # sums may be infinite or NaN, as in other allreduces
        return _sum_by_vector(parts, first, end) if is_dense else _sum_by_sorting(whole)


def _sum_by_vector(parts: Sequence[Part], first: int, end: int) -> Part:
    vector = np.zeros(end - first, parts[0].values.dtype)
    for part in parts:
        vector[part.indices - first] += part.values
    found = select(vector, 0.0)
    return Part(found.indices.astype(parts[0].indices.dtype) + first, found.values)


def _sum_by_sorting(whole: Part) -> Part:
    order = np.argsort(whole.indices, kind="stable")  # equal indices stay in the order of their parts
    indices, values = whole.indices[order], whole.values[order]
    is_first = np.ones(indices.size, np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=is_first[1:])
    # Few indices come more than once, so only their later values are added. Reducing every segment (`np.add.reduceat`)
    # would take five times as long.
    sums, later = values[is_first], ~is_first
    np.add.at(sums, np.cumsum(is_first)[later] - 1, values[later])
    is_left = sums != 0
    return Part(indices[is_first][is_left], sums[is_left])


def join(parts: Sequence[Part]) -> Part:
    """The concatenation of `parts`."""
    return Part(np.concatenate([part.indices for part in parts]), np.concatenate([part.values for part in parts]))


def common(indices: Array, others: Array) -> Array:
    """The indices that are in both arrays, each of which is ascending."""
    if _core.native is None:
        return _common_in_python(indices, others)
    found = np.empty_like(indices)
    return found[: _core.native.common(indices, others, found)]


def _common_in_python(indices: Array, others: Array) -> Array:
    merged = np.sort(np.concatenate([indices, others]), kind="stable")  # searching for them takes three times as long
    twice: Array = merged[:-1][merged[1:] == merged[:-1]]
    return twice


def nothing(like: Part) -> Part:
    """An empty part with the dtypes of `like`."""
    return like.slice(0, 0)
