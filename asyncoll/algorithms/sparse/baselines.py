"""The sparse allreduces that Ok-Topk is compared with: TopkA, Gaussiank, TopkDSA, gTopk, and Dense.

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 2 and table 1. Words are
those that a rank receives, for k elements of n and P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse import selection
from asyncoll.algorithms.sparse.parts import (
    Chosen,
    SparseOutcome,
    SparsePacking,
    Stateless,
    Wanted,
    common,
    join,
    nothing,
    sum_parts,
)
from asyncoll.algorithms.sparse.selection import Part
from asyncoll.algorithms.sparse.steps import (
    branches,
    check_refusals,
    deal_parts,
    gather_parts,
    owners,
    refusal,
    sum_on_host,
    tell_sizes,
)
from asyncoll.tensors.reductions import Array, ReduceOp


class _ByTopk(Stateless):
    """Selects exactly k elements, or all elements that are not 0 if there are fewer."""

    def __init__(self, count: int, k: int) -> None:
        self._count = count
        self._k = k

    def wanted(self) -> Wanted:
        return Wanted(self._k)

    def choose(self, x: Array) -> Chosen:
        return self.wanted().choose(x)


class TopkA(_ByTopk):
    """An allgather of the selected elements, which every rank adds up: 2k(P-1) words."""

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        return await _gather_and_add(collectives, chosen, self._count)


class Gaussiank(Stateless):
    """TopkA with a threshold estimated from a normal distribution that is fitted to the vector."""

    def __init__(self, count: int, density: float, feedback: selection.Feedback | None) -> None:
        self._count = count
        self._density = density
        self._feedback = feedback

    def wanted(self) -> None:
        """The distribution is fitted to all elements."""

    def choose(self, x: Array) -> Chosen:
        bad = selection.select(x, np.inf)
        if bad.size:  # nothing can be fitted to NaN and infinity
            return Chosen(bad, np.inf)
        threshold = selection.gaussian_threshold(x, self._density, self._feedback)
        return Chosen(selection.select(x, threshold), threshold)

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        return await _gather_and_add(collectives, chosen, self._count)


async def gathered_sum(collectives: Collectives, given: Part, count: int) -> Part:
    """The sum over all ranks of `given`, of vectors of `count` elements: every rank gathers all parts."""
    mine = await sum_on_host(collectives, given, count)
    sizes = await tell_sizes(collectives, mine.size)
    return sum_parts(await gather_parts(collectives, mine, sizes), 0, count)


async def _gather_and_add(collectives: Collectives, chosen: Chosen, count: int) -> SparseOutcome:
    mine = await sum_on_host(collectives, chosen.finite, count)
    sizes = await tell_sizes(collectives, mine.size if chosen.is_finite else refusal(collectives.rank))
    total = sum_parts(await gather_parts(collectives, mine, sizes), 0, count)
    return SparseOutcome(total, common(chosen.part.indices, total.indices), 0.0, nothing(mine))


class TopkDSA(_ByTopk):
    """SparCML's split allgather: each rank adds up an equal region, and all ranks gather the sums.

    The sums are gathered as a dense vector if there are so many that this is shorter: 4k(P-1)/P to (2k + n)(P-1)/P
    words.
    """

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        regions = bounds(self._count, len(owners(collectives)))
        edges = np.array([start for start, _ in regions] + [self._count], np.int64)
        sums = await deal_parts(collectives, chosen.finite, edges)
        sizes = await tell_sizes(collectives, sums.size if chosen.is_finite else refusal(collectives.rank))
        if sizes.sum() * SparsePacking(sums).element_bytes < self._count * sums.values.itemsize:
            total = join(await gather_parts(collectives, sums, sizes))
        else:
            total = await self._gather_densely(collectives, sums, edges)
        return SparseOutcome(total, common(chosen.part.indices, total.indices), 0.0, nothing(total))

    async def _gather_densely(self, collectives: Collectives, sums: Part, edges: Array) -> Part:
        whole = np.zeros(self._count, sums.values.dtype)
        whole[sums.indices] = sums.values
        blocks = [whole[:0]] * collectives.size
        for owner, (start, stop) in zip(owners(collectives), pairwise(edges.tolist()), strict=True):
            blocks[owner] = whole[start:stop]
        await collectives.allgather(blocks)
        found = selection.select(whole, 0.0)
        return Part(found.indices.astype(sums.indices.dtype), found.values)


class GTopk(_ByTopk):
    """A reduction along a binary tree that keeps the k largest elements of each sum of two: 4k log2 P words.

    An element that is dropped in one subtree may survive in another. Its contributors in the first subtree see it in
    the result, and clear it: their part is lost. The rank that has dropped it tells the amount in `SparseOutcome.lost`.
    """

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        packing, mine = SparsePacking(chosen.part), chosen.part
        size = mine.size if chosen.is_finite else refusal(collectives.rank)
        dropped = [nothing(mine)]
        for ranks, distance in branches(collectives):
            theirs = await _climb(collectives, packing, mine, size, ranks, distance)
            if isinstance(theirs, int):
                size = min(size, theirs)
            elif theirs is not None and size >= 0:
                mine, rest = self._largest(self._sum([mine, theirs]))
                dropped.append(rest)
                size = mine.size
        total = await _descend(collectives, packing, mine, size)
        gone = self._sum(dropped)
        missing = common(gone.indices, total.indices)
        lost = Part(missing, gone.values[np.searchsorted(gone.indices, missing)])
        return SparseOutcome(total, common(chosen.part.indices, total.indices), 0.0, lost)

    def _sum(self, parts: list[Part]) -> Part:
        return sum_parts(parts, 0, self._count)

    def _largest(self, union: Part) -> tuple[Part, Part]:
        """The k largest elements of `union`, and the rest."""
        kept, _ = selection.top_k(union.values, self._k)
        is_kept = np.zeros(union.size, np.bool_)
        is_kept[kept.indices] = True
        return (
            Part(union.indices[is_kept], union.values[is_kept]),
            Part(union.indices[~is_kept], union.values[~is_kept]),
        )


async def _climb(
    collectives: Collectives, packing: SparsePacking, mine: Part, size: int, ranks: Sequence[int], distance: int
) -> Part | int | None:
    """One level of the tree of `ranks`. Returns what this rank gets there: a part or a refusal; or None."""
    gives = takes = False
    parent = child = collectives.rank
    if collectives.rank in ranks:
        place = ranks.index(collectives.rank)
        turn = place % (2 * distance)
        gives, takes = turn == distance, turn == 0 and place + distance < len(ranks)
        parent = ranks[place - distance] if gives else parent
        child = ranks[place + distance] if takes else child
    head = np.array([size], np.int64)
    coming = np.empty(1, np.int64)
    await collectives.pass_on(head if gives else None, parent, coming if takes else None, child)
    raw = packing.room(int(coming[0])) if takes and coming[0] >= 0 else None
    await collectives.pass_on(packing.pack(mine) if gives and size >= 0 else None, parent, raw, child)
    if not takes:
        return None
    return int(coming[0]) if raw is None else packing.unpack(raw)


async def _descend(collectives: Collectives, packing: SparsePacking, mine: Part, size: int) -> Part:
    """Rank 0's final part, at every rank."""
    head = np.array([size], np.int64)
    await collectives.broadcast(head, 0)
    check_refusals(head)
    raw = packing.pack(mine) if collectives.rank == 0 else packing.room(int(head[0]))
    await collectives.broadcast(raw, 0)
    return packing.unpack(raw)


class Dense(Stateless):
    """An allreduce of all elements: 2n(P-1)/P words. No residual is left."""

    def wanted(self) -> None:
        """All elements are sent."""

    def choose(self, x: Array) -> Chosen:
        bad = selection.select(x, np.inf)
        if bad.size:
            return Chosen(bad, np.inf)
        return Chosen(Part(np.arange(x.size, dtype=selection.index_dtype(x.size)), x.copy()), 0.0)

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        await tell_sizes(collectives, chosen.part.size if chosen.is_finite else refusal(collectives.rank))
        whole = chosen.part.values
        await collectives.allreduce(whole, ReduceOp.SUM, whole.dtype.name)
        return SparseOutcome(chosen.part, chosen.part.indices.copy(), 0.0, nothing(chosen.part))
