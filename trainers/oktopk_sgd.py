"""Ok-Topk SGD: only the largest updates are sent; the others stay with their rank (algorithm 2).

Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, section 4. Each rank adds its
step to its residual, sends the largest elements of the sum, about a share `density` of all, and keeps the rest. So a
small update that recurs is sent in the end. The algorithms that section 5 of the paper compares with train in the same
way, so that they differ in nothing but their allreduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, get_args

import torch

import asyncoll
from trainers.allreduce_sgd import complete
from trainers.overlap import BUCKET_BYTES, overlapped_sgd
from trainers.replicas import share, share_buffers

Algorithm = Literal["oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "dense", "dense-overlapped"]
Accumulate = Literal["updates", "gradients"]
_PLAIN = {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


async def oktopk_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    algorithm: Algorithm = "oktopk",
    density: float = 0.01,
    accumulate: Accumulate = "updates",
    thresholds_every: int = 1,
    regions_every: int = 64,
    feedback: asyncoll.Feedback | None = None,
    warm_up: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    observe: Callable[[int, asyncoll.SparseReduction], None] = lambda round_, total: None,
    name: str = "oktopk-sgd",
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` for `rounds` rounds; yields after each update.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does; gradients
    are zero when it is called. `schedule(round)` is called after the gradient, and before its learning rate is used.

    Collective: every rank calls it. All ranks start with the model and the optimizer of rank 0, and leave each round
    with the same model, to the bit; its buffers are rank 0's (see `replicas.py`). A loop that all ranks leave early,
    after the same round, also leaves one model.

    `accumulate` says what the residual ε holds, and so how the result u of the allreduce becomes a step:

    - "updates", as in the paper: acc = ε + ηG, w = w - u/P. Residuals keep the learning rate of their own round. The
      optimizer lends its learning rates and takes no step; it must be plain SGD, with all trainable parameters.
    - "gradients", as in the authors' code: acc = ε + G, and any optimizer takes a step with the gradient u/P. Momentum,
      weight decay and Adam's moments act on all elements. Residuals get the learning rate of the round they enter.

    `algorithm`, `density`, `thresholds_every` (τ'), `regions_every` (τ) and `feedback` are those of
    `comm.sparse_allreduce`. While ε fills up, for about 1 / density rounds, accumulators grow. A threshold that is
    reused, as in the paper (τ' = 32 or 128), then selects several times k. With "updates" a rising learning rate has
    the same effect.

    The first `warm_up` rounds are "dense": they leave no residual, so ε is 0 when the sparse rounds begin, and
    thresholds and regions are counted from there. "dense-overlapped" (`overlapped_sgd`, in buckets of `bucket_bytes`)
    has no residual and no sparse result: it is synchronous SGD, for either `accumulate`.

    `observe(round, total)` is called with the result of each sparse allreduce. ε ends with the training; it is a
    registered tensor of this trainer. A second training on one communicator needs another `name`, because thresholds
    and regions belong to the name.

    Raises UsageError for impossible options. Raises NonFiniteError at every rank, with the parameters of the round
    before, if any rank's gradient holds NaN or infinity; "dense-overlapped" does not check this, as other dense SGD
    does not.
    """
    _check(model, optimizer, algorithm, accumulate, density, warm_up)
    if algorithm == "dense-overlapped":
        overlapped = overlapped_sgd(
            comm, model, optimizer, gradient, rounds=rounds, schedule=schedule, bucket_bytes=bucket_bytes
        )
        async with contextlib.aclosing(overlapped):
            async for done in overlapped:
                yield done
        return
    flat = await share(comm, model, optimizer)  # w is the same everywhere
    residual = comm.empty(flat.gradients.numel(), flat.gradients.dtype).zero_()  # ε = 0
    for t in range(1, rounds + 1):
        flat.zero_gradients()
        await gradient(t)  # G
        schedule(t)
        if accumulate == "updates":
            _scale_by_rate(optimizer)  # ηG
        method = algorithm if t > warm_up else "dense"
        total = await comm.sparse_allreduce(
            residual.add_(flat.gradients),  # acc = ε + ηG
            density=density,
            algorithm=method,
            name=f"{name}, {method}",
            thresholds_every=thresholds_every,
            regions_every=regions_every,
            feedback=feedback,
        )  # u and idx; ε = acc, but 0 at idx
        observe(t, total)
        _apply(flat, optimizer, total, comm.size, accumulate)
        await share_buffers(comm, model)
        yield complete(comm, t)


def _scale_by_rate(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(group["lr"])


def _apply(
    flat: asyncoll.Flat,
    optimizer: torch.optim.Optimizer,
    total: asyncoll.SparseReduction,
    size: int,
    accumulate: Accumulate,
) -> None:
    mean = (total.values / size).to(flat.gradients.dtype)  # u / P
    if accumulate == "updates":
        flat.parameters.index_add_(0, total.indices, mean, alpha=-1)  # w = w - u / P
        return
    flat.zero_gradients()
    flat.gradients.index_add_(0, total.indices, mean)
    optimizer.step()


def _check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    algorithm: str,
    accumulate: str,
    density: float,
    warm_up: int,
) -> None:
    for what, value, choices in (
        ("algorithm", algorithm, get_args(Algorithm)),
        ("accumulate", accumulate, get_args(Accumulate)),
    ):
        if value not in choices:
            raise asyncoll.UsageError(f"{what} is one of {', '.join(choices)}, not {value!r}")
    if not 0 < density <= 1:
        raise asyncoll.UsageError(f"density is above 0 and at most 1, not {density}")
    if warm_up < 0:
        raise asyncoll.UsageError(f"warm_up is a number of rounds, not {warm_up}")
    if accumulate == "updates":
        _check_plain(model, optimizer)


def _check_plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless the optimizer's step is -ηG for all trainable parameters, as w = w - u/P is."""
    groups = optimizer.param_groups
    is_plain = type(optimizer) is torch.optim.SGD and all(
        group[option] == off for group in groups for option, off in _PLAIN.items()
    )
    stepped = {parameter for group in groups for parameter in group["params"]}
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not is_plain or stepped != trainable:
        raise asyncoll.UsageError(
            "accumulate='updates' is plain SGD on all trainable parameters: without momentum and weight decay; "
            "for another optimizer, take accumulate='gradients'"
        )
