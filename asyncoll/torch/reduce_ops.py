"""The reductions of torch, as those of the library."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import ReduceOp, check_reduction
from asyncoll.tensors.registered import stager_of
from asyncoll.torch.memory import Block, is_on_device, reducible

_KINDS: Any = dist.ReduceOp.RedOpType  # the types of torch do not show its members
_OPS = {
    _KINDS.SUM: ReduceOp.SUM,
    _KINDS.AVG: ReduceOp.AVG,
    _KINDS.PRODUCT: ReduceOp.PROD,
    _KINDS.MIN: ReduceOp.MIN,
    _KINDS.MAX: ReduceOp.MAX,
    _KINDS.BAND: ReduceOp.BAND,
    _KINDS.BOR: ReduceOp.BOR,
    _KINDS.BXOR: ReduceOp.BXOR,
    _KINDS.PREMUL_SUM: ReduceOp.SUM,
}


def reduction(given: Any) -> tuple[ReduceOp, Any]:
    """The reduction, and the factor of this rank's contribution; None for no factor.

    `given` is a `torch.distributed.ReduceOp`, or a member of it. Raises UsageError for one that is not known.
    """
    kind = getattr(given, "op", given)
    op = _OPS.get(kind)
    if op is None:
        raise UsageError(f"{kind} is no reduction: use one of {', '.join(known.name for known in _OPS)}")
    if kind != _KINDS.PREMUL_SUM:
        return op, None
    if not hasattr(given, "factor"):
        raise UsageError(
            f"PREMUL_SUM needs torch 2.13 or newer, which tells its factor, and this is torch {torch.__version__}: "
            "multiply the tensor, and use SUM"
        )
    return op, given.factor


def contribution(x: Tensor, op: ReduceOp, factor: Any, *, fresh: bool = False) -> Block:
    """The elements of `x` that are to be reduced, multiplied by `factor`; `fresh`: a copy, if they are changed.

    Raises UsageError if `op` is not defined for their dtype.
    """
    if factor is not None and is_on_device(x):
        x, factor = _scaled_on_device(x, factor, fresh=fresh), None
    block = reducible(x, fresh=fresh and factor is not None)
    check_reduction(op, block.dtype)
    if factor is not None:
        scale(block.packed.detach(), factor)
    return block


def scale(x: Tensor, factor: Any) -> Tensor:
    """Multiply `x` by `factor`, in place. Raises UsageError if that is not possible, as for integers and a fraction."""
    try:
        return x.mul_(factor)
    except RuntimeError as error:
        raise _unfit(x, factor, error) from None


def _scaled_on_device(x: Tensor, factor: Any, *, fresh: bool) -> Tensor:
    """`x`, multiplied in place, or a copy of it, after the work that the program has queued.

    Raises UsageError if the product is of another dtype.
    """
    stager = stager_of(x)
    product = torch.result_type(x, factor)
    if not torch.can_cast(product, x.dtype):
        raise _unfit(x, factor, f"the product is of {product}")
    x = stager.clone(x) if fresh else x.detach()
    stager.queue(lambda elements: elements.mul_(factor), x)
    return x


def _unfit(x: Tensor, factor: Any, why: object) -> UsageError:
    return UsageError(f"the factor {factor} of PREMUL_SUM does not fit a tensor of {x.dtype}: {why}")
