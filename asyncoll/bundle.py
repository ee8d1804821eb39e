"""One tensor, or several that go together, as one flat array for each dtype.

The buckets of a model then share one round: it includes a rank for all of them or for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncoll import tensors
from asyncoll.errors import UsageError
from asyncoll.tensors import Array, Operand


@dataclass(frozen=True, slots=True)
class Bundle:
    """A caller's tensors."""

    operands: list[Operand]
    alone: bool  # the caller gave a tensor, and not a list

    @property
    def dtypes(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(operand.dtype for operand in self.operands))

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """(dtype, number of elements) of each array of `read`."""
        return tuple((dtype, sum(operand.flat.size for operand in self._of(dtype))) for dtype in self.dtypes)

    def read(self) -> list[Array]:
        """The tensors' values, packed into new arrays."""
        return [np.concatenate([operand.flat for operand in self._of(dtype)]) for dtype in self.dtypes]

    def write(self, parts: list[Array], divisor: int = 1) -> None:
        """Put `parts`, divided by `divisor`, back into the tensors."""
        for dtype, part in zip(self.dtypes, parts, strict=True):
            start = 0
            for operand in self._of(dtype):
                end = start + operand.flat.size
                operand.flat[...] = part[start:end]
                if divisor != 1:
                    tensors.divide(operand.flat, dtype, divisor)
                operand.write_back()
                start = end

    def like(self, parts: list[Array], divisor: int = 1) -> Any:
        """`parts`, divided by `divisor`, as new tensors of the caller's kind: one, or a list of them."""
        starts = dict.fromkeys(self.dtypes, 0)
        whole = {dtype: part.copy() for dtype, part in zip(self.dtypes, parts, strict=True)}
        for dtype, part in whole.items():
            if divisor != 1:
                tensors.divide(part, dtype, divisor)
        made = []
        for operand in self.operands:
            start = starts[operand.dtype]
            starts[operand.dtype] = end = start + operand.flat.size
            made.append(operand.like(whole[operand.dtype][start:end], operand.shape))
        return made[0] if self.alone else made

    def _of(self, dtype: str) -> list[Operand]:
        return [operand for operand in self.operands if operand.dtype == dtype]


def bundle(x: object) -> Bundle:
    """See `x`, a tensor or a list or tuple of tensors, as a bundle that results can go back into.

    Raises UsageError as `tensors.operand` does, and for an empty list.
    """
    if not isinstance(x, (list, tuple)):
        return Bundle([tensors.operand(x, writable=True)], alone=True)
    if not x:
        raise UsageError("an empty list of tensors: pass at least one")
    return Bundle([tensors.operand(part, writable=True) for part in x], alone=False)
