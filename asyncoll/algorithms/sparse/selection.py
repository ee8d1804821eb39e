"""The decisions of the sparse allreduces: the elements to send, the region of each rank, and the spread of the sums.

Pure functions on flat arrays of float32 or float64, without NaN. A *magnitude* is an element without its sign bit, read
as an integer. Magnitudes are ordered like the absolute values, to the last bit, denormals included. A *threshold* is
the smallest absolute value that is selected. Zeros are never selected, because sending one adds nothing. So an array
with fewer than k other elements behaves as if it were padded with zeros, and its k-th largest magnitude is 0.0. That
threshold selects all elements, and reusing it is pointless. Indices are int32 wherever they fit, because they are sent
with the values.

The paper is Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022 (Ok-Topk). Terms: n
elements, k of them wanted (the density is k/n), P ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from asyncoll import _core
from asyncoll.arguments import real
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array

_BLOCK = 1 << 16  # elements: a block and its scratch arrays stay in a core's own cache between passes
_SAMPLE = 1 << 16  # elements: at a density of 1 %, four standard deviations of the sample's count are 16 % of it
_DIGIT = 8  # bits that a round of `KthSearch` settles
# From `_MANY` elements on: one round less, and six times the words, 12,288, which are few then.
_LONG_DIGIT = 11
_MANY = 1 << 17
_ADJUSTMENTS = 20  # the most adjustments of a fitted threshold, as in the authors' code
_IMBALANCE = 4  # times the mean, from which sizes are balanced (section 5.3)


def index_dtype(count: int) -> np.dtype[np.signedinteger]:
    """The dtype of indices into `count` elements: int32 if they fit, otherwise int64."""
    return np.dtype(np.int32 if count <= 1 << 31 else np.int64)


# -- magnitudes ----------------------------------------------------------------------------------


def _bits(x: Array) -> Array:
    return x.view(f"i{x.itemsize}")


def _magnitudes(x: Array) -> Array:
    bits = _bits(x)
    return bits & np.iinfo(bits.dtype).max


def least_magnitude(threshold: float, dtype: np.dtype[np.floating]) -> int:
    """The least magnitude that `threshold` selects; at least that of the smallest denormal, so no zero is."""
    with np.errstate(over="ignore"):
        rounded = np.array([threshold], dtype)
    return max(int(_magnitudes(rounded)[0]), 1)


def _absolute(magnitude: int, dtype: np.dtype[np.floating]) -> float:
    return float(np.array([magnitude], f"i{dtype.itemsize}").view(dtype)[0])


class Part(NamedTuple):
    """Some elements of a vector.

    Attributes:
        indices: int32, or int64 in a vector of more than 2**31 elements; ascending, each at most once.
        values: as many; float64 if `x` of the call is, otherwise float32.
    """

    indices: Array
    values: Array

    @property
    def size(self) -> int:
        return int(self.indices.size)

    def slice(self, start: int, stop: int) -> Part:
        return Part(self.indices[start:stop], self.values[start:stop])


# -- selection -----------------------------------------------------------------------------------


def select(x: Array, threshold: float, room: int | None = None) -> Part:
    """The elements with |x| >= threshold that are not zero.

    `threshold`, at least 0, is rounded to the dtype of `x`. The k-th largest absolute value as the threshold selects k
    elements, or more if others equal it. The authors' code compares with > there, and so selects one too few. If there
    are more than `room` of them, a second pass is needed.
    """
    least = least_magnitude(threshold, x.dtype)
    if _core.native is None:
        return _select_in_python(x, least)
    bits, room = np.ascontiguousarray(_bits(x)), x.size if room is None else min(room, x.size)
    found = Part(np.empty(room, index_dtype(x.size)), np.empty(room, x.dtype))
    count = _core.native.select(bits, least, found.indices, _bits(found.values))
    if count > room:
        return select(x, threshold, count)
    found = found.slice(0, count)
    return found if 2 * count >= room else Part(found.indices.copy(), found.values.copy())  # which keeps no memory


def _select_in_python(x: Array, least: int) -> Part:
    bits = _bits(x)
    magnitudes, hits = np.empty(min(x.size, _BLOCK), bits.dtype), np.empty(min(x.size, _BLOCK), np.bool_)
    mask = np.iinfo(bits.dtype).max
    found = [np.empty(0, np.int64)]
    for start in range(0, x.size, _BLOCK):
        size = min(x.size - start, _BLOCK)
        np.bitwise_and(bits[start : start + size], mask, out=magnitudes[:size])
        np.greater_equal(magnitudes[:size], least, out=hits[:size])
        found.append(np.flatnonzero(hits[:size]) + start)
    indices = np.concatenate(found, dtype=index_dtype(x.size), casting="same_kind")
    return Part(indices, x[indices])


def kth_largest(x: Array, k: int) -> float:
    """The k-th largest absolute value in `x`, exactly, for k >= 1; 0.0 if fewer than k elements are not zero."""
    return top_k(x, k)[1]


def top_k(x: Array, k: int) -> tuple[Part, float]:
    """The k elements of the largest magnitudes, and the k-th largest absolute value.

    Among equal magnitudes the lowest indices are selected, so there are never more than k. There are fewer only if all
    elements that are not zero are selected. k is at least 1.
    """
    candidates = select(x, *_guess(x, k))
    if candidates.size < k:
        candidates = select(x, 0.0)
    if _core.native is None:
        count, kth = _keep_largest_in_python(candidates, k)
    else:
        count, kth = _core.native.keep_largest(candidates.indices, _bits(candidates.values), k)
    return candidates.slice(0, count), _absolute(kth, x.dtype)


def _keep_largest_in_python(candidates: Part, k: int) -> tuple[int, int]:
    """Move the k largest of `candidates` to the front. Returns their number, and the k-th largest magnitude, or 0."""
    magnitudes = _magnitudes(candidates.values)
    kth = _kth(magnitudes, k)
    chosen = magnitudes > kth
    wanted = k - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == kth)[:wanted]] = True
    count = int(np.count_nonzero(chosen))
    for array in candidates:
        array[:count] = array[chosen]
    return count, kth


def _kth(magnitudes: Array, k: int) -> int:
    """The k-th largest of `magnitudes`; 0 if there are fewer."""
    index = magnitudes.size - k
    return int(np.partition(magnitudes, index)[index]) if index >= 0 else 0


def _guess(x: Array, k: int) -> tuple[float, int]:
    """A threshold that almost surely selects at least k elements, and few more; and room for those.

    From a sample at equal distances.
    """
    if x.size <= _SAMPLE:
        return 0.0, x.size
    # Odd, because the lengths of matrix rows seldom are: with a common divisor the sample would see a few columns only.
    distance = x.size // _SAMPLE | 1
    sample = _magnitudes(x[::distance])
    wanted = k / distance
    wanted = math.ceil(wanted + 4 * math.sqrt(wanted) + 16)
    return _absolute(_kth(sample, wanted), x.dtype), math.ceil(wanted + 4 * math.sqrt(wanted)) * distance


# -- thresholds that are reused ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feedback:
    """How a threshold that is reused follows the number of elements that it selects.

    The paper (Li, Hoefler, PPoPP 2022, section 3.1.3) reuses a threshold unchanged. The authors' code adjusts it in
    this way, which the paper does not mention. The defaults are the code's numbers for the local threshold of BERT.
    """

    low: float = 4 / 5
    """Share of k: if fewer elements are selected, the threshold is divided by `factor`."""

    high: float = 5 / 4
    """Share of k: if more elements are selected, the threshold is multiplied by `factor`."""

    factor: float = 1.025
    """The change of the threshold after one round."""

    def __post_init__(self) -> None:
        """Raise UsageError unless the adjustment leads towards k."""
        for name in ("low", "high", "factor"):  # exact floats, because ranks compare the `repr`
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
    """Gaussiank's threshold: mean + z std of `x`, where a normal distribution has density / 2 above z.

    That fit alone (Li, Hoefler, PPoPP 2022, table 1), but at least 0. With feedback it is adjusted in up to 20 steps,
    until about as many elements of `x` as wanted reach it. The paper's trainings (section 5.4) adjust it until more
    than 3/4 of k do; the authors' numbers for VGG are `Feedback(3 / 4, 5 / 4, 1.02)`. 0.0 for an empty `x`.
    """
    mean, deviation = _moments(x)
    threshold = max(mean - NormalDist().inv_cdf(density / 2) * deviation, 0.0)
    for _ in range(_ADJUSTMENTS if feedback else 0):
        last, threshold = threshold, adapted(threshold, select(x, threshold).size, density * x.size, feedback)
        if threshold == last:
            break
    return threshold


def _moments(x: Array) -> tuple[float, float]:
    """Mean and standard deviation, in float64 and two passes, so that no squares cancel. They may be infinite."""
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
    """The k-th largest magnitude of the values of all ranks, in O(1) words: a radix search by all ranks together.

        search = KthSearch(values, k)
        while not search.done:
            counts = search.counts()
            ...  # sum them over the ranks
            search.narrow(counts)
        search.threshold

    A round settles the next 8 bits, or 11 for a large k, for any number of ranks. There is one round if there are fewer
    than k values. The paper gathers all values instead (section 3.1.4; algorithm 1, line 10). k, at least 1, and the
    dtype are the same at all ranks; `values`, of any number, must not change until the search is over.
    """

    def __init__(self, values: Array, k: int) -> None:
        self._dtype = values.dtype
        self._bits = np.ascontiguousarray(_bits(values))
        self._k = k  # counted among the values that may be the k-th
        self._digit = _DIGIT if k < _MANY else _LONG_DIGIT
        self._open = 8 * values.itemsize - 1  # the number of low bits of the k-th magnitude that are not known yet
        self._known = 0  # the k-th magnitude, with those bits 0

    @property
    def done(self) -> bool:
        """Whether the search is over. It is over at all ranks after the same round."""
        return not self._open

    @property
    def threshold(self) -> float:
        """The k-th largest absolute value; 0.0 if fewer than k are not zero. Before `done`, a lower bound."""
        return _absolute(self._known, self._dtype)

    def counts(self) -> Array:
        """The number of this rank's remaining values for each value of the next digit, int64: 256 of them, or 2048."""
        counts = np.zeros(1 << self._digit, np.int64)
        used = counts[: 1 << self._open - self._shift]
        if _core.native is None:
            self._count_in_python(used)
        else:
            _core.native.count_magnitudes(self._bits, self._known, self._shift, used)
        return counts

    def narrow(self, totals: Array) -> None:
        """Settle the next digit. `totals` is the sum of all ranks' counts."""
        not_below = np.cumsum(totals[::-1])[::-1]
        # Only in the first round this can be: later ones have enough values.
        if not_below[0] < self._k:
            self._open = 0
            return
        digit = int(np.flatnonzero(not_below >= self._k)[-1])
        self._k -= int(not_below[digit] - totals[digit])
        self._open = self._shift
        self._known |= digit << self._open

    @property
    def _shift(self) -> int:
        return max(self._open - self._digit, 0)

    def _count_in_python(self, into: Array) -> None:
        for start in range(0, self._bits.size, _BLOCK):
            magnitudes = self._bits[start : start + _BLOCK] & np.iinfo(self._bits.dtype).max
            remaining = magnitudes[magnitudes >> self._open == self._known >> self._open]
            into += np.bincount(remaining >> self._shift & into.size - 1, minlength=into.size)


