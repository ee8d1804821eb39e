"""Closed forms of the collectives' times, on a network where a message of m bytes takes alpha + m beta.

They describe `asyncoll/algorithms`; headers are included, computation is free. A round by activation that rank k opens
at A_k ends at A_k + activation + allreduce, because the rank that is activated last is in every result. A round at a
coordinator ends when the opening arrival has reached the coordinator and the result has reached all ranks. The
allreduce is that of ranks that start together. If P is no power of two, or if the reduction is a tree, the rank that
starts last need not be on the longest path, so the forms are upper bounds. Queues at a link can add to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncoll.algorithms.dense import by_size, on_lane
from asyncoll.algorithms.rounds import by_coordinator
from asyncoll.algorithms.rounds.tally import PARTICIPATION_BYTES
from asyncoll.bench.skewed import expected, half
from asyncoll.transport.wire import HEADER_BYTES, SEGMENT_BYTES


@dataclass(frozen=True, slots=True)
class Model:
    """Closed forms among `ranks` ranks, in seconds."""

    ranks: int
    latency_s: float  # alpha
    bandwidth: float  # 1 / beta, bytes per second
    riding: int = 0  # bytes of piggybacked metadata in every message

    def message(self, size: float) -> float:
        return self.latency_s + (size + self.riding + HEADER_BYTES) / self.bandwidth

    # -- reductions: the whole of it, from the moment when all ranks are there --------------------

    def allreduce(self, size: int) -> float:
        times = {
            "tree": self.tree,
            "doubling": self.doubling,
            "Rabenseifner": self.rabenseifner,
            "ring": self.ring,
        }
        return times[self.algorithm(size)](size) if self.ranks > 1 else 0.0

    def algorithm(self, size: int) -> str:
        """The algorithm that the dense allreduce takes for an array of `size` bytes of float32."""
        if size <= by_size.DOUBLING_MAX_BYTES:
            return "tree" if self.ranks >= by_size.TREE_MIN_RANKS and size <= by_size.TREE_MAX_BYTES else "doubling"
        return "Rabenseifner" if size <= by_size.RABENSEIFNER_MAX_BYTES else "ring"

    def allreduce_bytes(self, size: int) -> float:
        """Received by a rank, in the mean."""
        power, folded = 1 << self._phases, 2 * self._beyond * size
        if self.algorithm(size) == "doubling":
            return (power * self._phases * size + folded) / self.ranks
        if self.algorithm(size) == "Rabenseifner":
            return (2 * (power - 1) * size + folded) / self.ranks
        return 2 * size * (self.ranks - 1) / self.ranks

    def tree(self, size: int) -> float:
        """A reduction up a k-nomial tree and a broadcast down it."""
        return 2 * self.fan(size, on_lane.TREE_RADIX)

    def fan(self, size: int, radix: int) -> float:
        """From the root of a k-nomial tree to all, or back: at each level a parent takes its children in turn."""
        levels, span = 0.0, 1
        while span < self.ranks:
            children = min(radix, -(-self.ranks // span)) - 1
            levels += self.latency_s + children * (self.message(size) - self.latency_s)
            span *= radix
        return levels

    def doubling(self, size: int) -> float:
        """Exchanges of everything; the ranks beyond a power of two lend it before and get it back after.

        The last exchange of their hosts is with ranks that have not lent anything, and so are one step ahead, unless
        more than half of the power of two are hosts.
        """
        folds = 0 if not self._beyond else 1 if 2 * self._beyond <= 1 << self._phases else 2
        return (self._phases + folds) * self.message(size)

    def rabenseifner(self, size: int) -> float:
        """Halves, quarters, ... there and back; the ranks beyond a power of two as above."""
        halving = sum(self.message(size / 2**phase) for phase in range(1, self._phases + 1))
        folds = 2 if self._beyond else 0
        return 2 * halving + folds * self.message(size)

    def ring(self, size: int) -> float:
        return 2 * (self.ranks - 1) * self.message(size / self.ranks)

    # -- rounds: from the arrival that opens them -------------------------------------------------

    def round(self, mode: str, size: int) -> float:
        """From the arrival that lets a call of `mode` go on to its last rank's result."""
        if mode == "full":
            return self.allreduce(size)
        if self.is_coordinated(size):
            return self.coordinated(mode, size)
        told = self.message(0) if mode == "quorum" and self.ranks > 1 else 0.0  # the drawn rank counts arrivals
        return told + self.activation() + self.counted_allreduce(size)

    def is_coordinated(self, size: int) -> bool:
        return self.ranks * size <= by_coordinator.COORDINATED_MAX_BYTES

    def coordinated(self, mode: str, size: int) -> float:
        """The arrival that opens the round goes to the coordinator, and the result from there to all.

        Who opens a majority's round is the coordinator; of another's it may be, by chance, and then is faster.
        """
        opener_is_drawn = mode == "majority" or self.ranks == 1
        told = 0.0 if opener_is_drawn else self.message(size + PARTICIPATION_BYTES)
        return told + self.fan(size + PARTICIPATION_BYTES * self.ranks, by_coordinator.RADIX)

    def activation(self) -> float:
        """A rank is told in as many hops as its distance has bits set: at most floor(log2 P); the papers say ceil."""
        return self._phases * self.message(0)

    def counted_allreduce(self, size: int) -> float:
        """The reduction of a round: every message carries the participation list."""
        return replace(self, riding=PARTICIPATION_BYTES * self.ranks).allreduce(size)

    def round_algorithm(self, mode: str, size: int) -> str:
        return "coordinator" if mode != "full" and self.is_coordinated(size) else self.algorithm(size)

    @property
    def _phases(self) -> int:
        """floor(log2 P): the most bits that are set in any number below P."""
        return self.ranks.bit_length() - 1

    @property
    def _beyond(self) -> int:
        """The number of ranks beyond the largest power of two."""
        return self.ranks - (1 << self._phases)


