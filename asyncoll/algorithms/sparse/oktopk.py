"""Ok-Topk: a sparse allreduce in which a rank receives at most 6k(P-1)/P words of data, for any P.

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 3 and algorithm 1. Every
rank reduces a region of the vector. The regions are cut so that each has about equally many of the selected elements.
The sums that reach a global threshold are spread evenly over the ranks, and all ranks gather them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse import selection
from asyncoll.algorithms.sparse.parts import Chosen, SparseOutcome, SparsePacking, Wanted, common, join, nothing
from asyncoll.algorithms.sparse.selection import Part
from asyncoll.algorithms.sparse.steps import deal_parts, gather_parts, owners, refusal, tell_sizes
from asyncoll.tensors.reductions import Array, ReduceOp

# Words of the histogram search for float32 sums: 4 rounds of 256 counts, each sent twice by an allreduce. For float64
# it takes twice as many words, and so do the sums, so the comparison holds.
_HISTOGRAM_WORDS = 4 * 256 * 2


class Rules(NamedTuple):
    """The periods and thresholds of Ok-Topk's rounds; the same at every rank."""

    thresholds_every: int = 1  # tau': the thresholds are exact every so many rounds; the paper has 32 or 128
    regions_every: int = 64  # tau: the regions are cut every so many rounds
    # How reused thresholds follow the counts. The paper's do not.
    feedback: selection.Feedback | None = None
    # How the exact global threshold is found: "histogram" by allreduces of counts, O(1) words; "allgather", as in the
    # paper, by an allgather of all sums, kP words if each rank gives k; "auto" by the one that takes fewer words.
    global_threshold: str = "auto"


class OkTopk:
    """One rank's part in the rounds of one name.

    A threshold that would select all elements is kept as 0.0, as is one that would never select any, and is not reused.
    """

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

    def wanted(self) -> Wanted:
        """Algorithm 1, lines 2 to 4 and the selection of line 8."""
        return Wanted(self._k, 0.0 if self._thresholds_are_due else self._local)

    def choose(self, x: Array) -> Chosen:
        return self.wanted().choose(x)

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        """Algorithm 1, lines 5 to 14."""
        given, edges = chosen.finite, self._edges
        # A restored state may be that of ranks on other hosts.
        if self._round % self._rules.regions_every == 0 or edges.size != len(owners(collectives)) + 1:
            edges = await self._cut_regions(collectives, given.indices)
        sums = await deal_parts(collectives, given, edges)
        threshold, before = self._global, collectives.traffic.words_received
        if self._thresholds_are_due or not threshold:
            threshold = await self._exact_threshold(collectives, sums.values)
        words = collectives.traffic.words_received - before
        found = selection.select(sums.values, threshold)
        total = await _balance_and_allgather(collectives, chosen, Part(sums.indices[found.indices], found.values))
        self._round += 1
        self._edges = edges
        self._local = self._next_threshold(chosen.threshold, chosen.part.size)
        self._global = self._next_threshold(threshold, total.size)
        return SparseOutcome(total, common(chosen.part.indices, total.indices), threshold, nothing(total), words)

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "local": self._local, "global": self._global, "edges": self._edges.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self._round, self._local, self._global = state["round"], state["local"], state["global"]
        self._edges = np.array(state["edges"], np.int64)

    async def _cut_regions(self, collectives: Collectives, indices: Array) -> Array:
        """The edges of the regions, on which all ranks agree (section 3.1.1; algorithm 1, line 6)."""
        boundaries = selection.local_boundaries(indices, len(owners(collectives)), self._count)
        await collectives.allreduce(boundaries, ReduceOp.SUM, "int64")
        return selection.consensus(boundaries, collectives.size, self._count)

    async def _exact_threshold(self, collectives: Collectives, sums: Array) -> float:
        """The k-th largest magnitude of all ranks' sums (section 3.1.4; algorithm 1, lines 10 and 11)."""
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
        gathered = [np.empty(size, sums.dtype) for size in await tell_sizes(collectives, sums.size)]
        gathered[collectives.rank][...] = sums
        await collectives.allgather(gathered)
        return selection.kth_largest(np.concatenate(gathered), self._k)


async def _balance_and_allgather(collectives: Collectives, chosen: Chosen, mine: Part) -> Part:
    """All owners' sums, at every rank (section 3.1.2). Raises NonFiniteError if any rank's choice is not finite.

    If one owner has far more than the others, the sums are spread evenly first (section 5.3).
    """
    sizes = await tell_sizes(collectives, mine.size if chosen.is_finite else refusal(collectives.rank))
    have = list(owners(collectives))
    if selection.is_unbalanced(sizes[have]):
        mine = await _balance(collectives, mine, sizes[have])
        sizes[have] = selection.balanced_sizes(sizes[have])
    return join(await gather_parts(collectives, mine, sizes))


async def _balance(collectives: Collectives, mine: Part, sizes: Array) -> Part:
    """This rank's share of the owners' sums, of these `sizes`, when each owner has equally many, in the same order."""
    packing, have = SparsePacking(mine), owners(collectives)
    outgoing, incoming = [packing.room(0)] * collectives.size, [packing.room(0)] * collectives.size
    if collectives.rank in have:
        place = have.index(collectives.rank)
        for owner, start, stop in selection.outgoing_pieces(sizes, place):
            outgoing[have[owner]] = packing.pack(mine.slice(start, stop))
        for owner, start, stop in selection.incoming_pieces(sizes, place):
            incoming[have[owner]] = packing.room(stop - start)
    await collectives.alltoall(outgoing, incoming)
    return join([packing.unpack(raw) for raw in incoming])


def is_count(value: object) -> bool:
    """Whether `value` is a number of rounds or elements, as a plain int."""
    return type(value) is int and 0 <= value < 1 << 62


def is_state(state: dict[str, Any]) -> bool:
    """Whether `state` has the form of what `state` of the method returns."""
    match state:
        case {"round": round_, "local": float(local), "global": float(all_), "edges": list(edges)}:
            are_edges = all(map(is_count, edges)) and edges == sorted(edges)
            return is_count(round_) and local >= 0 and all_ >= 0 and are_edges
    return False
