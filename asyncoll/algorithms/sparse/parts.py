"""What all sparse allreduces are made of: parts of a vector, how they travel, and how they are added up.

Written once over `Collectives`, so each of them goes by message or through shared memory. Terms: n elements, k of them
wanted, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.sparse.selection import select
from asyncoll.errors import NonFiniteError
from asyncoll.tensors.reductions import Array

_SORTING = 9  # times what adding an element into a vector takes, by the element


class Part(NamedTuple):
    """Some elements of a vector."""

    indices: Array  # ascending, each once; int32 where that holds them
    values: Array  # float32 or float64

    @property
    def size(self) -> int:
        return int(self.indices.size)

    def slice(self, start: int, stop: int) -> Part:
        return Part(self.indices[start:stop], self.values[start:stop])


class Chosen(NamedTuple):
    """What one rank gives to a round."""

    part: Part
    threshold: float  # what the magnitudes in it had to reach

    @property
    def is_finite(self) -> bool:
        """Whether the whole vector is: NaN and infinity are larger than any threshold, and so chosen before others."""
        return bool(np.isfinite(self.part.values).all())


class Outcome(NamedTuple):
    """What a round came to."""

    total: Part  # the sum, the same bits at every rank
    included: Array  # of the indices that this rank gave: those whose values are in the sum
    threshold: float  # what the elements of the sum had to reach, 0.0 if nothing
    lost: Part  # partial sums that this rank dropped, of elements that are in the sum all the same


class Method(Protocol):
    """A sparse allreduce of vectors of one length, with what it keeps from round to round."""

    def choose(self, x: Array) -> Chosen:
        """What to give of `x`, which is float32 or float64: in the caller's thread, without a word to anybody."""

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> Outcome:
        """Carry out the round, at every rank.

        Raises NonFiniteError at every rank, and keeps nothing of the round, if any rank's choice is not finite.
        """


# -- how parts travel ----------------------------------------------------------------------------


class Packing:
    """Indices and values in one array of bytes; the wider ones first, so that all are aligned."""

    def __init__(self, part: Part) -> None:
        """For parts like this one."""
        self._dtypes = part.indices.dtype, part.values.dtype
        self._values_first = part.values.itemsize > part.indices.itemsize
        self.element_bytes = part.indices.itemsize + part.values.itemsize

    def room(self, count: int) -> Array:
        """For so many elements."""
        return np.empty(count * self.element_bytes, np.uint8)

    def pack(self, part: Part) -> Array:
        raw = self.room(part.size)
        into = self.unpack(raw)
        into.indices[...] = part.indices
        into.values[...] = part.values
        return raw

    def unpack(self, raw: Array) -> Part:
        """A view of `raw`."""
        index, value = self._dtypes
        count = raw.size // self.element_bytes
        edge = count * (value if self._values_first else index).itemsize
        if self._values_first:
            return Part(raw[edge:].view(index), raw[:edge].view(value))
        return Part(raw[:edge].view(index), raw[edge:].view(value))


async def tell_sizes(collectives: Collectives, size: int) -> Array:
    """Every rank's `size`, as int64. One below 0 is a refusal, and raises NonFiniteError everywhere."""
    sizes = np.empty(collectives.size, np.int64)
    sizes[collectives.rank] = size
    await collectives.allgather(list(sizes.reshape(-1, 1)))
    check_refusals(sizes)
    return sizes


def refusal(rank: int) -> int:
    """What stands for the size of a part that is not finite."""
    return -1 - rank


def check_refusals(sizes: Array) -> None:
    refused = sizes[sizes < 0]
    if refused.size:
        raise NonFiniteError(tuple(sorted({-1 - int(size) for size in refused})))


async def gather_parts(collectives: Collectives, mine: Part, sizes: Array) -> list[Part]:
    """Every rank's part, given that they have these sizes."""
    packing = Packing(mine)
    blocks = [packing.room(int(size)) for size in sizes]
    blocks[collectives.rank][...] = packing.pack(mine)
    await collectives.allgather(blocks)
    return [packing.unpack(block) for block in blocks]


async def deal_parts(collectives: Collectives, chosen: Chosen, edges: Array) -> Part:
    """Give each rank what is in its region; returns the sum of what all ranks give me: mine first, then downwards.

    The regions lie between the `edges`, int64 of shape (P + 1,). Split and reduce, Seed 004, section 3.1.2.
    """
    part, packing = chosen.part, Packing(chosen.part)
    cuts = np.searchsorted(part.indices, edges).tolist()
    counts = np.diff(cuts) if chosen.is_finite else np.full(collectives.size, refusal(collectives.rank))
    coming = np.empty(collectives.size, np.int64)
    await collectives.alltoall(list(counts.astype(np.int64).reshape(-1, 1)), list(coming.reshape(-1, 1)))
    check_refusals(coming)
    outgoing = [packing.pack(part.slice(start, stop)) for start, stop in pairwise(cuts)]
    incoming = [packing.room(int(count)) for count in coming]
    total = Sum(part, int(edges[collectives.rank]), int(edges[collectives.rank + 1]), int(coming.sum()))
    await collectives.alltoall(outgoing, incoming, lambda source: total.add(packing.unpack(incoming[source])))
    return total.part()


# -- sums ----------------------------------------------------------------------------------------


class Sum:
    """The sum of parts, in the order in which they come. Elements whose values cancel out are not in it."""

    def __init__(self, like: Part, first: int, end: int, expected: int) -> None:
        """Of so many elements in all, with indices from `first` to below `end`, and dtypes as `like`."""
        self._first = first
        self._parts = [nothing(like)]
        # Adding into a vector takes a pass over all of it, which few elements are not worth. 4 parts of 62,500 among
        # 6 million: 21 ms, and 9 by sorting; 32 parts of 7,800 among 780,000: 3 ms, and 11.
        is_dense = expected * _SORTING > end - first
        self._vector = np.zeros(end - first, like.values.dtype) if is_dense else None

    def add(self, part: Part) -> None:
        if self._vector is None:
            self._parts.append(part)
        else:
            with _quietly():
                self._vector[part.indices - self._first] += part.values

    def part(self) -> Part:
        if self._vector is None:
            return _sorted_sum(self._parts)
        found = select(self._vector, 0.0)
        return Part(found.astype(self._parts[0].indices.dtype) + self._first, self._vector[found])


def _quietly() -> np.errstate:
    """A sum that is infinite is a value here, not a warning, as in other allreduces."""
    return np.errstate(over="ignore", invalid="ignore")


def _sorted_sum(parts: Sequence[Part]) -> Part:
    whole = join(parts)
    order = np.argsort(whole.indices, kind="stable")  # equal indices stay in the order of their parts
    indices, values = whole.indices[order], whole.values[order]
    is_first = np.ones(indices.size, np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=is_first[1:])
    sums, later = values[is_first], ~is_first  # few are: to reduce every segment would take five times as long
    with _quietly():
        np.add.at(sums, np.cumsum(is_first)[later] - 1, values[later])
    is_left = sums != 0
    return Part(indices[is_first][is_left], sums[is_left])


def join(parts: Sequence[Part]) -> Part:
    """One after another."""
    return Part(np.concatenate([part.indices for part in parts]), np.concatenate([part.values for part in parts]))


def common(indices: Array, others: Array) -> Array:
    """Those that are in both; each is ascending. (To search for them takes three times as long.)"""
    merged = np.sort(np.concatenate([indices, others]), kind="stable")
    twice: Array = merged[:-1][merged[1:] == merged[:-1]]
    return twice


def nothing(like: Part) -> Part:
    return like.slice(0, 0)
