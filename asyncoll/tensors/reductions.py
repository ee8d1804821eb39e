"""The dtypes of tensors, and their reductions on one-dimensional, contiguous numpy arrays.

numpy has no bfloat16, so its bits are kept in uint16. torch reduces both half types: numpy takes about 50 times as long
to add float16. Otherwise torch is not imported before a torch tensor has been seen. The compiled core, if it is there,
reduces several arrays in one pass.
"""

from __future__ import annotations

import contextvars
import enum
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from asyncoll import _core
from asyncoll._core import NativeCore
from asyncoll.errors import UsageError
from asyncoll.tensors.metrics import METRICS, TABLE, merge

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Combine: TypeAlias = Callable[[Array, Array], object]  # combine(into, other): into = into ∘ other, element by element
Reduce: TypeAlias = Callable[[Array, Sequence[Array], int], None]  # see `reducer`
ReduceToAll: TypeAlias = Callable[[Sequence[Array], int], None]  # see `into_all`
T = TypeVar("T")

BFLOAT16 = "bfloat16"
MAX_DIMENSIONS = 64
HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # a peer that announces more than this is wrong
HALVES = ("float16", BFLOAT16)
_FLOATS = ("float64", "float32", *HALVES)
_COMPLEX = ("complex64", "complex128")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*_FLOATS, *_COMPLEX, *_INTEGERS, "bool")


def dtype_name(dtype: object) -> str:
    """The name of a dtype of torch, or of numpy, as in DTYPES."""
    return str(dtype).removeprefix("torch.")


class ReduceOp(enum.Enum):
    """An elementwise reduction. The members are also names of `asyncoll`: `asyncoll.SUM` and so on.

    AVG is the sum divided by the number of ranks; it is not defined for integers and bool. MIN and MAX are not defined
    for complex numbers. BAND, BOR and BXOR are defined for integers and bool. On bool, SUM is "or" and PROD is "and".

    AVG_ACTIVE is for wait-avoiding rounds only: the sum divided by the number of ranks that are active in the round,
    those with a contribution. In groups AVG does the same. Otherwise it is as AVG.

    AVG of half types (float16, bfloat16) is computed in float32 and rounded once, so an average that fits into a half
    is never infinite; by message, and in wait-avoiding rounds, each element then takes 4 bytes. Every other reduction
    of half types may be rounded, and overflow, at each step by message and in rounds.
    """

    SUM = "sum"
    AVG = "avg"
    AVG_ACTIVE = "avg_active"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # each call looks members up in dicts, and Enum would hash their names in Python


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.AVG_ACTIVE: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_AVERAGES = (ReduceOp.AVG, ReduceOp.AVG_ACTIVE)
_FORBIDDEN = {
    ReduceOp.AVG: (*_INTEGERS, "bool"),
    ReduceOp.AVG_ACTIVE: (*_INTEGERS, "bool"),
    ReduceOp.MIN: _COMPLEX,
    ReduceOp.MAX: _COMPLEX,
    ReduceOp.BAND: (*_FLOATS, *_COMPLEX),
    ReduceOp.BOR: (*_FLOATS, *_COMPLEX),
    ReduceOp.BXOR: (*_FLOATS, *_COMPLEX),
}


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds the bits of a tensor of `dtype`."""
    return TABLE if dtype == METRICS else np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)


def is_divisible(dtype: str) -> bool:
    """Whether tensors of `dtype` can be divided: not those of integers and bool."""
    return dtype not in _FORBIDDEN[ReduceOp.AVG]


def check_reduction(op: object, dtype: str, *, in_rounds: bool = False) -> ReduceOp:
    """`op`, if it is a reduction that is defined for `dtype`. Raises UsageError otherwise.

    `in_rounds`: of a wait-avoiding operation, in which not every rank is active.
    """
    if not isinstance(op, ReduceOp):
        names = ", ".join(op.name for op in ReduceOp)
        raise UsageError(f"unknown reduction {op!r:.60}: use one of asyncoll.{{{names}}}")
    if dtype in _FORBIDDEN.get(op, ()):
        advice = "use SUM, or convert to a float" if op in _AVERAGES else "choose another reduction or dtype"
        raise UsageError(f"{op.name} is not defined for {dtype}: {advice}")
    if op is ReduceOp.AVG_ACTIVE and not in_rounds:
        raise UsageError("AVG_ACTIVE is for wait-avoiding rounds, and every rank is active in this call: use AVG")
    return op


@lru_cache(maxsize=256)
def combiner(op: ReduceOp, dtype: str) -> Combine:
    """The in-place elementwise reduction `combine(into, other)` for arrays of `storage(dtype)`.

    Tables of metrics are united, whatever `op` is.
    """
    if dtype == METRICS:
        return merge
    if dtype not in HALVES:
        ufunc = _UFUNCS[op]
        return lambda into, other: _quietly.run(ufunc, into, other, out=into)
    function = torch_function(op)

    def combine(into: Array, other: Array) -> None:
        target = torch_view(into, dtype)
        function(target, torch_view(other, dtype), out=target)

    return combine


class _Quietly(threading.local):
    """`run(ufunc, *arguments)` calls `ufunc` without warnings: inf and nan are values here, as they are in torch.

    numpy keeps these settings in the context. Entering a prepared context takes a fourth of the time of
    `numpy.errstate`.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quietly = _Quietly()


