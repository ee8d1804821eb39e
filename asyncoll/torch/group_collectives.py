"""The collective calls of a process group, as torch makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch import coo
from asyncoll.torch.arguments import by_tensor, in_place, only, pairs, row
from asyncoll.torch.calling import CallingGroup, collective
from asyncoll.torch.memory import copyable, outputs_of, reducible, row_of, writable
from asyncoll.torch.reduce_ops import contribution, reduction


class GroupCollectives(CallingGroup):
    """A process group with its collectives.

    Each begins a call and returns its handle. All checks that raise UsageError come before.
    """

    # -- reductions -------------------------------------------------------------------------------

    @collective("all_reduce")
    def allreduce(self, tensors: Any, opts: Any) -> Handle[Any]:
        """Reduce the tensor over all ranks, in place: by any reduction of torch, also AVG and PREMUL_SUM.

        A sparse tensor (COO) is summed or averaged. The average of integers is rounded towards 0, as NCCL's.
        """
        x = only(tensors)
        op, factor = reduction(opts.reduceOp)
        if x.layout is not torch.strided:
            return coo.allreduce(self._calls, x, op, factor)
        if op is ReduceOp.AVG and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool):
            return self._calls.average_integers(in_place(reducible(x)))
        return self._calls.allreduce(in_place(contribution(x, op, factor)), op)

    @collective("all_reduce")
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Handle[Any]:
        """Reduce several tensors, of any dtypes, in place, in one call."""
        op, factor = reduction(opts.reduceOp)
        blocks = [in_place(contribution(x, op, factor)) for x, _ in pairs(tensors, tensors)]
        return self._calls.allreduce_together(blocks, op)

    @collective("reduce")
    def reduce(self, tensors: Any, opts: Any) -> Handle[Any]:
        """Reduce into the root's tensor; the other ranks' tensors keep their values."""
        root, (op, factor) = self._arguments.root(opts), reduction(opts.reduceOp)
        is_root = self._calls.rank == root
        block = contribution(only(tensors), op, factor, fresh=not is_root)
        return self._calls.reduce(in_place(block) if is_root else block, root, op)

    @collective("reduce_scatter")
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Reduce the inputs with the index of each rank into the output of that rank. Their sizes may differ."""
        return self._reduce_scatter([(only(outputs), row(inputs))], opts)

    @collective("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> Handle[Any]:
        """Reduce the input, cut into equal parts by rank, into the output of each rank."""
        return self._reduce_scatter([(output, x)], opts)

    _reduce_scatter_base = reduce_scatter_single

    @collective("_reduce_scatter_base")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Reduce each of several inputs, cut into equal parts by rank, into its output at each rank, in one call."""
        return self._reduce_scatter(pairs(outputs, inputs), opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, calls: list[tuple[Tensor, Any]], opts: Any) -> Handle[Any]:
        """For each of `calls`, an output, and an input for each rank or one for all."""
        op, factor = reduction(opts.reduceOp)
        return self._calls.reduce_scatter([self._arguments.scattered(*call, op, factor) for call in calls], op)

    # -- copies -----------------------------------------------------------------------------------

    @collective("broadcast")
    def broadcast(self, tensors: Any, opts: Any) -> Handle[Any]:
        """Copy the root's tensor, of any dtype, into those of all ranks."""
        x, root = only(tensors), self._arguments.root(opts)
        return self._calls.broadcast(copyable(x) if self._calls.rank == root else writable(x), root)

    @collective("all_gather")
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy each rank's tensor into the outputs with its index. Ranks may have different sizes, known to all."""
        return self._calls.allgather([self._arguments.gathered(only(inputs), row(outputs))])

    @collective("_allgather_base")
    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any) -> Handle[Any]:
        """Copy each rank's tensor into the part of the output with its index."""
        return self._calls.allgather([self._arguments.gathered(x, output)])

    _allgather_base = all_gather_single

    @collective("all_gather")
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy several tensors of each rank into the outputs, which are lists by rank, in one call."""
        calls = pairs(inputs, by_tensor(outputs))
        return self._calls.allgather([self._arguments.gathered(*call) for call in calls])

    @collective("_allgather_base")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy several tensors of each rank into the parts of the outputs with its index, in one call."""
        return self._calls.allgather([self._arguments.gathered(*call) for call in pairs(inputs, outputs)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @collective("gather")
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy each rank's tensor into the root's output with its index. Ranks may have different sizes."""
        x, root = only(inputs), self._arguments.root(opts)
        if self._calls.rank != root:
            return self._calls.gather(copyable(x), row_of([]), root)
        self._arguments.check_row(row(outputs), "outputs", x)
        return self._calls.gather(copyable(x), outputs_of(row(outputs)), root)

    @collective("gather")
    def gather_single(self, output: Tensor, x: Tensor, opts: Any) -> Handle[Any]:
        """Copy each rank's tensor into the part of the root's output with its index. Other ranks' outputs are left."""
        root = self._arguments.root(opts)
        if self._calls.rank != root:
            return self._calls.gather(copyable(x), row_of([]), root)
        return self._calls.gather(*self._arguments.gathered(x, output, "gather"), root)

    gather_into_tensor = gather_single

    @collective("scatter")
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy the root's inputs to the ranks with their indexes. They may differ in size."""
        output, root = only(outputs), self._arguments.root(opts)
        if self._calls.rank != root:
            return self._calls.scatter(row_of([]), writable(output), root)
        self._arguments.check_row(row(inputs), "inputs", output)
        return self._calls.scatter(row_of([copyable(x) for x in row(inputs)]), writable(output), root)

    @collective("all_to_all")
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Handle[Any]:
        """Copy each input to the rank with its index. All sizes may differ."""
        return self._calls.alltoall(*self._arguments.exchanged(inputs, outputs))

    @collective("all_to_all")
    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: Any, input_sizes: Any, opts: Any
    ) -> Handle[Any]:
        """Copy each part of the input to the rank with its index. The sizes count rows; none given: equal parts."""
        return self._calls.alltoall(*self._arguments.exchanged_parts(x, output, input_sizes, output_sizes))

    alltoall_base = all_to_all_single

    @collective("barrier")
    def barrier(self, opts: Any) -> Handle[Any]:
        """End once all ranks have called it."""
        return self._calls.barrier()
