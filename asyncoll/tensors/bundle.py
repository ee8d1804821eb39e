"""A contribution of one tensor, or of several, as one flat array for each dtype.

So the buckets of a model share one round, which includes a rank for all of them or for none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.operands import Operand, as_operand
from asyncoll.tensors.reductions import Array, ReduceOp

_SHOWN = 64  # characters: a longer text is replaced by its digest


class Single:
    """A caller's tensor that needs no packing: it is reduced as the dtype that it has. Methods as of `Bundle`."""

    __slots__ = ("_operand", "layout")

    boundaries = ""

    def __init__(self, operand: Operand) -> None:
        self._operand = operand
        self.layout = ((operand.dtype, operand.flat.size),)

    def read(self, into: Iterable[Array]) -> None:
        (part,) = into
        part[...] = self._operand.flat

    def lend(self) -> list[Array] | None:
        return [self._operand.flat]

    def write(self, parts: Iterable[Array], divisor: int = 1) -> None:
        (values,) = parts
        flat = self._operand.flat
        if values is not flat:  # else it was lent, and the result is there already
            flat[...] = values
        if divisor != 1:
            reductions.divide(flat, self._operand.dtype, divisor)
        if self._operand.copied:
            self._operand.write_back()

    def like(self, parts: Iterable[Array], divisor: int = 1) -> Any:
        (values,) = parts
        flat = values.copy()
        if divisor != 1:
            reductions.divide(flat, self._operand.dtype, divisor)
        return self._operand.like(flat, self._operand.shape)


class Bundle:
    """The tensors of one call, packed by dtype in the order in which the dtypes first appear."""

    def __init__(self, operands: list[Operand], op: ReduceOp, *, alone: bool) -> None:
        self._operands = operands
        self._op = op
        self._alone = alone  # the caller gave a tensor, not a list
        self._packs: dict[str, list[Operand]] = {}
        for operand in operands:
            self._packs.setdefault(self._carried(operand), []).append(operand)

    def _carried(self, operand: Operand) -> str:
        """The dtype in which `operand` is packed."""
        return reductions.accumulator(self._op, operand.dtype)

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """(dtype, number of elements) of each array of `read`."""
        return tuple((dtype, sum(operand.flat.size for operand in pack)) for dtype, pack in self._packs.items())

    @property
    def boundaries(self) -> str:
        """The sizes of the tensors, and the dtypes of those that are packed in another; a digest, if that text is long.

        Empty for one tensor that is packed in its own dtype. Ranks compare it: the layout alone does not tell whether
        two ranks cut the same vector into the same tensors.
        """
        if len(self._operands) == 1 and self._carried(self._operands[0]) == self._operands[0].dtype:
            return ""
        sizes = "+".join(
            str(operand.flat.size) + f" {operand.dtype}" * (self._carried(operand) != operand.dtype)
            for operand in self._operands
        )
        return sizes if len(sizes) <= _SHOWN else f"{digest(sizes):x}"

    def read(self, into: Iterable[Array]) -> None:
        """Copy the tensors' values, packed, into these arrays."""
        for pack, part in zip(self._packs.values(), into, strict=True):
            flats = [self._packed(operand) for operand in pack]
            if len(flats) == 1:
                part[...] = flats[0]
            else:
                np.concatenate(flats, out=part)

    def _packed(self, operand: Operand) -> Array:
        return (
            operand.flat if self._carried(operand) == operand.dtype else reductions.widened(operand.flat, operand.dtype)
        )

    def lend(self) -> list[Array] | None:
        """The tensors' own memory, in the form of `read`; None if they would have to be packed or converted."""
        if any(len(pack) > 1 or dtype != pack[0].dtype for dtype, pack in self._packs.items()):
            return None
        return [pack[0].flat for pack in self._packs.values()]

    def write(self, parts: Iterable[Array], divisor: int = 1) -> None:
        """Put `parts`, divided by `divisor`, back into the tensors."""
        for operand, values in self._pieces(parts):
            if not np.may_share_memory(operand.flat, values):
                reductions.put(operand.flat, operand.dtype, values, divisor)
            elif divisor != 1:  # the round was reduced in the caller's own memory
                reductions.divide(operand.flat, operand.dtype, divisor)
            operand.write_back()

    def like(self, parts: Iterable[Array], divisor: int = 1) -> Any:
        """`parts`, divided by `divisor`, as new tensors of the caller's kind: one, or a list of them."""
        made = {}
        for operand, values in self._pieces(parts):
            flat = np.empty_like(operand.flat)
            reductions.put(flat, operand.dtype, values, divisor)
            made[id(operand)] = operand.like(flat, operand.shape)
        tensors = [made[id(operand)] for operand in self._operands]
        return tensors[0] if self._alone else tensors

    def _pieces(self, parts: Iterable[Array]) -> Iterator[tuple[Operand, Array]]:
        """Each operand with its piece of the array that it is packed in."""
        for pack, part in zip(self._packs.values(), parts, strict=True):
            ends = accumulate((operand.flat.size for operand in pack), initial=0)
            for operand, (start, end) in zip(pack, pairwise(ends), strict=True):
                yield operand, part[start:end]


def bundle(x: object, op: ReduceOp) -> Bundle | Single:
    """The tensor `x`, or the list or tuple of tensors `x`, as a bundle into which results can be written.

    Raises UsageError as `as_operand` does, and for an empty list.
    """
    if not isinstance(x, (list, tuple)):
        operand = as_operand(x, writable=True)
        if op is not ReduceOp.AVG or reductions.accumulator(op, operand.dtype) == operand.dtype:
            return Single(operand)
        return Bundle([operand], op, alone=True)
    if not x:
        raise UsageError("an empty list of tensors: pass at least one")
    return Bundle([as_operand(part, writable=True) for part in x], op, alone=False)
