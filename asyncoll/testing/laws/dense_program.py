"""A program of dense calls, drawn from a case, and what each of its calls gives by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.errors import UsageError
from asyncoll.tensors import reductions
from asyncoll.tensors.reductions import BFLOAT16, DTYPES, Array, ReduceOp
from asyncoll.testing.laws.story import Case

AT_ALL = ("allreduce", "broadcast", "allgather", "allgatherv")  # all ranks get the same
_BY_ROWS = ("reduce_scatter", "alltoall")  # a tensor has rows for each rank
_WITHOUT_SHAPE = ("allgatherv", "scatter", "alltoallv")  # shapes differ between ranks
OPERATIONS = (
    *AT_ALL,
    "reduce",
    "reduce_scatter",
    "gather",
    "scatter",
    "alltoall",
    "alltoallv",
    "barrier",
    "neighbor_average",
)
_CALLS = 16
_HAS_OWN_WAY = 1 / 4  # of the calls, those for which the program has a way of its own
_SPLITS = 2
_COUNTS = (0, 1, 3, 17, 700, 5000)
_ROW_MAX = 700
_LONG = 1_300_000  # elements, of 4 bytes: more than one window of calls on two levels
_NORMAL = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX)  # reductions of values that are not small integers
_INEXACT = (ReduceOp.SUM, ReduceOp.AVG)  # reductions of these that depend on the order


@dataclass(frozen=True, slots=True)
class DenseCall:
    """One call, at all ranks that have a communicator by a split."""

    index: int
    split: int  # 0: the communicator of all ranks
    operation: str
    dtype: str
    op: ReduceOp
    shape: tuple[int, ...]  # of a tensor, or of a row of it
    drawn_root: int
    is_normal: bool  # the values are normally distributed; small integers otherwise, whose sums are exact
    is_beside: bool  # the call begins while the one before it may be under way
    has_own_way: bool  # the program has a way of its own for it

    def root(self, size: int) -> int:
        return self.drawn_root % size

    def __str__(self) -> str:
        what = f"{self.operation} of {self.dtype}{list(self.shape)}, {self.op.name}, root {self.drawn_root}"
        return f"call {self.index}, {what}, in the communicator of split {self.split}"


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors that a rank gets. An element may differ by `at_most`; None: each bit is known."""

    tensors: list[Array]
    at_most: Array | None = None


