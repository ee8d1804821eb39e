"""Memory of drawn layouts, for the tensors of a call."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.tensors.operands import as_operand
from asyncoll.tensors.reductions import BFLOAT16, Array, torch_view

_LAYOUTS = ("plain", "gaps", "transposed", "registered")


def laid_out(comm: Communicator, draw: np.random.Generator, value: Array, dtype: str) -> Any:
    """`value`, in the storage of `dtype`, in memory of a drawn layout: a numpy array or a torch tensor."""
    layout = _LAYOUTS[draw.integers(len(_LAYOUTS))]
    if layout == "gaps":
        memory = np.zeros((*value.shape, 2), value.dtype)[..., 0]
    elif layout == "transposed":
        memory = np.empty(value.shape[::-1], value.dtype).T
    elif layout == "registered":
        memory = comm.empty(value.shape, value.dtype)
    else:
        memory = np.empty(value.shape, value.dtype)
    memory[...] = value
    return torch_view(memory, dtype) if dtype == BFLOAT16 or draw.integers(2) else memory


def stored(x: Any) -> Array:
    """A copy of the elements of a tensor, in the storage of its dtype."""
    operand = as_operand(x)
    return operand.flat.reshape(operand.shape).copy()
