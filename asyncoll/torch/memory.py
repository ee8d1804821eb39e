"""The memory of torch tensors as flat numpy arrays. Those of tensors on devices are mirrors of them.

`Tensor.numpy` makes the storage of a tensor unresizable for ever, and FSDP resizes the storages of its parameters. So
the arrays here are made from the address of a tensor. They keep its storage alive: a program may give the tensor
another one (`x.data = y`) during a call. It must not resize the storage (`x.untyped_storage().resize_`) meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncoll.arguments import digest
from asyncoll.errors import UsageError
from asyncoll.tensors.operands import check_writable
from asyncoll.tensors.reductions import DTYPES, Array, dtype_name, storage
from asyncoll.tensors.registered import naming, stager_of
from asyncoll.tensors.staged import Staged, hidden, is_hidden

# The dtypes that can be reduced: their names in the library, and the numpy dtypes of their elements.
_REDUCIBLE = {getattr(torch, name): (name, storage(name)) for name in DTYPES}
_BYTE = np.dtype(np.uint8)
_SHOWN = 64  # characters: a longer list of sizes is replaced by its digest


class Block(NamedTuple):
    """A tensor, and its elements as a flat array: those of the tensor itself, or of a packed copy.

    The copy of a tensor on a device is on the host. It has the elements once `staged` has arrived.
    """

    tensor: Tensor  # of the caller
    packed: Tensor  # contiguous; the same elements
    flat: Array  # the memory of `packed`
    dtype: str  # without "torch."
    staged: Staged | None = None  # of a tensor on a device

    @property
    def elements(self) -> int:
        """How many it has: `flat` may be their bytes."""
        return self.packed.numel()

    @property
    def copied(self) -> bool:
        return self.packed is not self.tensor

    def write_back(self) -> None:
        """Copy the elements of `flat` into the caller's tensor, unless they are there."""
        if self.staged is not None:
            self.staged.put()
        elif self.packed is not self.tensor:
            # A tensor of inference mode may be written in that mode only, and this may run in any thread.
            with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
                self.tensor.detach().copy_(self.packed)


class Row(NamedTuple):
    """An array for each rank, and the tensors that the arrays belong to."""

    arrays: list[Array]
    blocks: Sequence[Block]

    @property
    def dtype(self) -> str:
        return self.blocks[0].dtype if self.blocks else ""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def write_back(self) -> None:
        for block in self.blocks:
            block.write_back()


def row_of(blocks: Sequence[Block]) -> Row:
    """A row of one tensor for each rank."""
    return Row([block.flat for block in blocks], blocks)


def outputs_of(tensors: Sequence[Tensor]) -> Row:
    """A row of one tensor for each rank, which gets a result. Raises UsageError if two of them overlap."""
    blocks = [writable(x) for x in tensors]
    end = 0
    # Of a tensor that is not contiguous, only the place of the first element is compared: others may be in its gaps.
    places = (
        (x.tensor.data_ptr(), x.flat.nbytes if x.tensor.is_contiguous() else x.tensor.itemsize)
        for x in blocks
        if x.flat.nbytes
    )
    for start, nbytes in sorted(places):
        if start < end:
            raise UsageError("two of the outputs have memory in common: pass a tensor of its own for each rank")
        end = start + nbytes
    return row_of(blocks)


def cut(block: Block, sizes: Sequence[int]) -> Row:
    """A row of parts of one tensor, of these sizes in elements of its array."""
    ends = accumulate(sizes, initial=0)
    return Row([block.flat[start:end] for start, end in pairwise(ends)], [block])


def reducible(x: Tensor, *, fresh: bool = False) -> Block:
    """`x` as elements that can be reduced. `fresh`: they are a copy in any case.

    Raises UsageError for a dtype that has no reductions, and for tensors without plain memory.
    """
    kind = _REDUCIBLE.get(x.dtype)
    if kind is None:
        raise UsageError(f"{x.dtype} cannot be reduced: use one of {', '.join(DTYPES)}, or convert the tensor")
    if fresh and _is_plain(x):
        packed = x.detach().clone(memory_format=torch.contiguous_format)
        return Block(x, packed, _array(packed, kind[1]), kind[0])
    return _read(x, kind[1], kind[0])


