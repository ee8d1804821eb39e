"""The view that algorithms have of a tensor: numpy arrays and torch tensors alike, as flat arrays.

Algorithms use one-dimensional, contiguous numpy arrays in native byte order only. `as_operand` makes such a view of the
caller's tensor (a copy, if the layout demands it), and `Operand.write_back` returns the result to it.

A call of a wait-avoiding operation may give several tensors. `bundle` packs them into one flat array for each dtype. So
the buckets of a model share one round, which includes a rank for all of them or for none.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.tensors.metrics import Metrics, MetricsOperand
from asyncoll.tensors.overlap import overlaps
from asyncoll.tensors.reductions import (
    BFLOAT16,
    DTYPES,
    Array,
    ReduceOp,
    accumulator,
    build,
    divide,
    dtype_name,
    put,
    scale,
    storage,
    widened,
)
from asyncoll.tensors.registered import naming, stager_of
from asyncoll.tensors.staged import Staged, Stager, hidden, is_hidden, stagers

if TYPE_CHECKING:
    import torch

_OVERLAPS = "the result goes into this tensor, but its elements overlap (expanded, or of small strides): pass a copy"
_SHOWN = 64  # characters: a longer text is replaced by its digest


class Operand(NamedTuple):
    """A caller's tensor as algorithms see it.

    `flat` is a view of the caller's memory or, where `copied`, a packed copy of it. A copy of a tensor on a device has
    its elements once `staged` has arrived.
    """

    source: Any
    flat: Array
    dtype: str
    shape: tuple[int, ...]
    copied: bool
    staged: Staged | None = None  # of a tensor on a device, whose mirror `flat` is

    @property
    def is_torch(self) -> bool:
        return not isinstance(self.source, np.ndarray)

    @property
    def elements(self) -> int:
        """How many it has."""
        return self.flat.size

    def write_back(self) -> None:
        """Put `flat` back into the caller's tensor, if it is a copy."""
        if not self.copied:
            return
        if self.staged is not None:
            self.staged.put()
        elif isinstance(self.source, np.ndarray):
            self.source[...] = self.flat.reshape(self.shape)
        else:
            self.source.detach().copy_(build(self.flat, self.dtype, self.shape, as_torch=True))

    def room(self, count: int) -> Array:
        """A flat array of `count` elements of its dtype, with undefined content, for a result that `like` takes."""
        if self.staged is None:
            return np.empty(count, self.flat.dtype)
        return self.staged.room(count * self.flat.itemsize).view(self.flat.dtype)

    def like(self, flat: Array, shape: Sequence[int], dtype: str = "") -> Any:
        """`flat` as a tensor of the caller's kind and of `shape`, on its device, and of its dtype if none is given."""
        if self.staged is not None:
            return self.staged.like(flat, dtype or self.dtype, tuple(shape))
        return build(flat, dtype or self.dtype, shape, as_torch=self.is_torch)


class Placed(Protocol):
    """A tensor of a call, on the host or on a device."""

    @property
    def staged(self) -> Staged | None:
        """None on the host."""


def staged_parts(operands: Iterable[Placed]) -> list[Staged]:
    """The tensors among the operands that are on devices."""
    return [operand.staged for operand in operands if operand.staged is not None]


def check_devices(operands: Sequence[Placed]) -> None:
    """Raise UsageError if the tensors of one call are not all on one device, or all on the host."""
    if not stagers:
        return
    devices = {"the host" if operand.staged is None else operand.staged.device for operand in operands}
    if len(devices) > 1:
        with naming():
            raise UsageError(f"one call got tensors on {', '.join(sorted(devices))}: pass tensors of one device")


def copy_of(x: Any) -> Any:
    """A copy of the tensor `x`, or a list of copies if `x` is a list or tuple of tensors."""
    if isinstance(x, (list, tuple)):
        return [copy_of(part) for part in x]
    if isinstance(x, Metrics):
        return x.copy()
    if isinstance(x, np.ndarray):
        return x.copy()
    return stager_of(x).clone(x) if not x.is_cpu or is_hidden(x) else x.detach().clone()