class DenseProgram:
    """The calls of all ranks, in the order in which they begin.

    In a crowded one all of them are on one communicator, and all may be under way.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._given: dict[tuple[int, int, int], Array] = {}  # by call, rank and part
        draw = np.random.default_rng([case.seed, case.size])
        # By split, the color and the key of each rank.
        self.splits = [self._split(draw, may_lack=True) for _ in range(_SPLITS)]
        self.last_split = self._split(draw, may_lack=False)
        self.is_crowded = bool(draw.integers(2))
        self._crowded_split = int(draw.integers(_SPLITS + 1))
        own = np.random.default_rng([case.seed, case.size, _CALLS]).random(_CALLS) < _HAS_OWN_WAY
        self.calls = [self._call(draw, index, has_own_way=bool(own[index])) for index in range(_CALLS)]

    def _split(self, draw: np.random.Generator, *, may_lack: bool) -> list[tuple[int | None, int]]:
        colors = draw.integers(-1 if may_lack else 0, 2, self._case.size).tolist()
        keys = draw.integers(0, 3, self._case.size).tolist()
        return [(None if color < 0 else color, key) for color, key in zip(colors, keys, strict=True)]

    def _call(self, draw: np.random.Generator, index: int, *, has_own_way: bool) -> DenseCall:
        operation = OPERATIONS[draw.integers(len(OPERATIONS))]
        dtypes = list(filter(reductions.is_divisible, DTYPES)) if operation == "neighbor_average" else DTYPES
        dtype = dtypes[draw.integers(len(dtypes))]
        ops = [op for op in ReduceOp if _is_defined(op, dtype)]
        op = ops[draw.integers(len(ops))]
        count = _COUNTS[draw.integers(len(_COUNTS))]
        if operation in _BY_ROWS:
            count = min(count, _ROW_MAX)
        shape = [(count,), (), (count // 3, 3)][draw.integers(3)]
        is_normal = reductions.is_divisible(dtype) and op in _NORMAL and bool(draw.integers(2))
        if index == 0 and draw.random() < (1 / 4 if self.is_crowded else 1 / 8):
            operation, dtype, op, shape = AT_ALL[draw.integers(2)], "float32", ReduceOp.SUM, (_LONG,)
        split, root = int(draw.integers(_SPLITS + 1)), int(draw.integers(self._case.size))
        is_beside = bool(draw.integers(2)) or self.is_crowded
        split = self._crowded_split if self.is_crowded else split
        return DenseCall(index, split, operation, dtype, op, shape, root, is_normal, is_beside, has_own_way)

    def members(self, split: int, rank: int) -> tuple[int, ...]:
        """The ranks of the communicator that `rank` has by this split, in their order; () if it has none."""
        if split == 0:
            return tuple(range(self._case.size))
        return members(self.splits[split - 1], rank)

    def given(self, call: DenseCall, rank: int, part: int = 0) -> Array:
        """What `rank` gives to a call, in the storage of its dtype. If it gives several tensors: that for `part`."""
        key = (call.index, rank, part)
        if key not in self._given:
            self._given[key] = self._make(call, rank, part)
        return self._given[key]

    def _make(self, call: DenseCall, rank: int, part: int) -> Array:
        draw = np.random.default_rng([self._case.seed, call.index, rank, part])
        shape = call.shape
        size = len(self.members(call.split, rank))
        if call.operation == "reduce_scatter":
            shape = (size + call.drawn_root, *shape)
        elif call.operation == "alltoall":
            shape = (size * (1 + call.drawn_root % 2), *shape)
        elif call.operation in _WITHOUT_SHAPE:
            shape = (int(draw.integers(3)), *shape)
        if call.is_normal:
            return encoded(draw.standard_normal(shape), call.dtype)
        least, end = (1, 3) if call.op is ReduceOp.PROD else (0, 2 if call.dtype == "bool" else 4)
        return encoded(draw.integers(least, end, shape), call.dtype)

    def expected(self, call: DenseCall, rank: int) -> ExpectedTensors:
        """What `rank` gets, by the definition of the operation."""
        group = self.members(call.split, rank)
        place, root = group.index(rank), group[call.root(len(group))]
        if call.operation == "barrier" or (call.operation == "gather" and rank != root):
            return ExpectedTensors([])
        if call.operation == "scatter":
            return ExpectedTensors([self.given(call, root, place)])
        if call.operation == "alltoallv":
            return ExpectedTensors([self.given(call, source, place) for source in group])
        if call.operation == "broadcast":
            return ExpectedTensors([self.given(call, root)])
        if call.operation == "reduce" and rank != root:
            return ExpectedTensors([self.given(call, rank)])
        if call.operation == "neighbor_average":
            ring = sorted({(place + step) % len(group) for step in (-1, 0, 1)})
            return mean(call.dtype, [self.given(call, group[each]) for each in ring])
        parts = [self.given(call, member) for member in group]
        if call.operation == "allgatherv":
            return ExpectedTensors(parts)
        if call.operation in ("allgather", "gather"):
            return ExpectedTensors([np.stack(parts)])
        if call.operation == "alltoall":
            return ExpectedTensors([np.concatenate([np.split(part, len(group))[place] for part in parts])])
        if call.operation == "reduce_scatter":
            start, end = bounds(len(parts[0]), len(group))[place]
            parts = [part[start:end] for part in parts]
        return reduced(call, parts)


def members(colors: Sequence[tuple[int | None, int]], rank: int) -> tuple[int, ...]:
    """The ranks that have a communicator with `rank` by a split of all ranks, given the color and the key of each."""
    mine = colors[rank][0]
    if mine is None:
        return ()
    ranks = [each for each, (color, _) in enumerate(colors) if color == mine]
    return tuple(sorted(ranks, key=lambda each: (colors[each][1], each)))


def reduced(call: DenseCall, parts: Sequence[Array]) -> ExpectedTensors:
    """The reduction of `parts`, computed in the widest dtype of their kind."""
    values = np.stack([decoded(part, call.dtype) for part in parts])
    total = _FORMULAS[call.op](values)
    is_divided = call.op is ReduceOp.AVG and values.dtype == np.complex128  # numpy rounds twice there
    if not is_divided and not (call.is_normal and call.op in _INEXACT):
        return ExpectedTensors([encoded(total, call.dtype)])
    return _rounded(total, values, call.dtype)


def mean(dtype: str, parts: Sequence[Array]) -> ExpectedTensors:
    """The mean of `parts`, computed in the widest dtype of their kind."""
    values = np.stack([decoded(part, dtype) for part in parts])
    return _rounded(values.sum(0) / len(values), values, dtype)


def _rounded(total: Array, values: Array, dtype: str) -> ExpectedTensors:
    """`total`, the sum or the mean of `values`. Each of the additions rounds, and so does the division."""
    return ExpectedTensors([total], 2 * len(values) * _EPSILON[dtype] * np.abs(values).sum(0))


_FORMULAS: dict[ReduceOp, Callable[[Array], Array]] = {
    ReduceOp.SUM: lambda values: values.sum(0),
    ReduceOp.AVG: lambda values: values.sum(0) / len(values),
    ReduceOp.PROD: lambda values: values.prod(0),
    ReduceOp.MIN: lambda values: values.min(0),
    ReduceOp.MAX: lambda values: values.max(0),
    ReduceOp.BAND: np.bitwise_and.reduce,
    ReduceOp.BOR: np.bitwise_or.reduce,
    ReduceOp.BXOR: np.bitwise_xor.reduce,
}
_EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    BFLOAT16: 2.0**-7,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
}


def encoded(values: Array, dtype: str) -> Array:
    """`values` in the storage of `dtype`."""
    if dtype != BFLOAT16:
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(dtype)
    flat = np.empty(values.size, reductions.storage(dtype))
    reductions.put(flat, dtype, np.asarray(values, np.float32).reshape(-1))
    return flat.reshape(values.shape)


def decoded(stored: Array, dtype: str) -> Array:
    """The values of an array in the storage of `dtype`, in a dtype that holds their sums."""
    if dtype == BFLOAT16:
        return reductions.widened(stored.reshape(-1), dtype).reshape(stored.shape).astype(np.float64)
    wide = {"f": np.float64, "c": np.complex128}.get(stored.dtype.kind, np.int64)
    return stored.astype(wide)


def _is_defined(op: ReduceOp, dtype: str) -> bool:
    try:
        reductions.check_reduction(op, dtype)
    except UsageError:
        return False
    return True
