"""Exchanges of one call with the neighbours of a rank in a graph: averages (D-PSGD) and push-sum (SGP).

Both use `Collectives.exchange`, which waits for the neighbours only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from asyncoll.algorithms.gossip.graphs import Graph
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.errors import UsageError
from asyncoll.tensors import device_operations, reductions
from asyncoll.tensors.operands import Operand, Resident, staged_parts
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.tensors.staged import Staged

_WEIGHT_BYTES = 8  # before the tensor in a message of push-sum; a multiple of the alignment of every dtype


def check_dtype(x: Operand | Resident, operation: str) -> None:
    """Raise UsageError unless elements of `x` can be divided."""
    if not reductions.is_divisible(x.dtype):
        raise UsageError(f"{operation} divides, and parts of {x.dtype} are not whole: convert to a float")


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

    def __init__(self, x: Operand | Resident, weight: Operand) -> None:
        """`weight` is one number of float64. Both keep their values until `take`."""
        self._resident = x if isinstance(x, Resident) else None
        self.operand = x.copied() if isinstance(x, Resident) else x
        self._weight = weight
        self._message = self._room()

    def _room(self) -> Array:
        return np.empty(_WEIGHT_BYTES + self.operand.flat.nbytes, np.uint8)

    @property
    def nbytes(self) -> int:
        """The size of the message."""
        return self._message.size

    @property
    def staged(self) -> Sequence[Staged]:
        """What has to arrive between `take` and `exchange`."""
        return staged_parts([self.operand])

    def take(self, parts: int) -> None:
        """Divide the rank's mass into `parts` equal parts: one stays in the operands, a copy of it is the message.

        A tensor of a device is divided there, so that its rank may go on with it at once.
        """
        if parts > 1:
            _divide(self._weight, parts)
            if self._resident is None:
                _divide(self.operand, parts)
            else:
                tensors = self._resident.source, self.operand.source
                self._resident.stager.queue(partial(device_operations.divide, parts=parts), *tensors)
        weight, tensor = self._split(self._message)
        weight[...] = self._weight.flat
        if self._resident is None:
            tensor[...] = self.operand.flat

    async def exchange(self, collectives: Collectives, graph: Graph) -> tuple[Array, float]:
        """Send the message to each destination. Returns the sums of the numerators and weights that came."""
        rank, size = collectives.rank, collectives.size
        sources = graph.sources(size, rank)
        if self._resident is not None:
            self._split(self._message)[1][...] = self.operand.flat
        incoming = [self._room() for _ in sources]
        await collectives.exchange(self._message, graph.destinations(size, rank), incoming, sources)
        if not incoming:
            return np.zeros_like(self.operand.flat), 0.0
        weights, tensors = zip(*map(self._split, incoming), strict=True)
        reductions.reducer(ReduceOp.SUM, self.operand.dtype)(tensors[0], tensors, 1)
        return tensors[0], float(sum(weight[0] for weight in weights))

    def _split(self, message: Array) -> tuple[Array, Array]:
        """The weight and the tensor of a message, as arrays over its memory."""
        return message[:_WEIGHT_BYTES].view(np.float64), message[_WEIGHT_BYTES:].view(self.operand.flat.dtype)


def _divide(operand: Operand, parts: int) -> None:
    reductions.divide(operand.flat, operand.dtype, parts)
    operand.write_back()
