"""Dense SGD whose allreduces begin during `backward()`: "DenseOvlp" (Li, Hoefler, PPoPP 2022, section 5).

`backward()` computes the gradients of the last layers first. They are averaged in buckets. Each bucket starts as soon
as it is complete, so only the first layers' bucket is left to wait for when `backward()` ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training.device_hooks import GradientStreams, compute_here
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer, finite, wait_for_flag
from asyncoll.training.under_way import UnderWay

BUCKET_BYTES = 4 << 20  # a call costs about as much as sending 1 MiB by message; torch's DDP has 25 MiB, for GPUs


class Bucket(NamedTuple):
    """Elements [start, stop) of the flat gradients: those of `parameters` consecutive parameters."""

    start: int
    stop: int
    parameters: int


class OverlappedSGD(Trainer):
    """Average the gradients of all ranks in buckets, each as soon as `backward()` has computed it.

    The result equals `AllreduceSGD`'s, to the bit if a bucket is added up in the same order as the whole: always in
    shared memory; by message, if both have lengths for which the same algorithm is chosen (up to 32 KiB, for example).

    A bucket is a slice of the flat gradients, of whole parameters. Buckets start in the same order at all ranks, from
    the end of the model to its beginning, whatever the order in which gradients arrive, because calls are numbered as
    they are made. So a complete bucket waits for those before it. Buckets that lack a gradient when `step()` is called,
    because `backward()` did not use a parameter, start then, with zeros for it.

    `backward()` is called on the thread of the loop, once for each `step()`; UsageError otherwise. With `accumulate`,
    buckets start in the last `backward()`. Gradients are sent before `step()` is called: a `weight` is refused, NaN
    reaches all ranks, and a `scaler` has one scale at all ranks, as in DistributedDataParallel. Without a scaler every
    rank then raises NonFiniteError, with the parameters of the round before; its `ranks` are those whose own gradient
    was not finite, and none if only the sum has overflowed. A step that fails in another way or is cancelled aborts the
    communicator, because the buckets of the other ranks would wait for ever.

    torch computes the gradients of a GPU in a thread of its own, which can make no calls. So for a model on a GPU,
    `start()` calls `torch.autograd.set_multithreading_enabled(False)` for the thread of the loop, which then computes
    them itself. `finish()` undoes that, or without it the end of the trainer. A bucket is copied as soon as the GPU has
    computed it, whatever else is queued.

    Args:
        bucket_bytes: the least size of a bucket, except of the last one to start.

    See `Trainer` for the other arguments. Memory: the gradients, as one flat tensor.
    """

    _is_elastic: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Unpack[Options],
    ) -> None:
        if bucket_bytes < 1:
            raise asyncoll.UsageError(f"a bucket has at least one byte, not {bucket_bytes}")
        super().__init__(comm, model, optimizer, **options)
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # in the order of the flat gradients
        gradients = self._flat.gradients
        self._buckets = cut([p.numel() for p in self._parameters], -(-bucket_bytes // gradients.itemsize))
        self._slices = [gradients[bucket.start : bucket.stop] for bucket in self._buckets]
        buckets = (index for index, bucket in enumerate(self._buckets) for _ in range(bucket.parameters))
        self._bucket_of = dict(zip(reversed(self._parameters), buckets, strict=True))
        self._thread = threading.get_ident()  # of the loop: calls can only be made there
        self._streams = None if gradients.is_cpu else GradientStreams(gradients.device)
        self._compute_as_before: Callable[[], object] | None = None  # once the thread computes gradients itself
        hook = _weak(self._arrived)
        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._parameters]
        self._kept = torch.empty_like(gradients) if self._elastic else None
        self._open()

    def _open(self) -> None:
        """Wait for the gradients of the next step."""
        self._lacking = set(self._parameters)  # parameters whose gradient has not arrived in this step
        self._missing = [bucket.parameters for bucket in self._buckets]  # the numbers of these, by bucket
        self._started: list[UnderWay[Tensor]] = []  # the calls of the first buckets, in order
        self._are_finite: list[Tensor] = []  # whether the parts of this rank in these buckets are, each one element
        self._is_repeated = False  # the step: its gradient is a copy of that which the buckets had

    def _arrived(self, parameter: nn.Parameter) -> None:
        """The hook of autograd: the gradient of `parameter` is complete."""
        if self._state != "training" or self._calls + 1 < self._accumulate:
            return
        if threading.get_ident() != self._thread:
            raise asyncoll.UsageError("backward() of an overlapped step must run on the thread of the loop")
        if parameter not in self._lacking:
            raise asyncoll.UsageError(
                "backward() ran twice before one step(), and may have added to gradients that are on their way: add "
                "the losses up and call it once, or set accumulate"
            )
        if self._streams is not None:
            self._streams.note()
        self._flat.collect_gradient(parameter)
        self._lacking.remove(parameter)
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            self._start_next()

    def _start_next(self) -> None:
        gradients, bucket = self._slices[len(self._started)], self._buckets[len(self._started)]
        if self._streams is not None:
            self._streams.join()
        if self._sum is not None and not self._is_repeated:
            # In the type of the sum, and before it is sent, as `AllreduceSGD` does: another order rounds otherwise.
            gradients.copy_(self._sum[bucket.start : bucket.stop].add_(gradients).div_(self._accumulate))
        self._are_finite.append(finite(gradients))  # the call overwrites them
        if self._kept is not None:
            self._kept[bucket.start : bucket.stop].copy_(gradients)
        self._started.append(UnderWay(self.comm.allreduce(gradients, op=asyncoll.AVG)))

    async def _prepare(self, weight: float | None) -> None:
        """Nothing: the gradients are on their way."""

    async def _update(self, weight: float | None) -> Step:
        try:
            self._refuse_weight(weight, "its gradients are on their way before step() is called")
            await self._average_buckets()
            await self._examine()
        finally:
            self._open()
        self._apply()
        await self._settle_buffers()
        return self._complete()

    async def _check_gradient(self) -> None:
        """Raise NonFiniteError at every rank if the averaged gradient is not finite, with the ranks that are to blame.

        Collective, at the same ranks: the average has the same bits everywhere.
        """
        if await wait_for_flag(finite(self._flat.gradients)):
            return
        flags = await self.comm.allgather(torch.stack(self._are_finite).all().view(1).cpu())
        ranks = tuple((~flags.flatten()).nonzero().flatten().tolist())
        whose = (
            f"in the gradient of rank {', '.join(map(str, ranks))}" if ranks else "only after the ranks were added up"
        )
        raise asyncoll.NonFiniteError(
            ranks,
            f"the averaged gradient for round {self.round + 1} holds NaN or infinity, {whose}: look at the loss of "
            "this step; the model has not changed",
        )

    def _keep(self) -> None:
        """Nothing: each bucket is copied as it starts."""

    def _restore(self, weight: float | None) -> float | None:
        self._is_repeated = True
        return super()._restore(weight)

    async def _average_buckets(self) -> None:
        """Start the buckets that are left, and wait for all.

        The wait goes on even if some of them fail: until it has ended, a call may write into the gradients.
        """
        while len(self._started) < len(self._buckets):
            self._start_next()
        errors: list[BaseException] = []
        for call in self._started:
            try:
                await call
            except BaseException as error:
                if not (self._elastic and isinstance(error, asyncoll.PeerLostError)):
                    self.comm.abort(f"a step with overlapped gradients failed: {error!r}")
                errors.append(error)
        if errors:
            raise errors[0]

    async def _resume(self) -> None:
        if self._streams is not None:
            self._compute_as_before = compute_here(self)

    def _differs(self) -> str:
        return ""  # models are equal after each step

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._compute_as_before is not None:
            self._compute_as_before()

    async def _finish(self) -> None:
        self._release()
        # There was a backward() without a step: its gradient is dropped, as every rank drops it.
        if self._started:
            try:
                await self._average_buckets()
            finally:
                self._open()
            self._flat.zero_gradients()
        await self._unite_buffers()


def _weak(arrived: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does nothing when the trainer is gone: one that a program drops without `finish()` starts no calls.

    The garbage collector does not see references from the hooks of a tensor, so a plain one would keep the trainer.
    """
    method = weakref.WeakMethod(arrived)

    def hook(parameter: nn.Parameter) -> None:
        known = method()
        if known is not None:
            known(parameter)

    return hook


def cut(sizes: Sequence[int], least: int) -> list[Bucket]:
    """The buckets of parameters of these `sizes`, from the last to the first, each of `least` elements or more."""
    buckets: list[Bucket] = []
    start = stop = sum(sizes)
    parameters = 0
    for index, size in reversed(list(enumerate(sizes))):
        start -= size
        parameters += 1
        if stop - start >= least or index == 0:
            buckets.append(Bucket(start, stop, parameters))
            stop, parameters = start, 0
    return buckets
