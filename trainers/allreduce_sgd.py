"""Synchronous data-parallel SGD (eager-SGD, section 2.1, the "synch-SGD" everything is compared with)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import torch

import asyncoll


async def allreduce_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` for `rounds` rounds; yields after each update.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does;
    gradients are zero when it is called; `schedule(round)` is called before the result of the round is applied.
    All ranks leave each round with the same parameters, to the bit.
    """
    flat = asyncoll.flatten(model)
    await comm.broadcast(flat.parameters)  # w is the same everywhere
    for t in range(1, rounds + 1):
        flat.zero_gradients()
        await gradient(t)  # G_local = mean gradient of b local samples at w
        await comm.allreduce(flat.gradients, op=asyncoll.AVG)  # G = sum of G_local / P, when the slowest is here
        schedule(t)
        optimizer.step()  # w = w + U(G, w, t)
        yield complete(comm, t)


def complete(comm: asyncoll.Communicator, round_: int) -> asyncoll.Reduction:
    """The record of a round that nobody missed."""
    everyone = tuple(range(comm.size))
    return asyncoll.Reduction(round_, comm.size, included=True, skipped=0, synchronous=True, group=everyone)
