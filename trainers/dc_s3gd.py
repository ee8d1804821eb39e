"""DC-S3GD: stale-synchronous SGD that overlaps its allreduce with the next gradient (algorithm 1).

Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD for large-scale decentralized neural network training", DLS
2019, section III-C. Each rank computes its next gradient while the last updates are averaged, so the gradient belongs
to weights that are one update old. The delay is compensated by a cheap estimate of the gradient's change on the way to
the average (equation 10). Ranks still wait for the slowest one, but a step later: a delay of up to one step that occurs
once is hidden, a rank that is always slow holds up the others.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable

import torch
from torch import Tensor

import asyncoll
from trainers.allreduce_sgd import complete
from trainers.replicas import share, share_buffers, weights

_PIECE = 1 << 16  # elements: a longer sum of squares in single precision would lose the small ones


async def dc_s3gd(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    schedule: Callable[[int], None] = lambda round_: None,
    lambda0: float = 0.2,
) -> AsyncIterator[asyncoll.Reduction]:
    """Train `model` for `rounds` rounds; yields after each average.

    `gradient(round)` leaves the mean gradient of this rank's next batch in the model, as `backward()` does; gradients
    are zero when it is called, and an allreduce runs meanwhile. `schedule(round)` is called before the step of the
    round. `lambda0` = 0 leaves the gradients uncorrected.

    Collective: every rank calls it. All ranks start with the model and the optimizer of rank 0. A round ends when its
    steps have been averaged. At each yield, all ranks have that average as their parameters, to the bit, and no call is
    under way. So a loop that all ranks leave early, after the same round, leaves one set of parameters. The model then
    has the gradient of the next step already, which the caller must not change. Buffers are each rank's own until the
    training ends; then all ranks get rank 0's (see `replicas.py`). Sharing them earlier would make every rank wait for
    rank 0 in each round.

    The paper sums the steps, and each rank adds that sum to its own weights, so that rounding lets the ranks' averages
    drift apart. Here the weights are averaged: mean(w̄ + Δw_i) = w̄ + sum(Δw_i) / N (equation 8). Every rank takes w̄
    from the allreduce, with the same bits.
    """
    flat = await share(comm, model, optimizer)  # w_i = w̄
    if rounds < 1:
        return
    await gradient(1)  # g_i = ∇l(w_i)
    mean, distance = (
        torch.empty_like(flat.gradients),
        torch.empty_like(flat.gradients),
    )  # reused, because the first use of new memory is slow
    for t in range(1, rounds + 1):
        schedule(t)
        optimizer.step()  # w_i = w̄ + Δw_i, Δw_i = U(g̃_i) (equation 12)
        w, g = weights(flat), flat.gradients
        mean.copy_(w)
        averaged = comm.allreduce(mean, op=asyncoll.AVG)  # has started; the model is free for the gradient
        try:
            flat.zero_gradients()
            if t < rounds:
                await gradient(t + 1)  # g_i = ∇l(w̄ + Δw_i)
        finally:
            await averaged  # even if `gradient` has failed, because the peers wait for this call
        torch.sub(mean, w, out=distance)  # D_i = mean - w_i (equation 9)
        compensate(g, distance, lambda0)
        w.copy_(mean)  # w_i = w_i + D_i (equation 11)
        yield complete(comm, t)  # nothing is in flight here, so a caller may stop, or call collectives
    await share_buffers(comm, model)


def compensate(g: Tensor, distance: Tensor, lambda0: float) -> None:
    """g̃ = g + λ g∘g∘D in place, with λ = λ0 |g| / |g∘g∘D| (equations 10 and 17); λ is 0 if g∘g∘D is 0 or not finite.

    It is computed as a step of length λ0 |g| along g∘g∘D, because λ itself may exceed any float. Norms are those of the
    whole model, as equation 17 has one λ for each worker. With one λ for each tensor, a layer that hardly differs from
    the average would be corrected as much as one that differs a lot. `distance` is D, and is overwritten.
    """
    if not lambda0:
        return
    correction = distance.mul_(g).mul_(g)
    norm = _norm(correction)
    if 0.0 < norm < math.inf:
        g.add_(correction.div_(norm), alpha=lambda0 * _norm(g))


def _norm(x: Tensor) -> float:
    """|x|. In single precision, which is faster, unless the squares underflow or overflow in it."""
    single = torch.promote_types(x.dtype, torch.float32)
    norm = math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=single)) for piece in x.split(_PIECE)))
    return norm if 1e-12 < norm < math.inf else float(torch.linalg.vector_norm(x, dtype=torch.float64))
