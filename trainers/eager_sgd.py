"""Eager-SGD (Li et al., PPoPP 2020): SGD that does not wait for slow ranks (section 5, algorithm 2).

The paper's line 7 is the only difference from synchronous SGD: a partial allreduce takes the gradients of the
ranks that are there. What comes too late is not lost: the collective keeps it, and it enters a later round.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import torch

import asyncoll

Partial = Literal["solo", "majority"]


async def eager_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    partial: Partial = "solo",
    history: int = 0,
    average_every: int = 0,
    sync_every: int = 0,
    seed: int = 0,
    name: str = "eager-sgd",
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` until round `rounds`; yields after each update this rank applies.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does;
    gradients are zero when it is called, and `round` is the one it aims at. `schedule(round)` is called before
    the result of each round is applied: a learning rate must go by rounds, for a late rank makes fewer local
    steps than there are rounds. With `history`, a rank that is late by no more rounds applies every result it
    missed, so all replicas stay equal to the bit. Without, models drift apart, and `average_every` rounds (0:
    only at the end) they are averaged. A second training on one communicator needs another `name`.
    """
    partial_allreduce: Callable[..., Awaitable[asyncoll.Reduction]] = comm.solo_allreduce
    if partial == "majority":
        partial_allreduce = functools.partial(comm.majority_allreduce, seed=seed)
    flat = asyncoll.flatten(model)
    await comm.broadcast(flat.parameters)  # w is the same everywhere
    t = 0  # the newest round seen: the clock of all ranks, while local steps drift apart
    while t < rounds:
        flat.zero_gradients()
        await gradient(t + 1)  # G_local = mean gradient of b local samples at w
        reduction = await partial_allreduce(flat.gradients, name=name, sync_every=sync_every, history=history)
        results = [*reduction.missed, flat.gradients.clone()]  # U_sum of each round since t that is still known
        for round_, total in enumerate(results, reduction.round - len(results) + 1):
            schedule(round_)
            flat.gradients.copy_(total).div_(comm.size)  # G = U_sum / P: always P, whoever was there (line 7)
            optimizer.step()  # w = w + U(G, w, t)
        # A rank that sees only the newest result misses those before it, so the models drift apart, and the
        # paper makes them equal every few epochs (section 5). We average, and count boundaries of rounds, not
        # local steps: each rank averages once for each boundary that it crosses, so all do equally often.
        for _ in range(t // average_every, reduction.round // average_every) if average_every else ():
            await comm.allreduce(flat.parameters, op=asyncoll.AVG)
        t = reduction.round
        yield reduction
    await comm.allreduce(flat.parameters, op=asyncoll.AVG)  # all leave with one model
