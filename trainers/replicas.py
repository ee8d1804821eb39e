"""Replicas that are equal to the bit, again: what a rank needs after it has missed results for good."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import asyncoll


async def resynchronise(
    comm: asyncoll.Communicator, flat: asyncoll.Flat, optimizer: torch.optim.Optimizer, lost: int
) -> None:
    """Make models and optimizer states equal to the bit if any rank has `lost` results; else nobody sends a model.

    Every rank calls it at the same round, after at least one step. The source is the lowest of the ranks that lost
    least: if somebody lost nothing, that is the state of a run in which nobody did.
    """
    losses = (await comm.allgather(torch.tensor(lost))).tolist()
    if not any(losses):
        return
    source = losses.index(min(losses))
    await comm.broadcast(flat.parameters, root=source)
    for tensor in _state(optimizer):
        await comm.broadcast(tensor, root=source)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The state's tensors (momentum, Adam's moments and step), in the same order at every rank."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield value
            elif value is not None:
                raise asyncoll.UsageError(
                    f"{type(optimizer).__name__} keeps {name!r} as a {type(value).__name__}, which cannot be "
                    "broadcast: use an optimizer whose state is tensors, or a history that is never overrun "
                    "(at least sync_every)"
                )
