"""What a tensor is to us: dtypes, layout, reductions; numpy arrays and torch tensors alike.

Algorithms only ever see one-dimensional, contiguous numpy arrays in native byte order. `operand` makes that view of
whatever the caller holds (copying where the layout demands it) and `Operand.write_back` returns the result to it.
numpy has no bfloat16, so those bits travel as uint16. Both half types are reduced by torch (numpy adds float16 about
50 times slower); otherwise torch is not imported before a torch tensor has been seen.
"""

from __future__ import annotations

import contextvars
import enum
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from asyncoll.errors import UsageError

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Combine: TypeAlias = Callable[[Array, Array], object]  # combine(into, other): into = into ∘ other, element by element
Reduce: TypeAlias = Callable[[Array, Sequence[Array], int], None]  # see `reducer`
T = TypeVar("T")

BFLOAT16 = "bfloat16"
MAX_DIMENSIONS = 64
HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # whoever announces more here is wrong
_HALVES = ("float16", BFLOAT16)
_FLOATS = ("float64", "float32", *_HALVES)
_COMPLEX = ("complex64", "complex128")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*_FLOATS, *_COMPLEX, *_INTEGERS, "bool")


class ReduceOp(enum.Enum):
    """An elementwise reduction. AVG is the sum divided by the number of ranks; on bool, SUM is "or" and PROD "and".

    AVG of halves (float16, bfloat16) is computed in float32 and rounded once, so an average that a half can hold is
    never infinite; by message, and in wait-avoiding rounds, it takes 4 bytes an element. Every other reduction of
    halves may be rounded, and overflow, at each step by message and in rounds.
    """

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    __hash__ = object.__hash__  # members are looked up in each call, and Enum would hash their names in Python


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_TORCH_FUNCTIONS = {
    ReduceOp.SUM: "add",
    ReduceOp.AVG: "add",
    ReduceOp.PROD: "mul",
    ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum",
}
_FORBIDDEN = {
    ReduceOp.AVG: (*_INTEGERS, "bool"),
    ReduceOp.MIN: _COMPLEX,
    ReduceOp.MAX: _COMPLEX,
    ReduceOp.BAND: (*_FLOATS, *_COMPLEX),
    ReduceOp.BOR: (*_FLOATS, *_COMPLEX),
    ReduceOp.BXOR: (*_FLOATS, *_COMPLEX),
}


def storage(dtype: str) -> np.dtype[Any]:
    """The numpy dtype whose bits a tensor of `dtype` travels as."""
    return np.dtype(np.uint16 if dtype == BFLOAT16 else dtype)


def check_reduction(op: object, dtype: str) -> ReduceOp:
    """`op`, if it is a reduction that makes sense for `dtype`; otherwise UsageError."""
    if not isinstance(op, ReduceOp):
        names = ", ".join(op.name for op in ReduceOp)
        raise UsageError(f"unknown reduction {op!r}: use one of asyncoll.{{{names}}}")
    if dtype in _FORBIDDEN.get(op, ()):
        advice = "use SUM, or convert to a float" if op is ReduceOp.AVG else "choose another reduction or dtype"
        raise UsageError(f"{op.name} is not defined for {dtype}: {advice}")
    return op


@lru_cache(maxsize=256)
def combiner(op: ReduceOp, dtype: str) -> Combine:
    """The in-place elementwise reduction `combine(into, other)` for arrays of `storage(dtype)`."""
    if dtype in _HALVES:
        return _half_combiner(op, dtype)
    ufunc = _UFUNCS[op]
    return lambda into, other: _quietly.run(ufunc, into, other, out=into)


