"""`ProcessGroup`: the collectives of torch.distributed on a communicator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import UsageError
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.handles import Handle
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch import membership
from asyncoll.torch.work import Work

_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PROD,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}


def make_group(options: Any) -> ProcessGroup:
    """The process group for torch's `options`: the world if they name no ranks, else a group of some of its ranks."""
    rank, size, store, timeout = options.group_rank, options.group_size, options.store, options.timeout
    ranks = options.global_ranks_in_group
    if not ranks:
        comm = membership.enter(store, rank, size, timeout)
    else:
        comm = membership.subgroup(options.group_id, ranks)
    return ProcessGroup(store, comm, timeout)


class ProcessGroup(dist.ProcessGroup):
    """A process group of CPU tensors."""

    def __init__(self, store: Any, comm: BlockingCommunicator, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # with a store, C++ would not call this class
        self._comm = comm
        self._store = store
        self._timeout = timeout
        self._pending: list[Work] | None = None  # the calls of a coalescing block

    def getBackendName(self) -> str:
        return "asyncoll"

    def _limit(self, opts: Any) -> contextlib.AbstractContextManager[None]:
        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout.total_seconds() <= 0:
            timeout = self._timeout
        return deadline(timeout.total_seconds())

    # -- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        (x,) = tensors
        with self._limit(opts):
            return Work((self._comm.allreduce(x.detach(), _op(opts)),), list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        with self._limit(opts):
            return Work([self._comm.allreduce(x.detach(), _op(opts)) for x in tensors], list(tensors))

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        (x,) = tensors
        with self._limit(opts):
            return Work((self._comm.reduce(x.detach(), opts.rootRank, _op(opts)),), list(tensors))

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        with self._limit(opts):
            rows = given.detach().reshape(self._comm.size, *output.shape)
            return Work((self._comm.reduce_scatter(rows, _op(opts)),), [output], lambda got: _copy(output, got[0]))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        (output,), (given,) = outputs, inputs
        return self.reduce_scatter_single(output, torch.stack([x.detach() for x in given]), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _together([self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- copies -----------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        (x,) = tensors
        with self._limit(opts):
            return Work((self._comm.broadcast(x.detach(), opts.rootRank),), list(tensors))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        with self._limit(opts):
            return Work(
                (self._comm.allgather(given.detach()),), [output], lambda got: _copy(output, got[0].view(output.shape))
            )

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        (row,), (x,) = outputs, inputs

        def deliver(got: list[Any]) -> None:
            for output, part in zip(row, got[0], strict=True):
                _copy(output, part)

        with self._limit(opts):
            return Work((self._comm.allgatherv(x.detach().reshape(-1)),), [list(row)], deliver)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        rows = zip(*outputs, strict=True)  # `outputs` are by rank, `inputs` by tensor
        return _together([self.allgather([row], [x], opts) for row, x in zip(rows, inputs, strict=True)])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return _together([self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        (x,) = inputs

        def deliver(got: list[Any]) -> None:
            if got[0] is not None:
                for output, part in zip(outputs[0], got[0], strict=True):
                    _copy(output, part)

        with self._limit(opts):
            return Work((self._comm.gather(x.detach(), opts.rootRank),), list(outputs), deliver)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        (output,) = outputs
        with self._limit(opts):
            parts = [x.detach() for x in inputs[0]] if self._comm.rank == opts.rootRank else None
            return Work((self._comm.scatter(parts, opts.rootRank),), list(outputs), lambda got: _copy(output, got[0]))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        def deliver(got: list[Any]) -> None:
            for output, part in zip(outputs, got[0], strict=True):
                _copy(output, part)

        with self._limit(opts):
            return Work((self._comm.alltoallv([x.detach() for x in inputs]),), list(outputs), deliver)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        return self.alltoall(_parts(output, output_sizes, self.size()), _parts(given, input_sizes, self.size()), opts)

    alltoall_base = all_to_all_single

    # -- messages ---------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dest: int, tag: int) -> Work:
        (x,) = tensors
        return Work((self._comm.send(x.detach(), dest, tag),), list(tensors))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Work:
        (x,) = tensors
        return Work((self._comm.recv(x.detach(), source, tag),), list(tensors))

    # -- the group itself -------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work:
        with self._limit(opts):
            return Work((self._comm.barrier(),), [])

    def shutdown(self) -> None:
        membership.leave(self._comm)

    def abort(self) -> None:
        membership.abort(self._comm)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        """Without effect: calls are numbered from the first one."""


def _op(opts: Any) -> ReduceOp:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    found = _OPS.get(getattr(op, "op", op))
    if found is None:
        raise UsageError(f"the reduction {op} is not supported: use one of {', '.join(map(str, _OPS))}")
    return found


def _copy(output: Tensor, part: Tensor) -> None:
    with torch.no_grad():
        output.detach().copy_(part.view(output.shape))


def _parts(x: Tensor, sizes: Sequence[int], count: int) -> Sequence[Tensor]:
    return x.detach().split(list(sizes) if sizes else x.shape[0] // count)


def _together(works: Sequence[Work]) -> Work:
    handles: list[Handle[Any]] = [handle for work in works for handle in work._handles]

    def deliver(_: list[Any]) -> None:
        for work in works:
            work.wait()

    return Work(handles, [output for work in works for output in work._outputs], deliver)