def torch_function(op: ReduceOp) -> Any:
    """The elementwise function of torch, which has the names of numpy."""
    import torch

    return getattr(torch, _UFUNCS[op].__name__)


@lru_cache(maxsize=256)
def reducer(op: ReduceOp, dtype: str, native: NativeCore | None = _core.native) -> Reduce:
    """The reduction of several arrays of `storage(dtype)` at once: `reduce(into, arrays, divisor)`.

    It goes in the order of the arrays; the first may be `into` itself. Half types are reduced in float32 and rounded
    once, as torch sums them. `divisor` is 1 unless `op` is an average. `native` is the compiled core, or None to do
    without it.

    The compiled core has the bits of numpy and torch, except where those depend on the position of an element: the
    payload of a sum or product of two NaN, and for half types the payload of any NaN, and the sign of a zero that is
    the MIN or MAX of zeros of both signs.
    """
    number = kernel_number(op, dtype, native)
    return partial(native.reduce, number) if native and number else reducer_in_python(op, dtype)


def kernel_number(op: ReduceOp, dtype: str, native: NativeCore | None) -> int:
    """The number of the reduction of `op` and `dtype` in the compiled core `native`; 0 if there is none."""
    return native.find_kernel(op.value, dtype) if native else 0


def into_all(reduce: Reduce, kernel: int, native: NativeCore | None) -> ReduceToAll:
    """The reduction of several arrays into all of them: `reduce_to_all(arrays, divisor)`, in the order of the arrays.

    `reduce` makes one result of them in numpy; `kernel` is the number of the same reduction in `native`, or 0.
    """
    if native and kernel:
        return partial(native.reduce_to_all, kernel)

    def reduce_to_all(arrays: Sequence[Array], divisor: int) -> None:
        reduce(arrays[0], arrays, divisor)
        for other in arrays[1:]:
            other[...] = arrays[0]

    return reduce_to_all


def reducer_in_python(op: ReduceOp, dtype: str) -> Reduce:
    """A reduction with numpy or torch: for dtypes that the compiled core does not know, and without it."""
    if dtype in HALVES:
        return _half_reducer(op, dtype)
    if dtype == METRICS:
        return _unite
    ufunc = _UFUNCS[op]

    def reduce(into: Array, arrays: Sequence[Array], divisor: int) -> None:
        first, run = arrays[0], _quietly.run
        for other in arrays[1:]:
            run(ufunc, first, other, out=into)
            first = into
        if first is not into:
            into[...] = first
        if divisor != 1:
            divide(into, dtype, divisor)

    return reduce


def _unite(into: Array, tables: Sequence[Array], divisor: int) -> None:
    # A mean has the count of its own contributions.
    del divisor
    total = tables[0].copy()
    for other in tables[1:]:
        merge(total, other)
    into[...] = total


