"""Synchronous data-parallel SGD: the "synch-SGD" with which the papers compare.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 3.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import torch

import asyncoll
from trainers.replicas import share, share_buffers


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

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does; gradients
    are zero when it is called. `schedule(round)` is called before the result of the round is applied.

    Collective: every rank calls it, with a model and an optimizer of the same structure. All ranks start with the model
    and the optimizer of rank 0, and leave each round with the same model, to the bit; its buffers are rank 0's (see
    `replicas.py`). A loop that all ranks leave early, after the same round, also leaves one model.
    """
    flat = await share(comm, model, optimizer)  # w is the same everywhere
    for t in range(1, rounds + 1):
        flat.zero_gradients()
        await gradient(t)  # G_local = mean gradient of b local samples at w
        await comm.allreduce(
            flat.gradients, op=asyncoll.AVG
        )  # G = sum of G_local / P, once the slowest rank has called
        schedule(t)
        optimizer.step()  # w = w + U(G, w, t)
        await share_buffers(comm, model)
        yield complete(comm, t)


def complete(comm: asyncoll.Communicator, round_: int) -> asyncoll.Reduction:
    """The record of a round in which every rank took part."""
    everyone = tuple(range(comm.size))
    return asyncoll.Reduction(round_, comm.size, included=True, skipped=0, synchronous=True, group=everyone)