def is_tensor(x: object) -> bool:
    """Whether `x` is a torch tensor or a numpy array. Subclasses that mean more than their elements are none."""
    if isinstance(x, np.ndarray):
        return type(x) in (np.ndarray, np.memmap)
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_operand(x: object, *, writable: bool = False, may_stage: bool = False, is_read: bool = True) -> Operand:
    """`x` as a flat array.

    With `may_stage`, `x` may be a tensor of a device: the caller waits for `Operand.staged` then. Unless `is_read`, the
    call needs no elements of it.

    Raises UsageError for anything but a numpy array or a torch tensor of one of `DTYPES`, and, if the result goes
    back into `x` (`writable`), for read-only memory or a tensor whose elements overlap. A subclass of either is seen as
    its elements alone. A masked array is refused, because its mask would be lost.
    """
    if type(x) is np.ndarray:
        return _numpy_operand(x, writable)
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(
            "a masked array would be taken without its mask: pass x.filled(0), or the arrays x.data, x.mask"
        )
    if isinstance(x, np.ndarray):
        # A subclass may have no flat view: numpy.matrix has none.
        return _numpy_operand(x.view(np.ndarray), writable)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        if hidden and is_hidden(x):
            return _mirrored(x, writable, may_stage, is_read)
        is_usual = type(x) is torch.Tensor and x.layout is torch.strided
        plain = _plain_torch_operand(x) if is_usual and not is_in_mode() else None
        if plain is not None:
            return plain
        return _torch_operand(x, writable) if x.is_cpu else _mirrored(x, writable, may_stage, is_read)
    remedy = "wrap it in numpy.array(...)"
    if isinstance(x, Metrics):
        remedy = "give it beside tensors, as in [x, metrics], to a wait-avoiding call"
    raise UsageError(f"expected a numpy array or a torch tensor, got {type(x).__name__}: {remedy}")


def one_for_each(xs: object, size: int, operation: str) -> list[Operand]:
    """The tensors of a call that has one for each of `size` ranks. Raises UsageError if `xs` are none."""
    no_sequence = (TypeError, RuntimeError, ValueError) if is_tensor(xs) else TypeError
    try:
        given = list(xs)  # type: ignore[call-overload]
    except no_sequence:
        given = []
    if len(given) != size:
        what = f"{len(given)}" if given else f"{xs!r:.60}"
        raise UsageError(f"{operation} needs one tensor for each of the {size} ranks, got {what}")
    operands = [as_operand(x, may_stage=True) for x in given]
    check_devices(operands)
    if len({operand.dtype for operand in operands}) > 1:
        raise UsageError(f"{operation} needs tensors of one dtype, got {sorted({o.dtype for o in operands})}")
    return operands


def is_in_mode() -> bool:
    """Whether torch, which is loaded, is in a mode here: even a view may be of other memory then. `_detached` tells."""
    return bool(sys.modules["torch"]._C._len_torch_dispatch_stack())


# numpy composes the name of a dtype at each access, which takes longer than the rest of `_numpy_operand`.
_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != BFLOAT16}


def _numpy_operand(x: Array, writable: bool) -> Operand:
    dtype = _NUMPY_NAMES.get(x.dtype) or x.dtype.name
    if dtype not in DTYPES:
        raise UsageError(f"dtype {x.dtype} is not supported: use one of {', '.join(DTYPES)}")
    flags = x.flags
    if writable and not flags.writeable:
        raise UsageError("the result goes into this array, but it is read-only: pass a copy")
    is_packed = flags.c_contiguous
    if writable and not is_packed and overlaps(x.shape, x.strides, x.itemsize):
        raise UsageError(_OVERLAPS)
    direct = is_packed and x.dtype.isnative
    if direct and x.ndim == 1:
        return Operand(x, x, dtype, x.shape, copied=False)
    flat = x.reshape(-1) if direct else np.ascontiguousarray(x, x.dtype.newbyteorder("=")).reshape(-1)
    if not direct and np.shares_memory(flat, x):
        flat = flat.copy()
    return Operand(x, flat, dtype, x.shape, copied=not direct)


