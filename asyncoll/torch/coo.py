"""The allreduce of sparse tensors in coordinate format (COO): the union of the elements of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.errors import UsageError
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp, check_reduction, dtype_name
from asyncoll.torch.calls import GroupCalls
from asyncoll.torch.memory import copyable, reducible
from asyncoll.torch.reduce_ops import scale


def allreduce(calls: GroupCalls, x: Tensor, op: ReduceOp, factor: Any) -> Handle[None]:
    """Sum the sparse tensors `x` of all ranks, or average them, into each of them. The results are coalesced.

    Each rank multiplies its elements by its `factor` before, unless that is None.

    They have the same shape, dtype and number of sparse dimensions at all ranks, and any numbers of elements. The
    elements of all ranks are collected at each, and summed in the order of ranks: equal bits everywhere.

    Raises UsageError for another reduction, another sparse layout, or a tensor on a device.
    """
    if not x.is_cpu:
        raise UsageError(f"a sparse tensor on {x.device} is not supported: pass x.to_dense(), or x.cpu()")
    if x.layout is not torch.sparse_coo:
        raise UsageError(f"a tensor of layout {x.layout} is not supported: pass a dense tensor, or a sparse one in COO")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UsageError(f"{op.name} of sparse tensors is not defined: use SUM or AVG")
    if factor is not None:
        scale(x, factor)
    own = x.detach().coalesce()
    values = own.values()
    check_reduction(op, reducible(values).dtype)
    indices, block = copyable(own.indices()), copyable(values)

    async def body(collectives: Collectives) -> None:
        counts = list(np.zeros((calls.size, 1), np.int64))
        counts[calls.rank][0] = own._nnz()
        await collectives.allgather(counts)
        all_indices = [torch.empty((own.sparse_dim(), int(count[0])), dtype=torch.int64) for count in counts]
        all_values = [torch.empty((int(count[0]), *values.shape[1:]), dtype=x.dtype) for count in counts]
        for parts, mine in ((all_indices, indices), (all_values, block)):
            blocks = [copyable(part).flat for part in parts]
            blocks[calls.rank][...] = mine.flat
            await collectives.allgather(blocks)
        with torch.no_grad():
            total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), torch.cat(all_values), x.shape).coalesce()
            x.copy_(total / calls.size if op is ReduceOp.AVG else total)

    detail = f"{op.name}, {own.sparse_dim()} sparse dimensions, shape {tuple(x.shape)}"
    return calls.run("sparse_allreduce_coo", dtype_name(x.dtype), detail, body, block.flat.nbytes)
