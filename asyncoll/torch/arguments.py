"""The arguments of the calls of a process group: checked, and as blocks of memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from asyncoll.errors import UsageError
from asyncoll.tensors.operands import check_writable
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch.errors import of_torch
from asyncoll.torch.memory import Block, Row, copyable, cut, outputs_of, reducible, row_of, writable
from asyncoll.torch.reduce_ops import contribution


def only(tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """The tensor of a call that takes one: it may be in a list. Raises UsageError if there are others, or none."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"the call got {len(tensors)} tensors, or lists of them: pass exactly one")
    return tensors[0]


def row(given: Any) -> Sequence[Tensor]:
    """The tensors of a call by rank, which may be in a list that contains their list."""
    return given[0] if given and isinstance(given[0], (list, tuple)) else given


def integer(given: Any, what: str) -> int:
    """`given` as an int. Raises UsageError if it is none."""
    try:
        return operator.index(given)
    except TypeError:
        raise UsageError(f"{what} is an integer, not {given!r}") from None


def pairs(ones: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The inputs and outputs of the calls that are made in one. Raises UsageError if one of them lacks its other."""
    if not ones or len(ones) != len(others):
        raise UsageError(f"{len(ones)} and {len(others)} inputs and outputs: pass at least one, and one for each other")
    return list(zip(ones, others, strict=True))


def by_tensor(rows: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """The lists of tensors of each rank, as lists of each tensor by rank. Raises UsageError if their lengths differ."""
    if len({len(tensors) for tensors in rows}) > 1:
        raise UsageError(f"lists of {[len(tensors) for tensors in rows]} outputs: pass as many for each rank")
    return list(zip(*rows, strict=True))


def in_place(block: Block) -> Block:
    """`block`, if a result can be put into its tensor. Raises UsageError otherwise."""
    if block.copied:
        check_writable(block.tensor)
    return block


class Arguments:
    """Checks and converts the arguments of one group at one rank. The methods raise UsageError."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def root(self, opts: Any) -> int:
        """The root of a call with these options."""
        root = int(opts.rootRank)
        if not 0 <= root < self.size:
            raise UsageError(f"the root {root} is not one of the ranks 0 to {self.size - 1} of the group")
        return root

    def peer(self, given: Any) -> int:
        """The rank `given`, if it is another one of the group."""
        rank = integer(given, "a rank")
        if rank == self.rank:
            raise UsageError(
                f"a message from rank {rank} of the group to itself: leave its send and its receive out, also of "
                "batch_isend_irecv, and copy the tensor, as in received.copy_(sent)"
            )
        if not 0 <= rank < self.size:
            raise UsageError(f"the rank {rank} is not one of the ranks 0 to {self.size - 1} of the group")
        return rank

    def part(self, ranks: Sequence[int]) -> list[int]:
        """`ranks`, if they are different ones of the group."""
        ranks = [integer(rank, "a rank") for rank in ranks]
        if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(self.size)):
            raise UsageError(f"{ranks} are not different ranks of the group of {self.size}")
        return ranks

    def scattered(
        self, output: Tensor, given: Sequence[Tensor] | Tensor, op: ReduceOp, factor: Any
    ) -> tuple[Row, Block]:
        """The inputs and the output of a reduce_scatter. `given` is an input for each rank, or one that is cut."""
        into = in_place(reducible(output))
        if isinstance(given, Tensor):
            self._same(given, output)
            parts = (f"{self.size} outputs", self.size * output.numel())
            self._fit("reduce_scatter", ("the input", given.numel()), parts)
            return cut(contribution(given, op, factor, fresh=True), [into.flat.size] * self.size), into
        self.check_row(given, "inputs", output)
        mine = given[self.rank]
        self._fit("reduce_scatter", (f"input {self.rank}", mine.numel()), ("the output", output.numel()))
        return row_of([contribution(x, op, factor, fresh=True) for x in given]), into

    def gathered(self, x: Tensor, into: Sequence[Tensor] | Tensor, call: str = "all_gather") -> tuple[Block, Row]:
        """The input and the outputs of an all_gather. `into` is an output for each rank, or one that is cut."""
        if isinstance(into, Tensor):
            self._same(x, into)
            parts = (f"{self.size} inputs", self.size * x.numel())
            self._fit(call, ("the output", into.numel()), parts)
            given = copyable(x)
            return given, cut(writable(into), [given.flat.size] * self.size)
        self.check_row(into, "outputs", x)
        mine = into[self.rank]
        self._fit(call, (f"output {self.rank}", mine.numel()), ("the input of this rank", x.numel()))
        return copyable(x), outputs_of(into)

    def exchanged(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Row, Row]:
        """The inputs and the outputs of an all_to_all."""
        self._expect(len(inputs), "inputs")
        self.check_row(inputs, "inputs", inputs[0])
        self.check_row(outputs, "outputs", inputs[0])
        return row_of([copyable(x) for x in inputs]), outputs_of(outputs)

    def exchanged_parts(self, x: Tensor, output: Tensor, rows: Sequence[int], places: Sequence[int]) -> tuple[Row, Row]:
        """The parts of the input and of the output of an all_to_all: so many rows for each rank; none given: equal."""
        self._same(x, output)
        parts, room = self._bytes(x, rows), self._bytes(output, places)
        return cut(copyable(x), parts), cut(writable(output), room)

    def check_row(self, tensors: Sequence[Tensor], what: str, like: Tensor) -> None:
        """Check that there is one tensor for each rank, of the dtype of `like`."""
        self._expect(len(tensors), what)
        for x in tensors:
            self._same(x, like)

    def _expect(self, count: int, what: str) -> None:
        if count != self.size:
            raise UsageError(f"{count} {what} for {self.size} ranks: pass one for each")

    def _same(self, x: Tensor, other: Tensor) -> None:
        if x.dtype is not other.dtype:
            raise UsageError(f"tensors of {x.dtype} and {other.dtype}: pass inputs and outputs of one dtype")

    def _fit(self, call: str, *sides: tuple[str, int]) -> None:
        """Check that both sides, which are named, have the same number of elements."""
        (one, count), (other, room) = sides
        if count != room:
            raise UsageError(f"{call}: {one} must have as many elements as {other}: {count} is not {room}")

    def _bytes(self, x: Tensor, rows: Sequence[int]) -> list[int]:
        """The sizes of the parts of `x` by rank: so many rows each, or equal parts if there are no `rows`."""
        if not x.dim():
            raise UsageError("a tensor of 0 dimensions has no rows to exchange: pass x.reshape(1)")
        total = x.shape[0]
        if rows:
            self._expect(len(rows), "sizes")
        if (sum(rows) != total or min(rows) < 0) if rows else total % self.size:
            raise UsageError(f"{total} rows cannot be split into {list(rows) or f'{self.size} equal parts'}")
        each = x.nbytes // total if total else 0
        return [count * each for count in rows or [total // self.size] * self.size]


def check_timeout(timeout: timedelta) -> None:
    """Raise UsageError unless the timeout of a group is above 0."""
    if timeout <= timedelta(0):
        text = "must be above 0, and torch makes those of 292,000 years negative"
        raise of_torch(UsageError(f"the argument timeout of a process group {text}: got {timeout!r}"))
