"""A world of sparse allreduces, the record of what they gave, and the laws of that.

All ranks carry out the rounds of two operations at once, each with options of its own. A rank keeps what is left of an
accumulator, and adds to it for the next round. In some rounds some ranks have NaN or infinity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncoll.algorithms.sparse.selection import Feedback, select
from asyncoll.algorithms.sparse.sparse_operations import ALGORITHMS
from asyncoll.communicator import Communicator
from asyncoll.errors import NonFiniteError
from asyncoll.tensors.reductions import BFLOAT16, Array
from asyncoll.testing.laws.dense_program import decoded, encoded
from asyncoll.testing.laws.layouts import laid_out, stored
from asyncoll.testing.laws.rounds import Breach
from asyncoll.testing.laws.story import Case, CaseRank, WorldStory

_ROUNDS = 5
_OPERATIONS = 2
_DTYPES = ("float32", "float32", "float64", "float16", BFLOAT16)
_COUNTS = (0, 1, 2, 7, 40, 333, 3000, 70_000)
_DENSITIES = (1.0, 0.3, 0.02, 0.001)
_USED = {  # options, beside those of all
    "oktopk": ("thresholds_every", "regions_every", "feedback", "global_threshold"),
    "gaussiank": ("feedback",),
}
_LOSING = "gtopk"  # drops partial sums, and reports them
_CHOOSING = [name for name in ALGORITHMS if name != "dense"]  # which gives all elements


@dataclass(frozen=True, slots=True)
class Drawn:
    """One operation, the same at all ranks."""

    index: int
    dtype: str
    shape: tuple[int, ...]
    options: dict[str, Any]  # of `sparse_allreduce`
    kinds: tuple[int, ...]  # by round: which of `_KINDS` the added values are
    culprits: tuple[tuple[int, ...], ...]  # by round: the ranks whose accumulator is not finite

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def algorithm(self) -> str:
        return str(self.options["algorithm"])

    def __str__(self) -> str:
        names = ("algorithm", "density", *_USED.get(self.algorithm, ()))
        options = {name: self.options[name] for name in names}
        return f"operation {self.index}, {options} of {self.dtype}{list(self.shape)}"


class SparseProgram:
    """The operations of all ranks."""

    def __init__(self, case: Case) -> None:
        self._case = case
        draw = np.random.default_rng([case.seed, case.size])
        self.operations = [self._operation(draw, index) for index in range(_OPERATIONS)]

    def _operation(self, draw: np.random.Generator, index: int) -> Drawn:
        def one_of(*values: Any) -> Any:
            return values[draw.integers(len(values))]

        count = one_of(*_COUNTS)
        shape = one_of((count,), (count // 3, 3))
        drawn = one_of("oktopk", *ALGORITHMS)
        options = {
            "name": f"operation {index}",
            "algorithm": self._case.method_name or drawn,
            "density": one_of(*_DENSITIES),
            "thresholds_every": one_of(1, 1, 3, 32),
            "regions_every": one_of(1, 2, 64),
            "feedback": one_of(None, None, Feedback(), Feedback(3 / 4, 5 / 4, 1.3)),
            "global_threshold": one_of("auto", "histogram", "allgather"),
        }
        culprits = [
            tuple(draw.choice(self._case.size, 1 + draw.integers(self._case.size), replace=False).tolist())
            if np.prod(shape) and draw.random() < 1 / 5
            else ()
            for _ in range(_ROUNDS)
        ]
        kinds = tuple(draw.integers(len(_KINDS), size=_ROUNDS).tolist())
        return Drawn(index, one_of(*_DTYPES), shape, options, kinds, tuple(culprits))

    def added(self, operation: Drawn, number: int, rank: int) -> Array:
        """What `rank` adds to its accumulator for a round: float64."""
        shared = np.random.default_rng([self._case.seed, operation.index, number])
        own = np.random.default_rng([self._case.seed, operation.index, number, rank])
        return _KINDS[operation.kinds[number]](shared, own, operation.shape)


# What ranks add: given generators of all ranks and of one, and a shape.
_Kind = Callable[[np.random.Generator, np.random.Generator, tuple[int, ...]], Array]
_KINDS: tuple[_Kind, ...] = (
    lambda shared, own, shape: own.standard_normal(shape),
    lambda shared, own, shape: own.standard_normal(shape),
    lambda shared, own, shape: np.zeros(shape),
    lambda shared, own, shape: own.standard_normal(shape) * own.integers(2),  # zeros at some ranks
    lambda shared, own, shape: np.full(shape, 3.0),
    lambda shared, own, shape: own.integers(-2, 3, shape).astype(float),  # many are equal
    lambda shared, own, shape: own.standard_normal(shape) * 10.0 ** shared.integers(-7, 4),
    lambda shared, own, shape: shared.standard_normal(shape) * (-1) ** own.integers(2),  # which cancel out
    lambda shared, own, shape: own.standard_normal(shape) * (shared.random(shape) < 0.01) * 100,  # in few places
)


@dataclass(frozen=True, slots=True, repr=False)
class SumGot:
    """The sum of a round, as a rank got it."""

    round: int
    selected: int
    thresholds: tuple[float, float]  # of this rank, and of the sums
    indices: Array
    values: Array
    included: Array
    lost_indices: Array
    lost_values: Array


@dataclass(frozen=True, slots=True, repr=False)
class RoundGot:
    """What a round gave to a rank: a sum, or a NonFiniteError."""

    operation: int
    number: int  # of the round, from 0 on
    before: Array  # the accumulator
    after: Array
    refused: list[int]  # the ranks that the error names
    sum: SumGot | None = None

    @property
    def round(self) -> int:
        """The number that the operation gives it; 0 if it was refused."""
        return self.sum.round if self.sum else 0


@dataclass(frozen=True, slots=True)
class SparsePart:
    """What one rank did."""

    gots: list[RoundGot]


SparseStory = WorldStory[SparseProgram, SparsePart]


class SparseCaller(CaseRank):
    """One rank of a case."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        super().__init__(comm, case, case.size)
        self._program = SparseProgram(case)
        self._left = [np.zeros(operation.shape) for operation in self._program.operations]

    async def run(self) -> SparsePart:
        gots: list[RoundGot] = []
        for number in range(_ROUNDS):
            await self._compute()
            gots += await asyncio.gather(*(self._begin(operation, number) for operation in self._program.operations))
        return SparsePart(gots)

    def _begin(self, operation: Drawn, number: int) -> Coroutine[Any, Any, RoundGot]:
        """Make a call now."""
        rank = self._comm.rank
        before = encoded(self._left[operation.index] + self._program.added(operation, number, rank), operation.dtype)
        if rank in operation.culprits[number]:
            bad = decoded(before, operation.dtype)
            bad.flat[: 1 + rank] = np.nan if number % 2 else -np.inf
            before = encoded(bad, operation.dtype)
        x = laid_out(self._comm, self._generator, before, operation.dtype)
        work = self._comm.sparse_allreduce(x, **operation.options)

        async def end() -> RoundGot:
            index = operation.index
            try:
                found = await work
            except NonFiniteError as error:
                after = stored(x)
                self._left[index] = np.nan_to_num(decoded(after, operation.dtype), posinf=0, neginf=0)
                return RoundGot(index, number, before, after, list(error.ranks))
            after = stored(x)
            self._left[index] = decoded(after, operation.dtype)
            thresholds = (found.threshold_local, found.threshold_global)
            arrays = (found.indices, found.values, found.included, found.lost_indices, found.lost_values)
            total = SumGot(found.round, found.selected, thresholds, *map(stored, arrays))
            return RoundGot(index, number, before, after, [], total)

        return end()


