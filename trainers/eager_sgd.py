"""Eager-SGD: SGD that does not wait for slow ranks.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in deep learning with partial
collective operations", PPoPP 2020, section 5. Line 7 of its algorithm is the only difference from synchronous SGD: a
partial allreduce takes the gradients of the ranks that have arrived. A gradient that comes too late is not lost: the
collective keeps it, and it enters a later round.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import torch

import asyncoll
from trainers.replicas import average, resynchronise, share

Partial = Literal["solo", "majority", "quorum"]


async def eager_sgd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    partial: Partial = "solo",
    candidates: int = 1,
    quorum: int | None = None,
    history: int = 0,
    sync_every: int = 0,
    average_every: int = 0,
    seed: int = 0,
    name: str = "eager-sgd",
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` until round `rounds`; yields after each update that this rank applies.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does; gradients
    are zero when it is called, and `round` is the round that it aims at. `schedule(round)` is called before the result
    of each round is applied. A learning rate must follow rounds, because a late rank makes fewer local steps than there
    are rounds.

    A round starts with the first rank ("solo"), with any of `candidates` drawn ranks ("majority"), or with the
    `quorum`-th rank ("quorum"; by default size // 2 + 1). Every `sync_every`-th round (0: none) waits for all ranks.

    With `history`, a rank that is late by no more rounds applies every result that it has missed. So all replicas that
    have applied the same round are equal to the bit. A rank that is later loses results for good; the next synchronous
    round makes all replicas equal again, optimizer state included. Without `sync_every` that loss is a UsageError. (A
    history of `sync_every` rounds is always enough.) Without history, models drift apart, and are averaged every
    `average_every` rounds (0: only at the end).

    Every rank calls it. All ranks start with the model and the optimizer of rank 0, and end with one model, whose
    buffers are rank 0's (see `replicas.py`). A loop that is left early leaves each rank's model as it is. With history
    all models are equal after a synchronous round. All ranks see that round, so it is the place to leave:
    `if done.synchronous and ...: break`.

    A second training on one communicator needs another `name`.
    """
    if history and average_every:
        raise asyncoll.UsageError("with history no replica drifts: average_every is for training with history=0")
    partial_allreduce = _partial_allreduce(comm, partial, candidates, quorum, seed)
    flat = await share(comm, model, optimizer)  # w is the same everywhere
    t = 0  # the newest round seen: the clock of all ranks, while local steps drift apart
    lost = 0  # results that this rank has lost since all replicas were equal
    while t < rounds:
        flat.zero_gradients()
        await gradient(t + 1)  # G_local = mean gradient of b local samples at w
        reduction = await partial_allreduce(flat.gradients, name=name, sync_every=sync_every, history=history)
        if history and reduction.skipped and not sync_every:
            raise _overrun(comm.rank, reduction, history)
        lost += reduction.skipped
        results = [*reduction.missed, flat.gradients.clone()]  # U_sum of each round since t that history has kept
        for round_, total in enumerate(results, reduction.round - len(results) + 1):
            schedule(round_)
            flat.gradients.copy_(total).div_(comm.size)  # G = U_sum / P: always P, however many contributed (line 7)
            optimizer.step()  # w = w + U(G, w, t)
        # A rank that is given only the newest result misses those before it, so the models drift apart. The paper
        # makes them equal every few epochs (section 5). Here they are averaged once for each multiple of
        # `average_every` that a rank's round passes. Counting rounds and not local steps makes all ranks average
        # equally often.
        for _ in range(t // average_every, reduction.round // average_every) if average_every else ():
            await average(comm, model, flat)
        if history and reduction.synchronous:  # all ranks are here, after the same round
            await resynchronise(comm, model, flat, optimizer, lost)
            lost = 0
        t = reduction.round
        yield reduction
    if history:
        await resynchronise(comm, model, flat, optimizer, lost)
    else:
        await average(comm, model, flat)  # all ranks leave with one model


def _partial_allreduce(
    comm: asyncoll.Communicator, partial: Partial, candidates: int, quorum: int | None, seed: int
) -> Callable[..., Awaitable[asyncoll.Reduction]]:
    match partial:
        case "solo":
            return comm.solo_allreduce
        case "majority":
            return functools.partial(comm.majority_allreduce, candidates=candidates, seed=seed)
        case "quorum":
            majority = comm.size // 2 + 1  # more than half: half of two ranks would be one, which waits for no other
            chosen = majority if quorum is None else quorum
            return functools.partial(comm.quorum_allreduce, quorum=chosen, seed=seed)
    raise asyncoll.UsageError(f"partial is solo, majority or quorum, not {partial!r}")


def _overrun(rank: int, reduction: asyncoll.Reduction, history: int) -> asyncoll.UsageError:
    late = reduction.skipped + len(reduction.missed)
    return asyncoll.UsageError(
        f"rank {rank} came {late} rounds late to round {reduction.round}, and history={history} keeps too few: "
        f"{reduction.skipped} results are lost, and its model would differ from the others'. Set sync_every, so that "
        f"replicas are made equal again, or a history of at least {late}"
    )
