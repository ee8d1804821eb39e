"""What a sparse algorithm of a program's own is made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse.baselines import gathered_sum
from asyncoll.algorithms.sparse.parts import Chosen, SparseOutcome, common, nothing
from asyncoll.algorithms.sparse.selection import Part, index_dtype, select
from asyncoll.algorithms.sparse.steps import refusal, tell_sizes
from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array


class SparseAlgorithm(ABC):
    """A sparse allreduce of a program's own: which elements a rank gives, and how the ranks add them up.

    There is one instance for each name of an operation at each rank. Attributes: `count`, the number of elements; `k`,
    how many of them `density` asks for; `round`, the number of rounds that are over, which checkpoints keep. The
    library refuses NaN and infinity at all ranks, clears what is in the sum, and keeps the rest in the accumulator.
    """

    def __init__(self, count: int, k: int) -> None:
        self.count = count
        self.k = k
        self.round = 0

    @abstractmethod
    def select(self, x: Array) -> Array:
        """The indices of the elements to give, as integers in any order, each at most once. Other ones: UsageError.

        `x` is the accumulator, finite, flat, float32 or float64, and not empty. It is only read. Sends nothing.
        """

    async def exchange(self, collectives: Collectives, given: Part) -> Part:
        """The sum over all ranks of what each has `given`: the same bits at every rank, indices ascending.

        `Part(indices, values)` has the selected elements, ascending. By default every rank gathers all parts. Another
        one awaits methods of `collectives` only, such as `allreduce(values, asyncoll.SUM, values.dtype.name)`, which
        works in place, the same ones at every rank. Also called where `x` is empty, unlike `select`. The result has the
        dtypes of `given`; UsageError if it is no `Part`, has other dtypes or lengths, or indices that are not
        ascending, repeat, or are not below `count`.
        """
        return await gathered_sum(collectives, given, self.count)

    # -- as a `SparseMethod` ----------------------------------------------------------------------

    def wanted(self) -> None:
        return None  # `select` sees all elements

    def choose(self, x: Array) -> Chosen:
        bad = select(x, np.inf)
        if bad.size:
            return Chosen(bad, np.inf)
        found = np.asarray(self.select(x)) if x.size else np.empty(0, np.int64)
        indices = np.sort(found, axis=None)
        if found.dtype.kind not in "iu" or not _are_indices(indices, x.size):
            raise UsageError(
                f"{type(self).__name__}.select has to return indices below {x.size}, each at most once, "
                f"got {found!r:.80}"
            )
        indices = indices.astype(index_dtype(x.size))
        return Chosen(Part(indices, x[indices]), 0.0)

    async def reduce(self, collectives: Collectives, chosen: Chosen) -> SparseOutcome:
        await tell_sizes(collectives, chosen.part.size if chosen.is_finite else refusal(collectives.rank))
        total = self._checked(await self.exchange(collectives, chosen.part), chosen.part)
        self.round += 1
        return SparseOutcome(total, common(chosen.part.indices, total.indices), 0.0, nothing(total))

    def _checked(self, total: object, given: Part) -> Part:
        """The result of `exchange`. Raises UsageError unless it is a sum that `given` can be a part of."""
        index, value = given.indices.dtype, given.values.dtype
        if isinstance(total, Part) and all(isinstance(array, np.ndarray) and array.ndim == 1 for array in total):
            got = f"{total.indices.size} of {total.indices.dtype} and {total.values.size} of {total.values.dtype}"
            is_typed = (total.indices.dtype, total.values.dtype) == (index, value)
            if is_typed and total.size == total.values.size and _are_indices(total.indices, self.count):
                return total
            got += f", indices {total.indices!r:.80}"
        else:
            got = f"{total!r:.80}"
        raise UsageError(
            f"{type(self).__name__}.exchange has to return a Part of ascending {index} indices below {self.count}, "
            f"each at most once, and as many values of {value}, got {got}"
        )

    def state(self) -> dict[str, Any]:
        return {"round": self.round}

    def restore(self, state: dict[str, Any]) -> None:
        self.round = state["round"]


def _are_indices(ascending: Array, count: int) -> bool:
    """Whether the integers are indices of `count` elements, ascending, each at most once."""
    if not ascending.size:
        return True
    return bool(ascending[0] >= 0 and ascending[-1] < count and (ascending[1:] > ascending[:-1]).all())
