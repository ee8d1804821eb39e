"""WAGMA-SGD: models are averaged in changing groups, without waiting for late ranks (algorithm 2).

Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in parallel stochastic
optimization with wait-avoiding group averaging", IEEE TPDS 2021, section IV. Each rank takes a step of its own, and
then averages its model with those of its group in this round. Groups change so that every update soon reaches every
rank; an average over all ranks every τ rounds bounds staleness.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

import asyncoll
from asyncoll.training.one_average import OneAverage
from asyncoll.training.step import Step
from asyncoll.training.step_metrics import beside, means
from asyncoll.training.trainer import MODELS_MAY_DIFFER, Options, Trainer

Order = Literal["step-then-average", "average-then-step"]


class WagmaSGD(Trainer):
    """Take a local step, and average the model with those of this round's group, without waiting for late ranks.

    A late rank makes fewer steps than there are rounds, so programs count `Trainer.round`.

    The state of the optimizer is each rank's own. The model is each rank's
    own, except after a round that is `synchronous`, with "step-then-average". `finish()` gives all ranks an average of
    all models. Ranks may end at different rounds: their last models then stay in the rounds of the others.

    A step that is cancelled while it waits for a group loses no gradient: the local step is taken all the same, with
    "average-then-step" from this rank's own model. The next step reports the rounds since. A cancellation while buffers
    are shared, after a `synchronous` round, ends the communicator.

    A checkpoint is each rank's own, and all ranks load the same round: save it after a `synchronous` round.

    Args:
        group_size: the number of ranks of a group; by default the square root of the number of all, rounded up.
        sync_every: τ: every so many rounds, one averages over all ranks and waits for them (0: none).
        order: "step-then-average" is the order of the paper. "average-then-step" is the order of the authors' code: it
            averages the models of the last step and then applies the gradient to the average, as D-PSGD does.
        fixed: groups never change (the ablation of the paper).
        observe: is called with the round, this rank's model and the mean (both flat) at each average over all ranks,
            before the mean replaces the model. Their distance is this rank's part of the consensus distance.
        name: of the rounds: a second training on one communicator needs another one.

    See `Trainer` for the other arguments; a `weight` is refused, because models are averaged, and not gradients.

    Memory: the gradients, as one flat tensor, and one copy of the parameters; a second copy during the step. The rounds
    hold about three more of that size by message: the staged model, the sum that is reduced, and the result.
    """

    has_local_state: ClassVar[bool] = True
    _is_elastic: ClassVar[bool] = True
    _steps_together: ClassVar[bool | None] = None
    _carries_metrics: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group_size: int | None = None,
        sync_every: int = 10,  # τ = 10, section V
        order: Order = "step-then-average",
        fixed: bool = False,
        observe: Callable[[int, Tensor, Tensor], None] = lambda round_, own, mean: None,
        name: str = "wagma-sgd",
        **options: Unpack[Options],
    ) -> None:
        if order not in get_args(Order):
            raise asyncoll.UsageError(f"order is {' or '.join(get_args(Order))}, not {order!r}")
        super().__init__(comm, model, optimizer, **options)
        self._group_size = math.isqrt(comm.size - 1) + 1 if group_size is None else group_size  # S = sqrt(P)
        self._sync_every = sync_every
        self._order = order
        self._fixed = fixed
        self._observe = observe
        self._name = name
        self._base = 0  # rounds before this training, of which a checkpoint tells
        self._total = torch.empty_like(self._flat.trainable)
        self._last = OneAverage(self)
        self._is_repeated = False  # the step under way: it has changed the model already
        self._own_metrics: asyncoll.Metrics | None = None  # of the step under way
        self._has_stepped = False
        self._has_called = False  # in this epoch
        self._are_equal = True  # the models of all ranks

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight)
        self._has_stepped = self._has_called = True
        self._are_equal = False
        if self._order == "step-then-average" and not self._is_repeated:
            self._step_optimizer()  # lines 3-7: W' = W + U(G, W, t), with G = mean gradient of b local samples at W
        own = self._flat.trainable
        total = self._total.copy_(own)
        metrics = self._own_metrics if self._is_repeated else self._metrics.taken()
        self._own_metrics = None if metrics is None else metrics.copy()
        try:
            reduction = await self._without_loss(
                self.comm.group_allreduce(
                    beside(total, metrics),
                    group_size=self._group_size,
                    name=self._name,
                    fixed=self._fixed,
                    sync_every=self._sync_every,
                    sync_offset=self._base,
                )
            )  # lines 8, 9 and 16
        except asyncio.CancelledError:
            if self._order == "average-then-step":
                # Without the average: otherwise the gradient would be lost.
                self._step_optimizer()
            raise
        average = merge(total, own, reduction)
        if reduction.synchronous:
            self._observe(self._base + reduction.round, own, average)
            await self._settle_buffers()
        own.copy_(average)
        self._are_equal = reduction.synchronous and self._order == "step-then-average"
        if self._order == "average-then-step" and not self._is_finishing:
            self._step_optimizer()
        self._skip_to(self._base + reduction.round)
        return self._at_own_round(reduction, metrics=means(metrics))

    def _differs(self) -> str:
        return "" if self._are_equal else MODELS_MAY_DIFFER

    async def _finish(self) -> None:
        own = self._flat.trainable
        self._check_stepped(self._has_stepped)
        if self._has_stepped and not (self._has_called or self._last.newest):
            self._is_repeated = True
            await self._update(None)
        if self._has_called:
            await self.comm.join(
                self._name, beside(self._total, self._metrics.taken())
            )  # no synchronous round waits for this rank any more
        if not self._last.newest:
            self._total.copy_(own)
            await self._last.take(1)
            self._observe(self.round, self._total, own)  # all ranks leave with one model
        await self._unite_buffers()

    async def _resume(self) -> None:
        self._base = self.round

    # -- after a death: models are each rank's own, and each contributes its model again --------------------------

    async def _settle(self) -> None:
        await self._last.settle()
        rounds = await self.comm.allgather(torch.tensor(self.round))
        await self._settle_buffers()
        self._skip_to(int(rounds.max()))
        self._base, self._has_called = self.round, False
        self._group_size = min(self._group_size, self.comm.size)

    def _keep(self) -> None:
        self._is_repeated = False
        super()._keep()

    def _is_over(self, before: int) -> bool:
        return False

    def _restore(self, weight: float | None) -> float | None:
        self._is_repeated = True
        return super()._restore(weight)


def merge(total: Tensor, own: Tensor, reduction: asyncoll.Reduction) -> Tensor:
    """The next model. Weights add up to one: S of the paper is the number of models that are in `total`."""
    if not reduction.active:
        return own  # no rank of the group, this one included, had made a step when the round began
    if reduction.included:
        return total / reduction.active  # line 11, and line 16, where all ranks are active
    return (total + own) / (reduction.active + 1)  # line 13: `total` has an older model of this rank