class _Quietly(threading.local):
    """`run(ufunc, *arguments)`: inf and nan are values here, as they are in torch, not warnings.

    numpy keeps what it warns about in the context, and entering one that is ready takes a fourth of `numpy.errstate`.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


_quietly = _Quietly()


def _half_combiner(op: ReduceOp, dtype: str) -> Combine:
    import torch

    function = getattr(torch, _TORCH_FUNCTIONS[op])

    def combine(into: Array, other: Array) -> None:
        target = _as_torch(into, dtype)
        function(target, _as_torch(other, dtype), out=target)

    return combine


@lru_cache(maxsize=256)
def reducer(op: ReduceOp, dtype: str) -> Reduce:
    """The reduction of several arrays of `storage(dtype)` at once: `reduce(into, arrays, divisor)`.

    In the order of the arrays, of which the first may be `into` itself. Halves are reduced in float32 and rounded once,
    as torch sums them.
    """
    if dtype in _HALVES:
        return _half_reducer(op, dtype)
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


def _half_reducer(op: ReduceOp, dtype: str) -> Reduce:
    import torch

    function = getattr(torch, _TORCH_FUNCTIONS[op])

    def reduce(into: Array, arrays: Sequence[Array], divisor: int) -> None:
        total = _as_torch(arrays[0], dtype).float()
        for other in arrays[1:]:
            function(total, _as_torch(other, dtype).float(), out=total)
        _as_torch(into, dtype).copy_(total.div_(divisor) if divisor != 1 else total)

    return reduce


def _as_torch(flat: Array, dtype: str) -> torch.Tensor:
    """The torch tensor over `flat`, copied if it is read-only: torch warns about that even where it only reads."""
    import torch

    tensor = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
    return tensor.view(torch.bfloat16) if dtype == BFLOAT16 else tensor


def widened(flat: Array, dtype: str) -> Array:
    """`flat`, or its values in float32 if they are halves."""
    if dtype not in _HALVES:
        return flat
    wide: Array = _as_torch(flat, dtype).float().numpy()
    return wide


def accumulator(op: ReduceOp, dtype: str) -> str:
    """The dtype that `dtype` is reduced in wherever partial results travel or are kept."""
    return "float32" if op is ReduceOp.AVG and dtype in _HALVES else dtype


def put(into: Array, dtype: str, values: Array, divisor: int = 1) -> None:
    """Put `values / divisor` into `into`, which is of `dtype`. `values` are of it too, or wider and rounded once."""
    if values.dtype == into.dtype:
        into[...] = values
        if divisor != 1:
            divide(into, dtype, divisor)
    else:
        wide = _as_torch(values, values.dtype.name)
        _as_torch(into, dtype).copy_(wide / divisor if divisor != 1 else wide)


def divide(flat: Array, dtype: str, divisor: int) -> None:
    """`flat /= divisor` in place: the last step of AVG."""
    if dtype in _HALVES:
        _as_torch(flat, dtype).div_(divisor)
    else:
        _quietly.run(np.divide, flat, divisor, out=flat)


@lru_cache(maxsize=256)
def _neutral_value(op: ReduceOp, dtype: str) -> Any:
    if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BOR, ReduceOp.BXOR):
        return 0
    if op is ReduceOp.PROD:
        return 0x3F80 if dtype == BFLOAT16 else 1
    if op is ReduceOp.BAND:
        return np.invert(storage(dtype).type(0))
    if dtype == BFLOAT16:
        return 0x7F80 if op is ReduceOp.MIN else 0xFF80
    if dtype == "bool":
        return op is ReduceOp.MIN
    if dtype in _FLOATS:
        return math.inf if op is ReduceOp.MIN else -math.inf
    limits = np.iinfo(dtype)
    return limits.max if op is ReduceOp.MIN else limits.min


def fill_neutral(flat: Array, op: ReduceOp, dtype: str) -> None:
    """Make of `flat` a contribution that changes nothing: what a rank with nothing to give puts into a round."""
    flat.fill(_neutral_value(op, dtype))


class Operand(NamedTuple):
    """A caller's tensor as algorithms see it.

    `flat` is a view of the caller's memory or, where `copied`, a packed copy of it.
    """

    source: Any
    flat: Array
    dtype: str
    shape: tuple[int, ...]
    copied: bool

    @property
    def is_torch(self) -> bool:
        return not isinstance(self.source, np.ndarray)

    def write_back(self) -> None:
        """Put `flat` back into the caller's tensor, if it is a copy."""
        if not self.copied:
            return
        if isinstance(self.source, np.ndarray):
            self.source[...] = self.flat.reshape(self.shape)
        else:
            self.source.detach().copy_(build(self.flat, self.dtype, self.shape, as_torch=True))

    def like(self, flat: Array, shape: Sequence[int]) -> Any:
        """`flat` as a tensor of the caller's kind."""
        return build(flat, self.dtype, shape, as_torch=self.is_torch)