def _half_reducer(op: ReduceOp, dtype: str) -> Reduce:
    function = torch_function(op)

    def reduce(into: Array, arrays: Sequence[Array], divisor: int) -> None:
        total = torch_view(arrays[0], dtype).float()
        for other in arrays[1:]:
            function(total, torch_view(other, dtype).float(), out=total)
        torch_view(into, dtype).copy_(total.div_(divisor) if divisor != 1 else total)

    return reduce


def torch_view(flat: Array, dtype: str) -> torch.Tensor:
    """The torch tensor over `flat`; over a copy, if it is read-only, because torch warns about that even on reading."""
    import torch

    tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor


def build(flat: Array, dtype: str, shape: Sequence[int], *, as_torch: bool) -> Any:
    """A numpy array, or a torch tensor, of `shape` over the memory of `flat`."""
    return torch_view(flat, dtype).reshape(tuple(shape)) if as_torch else flat.reshape(shape)


def torch_maker(dtype: str, shape: tuple[int, ...]) -> Callable[[bytearray | Array], torch.Tensor]:
    """A function that makes the torch tensor of this dtype and shape over memory, which is not empty and fits.

    One step; through numpy it would take three, which matters for short tensors.
    """
    import torch

    flat = partial(torch.frombuffer, dtype=getattr(torch, dtype))
    return flat if len(shape) == 1 else lambda memory: flat(memory).view(shape)


def widened(flat: Array, dtype: str) -> Array:
    """`flat`; if it is of a half type, its values in float32."""
    if dtype not in HALVES:
        return flat
    wide: Array = torch_view(flat, dtype).float().numpy()
    return wide


def accumulator(op: ReduceOp, dtype: str) -> str:
    """The dtype of partial results of `dtype`, where these are sent or kept."""
    return "float32" if op in _AVERAGES and dtype in HALVES else dtype


def put(into: Array, dtype: str, values: Array, divisor: float = 1) -> None:
    """Put `values / divisor` into `into`, which is of `dtype`. If `values` are wider, they are rounded once."""
    if values.dtype == into.dtype:
        into[...] = values
        if divisor != 1:
            divide(into, dtype, divisor)
    else:
        wide = torch_view(values, values.dtype.name)
        torch_view(into, dtype).copy_(wide / divisor if divisor != 1 else wide)


def scale(into: Array, values: Array, factor: float) -> None:
    """Put `values * factor` into `into`, of the same dtype, which is no half type; zeros if the factor is 0.

    Tables of metrics stay as they are: their means are over contributions, whatever the weights.
    """
    if factor == 1 or into.dtype == TABLE:
        if into is not values:
            into[...] = values
    elif factor == 0:
        into.fill(0)
    else:
        _quietly.run(np.multiply, values, factor, out=into)


def divide(flat: Array, dtype: str, divisor: float) -> None:
    """`flat /= divisor` in place: the last step of AVG. Tables of metrics have their own counts."""
    if dtype == METRICS:
        return
    if dtype in HALVES:
        torch_view(flat, dtype).div_(divisor)
    else:
        _quietly.run(np.divide, flat, divisor, out=flat)


@lru_cache(maxsize=256)
def _neutral_value(op: ReduceOp, dtype: str) -> Any:
    if op in (ReduceOp.SUM, *_AVERAGES, ReduceOp.BOR, ReduceOp.BXOR):
        return 0
    if op is ReduceOp.PROD:
        return 0x3F80 if dtype == BFLOAT16 else 1
    if op is ReduceOp.BAND:
        return np.invert(storage(dtype).type(0))
    is_min = {ReduceOp.MIN: True, ReduceOp.MAX: False}[op]
    if dtype == BFLOAT16:
        return 0x7F80 if is_min else 0xFF80
    if dtype == "bool":
        return is_min
    if dtype in _FLOATS:
        return math.inf if is_min else -math.inf
    limits = np.iinfo(dtype)
    return limits.max if is_min else limits.min


def fill_neutral(flat: Array, op: ReduceOp, dtype: str) -> None:
    """Fill `flat` with the neutral element of `op`: the contribution of a rank that has none."""
    if dtype == METRICS:
        flat.view(np.uint8).fill(0)
        return
    flat.fill(_neutral_value(op, dtype))
