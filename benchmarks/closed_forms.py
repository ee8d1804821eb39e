"""What our collectives take on a network where a message of m bytes takes alpha + m beta: closed forms.

`algorithms/` in formulas; headers included, computation free. A round by activation that rank k opens at A_k ends at
A_k + activation + allreduce, for whoever is activated last is in every result; one at a coordinator ends when its news
has come there and the result is everywhere. The allreduce is that of ranks which start together. Where P is no power of
two, or the reduction is a tree, the rank that starts last need not lie on its longest path, so these are upper bounds
there; queues at a link can add to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncoll.algorithms import coordinated, dense
from asyncoll.algorithms.tally import ATTENDANCE_BYTES
from asyncoll.bench.skewed import expected, half
from asyncoll.wire import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Model:
    """Closed forms among `ranks` ranks, in seconds."""

    ranks: int
    latency_s: float  # alpha
    bandwidth: float  # 1 / beta, bytes per second
    riding: int = 0  # bytes that go along with every message

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
        """Which one `dense.allreduce` takes for so many bytes of float32."""
        if size <= dense.DOUBLING_MAX_BYTES:
            return "tree" if self.ranks >= dense.TREE_MIN_RANKS and size <= dense.TREE_MAX_BYTES else "doubling"
        return "Rabenseifner" if size <= dense.RABENSEIFNER_MAX_BYTES else "ring"

    def tree(self, size: int) -> float:
        """A reduction up a k-nomial tree and a broadcast down it."""
        return 2 * self.fan(size, dense.TREE_RADIX)

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

        The last exchange of their hosts is with ranks that have lent nobody anything, and so are one step ahead, unless
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
        return self.ranks * size <= coordinated.COORDINATED_MAX_BYTES

    def coordinated(self, mode: str, size: int) -> float:
        """The arrival that opens the round goes to the coordinator, and the result from there to all.

        Who opens a majority's round is the coordinator; of another's it may be, by chance, and then is faster.
        """
        opener_is_drawn = mode == "majority" or self.ranks == 1
        told = 0.0 if opener_is_drawn else self.message(size + ATTENDANCE_BYTES)
        return told + self.fan(size + ATTENDANCE_BYTES * self.ranks, coordinated.RADIX)

    def activation(self) -> float:
        """A rank is told in as many hops as its distance has bits set: at most floor(log2 P); the papers say ceil."""
        return self._phases * self.message(0)

    def counted_allreduce(self, size: int) -> float:
        """The reduction of a round: the attendance list rides along with every message."""
        return replace(self, riding=ATTENDANCE_BYTES * self.ranks).allreduce(size)

    def round_algorithm(self, mode: str, size: int) -> str:
        return "coordinator" if mode != "full" and self.is_coordinated(size) else self.algorithm(size)

    @property
    def _phases(self) -> int:
        """floor(log2 P): the most bits that are set in any number below P."""
        return self.ranks.bit_length() - 1

    @property
    def _beyond(self) -> int:
        """How many ranks there are beyond the largest power of two."""
        return self.ranks - (1 << self._phases)


def openers(mode: str, ranks: int) -> list[int]:
    """The ranks that may open a round of skewed arrivals, all equally likely; rank r is the r-th to arrive."""
    if mode == "majority":
        return list(range(ranks))
    return [{"full": ranks, "quorum": half(ranks), "solo": 1}[mode] - 1]


def ceiling(mode: str, ranks: int) -> float | None:
    """How many times shorter than a full allreduce's the mean wait is with free communication; None: it is nothing."""
    skews = expected(mode, ranks)[0]
    return expected("full", ranks)[0] / skews if skews else None


def shown(ratio: float | None) -> str:
    return "no limit" if ratio is None else f"{ratio:.2f}"


def mean_wait(ranks: int, opened_by: list[int], skew_s: float, round_s: float) -> float:
    """Rank r comes r skews late, and waits until the round that rank k opened has taken `round_s`."""
    waits = [max(0.0, (k - r) * skew_s + round_s) for k in opened_by for r in range(ranks)]
    return sum(waits) / len(waits)