def build(flat: Array, dtype: str, shape: Sequence[int], *, as_torch: bool) -> Any:
    """A numpy array, or a torch tensor, of `shape` over the memory of `flat`."""
    return _as_torch(flat, dtype).reshape(tuple(shape)) if as_torch else flat.reshape(shape)


def is_tensor(x: object) -> bool:
    """Whether `x` is a numpy array, of no class that means more than its elements, or a torch tensor."""
    if isinstance(x, np.ndarray):
        return type(x) in (np.ndarray, np.memmap)
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def operand(x: object, *, writable: bool = False) -> Operand:
    """See `x` as a flat array.

    Raises UsageError for anything but a numpy array or a torch CPU tensor of one of `DTYPES`, and, where the result
    goes back into `x` (`writable`), for read-only memory or a tensor whose elements overlap. A subclass of
    either is seen as its elements alone. A masked array, whose mask says which of them count, is refused.
    """
    if type(x) is np.ndarray:
        return _numpy_operand(x, writable)
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(
            "a masked array would be taken without its mask: pass x.filled(0), or the arrays x.data, x.mask"
        )
    if isinstance(x, np.ndarray):
        return _numpy_operand(x.view(np.ndarray), writable)  # a matrix, for one, has no flat view
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch_operand(x, writable)
    raise UsageError(f"expected a numpy array or a torch tensor, got {type(x).__name__}: wrap it in numpy.array(...)")


# numpy composes the name of a dtype anew each time it is asked, which takes longer than the rest of `_numpy_operand`.
_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != BFLOAT16}


def _numpy_operand(x: Array, writable: bool) -> Operand:
    dtype = _NUMPY_NAMES.get(x.dtype) or x.dtype.name
    if dtype not in DTYPES:
        raise UsageError(f"dtype {x.dtype} is not supported: use one of {', '.join(DTYPES)}")
    flags = x.flags
    if writable and not flags.writeable:
        raise UsageError("the result goes into this array, but it is read-only: pass a copy")
    direct = flags.c_contiguous and x.dtype.isnative
    if direct and x.ndim == 1:
        return Operand(x, x, dtype, x.shape, copied=False)
    flat = x.reshape(-1) if direct else np.ascontiguousarray(x, x.dtype.newbyteorder("=")).reshape(-1)
    if not direct and np.shares_memory(flat, x):
        flat = flat.copy()
    return Operand(x, flat, dtype, x.shape, copied=not direct)


def _torch_operand(x: torch.Tensor, writable: bool) -> Operand:
    import torch

    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UsageError(f"dtype {x.dtype} is not supported: use one of {', '.join(DTYPES)}")
    if x.layout is not torch.strided:
        raise UsageError(f"layout {x.layout} is not supported: pass x.to_dense()")
    if x.device.type != "cpu":
        raise UsageError(f"a tensor on {x.device} is not supported yet: pass x.cpu() and copy the result back")
    try:
        if writable and any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise UsageError("the result goes into this tensor, but its elements overlap (expanded): pass x.clone()")
        return _strided_operand(x, dtype)
    except RuntimeError as error:  # a subclass of its own layout: masked, nested, fake, inside of vmap
        raise UsageError(f"a {type(x).__name__} without plain memory is not supported: {error}") from None


def _strided_operand(x: torch.Tensor, dtype: str) -> Operand:
    import torch

    plain = x.detach()
    direct = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    packed = plain if direct else plain.resolve_conj().resolve_neg().contiguous()
    if not direct and packed.data_ptr() == plain.data_ptr():
        packed = packed.clone()
    bits = packed.reshape(-1)
    flat: Array = (bits.view(torch.uint16) if dtype == BFLOAT16 else bits).numpy()
    return Operand(x, flat, dtype, tuple(x.shape), copied=not direct)