def _plain_torch_operand(x: torch.Tensor) -> Operand | None:
    """The operand of a tensor that a view in numpy shows as it is; None for any other. It saves most of the checks."""
    dtype = _torch_names().get(x.dtype)
    try:
        if dtype is None or x.requires_grad or not (x.is_cpu and x.is_contiguous()) or x.is_neg():
            return None
        if not has_memory(x):
            return None
        shape = x.shape
        return Operand(x, (x if len(shape) == 1 else x.reshape(-1)).numpy(), dtype, tuple(shape), copied=False)
    # It has no memory of its own: the general way says so.
    except RuntimeError:
        return None


@cache
def _torch_names() -> dict[torch.dtype, str]:
    """The names of the real dtypes that numpy has, too: their tensors have no lazy conjugate."""
    import torch

    return {getattr(torch, name): name for name in DTYPES if name != BFLOAT16 and not name.startswith("complex")}


class Resident(NamedTuple):
    """A caller's tensor that is on a device."""

    source: Any
    stager: Stager
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    def mirrored(self, *, is_read: bool = True) -> Operand:
        """The tensor as a flat array of the host: see `Operand`."""
        staged = self.stager.stage(self.source, is_read=is_read)
        flat = staged.mirror.view(storage(self.dtype))
        return Operand(self.source, flat, self.dtype, self.shape, copied=True, staged=staged)

    def copied(self) -> Operand:
        """The same for a copy of the tensor on the device, which keeps its values if the tensor changes."""
        return self._replace(source=self.stager.clone(self.source)).mirrored()


def resident_of(x: object, *, writable: bool = False) -> Resident | None:
    """`x` if it is a tensor on a device, otherwise None. Raises UsageError as `as_operand` does."""
    if not is_tensor(x) or isinstance(x, np.ndarray):
        return None
    tensor: torch.Tensor = x  # type: ignore[assignment]
    if tensor.is_cpu and not (hidden and is_hidden(tensor)):
        return None
    stager = stager_of(tensor)
    if tensor.is_conj() or tensor.is_neg():
        with naming():
            text = f"a tensor on {tensor.device} whose conjugate or negative is due is not supported"
            raise UsageError(f"{text}: pass x.resolve_conj().resolve_neg()")
    dtype = _checked_dtype(tensor, writable)
    return Resident(_detached(tensor), stager, dtype, tuple(tensor.shape))


def _mirrored(x: torch.Tensor, writable: bool, may_stage: bool, is_read: bool) -> Operand:
    resident = resident_of(x, writable=writable)
    assert resident is not None, "it is on a device"
    if not may_stage:
        raise UsageError("this call takes no tensors of a device yet: pass x.cpu(), and copy the result back")
    return resident.mirrored(is_read=is_read)


def _checked_dtype(x: torch.Tensor, writable: bool) -> str:
    import torch

    dtype = dtype_name(x.dtype)
    if dtype not in DTYPES:
        raise UsageError(f"dtype {x.dtype} is not supported: use one of {', '.join(DTYPES)}")
    if x.layout is not torch.strided:
        raise UsageError(f"layout {x.layout} is not supported: pass x.to_dense()")
    if writable:
        check_writable(x)
    return dtype


def check_writable(x: torch.Tensor) -> None:
    """Raise UsageError if several elements of `x` are at one place of the memory."""
    if not x.is_contiguous() and overlaps(x.shape, [stride * x.itemsize for stride in x.stride()], x.itemsize):
        raise UsageError(_OVERLAPS)


def _torch_operand(x: torch.Tensor, writable: bool) -> Operand:
    try:
        return _strided_operand(x, _checked_dtype(x, writable))
    except (RuntimeError, ValueError) as error:  # a subclass of its own layout: masked, nested, lazy, inside of vmap
        raise UsageError(f"a {type(x).__name__} without plain memory is not supported: {error}") from None


