"""The common steps of the sparse allreduces: parts of a vector, how they are sent, and how they are added up.

They are written once, over `Collectives`, so each algorithm goes by message or through shared memory. Terms: n
elements, k of them wanted, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.sparse.selection import select, top_k
from asyncoll.errors import NonFiniteError
from asyncoll.tensors.reductions import Array

_SORTING = 9  # sorting one element takes as long as a pass over so many elements of a vector


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
    """The elements that one rank gives to a round."""

    part: Part
    threshold: float  # the magnitude that its elements had to reach

    @property
    def is_finite(self) -> bool:
        """Whether the whole vector is finite.

        NaN and infinity exceed any threshold, so they are among the first selected.
        """
        return bool(np.isfinite(self.part.values).all())


class Outcome(NamedTuple):
    """The result of a round at one rank."""

    total: Part  # the sum, the same bits at every rank
    included: Array  # those of the indices that this rank gave whose values are in the sum
    threshold: float  # the magnitude that the sums had to reach; 0.0 if there is no such threshold
    lost: Part  # partial sums that this rank has dropped, of elements that are in the sum


class Wanted(NamedTuple):
    """A selection that a device can make, too: the `k` largest elements, or all that reach a `threshold` above 0."""

    k: int
    threshold: float = 0.0

    def choose(self, x: Array) -> Chosen:
        """Select these elements of `x`."""
        indices, threshold = (select(x, self.threshold), self.threshold) if self.threshold else top_k(x, self.k)
        return Chosen(Part(indices, x[indices]), threshold)


class Method(Protocol):
    """A sparse allreduce of vectors of one length, with its state from round to round."""

    def wanted(self) -> Wanted | None:
        """What `choose` selects in the next round; None if it has to see all elements."""

    def choose(self, x: Array) -> Chosen:
        """Select the elements of `x`, float32 or float64, for the next round. Sends nothing."""

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> Outcome:
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


# -- how parts travel ----------------------------------------------------------------------------


class Packing:
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


async def tell_sizes(collectives: Collectives, size: int) -> Array:
    """Every rank's `size`, as int64. A negative one is a `refusal`: then every rank raises NonFiniteError."""
    sizes = np.empty(collectives.size, np.int64)
    sizes[collectives.rank] = size
    await collectives.allgather(list(sizes.reshape(-1, 1)))
    check_refusals(sizes)
    return sizes


def refusal(rank: int) -> int:
    """The number that `rank` sends in place of the size of a part that is not finite."""
    return -1 - rank


def check_refusals(sizes: Array) -> None:
    """Raise NonFiniteError, with the ranks that have refused, if any of `sizes` is a refusal."""
    refused = sizes[sizes < 0]
    if refused.size:
        raise NonFiniteError(tuple(sorted({-1 - int(size) for size in refused})))


async def gather_parts(collectives: Collectives, mine: Part, sizes: Array) -> list[Part]:
    """Every rank's part, given the sizes of all parts."""
    packing = Packing(mine)
    blocks = [packing.room(int(size)) for size in sizes]
    blocks[collectives.rank][...] = packing.pack(mine)
    await collectives.allgather(blocks)
    return [packing.unpack(block) for block in blocks]


async def deal_parts(collectives: Collectives, chosen: Chosen, edges: Array) -> Part:
    """Give each rank the elements in its region. Returns the sum of the parts for this rank's region.

    The regions lie between the `edges`, int64 of shape (P + 1,). The own part is added first, then those of the ranks
    below it in descending order, modulo P. This is "split and reduce" (Li, Hoefler, PPoPP 2022, section 3.1.1).
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
    """The sum of parts, in the order in which they are added. Elements whose sum is 0 are left out."""

    def __init__(self, like: Part, first: int, end: int, expected: int) -> None:
        """For `expected` elements in all parts, with indices from `first` to below `end` and the dtypes of `like`."""
        self._first = first
        self._parts = [nothing(like)]
        # Adding into a vector takes a pass over all of it, which does not pay for few elements. Measured: 4 parts of
        # 62,500 among 6 million elements: 21 ms, and 9 ms by sorting; 32 parts of 7,800 among 780,000: 3 ms, and 11 ms
        # by sorting.
        is_dense = expected * _SORTING > end - first
        self._vector = np.zeros(end - first, like.values.dtype) if is_dense else None

    def add(self, part: Part) -> None:
        """Add a part."""
        if self._vector is None:
            self._parts.append(part)
        else:
            with _quietly():
                self._vector[part.indices - self._first] += part.values

    def part(self) -> Part:
        """The sum of all parts so far."""
        if self._vector is None:
            return _sorted_sum(self._parts)
        found = select(self._vector, 0.0)
        return Part(found.astype(self._parts[0].indices.dtype) + self._first, self._vector[found])


def _quietly() -> np.errstate:
    """A context in which sums may be infinite or NaN without a warning, as in other allreduces."""
    return np.errstate(over="ignore", invalid="ignore")


def _sorted_sum(parts: Sequence[Part]) -> Part:
    whole = join(parts)
    order = np.argsort(whole.indices, kind="stable")  # equal indices stay in the order of their parts
    indices, values = whole.indices[order], whole.values[order]
    is_first = np.ones(indices.size, np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=is_first[1:])
    # Few indices come more than once, so only their later values are added. Reducing every segment (`np.add.reduceat`)
    # would take five times as long.
    sums, later = values[is_first], ~is_first
    with _quietly():
        np.add.at(sums, np.cumsum(is_first)[later] - 1, values[later])
    is_left = sums != 0
    return Part(indices[is_first][is_left], sums[is_left])


def join(parts: Sequence[Part]) -> Part:
    """The concatenation of `parts`."""
    return Part(np.concatenate([part.indices for part in parts]), np.concatenate([part.values for part in parts]))


def common(indices: Array, others: Array) -> Array:
    """The indices that are in both arrays, each of which is ascending. Searching for them takes three times as long."""
    merged = np.sort(np.concatenate([indices, others]), kind="stable")
    twice: Array = merged[:-1][merged[1:] == merged[:-1]]
    return twice


def nothing(like: Part) -> Part:
    """An empty part with the dtypes of `like`."""
    return like.slice(0, 0)
