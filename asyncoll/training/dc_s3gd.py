"""DC-S3GD: stale-synchronous SGD that overlaps its allreduce with the next gradient (algorithm 1).

Rigazzi, "DC-S3GD: delay-compensated stale-synchronous SGD for large-scale decentralized neural network training", DLS
2019, section III-C. Each rank computes its next gradient while the last updates are averaged, so the gradient belongs
to weights that are one update old. The delay is compensated by a cheap estimate of the gradient's change on the way to
the average (equation 10). Ranks still wait for the slowest one, but a step later: a delay of up to one step that occurs
once is hidden, a rank that is always slow holds up the others.
"""

from __future__ import annotations

import math
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer
from asyncoll.training.under_way import UnderWay

_PIECE = 1 << 16  # elements: a longer sum of squares in single precision would lose the small ones


class DCS3GD(Trainer):
    """Average the models of the last step while the next gradient is computed, and correct that gradient.

    `step()` takes the average that the step before has started, corrects the gradient, takes a local step from the
    average, and starts the next average. So between steps each rank has its own model, one step away from an average
    that all ranks share, and an allreduce is under way.

    All ranks make the same number of steps. `finish()` takes the last average: all ranks leave with one model. A
    program that ends without it leaves unequal models. Buffers are each rank's own until then, because sharing them
    would make every rank wait for rank 0 in each round. Clipping applies to the corrected local gradient.

    A checkpoint is each rank's own, and all ranks load the same round.

    Args:
        lambda0: the weight of the correction; 0 leaves the gradients uncorrected.

    See `Trainer` for the other arguments; a `weight` is refused, because models are averaged, and not gradients.

    The paper sums the steps, and each rank adds that sum to its own weights, so that rounding lets the ranks' averages
    drift apart. Here the weights are averaged: mean(w̄ + Δw_i) = w̄ + sum(Δw_i) / N (equation 8). Every rank takes w̄
    from the allreduce, with the same bits.

    Memory: the gradients, as one flat tensor, and two copies of the parameters.
    """

    has_local_state: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        lambda0: float = 0.2,
        **options: Unpack[Options],
    ) -> None:
        if not 0 <= lambda0 < math.inf:
            raise asyncoll.UsageError(f"lambda0 is a share of the gradient, at least 0, not {lambda0}")
        super().__init__(comm, model, optimizer, **options)
        self._lambda0 = lambda0
        w = self._flat.trainable
        self._mean = comm.empty(w.numel(), w.dtype, device=w.device)
        self._distance = torch.empty_like(self._flat.gradients)  # reused, because the first use of memory is slow
        self._averaged: UnderWay[Tensor] | None = None

    async def _update(self, weight: float | None) -> Step | None:
        self._refuse_weight(weight)
        is_averaged = await self._take_average()  # w_i = w̄, and D_i
        if is_averaged:
            compensate(self._flat.gradients, self._distance, self._lambda0)  # g̃_i (equation 10)
        self._apply()  # Δw_i = U(g̃_i) (equation 11), w_i = w̄ + Δw_i (equation 12)
        # The model is free for the next gradient, g_i = ∇l(w̄ + Δw_i).
        self._start_average()
        return self._complete() if is_averaged else None

    async def _take_average(self) -> bool:
        """Wait for the average that is under way, and go to it: w_i + D_i of equation 12. False: there is none."""
        if self._averaged is None:
            return False
        averaged, self._averaged = self._averaged, None
        await averaged
        w = self._flat.trainable
        torch.sub(self._mean, w, out=self._distance)  # D_i = mean - w_i (equation 9)
        w.copy_(self._mean)
        return True

    def _start_average(self) -> None:
        self._mean.copy_(self._flat.trainable)
        self._averaged = UnderWay(self.comm.allreduce(self._mean, op=asyncoll.AVG))

    async def _finish(self) -> None:
        await self._take_average()
        await self._unite_buffers()

    async def _resume(self) -> None:
        # The model of the checkpoint is one step away from the average that was under way.
        if self.round:
            self._start_average()


def compensate(g: Tensor, distance: Tensor, lambda0: float) -> None:
    """g̃ = g + λ g∘g∘D in place, with λ = λ0 |g| / |g∘g∘D| (equations 10 and 17); λ is 0 if g∘g∘D is 0 or not finite.

    It is computed as a step of length λ0 |g| along g∘g∘D, because λ itself may exceed any float. Norms are those of the
    whole model, as equation 17 has one λ for each worker. With one λ for each tensor, a layer that hardly differs from
    the average would be corrected as much as one that differs a lot. `distance` is D, and is overwritten.
    """
    if not lambda0:
        return
    correction = distance.mul_(g).mul_(g)
    if not g.is_cpu:
        add_on_device(g, correction, lambda0)
        return
    norm = _norm(correction)
    if 0.0 < norm < math.inf:
        g.add_(correction.div_(norm), alpha=lambda0 * _norm(g))


def add_on_device(g: Tensor, correction: Tensor, lambda0: float) -> None:
    """The same without a wait for the device: the norms stay there. `correction` is overwritten."""
    length, norm = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (g, correction))
    # In a half type the norm would be rounded to a half.
    step = correction.float() if correction.itemsize < 4 else correction
    step.div_(norm).mul_(lambda0 * length)
    g.add_(step.masked_fill_(~((norm > 0) & (norm < math.inf)), 0))


def _norm(x: Tensor) -> float:
    """|x|, in single precision, which is faster, unless the squares underflow or overflow in it."""
    single = torch.promote_types(x.dtype, torch.float32)
    norm = math.hypot(*(float(torch.linalg.vector_norm(piece, dtype=single)) for piece in x.split(_PIECE)))
    return norm if 1e-12 < norm < math.inf else float(torch.linalg.vector_norm(x, dtype=torch.float64))
