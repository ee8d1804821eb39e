"""What the sparse allreduces decide: which elements are sent, what region each rank reduces, who hands what to whom.

Pure functions on flat arrays of float32 or float64, without NaN. A *magnitude* is an element without its sign bit, read
as an integer: these are ordered like the absolute values, to the last bit, denormals included. A *threshold* is the
smallest absolute value that is selected. Zeros are never selected, since to send one says nothing; so an array of fewer
than k other elements behaves as if padded with zeros, and its k-th largest magnitude is 0.0. That threshold selects all
there is and is not worth reusing. Indices are int32 wherever they fit, as they travel beside the values.

The paper is Seed 004 (Ok-Topk). Terms: n elements, k of them wanted (the density is k/n), P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from asyncoll.arguments import real
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array

_BLOCK = 1 << 16  # elements: a block and its scratch stay in a core's own cache from one pass to the next
_SAMPLE = 1 << 16  # elements: 1 % of them, and four deviations more, is within a fifth of 1 %
_DIGIT = 8  # bits a round of `KthSearch`: with 11, a round less would take six times the words
_ADJUSTMENTS = 20  # of a threshold that was fitted, at most: as many as the authors make
_IMBALANCE = 4  # times the average: Seed 004, section 5.3


def index_dtype(count: int) -> np.dtype[np.signedinteger]:
    """Of the indices into `count` elements: int32 where that holds them, otherwise int64."""
    return np.dtype(np.int32 if count <= 1 << 31 else np.int64)


# -- magnitudes ----------------------------------------------------------------------------------


def _bits(x: Array) -> Array:
    return x.view(f"i{x.itemsize}")


def _magnitudes(x: Array) -> Array:
    bits = _bits(x)
    return bits & np.iinfo(bits.dtype).max


def _magnitude(threshold: float, dtype: np.dtype[np.floating]) -> int:
    """The least magnitude that is selected: that of `threshold`, or of the smallest denormal."""
    with np.errstate(over="ignore"):
        rounded = np.array([threshold], dtype)
    return max(int(_magnitudes(rounded)[0]), 1)


def _absolute(magnitude: int, dtype: np.dtype[np.floating]) -> float:
    return float(np.array([magnitude], f"i{dtype.itemsize}").view(dtype)[0])


def _kth(magnitudes: Array, k: int) -> int:
    """The k-th largest of them; 0 if there are fewer."""
    place = magnitudes.size - k
    return int(np.partition(magnitudes, place)[place]) if place >= 0 else 0


# -- selection -----------------------------------------------------------------------------------


def select(x: Array, threshold: float) -> Array:
    """The indices, ascending, of the elements with |x| >= threshold that are not zero.

    `threshold`, at least 0, is rounded to the dtype of `x`. The k-th largest absolute value selects k elements, or more
    if others equal it; the authors' code compares with > there, and so selects one too few.
    """
    bits, least = _bits(x), _magnitude(threshold, x.dtype)
    magnitudes, hits = np.empty(min(x.size, _BLOCK), bits.dtype), np.empty(min(x.size, _BLOCK), np.bool_)
    mask = np.iinfo(bits.dtype).max
    found = [np.empty(0, np.int64)]
    for start in range(0, x.size, _BLOCK):
        size = min(x.size - start, _BLOCK)
        np.bitwise_and(bits[start : start + size], mask, out=magnitudes[:size])
        np.greater_equal(magnitudes[:size], least, out=hits[:size])
        found.append(np.flatnonzero(hits[:size]) + start)
    return np.concatenate(found, dtype=index_dtype(x.size), casting="same_kind")


def kth_largest(x: Array, k: int) -> float:
    """The k-th largest absolute value in `x`, exactly, for k >= 1; 0.0 if fewer than k elements are not zero."""
    return _absolute(_kth(_magnitudes(x[_candidates(x, k)]), k), x.dtype)


def top_k(x: Array, k: int) -> tuple[Array, float]:
    """The indices, ascending, of the k elements of the largest magnitudes, and the k-th largest absolute value.

    Among equals the lowest indices are taken, so there are never more than k, and fewer only where all that are not
    zero are selected. k is at least 1.
    """
    candidates = _candidates(x, k)
    magnitudes = _magnitudes(x[candidates])
    kth = _kth(magnitudes, k)
    chosen = magnitudes > kth
    wanted = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == kth)[:wanted]] = True
    return candidates[chosen], _absolute(kth, x.dtype)


def _candidates(x: Array, k: int) -> Array:
    """The indices of the k elements of the largest magnitudes, of those that equal the k-th, and of some more."""
    found = select(x, _guess(x, k))
    return found if found.size >= k else select(x, 0.0)


def _guess(x: Array, k: int) -> float:
    """A threshold that selects, almost surely, at least k elements but few more: by a sample at even distances."""
    if x.size <= _SAMPLE:
        return 0.0
    distance = x.size // _SAMPLE | 1  # odd: the rows of matrices seldom are, and no column is to be all that is seen
    sample = _magnitudes(x[::distance])
    expected = k / distance
    return _absolute(_kth(sample, math.ceil(expected + 4 * math.sqrt(expected) + 16)), x.dtype)


# -- thresholds that are reused ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feedback:
    """How a threshold that is reused follows the counts that it selects.

    The paper (Seed 004, section 3.1.3) reuses a threshold unchanged; the authors' code does this, which the paper does
    not mention. The defaults are its numbers for BERT's local threshold.
    """

    low: float = 4 / 5  # of k: with fewer elements the threshold sinks
    high: float = 5 / 4  # of k: with more it rises
    factor: float = 1.025  # by so much

    def __post_init__(self) -> None:
        """Raise UsageError unless it leads towards k."""
        for name in ("low", "high", "factor"):  # ranks compare its `repr`
            object.__setattr__(self, name, real(getattr(self, name), f"{name} of feedback"))
        numbers = (self.low, self.high, self.factor)
        if not (0 <= self.low <= 1 <= self.high and 1 < self.factor < math.inf):
            raise UsageError(f"feedback needs 0 <= low <= 1 <= high and a finite factor above 1, got {numbers}")


def adapted(threshold: float, count: int, k: float, feedback: Feedback | None = None) -> float:
    """The threshold for the next round, after this one selected `count` elements of k wanted.

    One step towards k where `count` is outside of the feedback's band; without feedback, the same threshold.
    """
    if feedback is None:
        return threshold
    if count < feedback.low * k:
        return threshold / feedback.factor
    if count > feedback.high * k:
        return threshold * feedback.factor
    return threshold


def gaussian_threshold(x: Array, density: float, feedback: Feedback | None = None) -> float:
    """Gaussiank's threshold: mean + z std of `x`, if a normal distribution has density / 2 above z.

    That fit and no more (Seed 004, table 1), but at least 0. With feedback it is adjusted, in up to 20 steps, until as
    many elements of `x` as wanted are beyond it: in the paper's trainings (section 5.4) at least 3/4; with the authors'
    numbers for VGG, `Feedback(3 / 4, 5 / 4, 1.02)`. 0.0 for an empty `x`.
    """
    mean, deviation = _moments(x)
    threshold = max(mean - NormalDist().inv_cdf(density / 2) * deviation, 0.0)
    for _ in range(_ADJUSTMENTS if feedback else 0):
        last, threshold = threshold, adapted(threshold, select(x, threshold).size, density * x.size, feedback)
        if threshold == last:
            break
    return threshold


def _moments(x: Array) -> tuple[float, float]:
    """Mean and standard deviation, in float64 and two passes: no squares that cancel. They may be infinite."""
    if not x.size:
        return 0.0, 0.0
    blocks = [x[start : start + _BLOCK] for start in range(0, x.size, _BLOCK)]
    scratch = np.empty(min(x.size, _BLOCK), np.float64)
    squares = 0.0
    with np.errstate(over="ignore"):
        mean = sum(float(block.sum(dtype=np.float64)) for block in blocks) / x.size
        for block in blocks:
            apart = np.subtract(block, mean, out=scratch[: block.size], dtype=np.float64)
            squares += float(np.square(apart, out=apart).sum())
    return mean, math.sqrt(squares / x.size)


class KthSearch:
    """The k-th largest magnitude among the values of all ranks, by O(1) words: a radix search that they make together.

        search = KthSearch(values, k)
        while not search.done:
            counts = search.counts()
            ...  # sum them over the ranks
            search.narrow(counts)
        search.threshold

    A round settles the next 8 bits, at any number of ranks: 4 rounds for float32, 8 for float64, and 1 if there are
    fewer than k values. The paper gathers all values instead (Seed 004, section 3.1.4, line 10). k, at least 1, and the
    dtype are the same at all ranks; `values`, of any number, must not change until the first `narrow`.
    """

    def __init__(self, values: Array, k: int) -> None:
        self._dtype = values.dtype
        self._bits = _bits(values)  # of those that may be the k-th, signs included
        self._k = k  # counted among those
        self._open = 8 * values.itemsize - 1  # the low bits of the k-th magnitude that are not known yet
        self._known = 0  # the magnitude, these bits being 0

    @property
    def done(self) -> bool:
        """At all ranks after the same round."""
        return not self._open

    @property
    def threshold(self) -> float:
        """The k-th largest absolute value; before `done`, a lower bound of it. 0.0 if fewer than k are not zero."""
        return _absolute(self._known, self._dtype)

    def counts(self) -> Array:
        """How many of this rank's values that are left have each value of the next 8 bits: int64, shape (256,)."""
        counts = np.zeros(1 << _DIGIT, np.int64)
        for _, digits in self._blocks():
            counts += np.bincount(digits, minlength=counts.size)
        return counts

    def narrow(self, totals: Array) -> None:
        """Settle these bits, given the sum of all ranks' counts."""
        not_below = np.cumsum(totals[::-1])[::-1]
        if not_below[0] < self._k:  # only in the first round: later ones know that there are enough
            self._open = 0
            return
        digit = int(np.flatnonzero(not_below >= self._k)[-1])
        self._k -= int(not_below[digit] - totals[digit])
        self._bits = np.concatenate([self._bits[:0], *(block[digits == digit] for block, digits in self._blocks())])
        self._open = self._shift
        self._known |= digit << self._open

    @property
    def _shift(self) -> int:
        return max(self._open - _DIGIT, 0)

    def _blocks(self) -> Iterator[tuple[Array, Array]]:
        """The values that are left, and the next digit of each."""
        shift, mask = self._shift, (1 << self._open - self._shift) - 1  # the sign is above the mask
        for start in range(0, self._bits.size, _BLOCK):
            block = self._bits[start : start + _BLOCK]
            yield block, block >> shift & mask


