"""The gradients of one step: DDP's buckets, gathered in one flat tensor until the last one is there."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import UsageError
from asyncoll.torch.futures import future_of
from asyncoll.torch.hooks import refusals


def trained(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that have gradients, in the order of the model."""
    return [parameter for parameter in ddp._module_parameters if parameter.requires_grad]


class Layout:
    """Where each parameter's elements are in flat tensors: in the order of the parameters, without gaps.

    That order does not change when DDP makes its buckets anew, and is the same in another run.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        kinds = {parameter.dtype for parameter in parameters}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise UsageError(f"the parameters have the dtypes {names}, and one operation has one: train in one dtype")
        places = {parameter.device for parameter in parameters}
        if len(places) > 1:
            names = ", ".join(sorted(map(str, places)))
            raise UsageError(f"the parameters are on {names}, and one operation has one device: train on one device")
        (self.dtype,), (self.device,) = kinds, places
        if self.dtype.is_complex:
            raise UsageError(
                "DDP gives hooks complex gradients as real ones of twice the length, and this hook needs one element "
                "for each of the parameter: use the hook allreduce, or real parameters"
            )
        self.parameters = parameters
        self.starts = dict(zip(parameters, accumulate((p.numel() for p in parameters), initial=0), strict=False))
        self.count = sum(parameter.numel() for parameter in parameters)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The part of `flat` that belongs to each parameter, as a tensor like the parameter."""
        return [_like(parameter, flat, start) for parameter, start in self.starts.items()]

    def read_gradients(self, into: Tensor) -> None:
        """Copy the parameters' gradients to the flat tensor `into`. A gradient that is missing is 0."""
        for parameter, part in zip(self.parameters, self.parts(into), strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad)

    def write_gradients(self, flat: Tensor) -> None:
        """Copy `flat` to the parameters' gradients. A parameter without one, which DDP has found unused, keeps none."""
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part)

    def are_gradients(self, flat: Tensor) -> bool:
        """Whether all parameters have gradients, and `flat` has their bits."""
        return all(
            parameter.grad is not None and torch.equal(_bits(parameter.grad), _bits(part))
            for parameter, part in zip(self.parameters, self.parts(flat), strict=True)
        )

    def set_gradients(self, flat: Tensor) -> None:
        """Copy `flat` to the gradients of all parameters."""
        for parameter, part in zip(self.parameters, self.parts(flat), strict=True):
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)


class Buckets:
    """Gathers the buckets of a step in `flat`, and returns its content to them. On the CPU it is registered memory."""

    def __init__(self, comm: BlockingCommunicator, layout: Layout) -> None:
        self.layout = layout
        self.flat: Tensor = comm.empty(layout.count, layout.dtype, device=layout.device)
        self._pending: list[tuple[Tensor, list[tuple[Tensor, Tensor]], torch.futures.Future[Tensor]]] = []

    def gather(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Copy the gradients of a bucket to `flat`. The future waits for `scatter`."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            # What is left here is of a step that has failed.
            self._pending.clear()
        pairs = [self._pair(*each, buffer) for each in zip(bucket.parameters(), bucket.gradients(), strict=True)]
        for here, there in pairs:
            here.copy_(there)
        future = future_of([buffer])
        self._pending.append((buffer, pairs, future))
        return future

    def scatter(self) -> None:
        """Copy `flat` to all buckets of the step, and end their futures."""
        pending, self._pending = self._pending, []
        for buffer, pairs, future in pending:
            for here, there in pairs:
                there.copy_(here)
            future.set_result(buffer)

    def _pair(self, parameter: Tensor, gradient: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        start, count = self.layout.starts.get(parameter), parameter.numel()  # type: ignore[call-overload]
        if start is None:
            raise refusals.changed_parameters()
        if buffer.dtype is not self.layout.dtype:
            raise UsageError(
                f"the bucket is in {buffer.dtype}, and its parameters are in {self.layout.dtype}: register the hook "
                "without a wrapper that compresses, such as fp16_compress_wrapper"
            )
        offset = gradient.storage_offset() - buffer.storage_offset()
        return self.flat[start : start + count], buffer[offset : offset + count]


def _bits(x: Tensor) -> Tensor:
    """The elements as integers: NaN, of a sum that overflows, equals itself."""
    return x.detach().view(getattr(torch, f"int{8 * x.itemsize}"))


def _like(parameter: Tensor, flat: Tensor, start: int) -> Tensor:
    """The part of `flat` from `start`, of the shape of `parameter`, with its order of elements in memory."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # dense: as DDP lays out its buckets
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + start)
    return flat[start : start + parameter.numel()].view(parameter.size())