def _detached(x: torch.Tensor) -> torch.Tensor:
    """`x` without its graph, with the same memory. Raises UsageError if it has none."""
    try:
        plain = x.detach()
    except AssertionError as error:  # of a FakeTensorMode that takes fake tensors only
        raise UsageError(f"no call of this library works inside of a FakeTensorMode: {error}") from None
    if hasattr(plain, "fake_mode"):
        what = "a FakeTensorMode is active: what it makes of a tensor has no memory, so make the call outside of it"
        raise UsageError("this FakeTensor has no memory" if hasattr(x, "fake_mode") else what)
    return plain


def has_memory(x: torch.Tensor) -> bool:
    """Whether the storage of `x` holds all elements: a program may have resized it, as FSDP does."""
    if not x.numel():
        return True
    last = x.numel() - 1
    if not x.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last) * x.itemsize < x.untyped_storage().nbytes()


def _strided_operand(x: torch.Tensor, dtype: str) -> Operand:
    import torch

    plain = _detached(x)
    if not has_memory(plain):
        raise UsageError("the memory of this tensor was released: make the call while it has its elements")
    direct = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    packed = plain if direct else plain.resolve_conj().resolve_neg().contiguous()
    if not direct and packed.data_ptr() == plain.data_ptr():
        packed = packed.clone()
    bits = packed.reshape(-1)
    flat: Array = (bits.view(torch.uint16) if dtype == BFLOAT16 else bits).numpy()
    return Operand(x, flat, dtype, tuple(x.shape), copied=not direct)


class Single:
    """A caller's tensor that needs no packing: it is reduced as the dtype that it has. Methods as of `Bundle`."""

    __slots__ = ("_dtype", "_factor", "_flat", "_operand", "given", "layout", "staged", "weight")

    boundaries = ""

    def __init__(self, given: Any, flat: Array, dtype: str, weight: float, operand: Operand | None = None) -> None:
        """`operand` is None if `given` is a flat array, and `flat` the same."""
        self.weight = self._factor = weight
        self.given = given
        self.layout = ((dtype, flat.size),)
        self._flat = flat
        self._dtype = dtype
        self._operand = operand
        self.staged: Sequence[Staged] = () if operand is None or operand.staged is None else (operand.staged,)

    def read(self, into: Iterable[Array]) -> None:
        (part,) = into
        scale(part, self._flat, self._factor)

    def lend(self) -> list[Array] | None:
        return [self._flat]

    def scale_lent(self) -> None:
        scale(self._flat, self._flat, self._factor)
        self._factor = 1.0

    def write(self, parts: Iterable[Array], divisor: float = 1) -> None:
        (values,) = parts
        flat = self._flat
        # Otherwise the memory was lent, and the result is there already.
        if values is not flat:
            flat[...] = values
        if divisor != 1:
            divide(flat, self._dtype, divisor)
        if self._operand is not None:
            self._operand.write_back()

    def like(self, parts: Iterable[Array], divisor: float = 1) -> Any:
        (values,) = parts
        operand = self._operand
        flat = np.empty_like(values) if operand is None else operand.room(values.size)
        flat[...] = values
        if divisor != 1:
            divide(flat, self._dtype, divisor)
        return flat if operand is None else operand.like(flat, operand.shape)


