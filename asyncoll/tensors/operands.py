"""The view that algorithms have of a tensor: numpy arrays and torch tensors alike, as flat arrays.

Algorithms use one-dimensional, contiguous numpy arrays in native byte order only. `as_operand` makes such a view of the
caller's tensor (a copy, if the layout demands it), and `Operand.write_back` returns the result to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import BFLOAT16, DTYPES, Array, torch_view

if TYPE_CHECKING:
    import torch


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
        """`flat` as a tensor of the caller's kind and of `shape`."""
        return build(flat, self.dtype, shape, as_torch=self.is_torch)


def build(flat: Array, dtype: str, shape: Sequence[int], *, as_torch: bool) -> Any:
    """A numpy array, or a torch tensor, of `shape` over the memory of `flat`."""
    return torch_view(flat, dtype).reshape(tuple(shape)) if as_torch else flat.reshape(shape)


def is_tensor(x: object) -> bool:
    """Whether `x` is a torch tensor or a numpy array. Subclasses that mean more than their elements are none."""
    if isinstance(x, np.ndarray):
        return type(x) in (np.ndarray, np.memmap)
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_operand(x: object, *, writable: bool = False) -> Operand:
    """`x` as a flat array.

    Raises UsageError for anything but a numpy array or a torch CPU tensor of one of `DTYPES`, and, if the result goes
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
        return _numpy_operand(x.view(np.ndarray), writable)  # a subclass may have no flat view: numpy.matrix has none
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _torch_operand(x, writable)
    raise UsageError(f"expected a numpy array or a torch tensor, got {type(x).__name__}: wrap it in numpy.array(...)")


# numpy composes the name of a dtype at each access, which takes longer than the rest of `_numpy_operand`.
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