def copyable(x: Tensor) -> Block:
    """`x` as bytes, of any dtype. Raises UsageError for tensors without plain memory."""
    return _read(x, _BYTE, dtype_name(x.dtype))


def _read(x: Tensor, element: np.dtype[Any], dtype: str) -> Block:
    """`x` as an array of `element`."""
    if _is_plain(x):
        packed = x
    elif is_on_device(x):
        return _mirrored(x, element, is_read=True)
    else:
        packed = _packed(x)
    return Block(x, packed, _array(packed, element), dtype)


def writable(x: Tensor) -> Block:
    """`x` as bytes, of any dtype, for a result: its elements are not read. Raises UsageError without plain memory."""
    if _is_plain(x):
        return Block(x, x, _array(x, _BYTE), dtype_name(x.dtype))
    _check_dense(x)
    check_writable(x)
    if is_on_device(x):
        return _mirrored(x, _BYTE, is_read=False)
    packed = torch.empty(x.shape, dtype=x.dtype)
    return Block(x, packed, _array(packed, _BYTE), dtype_name(x.dtype))


def described(rows: Sequence[Row]) -> str:
    """The sizes of rows in bytes, and their dtypes if they differ, as a text that the ranks compare."""
    text = "; ".join("+".join(str(array.nbytes) for array in row.arrays) for row in rows)
    if len({row.dtype for row in rows}) > 1:
        text += " of " + ", ".join(row.dtype for row in rows)
    return f"{text} bytes" if len(text) <= _SHOWN else f"sizes {digest(text):x}"


def overlap(x: Array, y: Array) -> bool:
    """Whether two contiguous arrays have memory in common."""
    start, other = x.ctypes.data, y.ctypes.data
    return start < other + y.nbytes and other < start + x.nbytes


def _is_plain(x: Tensor) -> bool:
    """Whether the elements of `x` are in memory as they are in a contiguous tensor."""
    if not x.is_cpu or (hidden and is_hidden(x)):
        return False
    return x.layout is torch.strided and x.is_contiguous() and not (x.is_conj() or x.is_neg())


def is_on_device(x: Tensor) -> bool:
    """Whether the host does not read the memory of `x`."""
    return not x.is_cpu or (bool(hidden) and is_hidden(x))


def _mirrored(x: Tensor, dtype: np.dtype[Any], *, is_read: bool) -> Block:
    """The tensor `x` of a device. Its elements are copied if it `is_read`."""
    stager = stager_of(x)
    _check_dense(x)
    if x.is_conj() or x.is_neg():
        with naming():
            text = f"a tensor on {x.device} whose conjugate or negative is due is not supported"
            raise UsageError(f"{text}: pass x.resolve_conj().resolve_neg()")
    staged = stager.stage(x.detach(), is_read=is_read)
    packed = torch.from_numpy(staged.mirror).view(x.dtype) if staged.mirror.size else torch.empty(0, dtype=x.dtype)
    return Block(x, packed.view(x.shape), staged.mirror.view(dtype), dtype_name(x.dtype), staged)


def _packed(x: Tensor) -> Tensor:
    """A copy of the elements of `x`, which is not plain, as a contiguous tensor."""
    _check_dense(x)
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.clone() if plain.data_ptr() == x.data_ptr() else plain


def _check_dense(x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise UsageError(f"a {x.layout} tensor is not supported here: pass a dense tensor")


def _array(x: Tensor, dtype: np.dtype[Any]) -> Array:
    nbytes = x.nbytes
    if not nbytes:
        return np.empty(0, dtype)
    try:
        address = x.data_ptr()
    except RuntimeError as error:  # a subclass without memory of its own: fake, or inside of vmap
        raise UsageError(f"a {type(x).__name__} without plain memory is not supported: {error}") from None
    if not address:
        raise UsageError(f"this {type(x).__name__} has no memory: its storage was resized to 0, or it is fake")
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    memory.storage = x.untyped_storage()
    return np.frombuffer(memory, dtype)