# -- regions -------------------------------------------------------------------------------------


def local_boundaries(indices: Array, size: int, count: int) -> Array:
    """Where this rank would cut `count` elements into regions, one for each of `size` ranks: int64, shape (size - 1,).

    `indices` are those that it selects, ascending; each region has as many of them as the others, give or take one
    (Seed 004, section 3.1.1). So boundary j is number floor(j m / P) of these m, where the authors' code takes number
    j floor(m / P), which leaves the rest to the last rank. With nothing selected, all regions are equally long.
    """
    cuts = np.arange(1, size, dtype=np.int64)
    if not indices.size:
        return cuts * count // size
    return indices[cuts * indices.size // size].astype(np.int64)


def consensus(total: Array, size: int, count: int) -> Array:
    """The edges of all ranks' regions, given the sum of their `local_boundaries`: int64, shape (size + 1,).

    Region j is [edges[j], edges[j + 1]), and may be empty. Averages of sequences that ascend do so too.
    """
    return np.concatenate([[0], total // size, [count]], dtype=np.int64)


# -- balance -------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements [start, stop) of this rank's, that go to or come from `rank`."""

    rank: int
    start: int
    stop: int


def is_unbalanced(sizes: Array) -> bool:
    """Whether the largest of the ranks' `sizes`, int64, is more than 4 times the average (Seed 004, section 5.3).

    With 4 ranks or fewer it never is.
    """
    return bool(sizes.max() * sizes.size > _IMBALANCE * sizes.sum())


def balanced_sizes(sizes: Array) -> Array:
    """The sizes after balancing: floor(total / P), and one more for the first total mod P ranks. int64, shape (P,)."""
    small, larger = divmod(int(sizes.sum()), sizes.size)
    return small + (np.arange(sizes.size, dtype=np.int64) < larger)


def outgoing_pieces(sizes: Array, rank: int) -> list[Piece]:
    """What `rank` sends to whom, its own part included, so that all have `balanced_sizes`; in order, none empty.

    The concatenation of all ranks' elements in the order of ranks stays as it is; only the cuts move.
    """
    return _overlaps(sizes, balanced_sizes(sizes), rank)


def incoming_pieces(sizes: Array, rank: int) -> list[Piece]:
    """Where `rank`, which will have `balanced_sizes(sizes)[rank]` elements, puts what it gets from whom, as above."""
    return _overlaps(balanced_sizes(sizes), sizes, rank)


def _overlaps(mine: Array, others: Array, rank: int) -> list[Piece]:
    """The pieces into which the cuts of `others` divide part `rank` of `mine`, counted from its start."""
    start = int(mine[:rank].sum())
    edges = np.clip(np.concatenate([[0], np.cumsum(others)]) - start, 0, mine[rank])
    return [Piece(other, *ends) for other, ends in enumerate(pairwise(edges.tolist())) if ends[0] < ends[1]]
