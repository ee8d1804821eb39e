"""AD-PSGD: each rank averages its model with one other rank's at a time, and waits for no rank's computation.

Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, algorithm 1. Even
ranks begin averages, odd ranks answer, also while they compute: on this bipartite graph no circle of ranks waits.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import torch
from torch import nn

import asyncoll
from asyncoll.training.step import Step
from asyncoll.training.trainer import Options, Trainer
from asyncoll.training.under_way import UnderWay


class ADPSGD(Trainer):
    """Add local steps to a model that other ranks average with theirs at any time.

    An even rank begins one average in each of its steps, with an odd rank that `seed` draws from its neighbours in
    `graph`. The average takes place while the next gradient is computed. So a gradient belongs to a model that is up to
    an average, or several, older than the one it is added to.

    Ranks make steps at their own pace, and may end after different numbers of steps: `Trainer.round` is the number of
    this rank's own steps. `finish()` gives all ranks the mean of all models. Buffers and the state of the optimizer are
    each rank's own until then. Clipping applies to the local gradient.

    A step that is cancelled loses nothing: it has been counted in `round`, and its change of the model reaches the
    other ranks with the next step, or at the end. An average that a program leaves under way, because it drops the
    trainer, is carried out.

    A checkpoint is each rank's own, of any of its rounds (`Checkpoints.newest(common=False)`). It is the model after
    that step of the rank. Averages that ranks had with it since are not in it: a resumed run differs from an unbroken
    one.

    Args:
        graph: of the neighbours: "ring" or "exponential", as in `comm.gossip`; the same at every rank.
        seed: draws the odd rank of each average; the same at every rank.

    See `Trainer` for the other arguments; a `weight` is refused, because models are averaged, and not gradients.

    Memory: the gradients, as one flat tensor, and four copies of the parameters.
    """

    has_local_state: ClassVar[bool] = True
    _has_rounds_of_all: ClassVar[bool] = False
    counts_own_rounds: ClassVar[bool] = True

    def __init__(
        self,
        comm: asyncoll.Communicator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        graph: Literal["ring", "exponential"] = "ring",
        seed: int = 0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(comm, model, optimizer, **options)
        self._graph = graph
        self._seed = seed
        self._gossip: asyncoll.Gossip | None = None  # None: this rank is alone
        self._averaging: UnderWay[int | None] | None = None  # at an even rank
        self._change = torch.zeros_like(self._flat.trainable)  # local steps that the gossip does not have yet

    async def _resume(self) -> None:
        if self.comm.size > 1:
            self._gossip = await self.comm.gossip(self._flat.trainable, graph=self._graph, seed=self._seed)

    async def _update(self, weight: float | None) -> Step:
        self._refuse_weight(weight)  # line 2: G = ∇F(x̂_i), at the model as it was after the last step
        if self._gossip is None:
            self._apply()
            return self._exchanged(())
        self._step_locally()  # -ηG, before the first await: a step that is cancelled is not lost
        partner = await self._without_loss(self._end_average())  # line 4: x_i, x_j = (x_i + x_j) / 2
        await self._without_loss(self._add_change(self._gossip))  # line 5: x_i = x_i - ηG
        self._averaging = UnderWay(self._gossip.exchange())  # line 3: j, drawn from the neighbours
        return self._exchanged(() if partner is None else (partner,))

    def _step_locally(self) -> None:
        x = self._flat.trainable
        self._change.sub_(x)
        try:
            self._apply()
        # An optimizer that fails may have changed a part of the model.
        finally:
            self._change.add_(x)

    async def _add_change(self, gossip: asyncoll.Gossip) -> None:
        updating = gossip.update(self._change)
        try:
            self._flat.trainable.copy_(await updating)
        finally:
            # The change is added to the model, also if this call is cancelled.
            self._change.zero_()

    async def _end_average(self) -> int | None:
        """Wait for the average that this rank has begun, and return the other rank; None if there is none."""
        averaging, self._averaging = self._averaging, None
        return None if averaging is None else await averaging

    async def _finish(self) -> None:
        await self._end_average()
        if self._gossip is not None:
            # The change of a step that was cancelled is still to be added.
            await self._add_change(self._gossip)
            self._flat.trainable.copy_(await self._gossip.close())
        await self._average_models()