def openers(mode: str, ranks: int) -> list[int]:
    """The ranks that may open a round of skewed arrivals, all equally likely; rank r is the r-th to arrive."""
    if mode == "majority":
        return list(range(ranks))
    return [{"full": ranks, "quorum": half(ranks), "solo": 1}[mode] - 1]


def ceiling(mode: str, ranks: int) -> float | None:
    """The mean wait of a full allreduce over this mode's, with free communication. None if this mode does not wait."""
    skews = expected(mode, ranks)[0]
    return expected("full", ranks)[0] / skews if skews else None


def shown(ratio: float | None) -> str:
    return "no limit" if ratio is None else f"{ratio:.2f}"


def mean_wait(ranks: int, opened_by: list[int], skew_s: float, round_s: float) -> float:
    """Rank r comes r skews late, and waits until the round that rank k opened has taken `round_s`."""
    waits = [max(0.0, (k - r) * skew_s + round_s) for k in opened_by for r in range(ranks)]
    return sum(waits) / len(waits)


# -- sparse allreduces ----------------------------------------------------------------------------

_WORD, _COUNT, _PAIR = 4, 8, 8  # bytes: of a float32; of an int64; of an int32 and a float32
_HISTOGRAM, _HISTOGRAMS = 256 * 4, 4  # bytes of one, and how many settle the 31 bits of a float32's magnitude


