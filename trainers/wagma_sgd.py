"""WAGMA-SGD: models are averaged in changing groups, without waiting for late ranks (algorithm 2).

Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel stochastic
optimization with wait-avoiding group averaging", IEEE TPDS 2021, section IV. Each rank takes a step of its own, and
then averages its model with those of its group in this round. Groups change so that every update soon reaches every
rank; an average over all ranks every τ rounds bounds staleness.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import torch
from torch import Tensor

import asyncoll
from trainers.replicas import share, share_buffers, weights

Order = Literal["step-then-average", "average-then-step"]


async def wagma_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    group_size: int | None = None,
    sync_every: int = 10,
    order: Order = "step-then-average",
    fixed: bool = False,
    observe: Callable[[int, Tensor, Tensor], None] = lambda round_, own, mean: None,
    name: str = "wagma-sgd",
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` until round `rounds`; yields after each average, or step, that ends a round of this rank.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does; gradients
    are zero when it is called, and `round` is the round that it aims at. `schedule(round)` is called before the local
    step with that gradient. Every rank calls this function. All ranks start with the model and the optimizer of rank 0;
    afterwards the state of the optimizer stays local.

    Groups have `group_size` ranks, by default the square root of the number of all, rounded up; `fixed` ones never
    change (the paper's ablation). Every `sync_every`-th round (τ; 0: none) averages over all ranks and waits for them.
    At the end all ranks have an average of all models. `order` is the paper's, or that of the authors' code, which
    averages the models of the last step and then applies the gradient to the average, as D-PSGD does.

    `observe(round, own, mean)` is called at each average over all ranks, before the mean replaces this rank's model
    (both flat). Their distance is this rank's part of the consensus distance.

    Buffers are each rank's own; with each average over all ranks, all ranks get rank 0's (see `replicas.py`). A loop
    that is left early leaves each rank's model as it is. With "step-then-average" all models are equal after a
    synchronous round. All ranks see that round, so it is the place to leave: `if done.synchronous and ...: break`.

    A second training on one communicator needs another `name`.
    """
    if order not in ("step-then-average", "average-then-step"):
        raise asyncoll.UsageError(f"order is step-then-average or average-then-step, not {order!r}")
    if group_size is None:
        group_size = math.isqrt(comm.size - 1) + 1  # S = sqrt(P), section IV
    flat = await share(comm, model, optimizer)  # W is the same everywhere
    t = 0  # the newest round seen: the clock of all ranks, while local steps drift apart
    while t < rounds:
        flat.zero_gradients()
        await gradient(t + 1)  # lines 3-5: G = mean gradient of b local samples at W
        schedule(t + 1)
        if order == "step-then-average":
            optimizer.step()  # lines 6-7: W' = W + U(G, W, t)
        own = weights(flat)
        total = own.clone()
        reduction = await comm.group_allreduce(
            total, group_size=group_size, name=name, fixed=fixed, sync_every=sync_every
        )  # lines 8, 9 and 16
        average = merge(total, own, reduction)
        if reduction.synchronous:
            observe(reduction.round, own, average)
            await share_buffers(comm, model)
        own.copy_(average)
        if order == "average-then-step":
            optimizer.step()
        t = reduction.round
        yield reduction
    own = weights(flat)
    mean = await comm.allreduce(own.clone(), op=asyncoll.AVG)
    observe(t, own, mean)
    own.copy_(mean)  # all ranks leave with one model
    await share_buffers(comm, model)


def merge(total: Tensor, own: Tensor, reduction: asyncoll.Reduction) -> Tensor:
    """The next model. Weights add up to one: S of the paper is the number of models that are in `total`."""
    if not reduction.active:
        return own  # no rank of the group, this one included, had made a step when the round began
    if reduction.included:
        return total / reduction.active  # line 11, and line 16, where all ranks are active
    return (total + own) / (reduction.active + 1)  # line 13: `total` has an older model of this rank
