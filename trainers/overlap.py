"""Dense SGD whose allreduces begin during `backward()`: "DenseOvlp" (Li, Hoefler, PPoPP 2022, section 5).

`backward()` computes the gradients of the last layers first. They are averaged in buckets. Each bucket starts as soon
as it is complete, so only the first layers' bucket is left to wait for when `backward()` ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import torch

import asyncoll
from trainers.allreduce_sgd import complete
from trainers.replicas import share, share_buffers

BUCKET_BYTES = 4 << 20  # a call costs about as much as sending 1 MiB by message; torch's DDP has 25 MiB, for GPUs


async def overlapped_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    bucket_bytes: int = BUCKET_BYTES,
) -> AsyncGenerator[asyncoll.Reduction, None]:
    """Train `model` for `rounds` rounds as `allreduce_sgd` does; yields after each update.

    Collective: every rank calls it. All ranks start with the model and the optimizer of rank 0, and leave each round
    with one model, to the bit.

    `gradient(round)` calls `backward()` once, on the thread of its loop, and does not touch the gradients afterwards:
    they are being averaged. If it raises, or is cancelled, the communicator is aborted, as described at `Overlap`.
    `schedule(round)` is called before the result of the round is applied.
    """
    flat = await share(comm, model, optimizer)  # w is the same everywhere
    with Overlap(comm, model, flat, bucket_bytes) as overlap:
        for t in range(1, rounds + 1):
            flat.zero_gradients()
            async with overlap.step():
                await gradient(t)
            schedule(t)
            optimizer.step()
            await share_buffers(comm, model)
            yield complete(comm, t)  # nothing is in flight here


class Bucket(NamedTuple):
    """Elements [start, stop) of the flat gradients: those of `parameters` consecutive parameters."""

    start: int
    stop: int
    parameters: int


class Overlap:
    """Averages the gradients of a flattened model over all ranks, in place, while `backward()` makes them.

        with Overlap(comm, model, flat) as overlap:
            for batch in batches:
                flat.zero_gradients()
                async with overlap.step():
                    loss(batch).backward()
                optimizer.step()

    A bucket is a slice of `flat.gradients`, of at least `bucket_bytes` (except the last to start) and of whole
    parameters. Buckets start in the same order at all ranks, from the end of the model to its beginning, whatever the
    order in which gradients arrive, because calls are numbered as they are made. So a complete bucket waits for those
    before it. Buckets that lack a gradient when the step ends, because `backward()` did not use a parameter, start
    then, with zeros for it. The result is that of `comm.allreduce(flat.gradients, op=AVG)`, to the bit if a bucket is
    added up in the same order as the whole: always in shared memory; by message, if both have lengths for which the
    same algorithm is chosen (up to 32 KiB, for example).

    Every rank must make the same steps. A step that raises an exception, or is cancelled, aborts the communicator: the
    buckets of the other ranks would wait for ever, or be averaged with half a gradient. They get AbortedError with the
    reason. `backward()` must run on the thread of the loop, and once in a step; UsageError otherwise. Outside of steps
    `backward()` is not affected. Leaving the context removes the hooks.
    """

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: torch.nn.Module,
        flat: asyncoll.Flat,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise asyncoll.UsageError(f"a bucket has at least one byte, not {bucket_bytes}")
        self._comm = comm
        self._flat = flat
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # in the order of the flat gradients
        self._buckets = cut([p.numel() for p in self._parameters], -(-bucket_bytes // flat.gradients.itemsize))
        buckets = (index for index, bucket in enumerate(self._buckets) for _ in range(bucket.parameters))
        self._bucket_of = dict(zip(reversed(self._parameters), buckets, strict=True))
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._lacking: set[torch.nn.Parameter] = set()  # parameters whose gradient has not arrived in this step
        self._missing: list[int] = []  # for each bucket: the number of its gradients that have not arrived
        self._calls: list[Coroutine[Any, Any, Any]] = []  # of the buckets that have started, in order
        self._is_open = False
        self._thread = 0  # of the loop: calls can only be made there

    def __enter__(self) -> Overlap:
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self._parameters]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Around one `backward()`. At the end the gradients are the averages, and all calls have ended."""
        self._lacking = set(self._parameters)
        self._missing = [bucket.parameters for bucket in self._buckets]
        self._calls = []
        self._is_open = True
        self._thread = threading.get_ident()
        try:
            yield
            while len(self._calls) < len(self._buckets):
                self._start_next()
        except BaseException as error:
            self._comm.abort(f"a step with overlapped gradients failed: {error!r}")
            await _errors_of(self._calls)
            raise
        finally:
            self._is_open = False
        for failure in await _errors_of(self._calls):
            raise failure

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        """The hook of autograd: the gradient of `parameter` is complete."""
        if not self._is_open:
            return
        if threading.get_ident() != self._thread:
            raise asyncoll.UsageError("backward() of an overlapped step must run on the thread of the loop")
        if parameter not in self._lacking:
            raise asyncoll.UsageError(
                "backward() ran twice in one step, and may have added to gradients that are on their way: "
                "add the losses up and call it once, or use another algorithm"
            )
        self._lacking.remove(parameter)
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._calls) < len(self._buckets) and not self._missing[len(self._calls)]:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[len(self._calls)]
        gradients = self._flat.gradients[bucket.start : bucket.stop]
        self._calls.append(self._comm.allreduce(gradients, op=asyncoll.AVG))


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


async def _errors_of(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[BaseException]:
    """Wait for every call, even if others fail: until it has ended, a call may write into the gradients."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            await call
        except BaseException as error:
            errors.append(error)
    return errors