class Phase(NamedTuple):
    """A collective that every rank takes part in, with so many bytes of each rank, or for each of them."""

    collective: str
    size: float
    is_control: bool = False  # counts, boundaries, histograms: no elements
    share: float = 1.0  # of the rounds


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sparse allreduces of `elements` float32: words received by a rank, in the mean, and seconds in a mean round.

    Every rank chooses k elements; `union` of the elements are chosen by any, and evenly spread, so nothing is balanced.
    """

    links: Model
    elements: int
    k: float
    union: float
    thresholds_every: int = 1
    regions_every: int = 1

    def words(self, method: str, *, of_control: bool = False) -> float:
        return sum(
            phase.share * self._bytes(phase.collective, phase.size) / _WORD
            for phase in self.phases(method)
            if phase.is_control or not of_control
        )

    def seconds(self, method: str) -> float:
        return sum(phase.share * self._seconds(phase.collective, phase.size) for phase in self.phases(method))

    def phases(self, method: str) -> list[Phase]:
        """The phases of `asyncoll.algorithms.sparse.oktopk` and its baselines, one after another."""
        ranks = self.links.ranks
        sizes = Phase("allgather", _COUNT, is_control=True)
        dealt = [Phase("alltoall", _COUNT, is_control=True), Phase("alltoall", _PAIR * self.k / ranks)]
        if method == "oktopk":
            return [
                Phase("allreduce", _COUNT * (ranks - 1), True, 1 / self.regions_every),
                *dealt,
                Phase("allreduce", _HISTOGRAM, True, _HISTOGRAMS / self.thresholds_every),
                sizes,
                Phase("allgather", _PAIR * self.k / ranks),
            ]
        if method == "topkdsa":
            gathered = min(_PAIR * self.union, _WORD * self.elements)
            return [*dealt, sizes, Phase("allgather", gathered / ranks)]
        if method == "gtopk":
            heads = [Phase("head", _COUNT, is_control=True)] * 2
            return [*heads, Phase("climb", _PAIR * self.k), Phase("broadcast", _PAIR * self.k)]
        if method == "dense":
            return [sizes, Phase("allreduce", _WORD * self.elements)]
        return [sizes, Phase("allgather", _PAIR * self.k)]

    def _bytes(self, collective: str, size: float) -> float:
        """Received by a rank, in the mean."""
        others = self.links.ranks - 1
        if collective in ("alltoall", "allgather"):
            return others * size
        if collective == "allreduce":
            return self.links.allreduce_bytes(int(size))
        scattered = size / self.links.ranks if collective == "broadcast" and self._scatters(size) else 0.0
        return (size + scattered) * others / self.links.ranks

    def _seconds(self, collective: str, size: float) -> float:
        if collective == "allreduce":
            return self.links.allreduce(int(size))
        times = {
            "alltoall": self._alltoall,
            "allgather": self._allgather,
            "head": self._head,
            "climb": self._climb,
            "broadcast": self._broadcast,
        }
        return times[collective](size)

    def _alltoall(self, size: float) -> float:
        """Messages follow each other at once while no more than a few are under way; a long one waits for its grant."""
        message, steps = self.links.message(size), self.links.ranks - 1
        occupied = message - self.links.latency_s
        if size > SEGMENT_BYTES:
            return steps * (self._grant(size) + occupied) + self.links.latency_s
        return message + (steps - 1) * max(occupied, message / on_lane.ALLTOALL_AHEAD)

    def _allgather(self, size: float) -> float:
        ranks = self.links.ranks
        if ranks * size > by_size.SMALL_MAX_BYTES:
            return (ranks - 1) * self.links.message(size) + self._grant(size)
        shifts = [1 << phase for phase in range((ranks - 1).bit_length())]
        return sum(self.links.message(min(have, ranks - have) * size) for have in shifts)

    def _head(self, size: float) -> float:
        """The time of the message with the length of the next one in the tree; only a long array waits for it."""
        follows_at_once = _PAIR * self.k <= SEGMENT_BYTES
        return self._levels * (self.links.message(size) - self.links.latency_s * follows_at_once)

    def _climb(self, size: float) -> float:
        return self._levels * (self.links.message(size) + self._grant(size))

    def _broadcast(self, size: float) -> float:
        if not self._scatters(size):
            return self._levels * self.links.message(size)
        chunk = size / self.links.ranks
        scatter = self.links.latency_s + (self.links.ranks - 1) * (self.links.message(chunk) - self.links.latency_s)
        return scatter + self._grant(chunk) + self._allgather(chunk)

    def _scatters(self, size: float) -> bool:
        return size > by_size.SMALL_MAX_BYTES and self.links.ranks > 2

    def _grant(self, size: float) -> float:
        """The time that a long array waits for the grant of its receiver."""
        return self.links.message(0) if size > SEGMENT_BYTES else 0.0

    @property
    def _levels(self) -> int:
        return (self.links.ranks - 1).bit_length()


def overlapped(links: Model, bucket: int, ready_s: list[float]) -> float:
    """The time at which the last bucket is reduced, if buckets of these bytes are ready at these times."""
    end_s = 0.0
    for start_s in ready_s:
        end_s = max(start_s, end_s) + links.allreduce(bucket)
    return end_s