# -- regions -------------------------------------------------------------------------------------


def local_boundaries(indices: Array, size: int, count: int) -> Array:
    """The cuts of `count` elements into `size` regions that this rank proposes: int64, shape (size - 1,).

    `indices` are the elements that this rank selects, ascending. Each region has equally many of them, to within one
    (Li, Hoefler, PPoPP 2022, section 3.1.1): boundary j is number floor(j m / P) of these m. The authors' code takes
    number j floor(m / P), which leaves the rest to the last rank. With nothing selected, all regions are equally long.
    """
    cuts = np.arange(1, size, dtype=np.int64)
    if not indices.size:
        return cuts * count // size
    return indices[cuts * indices.size // size].astype(np.int64)


def consensus(total: Array, size: int, count: int) -> Array:
    """The edges of the regions, given the sum of all ranks' `local_boundaries`: int64, shape (size + 1,).

    Region j is [edges[j], edges[j + 1]), and may be empty. The edges ascend, as averages of ascending sequences do.
    """
    return np.concatenate([[0], total // size, [count]], dtype=np.int64)


# -- balance -------------------------------------------------------------------------------------


class MovedElements(NamedTuple):
    """Elements [start, stop) of this rank's, which go to `rank` or come from it."""

    rank: int
    start: int
    stop: int


def is_unbalanced(sizes: Array) -> bool:
    """Whether the largest of the ranks' `sizes`, int64, is more than 4 times the mean.

    Li, Hoefler, PPoPP 2022, section 5.3. With 4 ranks or fewer it never is.
    """
    return bool(sizes.max() * sizes.size > _IMBALANCE * sizes.sum())


def balanced_sizes(sizes: Array) -> Array:
    """The sizes after balancing: floor(total / P), and one more for the first total mod P ranks. int64, shape (P,)."""
    small, larger = divmod(int(sizes.sum()), sizes.size)
    return small + (np.arange(sizes.size, dtype=np.int64) < larger)


def outgoing_pieces(sizes: Array, rank: int) -> list[MovedElements]:
    """The pieces that `rank` sends, its own included, so that all ranks have `balanced_sizes`; in order, none empty.

    The concatenation of all ranks' elements in the order of ranks stays the same; only the cuts move.
    """
    return _overlaps(sizes, balanced_sizes(sizes), rank)


def incoming_pieces(sizes: Array, rank: int) -> list[MovedElements]:
    """The pieces that `rank` receives, to have `balanced_sizes(sizes)[rank]` elements; in order, none empty."""
    return _overlaps(balanced_sizes(sizes), sizes, rank)


def _overlaps(mine: Array, others: Array, rank: int) -> list[MovedElements]:
    """The pieces into which the cuts of `others` divide part `rank` of `mine`, counted from its start."""
    start = int(mine[:rank].sum())
    edges = np.clip(np.concatenate([[0], np.cumsum(others)]) - start, 0, mine[rank])
    return [MovedElements(other, *ends) for other, ends in enumerate(pairwise(edges.tolist())) if ends[0] < ends[1]]
