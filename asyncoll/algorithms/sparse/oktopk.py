"""Ok-Topk: a sparse allreduce of at most 6k(P-1)/P words of data a rank, for any P (Seed 004, algorithm 1).

Every rank reduces a region of the vector. The regions are cut so that each gets as many of the chosen elements, the
sums that reach a global threshold are spread evenly, and all gather them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.sparse import selection
from asyncoll.algorithms.sparse.parts import (
    Chosen,
    Outcome,
    Packing,
    Part,
    common,
    deal_parts,
    gather_parts,
    join,
    nothing,
    tell_sizes,
)
from asyncoll.tensors.reductions import Array, ReduceOp

# Of float32 sums: 4 rounds of 256 counts, which an allreduce sends twice. Of float64 twice as many, as are the sums.
_HISTOGRAM_WORDS = 4 * 256 * 2


class Rules(NamedTuple):
    """How Ok-Topk goes on from round to round."""

    thresholds_every: int = 1  # rounds: tau', after which thresholds are exact again; the paper's 32 or 128
    regions_every: int = 64  # rounds: tau, after which the regions are cut again
    # How thresholds that are reused follow the counts. The paper's do not.
    feedback: selection.Feedback | None = None
    # How the exact global threshold is found: by a "histogram" that is summed again and again, O(1) words, or as in the
    # paper, by an "allgather" of all sums, kP words if each rank gives k; "auto": by whichever takes fewer then.
    global_threshold: str = "auto"


class OkTopk:
    """One rank's side. A threshold that would select everything, or nothing ever, is not reused, but kept as 0.0."""

    def __init__(self, count: int, k: int, rules: Rules) -> None:
        self._count = count
        self._k = k
        self._rules = rules
        self._round = 0
        self._local = 0.0
        self._global = 0.0
        self._edges: Array = np.zeros(0, np.int64)

    @property
    def _thresholds_are_due(self) -> bool:
        return self._round % self._rules.thresholds_every == 0

    def choose(self, x: Array) -> Chosen:
        if self._thresholds_are_due or not self._local:
            indices, threshold = selection.top_k(x, self._k)
        else:
            indices, threshold = selection.select(x, self._local), self._local
        return Chosen(Part(indices, x[indices]), threshold)

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> Outcome:
        edges = self._edges
        if self._round % self._rules.regions_every == 0:
            edges = await self._cut_regions(collectives, chosen.part.indices)
        sums = await deal_parts(collectives, chosen, edges)
        threshold = self._global
        if self._thresholds_are_due or not threshold:
            threshold = await self._exact_threshold(collectives, sums.values)
        found = selection.select(sums.values, threshold)
        total = await _balance_and_allgather(collectives, Part(sums.indices[found], sums.values[found]))
        self._round += 1
        self._edges = edges
        self._local = self._next_threshold(chosen.threshold, chosen.part.size)
        self._global = self._next_threshold(threshold, total.size)
        return Outcome(total, common(chosen.part.indices, total.indices), threshold, nothing(total))

    async def _cut_regions(self, collectives: Collectives, indices: Array) -> Array:
        """Where all ranks together cut the vector (section 3.1.1)."""
        boundaries = selection.local_boundaries(indices, collectives.size, self._count)
        await collectives.allreduce(boundaries, ReduceOp.SUM, "int64")
        return selection.consensus(boundaries, collectives.size, self._count)

    async def _exact_threshold(self, collectives: Collectives, sums: Array) -> float:
        """The k-th largest of all ranks' sums (section 3.1.4, line 10)."""
        if self._gathers_sums(collectives.size):
            return await self._threshold_of_all(collectives, sums)
        search = selection.KthSearch(sums, self._k)
        while not search.done:
            counts = search.counts().astype(selection.index_dtype(self._count))
            await collectives.allreduce(counts, ReduceOp.SUM, counts.dtype.name)
            search.narrow(counts)
        return search.threshold

    def _next_threshold(self, threshold: float, count: int) -> float:
        adapted = selection.adapted(threshold, count, self._k, self._rules.feedback)
        return adapted if math.isfinite(adapted) else 0.0

    def _gathers_sums(self, size: int) -> bool:
        if self._rules.global_threshold == "auto":
            return self._k * size <= _HISTOGRAM_WORDS
        return self._rules.global_threshold == "allgather"

    async def _threshold_of_all(self, collectives: Collectives, sums: Array) -> float:
        everyones = [np.empty(size, sums.dtype) for size in await tell_sizes(collectives, sums.size)]
        everyones[collectives.rank][...] = sums
        await collectives.allgather(everyones)
        return selection.kth_largest(np.concatenate(everyones), self._k)


async def _balance_and_allgather(collectives: Collectives, mine: Part) -> Part:
    """All ranks' sums, at every rank (section 3.1.3). They are spread evenly first if a rank has far too many."""
    sizes = await tell_sizes(collectives, mine.size)
    if selection.is_unbalanced(sizes):
        mine = await _balance(collectives, mine, sizes)
        sizes = selection.balanced_sizes(sizes)
    return join(await gather_parts(collectives, mine, sizes))


async def _balance(collectives: Collectives, mine: Part, sizes: Array) -> Part:
    """What this rank has once all have equally much, in the same order."""
    packing = Packing(mine)
    outgoing, incoming = [packing.room(0)] * collectives.size, [packing.room(0)] * collectives.size
    for rank, start, stop in selection.outgoing_pieces(sizes, collectives.rank):
        outgoing[rank] = packing.pack(mine.slice(start, stop))
    for rank, start, stop in selection.incoming_pieces(sizes, collectives.rank):
        incoming[rank] = packing.room(stop - start)
    await collectives.alltoall(outgoing, incoming)
    return join([packing.unpack(raw) for raw in incoming])