class Bundle:
    """The tensors of one call, packed by dtype in the order in which the dtypes first appear."""

    def __init__(self, operands: Sequence[Operand | MetricsOperand], op: ReduceOp, given: Any, weight: float) -> None:
        self.given = given  # by the caller: a tensor, or a list or tuple of tensors, and of metrics
        self.weight = weight
        self._factor = weight  # the tensors' values are yet to be multiplied by it
        self._operands = operands
        self._op = op
        self._packs: dict[str, list[Operand | MetricsOperand]] = {}
        for operand in operands:
            self._packs.setdefault(self._carried(operand), []).append(operand)

    def _carried(self, operand: Operand | MetricsOperand) -> str:
        """The dtype in which `operand` is packed."""
        return accumulator(self._op, operand.dtype)

    @property
    def staged(self) -> Sequence[Staged]:
        """The tensors of devices, which have to arrive before `read` and `lend`."""
        return staged_parts(self._operands) if stagers else ()

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
        """Copy the tensors' values, packed and multiplied by the weight, into these arrays."""
        if self._factor != 1:
            for operand, piece in self._pieces(into):
                scale(piece, self._packed(operand), self._factor)
            return
        for pack, part in zip(self._packs.values(), into, strict=True):
            flats = [self._packed(operand) for operand in pack]
            if len(flats) == 1:
                part[...] = flats[0]
            else:
                np.concatenate(flats, out=part)

    def _packed(self, operand: Operand | MetricsOperand) -> Array:
        return operand.flat if self._carried(operand) == operand.dtype else widened(operand.flat, operand.dtype)

    def lend(self) -> list[Array] | None:
        """The tensors' own memory, in the form of `read`; None if they would have to be packed or converted."""
        if any(len(pack) > 1 or dtype != pack[0].dtype for dtype, pack in self._packs.items()):
            return None
        return [pack[0].flat for pack in self._packs.values()]

    def scale_lent(self) -> None:
        """Multiply the memory of `lend` by the weight, in place. Without effect the second time."""
        for pack in self._packs.values():
            scale(pack[0].flat, pack[0].flat, self._factor)
        self._factor = 1.0

    def write(self, parts: Iterable[Array], divisor: float = 1) -> None:
        """Put `parts`, divided by `divisor`, back into the tensors."""
        for operand, values in self._pieces(parts):
            if not np.may_share_memory(operand.flat, values):
                put(operand.flat, operand.dtype, values, divisor)
            elif divisor != 1:  # the round was reduced in the caller's own memory
                divide(operand.flat, operand.dtype, divisor)
            operand.write_back()

    def like(self, parts: Iterable[Array], divisor: float = 1) -> Any:
        """`parts`, divided by `divisor`, as new tensors of the caller's kind: one, or a list of them."""
        made = {}
        for operand, values in self._pieces(parts):
            flat = operand.room(operand.flat.size)
            put(flat, operand.dtype, values, divisor)
            made[id(operand)] = operand.like(flat, operand.shape)
        tensors = [made[id(operand)] for operand in self._operands]
        return tensors if isinstance(self.given, (list, tuple)) else tensors[0]

    def _pieces(self, parts: Iterable[Array]) -> Iterator[tuple[Operand | MetricsOperand, Array]]:
        """Each operand with its piece of the array that it is packed in."""
        for pack, part in zip(self._packs.values(), parts, strict=True):
            ends = accumulate((operand.flat.size for operand in pack), initial=0)
            for operand, (start, end) in zip(pack, pairwise(ends), strict=True):
                yield operand, part[start:end]


def bundle(x: object, op: ReduceOp, weight: float = 1.0, *, is_read: bool = True) -> Bundle | Single:
    """The tensor `x`, or the list or tuple of tensors `x`, as a bundle into which results can be written.

    Its contribution is `x` multiplied by `weight`, which is 1 unless `op` is an average. Unless `is_read`, the call
    needs no elements of tensors of devices. Raises UsageError as `as_operand` does, and for an empty list.
    """
    if type(x) is np.ndarray and x.ndim == 1 and (dtype := _NUMPY_NAMES.get(x.dtype)) is not None:
        flags = x.flags  # the frequent case first: an operand would take as long as the rest of this
        if flags.c_contiguous and flags.writeable and accumulator(op, dtype) == dtype:
            return Single(x, x, dtype, weight)
    if not isinstance(x, (list, tuple)):
        operand = as_operand(x, writable=True, may_stage=True, is_read=is_read)
        if accumulator(op, operand.dtype) == operand.dtype:
            return Single(x, operand.flat, operand.dtype, weight, operand)
        return Bundle([operand], op, x, weight)
    if not x:
        raise UsageError("an empty list of tensors: pass at least one")
    tensors: list[Operand] = []
    operands: list[Operand | MetricsOperand] = []
    for part in x:
        if isinstance(part, Metrics):
            operands.append(MetricsOperand(part))
        else:
            tensors.append(as_operand(part, writable=True, may_stage=True, is_read=is_read))
            operands.append(tensors[-1])
    if len(operands) > len(tensors) + 1 or not tensors:
        raise UsageError("x has one Metrics at most, and a tensor beside it")
    check_devices(tensors)
    return Bundle(operands, op, x, weight)
