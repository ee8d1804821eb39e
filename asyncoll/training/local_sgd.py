"""Local SGD: several steps on one's own model, then the mean of all models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017, algorithm 1 (federated averaging), with all clients in every round and equal weights. Stich, "Local
SGD converges fast and communicates little", ICLR 2019, algorithm 1. Li et al., "Breaking (global) barriers in parallel
stochastic optimization with wait-avoiding group averaging", TPDS 2021, section V, compare with it.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch
from torch import nn

import asyncoll
from asyncoll.training.one_average import OneAverage
from asyncoll.training.step import Step
from asyncoll.training.trainer import MODELS_MAY_DIFFER, Options, Trainer


class LocalSGD(Trainer):
    """Take local steps, and average the models of all ranks after every `every`-th one (H).

    A round is a local step. `step()` returns None after a step without an average, and otherwise a `Reduction`, once
    the slowest rank has called. With `every` = 1 and an optimizer that is linear in the gradient, such as SGD with
    momentum, `AllreduceSGD` gives the same result, up to rounding.

    All ranks make the same number of steps. `finish()` takes the average that is due since the last one: all ranks
    leave with one model, to the bit. The state of the optimizer is each rank's own, and is never averaged. The buffers
    are each rank's own between two averages. Clipping applies to the local gradient.

    A checkpoint is each rank's own, and all ranks load the same round. It may be saved after any step, also between two
    averages.

    Args:
        every: H: the number of steps between two averages.

    See `Trainer` for the other arguments; a `weight` is refused, because models are averaged, and not gradients.

    Memory: the gradients, as one flat tensor.
    """

    has_local_state: ClassVar[bool] = True
    _is_elastic: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        **options: Unpack[Options],
    ) -> None:
        if every < 1:
            raise asyncoll.UsageError(f"every is a number of local steps, at least 1, not {every}")
        super().__init__(comm, model, optimizer, **options)
        self._every = every
        self._averages = OneAverage(self)
        self._is_repeated = False

    async def _update(self, weight: float | None) -> Step | None:
        self._refuse_weight(weight)
        if not self._is_repeated:
            # G_i = mean gradient of b local samples at w_i
            self._apply()  # w_i = w_i + U(G_i, w_i, t)
        if self._is_between_averages():  # H does not divide t
            return None
        await self._averages.take(self.round)  # w_i = sum of w_j / P
        await self._settle_buffers()
        return self._complete()

    def _differs(self) -> str:
        return MODELS_MAY_DIFFER if self._is_between_averages() else ""

    async def _finish(self) -> None:
        if self._is_between_averages() and self._averages.newest < self.round:
            await self._averages.take(self.round)
        await self._unite_buffers()

    # -- after a death: models are each rank's own, unless another rank has the average that this one lacks -------

    async def _settle(self) -> None:
        await self._averages.settle()
        await self._settle_buffers()

    def _steps_of_lost(self, member: int) -> int:
        return (self._averages.newest - self._first_round) * self._accumulate  # later ones are in its own model only

    def _keep(self) -> None:
        self._is_repeated = False

    def _is_over(self, before: int) -> bool:
        return self.round > before and self._averages.newest == self.round

    def _restore(self, weight: float | None) -> float | None:
        self._is_repeated = True
        return weight

    def _is_between_averages(self) -> bool:
        """Whether this rank has taken local steps since the last average."""
        return self.round % self._every != 0
