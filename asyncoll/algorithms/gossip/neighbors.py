"""Exchanges of one call with the neighbours of a rank in a graph: averages (D-PSGD) and push-sum (SGP).

Both use `Collectives.exchange`, which waits for the neighbours only.
"""

from __future__ import annotations

import numpy as np

from asyncoll.algorithms.backend import Collectives
from asyncoll.algorithms.gossip.graphs import Graph
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import Operand
from asyncoll.tensors.reductions import Array, ReduceOp

_WEIGHT_BYTES = 8  # before the tensor in a message of push-sum; a multiple of the alignment of every dtype


def check_dtype(operand: Operand, operation: str) -> None:
    """Raise UsageError unless elements of `operand` can be divided."""
    if not reductions.is_divisible(operand.dtype):
        raise UsageError(f"{operation} divides, and parts of {operand.dtype} are not whole: convert to a float")


async def average(collectives: Collectives, x: Array, dtype: str, graph: Graph) -> None:
    """Replace `x` by the mean of this rank's and its sources', in the order of ranks."""
    rank, size = collectives.rank, collectives.size
    sources = graph.sources(size, rank)
    incoming = [np.empty_like(x) for _ in sources]
    await collectives.exchange(x, graph.destinations(size, rank), incoming, sources)
    by_rank = dict(zip(sources, incoming, strict=True)) | {rank: x}
    arrays = [by_rank[each] for each in sorted(by_rank)]
    reductions.reducer(ReduceOp.AVG, dtype)(arrays[0], arrays, len(arrays))
    if arrays[0] is not x:
        x[...] = arrays[0]


class Push:
    """The mass of one rank in one call of push-sum: what it sends, and what it receives.

    Mass is a numerator, which is a tensor, and a weight. A message has the weight first, then the tensor.
    """

    def __init__(self, operand: Operand, weight: Operand) -> None:
        """`weight` is one number of float64. Both keep their values until `take`."""
        self._operand = operand
        self._weight = weight
        self._message = self._room()

    def _room(self) -> Array:
        return np.empty(_WEIGHT_BYTES + self._operand.flat.nbytes, np.uint8)

    @property
    def nbytes(self) -> int:
        """The size of the message."""
        return self._message.size

    def take(self, parts: int) -> None:
        """Divide the rank's mass into `parts` equal parts: one stays in the operands, a copy of it is the message."""
        for operand, copy in zip((self._weight, self._operand), self._split(self._message), strict=True):
            if parts > 1:
                reductions.divide(operand.flat, operand.dtype, parts)
                operand.write_back()
            copy[...] = operand.flat

    async def exchange(self, collectives: Collectives, graph: Graph) -> tuple[Array, float]:
        """Send the message to each destination. Returns the sums of the numerators and weights that came."""
        rank, size = collectives.rank, collectives.size
        sources = graph.sources(size, rank)
        incoming = [self._room() for _ in sources]
        await collectives.exchange(self._message, graph.destinations(size, rank), incoming, sources)
        if not incoming:
            return np.zeros_like(self._operand.flat), 0.0
        weights, tensors = zip(*map(self._split, incoming), strict=True)
        reductions.reducer(ReduceOp.SUM, self._operand.dtype)(tensors[0], tensors, 1)
        return tensors[0], float(sum(weight[0] for weight in weights))

    def _split(self, message: Array) -> tuple[Array, Array]:
        """The weight and the tensor of a message, as arrays over its memory."""
        return message[:_WEIGHT_BYTES].view(np.float64), message[_WEIGHT_BYTES:].view(self._operand.flat.dtype)