# -- the laws ------------------------------------------------------------------------------------


def _rounds(story: SparseStory) -> Iterator[tuple[Drawn, list[RoundGot]]]:
    """The rounds of all operations, each as it was at all ranks."""
    for gots in zip(*(part.gots for part in story.parts), strict=True):
        yield story.program.operations[gots[0].operation], list(gots)


def refusal(story: SparseStory) -> Iterator[Breach]:
    """A round fails at all ranks if an accumulator is not finite, and names only ranks with such a one."""
    for operation, gots in _rounds(story):
        culprits = operation.culprits[gots[0].number]
        for rank, got in enumerate(gots):
            if bool(got.refused) != bool(culprits) or not set(got.refused) <= set(culprits):
                yield Breach(got.round, rank, f"{operation} refused {got.refused}, and {culprits} are not finite")


def agreement(story: SparseStory) -> Iterator[Breach]:
    """All ranks get the same round and the same sum, to the bit."""
    for operation, gots in _rounds(story):
        first = _bits(gots[0].sum)
        for rank, got in enumerate(gots):
            if _bits(got.sum) != first:
                yield Breach(got.round, rank, f"{operation} gave another sum than at rank 0")


def _bits(total: SumGot | None) -> tuple[object, ...]:
    """What all ranks must have alike."""
    if total is None:
        return ()
    return total.round, total.thresholds[1], total.indices.tobytes(), total.values.tobytes()


