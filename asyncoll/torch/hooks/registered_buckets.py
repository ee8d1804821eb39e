"""The hook `allreduce`: DDP's buckets in memory that the ranks of the host share, reduced where they are.

Those of a model on a GPU stay where DDP has made them: the memory of a GPU that ranks share belongs to their calls.
"""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncoll.errors import UsageError
from asyncoll.runtime.handles import Handle
from asyncoll.torch.futures import future_of
from asyncoll.torch.hooks import refusals
from asyncoll.torch.hooks.state import HookState, checked


class AllreduceState(HookState):
    """The state of `allreduce`.

    The model is wrapped with `gradient_as_bucket_view=True`. In the first backward pass after DDP has made its final
    buckets, the second one, each bucket and the gradients that are views of it move to registered memory. From then on
    a bucket is reduced in place, without a copy. The memory is freed with the model. On a GPU the buckets stay where
    they are, and are reduced as without a hook.

    The results are those of DDP without a hook, to the bit. (DDP itself rounds in two ways if the number of ranks is no
    power of two: it multiplies new gradients by 1 / size, as this hook does, and divides those that it adds up in a
    bucket, after `no_sync()` or `zero_grad(set_to_none=False)`.) All features of DDP may be used but `mixed_precision`,
    `delay_all_reduce_named_params`, `skip_all_reduce_unused_params`, the `python_reducer` of torch.compile, sparse
    gradients, parameters that are unfrozen after the model was wrapped, and `join(divide_by_initial_world_size=False)`:
    they are a UsageError. Buckets with parameters that a step has not used stay where they are.

    The first `backward()` raises UsageError at all ranks unless they have the same round. `state_dict()` has the round
    alone, so that of any rank is that of all.

    Args:
        ddp: the model, wrapped with `gradient_as_bucket_view=True`. Register the hook on the same one.

    Memory: registered memory of the size of the gradients. DDP's own buckets are freed.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp)
        if not ddp.gradient_as_bucket_view:
            raise UsageError(
                "gradients that are copies of the buckets would stay in ordinary memory: wrap the model with "
                "gradient_as_bucket_view=True"
            )
        self._moved: dict[int, list[Tensor]] = {}  # by index of the bucket: its buffer, and the gradients in it

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        ddp = self._model()
        refusals.check_join_divides(ddp)
        self._accept(bucket)
        buffer = bucket.buffer()
        are_final = ddp._has_rebuilt_buckets or (ddp.find_unused_parameters and not ddp.static_graph)
        may_move = are_final and buffer.is_cpu
        if may_move and bucket.index() not in self._moved and (tensors := _tensors_of(bucket)):
            _move(tensors, self._comm.empty(buffer.numel(), buffer.dtype))
            self._moved[bucket.index()] = tensors
        if bucket.is_last():
            self.round += 1
        # Before the sum, as DDP does, so that the bits are the same.
        buffer.mul_(1 / self._comm.size)
        with self._calls():
            future = _future(self._comm.allreduce(buffer), buffer)
        if bucket.is_last():
            self._share_metrics()
        return future

    def _finish(self) -> None:
        self._release()

    def _release(self) -> None:
        self._moved.clear()


def allreduce(state: AllreduceState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of all ranks, as DDP does, in registered memory."""
    return checked(state, AllreduceState)._reduce(bucket)


def _tensors_of(bucket: GradBucket) -> list[Tensor]:
    """The buffer of the bucket, and all gradients; nothing if one of them is elsewhere, or missing."""
    buffer = bucket.buffer()
    address = buffer.untyped_storage().data_ptr()
    tensors = [buffer]
    for parameter in bucket.parameters():
        gradient = parameter.grad
        if gradient is None or gradient.untyped_storage().data_ptr() != address:
            return []
        tensors.append(gradient)
    return tensors


def _move(tensors: list[Tensor], memory: Tensor) -> None:
    """Move a bucket and its gradients to `memory`. DDP holds the same tensor objects, and so finds them there."""
    buffer, *gradients = tensors
    memory.copy_(buffer)
    start = buffer.storage_offset()
    for gradient in gradients:
        offset = memory.storage_offset() + gradient.storage_offset() - start
        gradient.set_(memory.untyped_storage(), offset, gradient.size(), gradient.stride())
    buffer.set_(memory.untyped_storage(), memory.storage_offset(), buffer.size(), buffer.stride())


def _future(handle: Handle[Tensor], result: Tensor) -> torch.futures.Future[Tensor]:
    """The end of a call whose result is in `result`, as DDP waits for it."""
    ended = future_of([result])

    def deliver(_: object) -> Tensor:
        handle.wait()
        return result

    future = ended.then(deliver)  # C++ takes what a callback raises for an error, but no exception that is set
    handle.when_done(lambda: ended.set_result(None))
    return future
