"""How a contribution lies in a block."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.tensors.reductions import storage

_ALIGNED = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the parts of a contribution are in a block."""

    offsets: tuple[int, ...]  # of its parts
    lengths: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, operation: Operation) -> BlockLayout:
        lengths = tuple(count * storage(dtype).itemsize for dtype, count in operation.layout)
        ends = tuple(accumulate((-(-length // _ALIGNED) * _ALIGNED for length in lengths), initial=0))
        return cls(ends[:-1], lengths, max(ends[-1], _ALIGNED))