def residual(story: SparseStory) -> Iterator[Breach]:
    """An accumulator is 0 where its values are in the sum, and keeps its bits elsewhere."""
    for operation, gots in _rounds(story):
        for rank, got in enumerate(gots):
            kept = got.before.copy()
            if got.sum is not None:
                kept.reshape(-1)[got.sum.included] = 0
                if not np.isin(got.sum.included, got.sum.indices, assume_unique=True).all():
                    yield Breach(got.round, rank, f"{operation} cleared elements that are not in the sum")
            if got.after.tobytes() != kept.tobytes():
                yield Breach(got.round, rank, f"{operation} left another accumulator")


def choice(story: SparseStory) -> Iterator[Breach]:
    """A rank gives its k largest elements, or those that reach a threshold, and the sums reach the global threshold.

    Algorithms of the program's own give what they like.
    """
    for operation, gots in _rounds(story):
        for rank, got in enumerate(gots):
            if (total := got.sum) is None or operation.algorithm not in _CHOOSING:
                continue
            reached = select(_wide(got.before, operation).reshape(-1), total.thresholds[0])
            k = max(1, round(operation.options["density"] * operation.count))
            most = reached.size if operation.algorithm in ("gaussiank", "oktopk") else min(reached.size, k)
            is_reused = operation.algorithm == "oktopk" and operation.options["thresholds_every"] > 1
            if total.selected > most or (not is_reused and total.selected < min(most, k) and most):
                what = f"{operation} selected {total.selected} elements, of {reached.size}, k {k}"
                yield Breach(got.round, rank, what)
            if not np.isin(total.included, reached.indices, assume_unique=True).all():
                yield Breach(got.round, rank, f"{operation} gave elements below {total.thresholds[0]}")
            if (np.abs(total.values) < total.thresholds[1]).any():
                yield Breach(got.round, rank, f"{operation} has sums below {total.thresholds[1]}")


def _wide(x: Array, operation: Drawn) -> Array:
    """The values of `x` in the dtype of sums."""
    return decoded(x, operation.dtype).astype("f8" if operation.dtype == "float64" else "f4")


def conservation(story: SparseStory) -> Iterator[Breach]:
    """At every element the accumulators before add up to the result and those after.

    And to the lost parts that gTopk reports.
    """
    for operation, gots in _rounds(story):
        sums = [got.sum for got in gots if got.sum is not None]
        if not sums:
            continue
        befores, afters = ([_wide(x, operation).reshape(-1).astype("f8") for x in xs] for xs in _accumulators(gots))
        total = np.sum(afters, axis=0)
        np.add.at(total, sums[0].indices, sums[0].values)
        for each in sums:
            np.add.at(total, each.lost_indices, each.lost_values)
            if each.lost_indices.size and operation.algorithm != _LOSING:
                yield Breach(each.round, 0, f"{operation} has lost elements")
        info = np.finfo("f8" if operation.dtype == "float64" else "f4")
        bound = len(gots) * (2 * float(info.eps) * np.sum(np.abs(befores), axis=0) + float(info.smallest_subnormal))
        if (np.abs(total - np.sum(befores, axis=0)) > bound).any():
            yield Breach(gots[0].round, 0, f"{operation} did not keep the sum of all accumulators")


def _accumulators(gots: list[RoundGot]) -> tuple[list[Array], list[Array]]:
    return [got.before for got in gots], [got.after for got in gots]


LAWS: tuple[Callable[[SparseStory], Iterator[Breach]], ...] = (refusal, agreement, residual, choice, conservation)
