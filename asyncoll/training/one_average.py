"""Averages of models that the survivors of a death have all, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

import asyncoll
from asyncoll.training import replicas

if TYPE_CHECKING:
    from asyncoll.training.trainer import Trainer


class OneAverage:
    """The averages of the parameters of all ranks, each after a round of its own.

    A rank may die in one, which is then over at some survivors, and has failed at others. These are given it. If no
    survivor has it, they take it again, from the models that they had.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.newest = 0  # the round of the newest one
        self._trainer = trainer
        # With `elastic`:
        self._mean: Tensor | None = None  # the newest one
        self._own: Tensor | None = None  # the model before the one that is under way

    async def take(self, round_: int) -> None:
        """Replace the parameters by their mean over all ranks. Collective. Frozen ones are equal already."""
        trainer, w = self._trainer, self._trainer._flat.trainable
        if trainer._elastic:
            self._own = w.clone()
        await trainer.comm.allreduce(w, op=asyncoll.AVG)
        if self._own is not None:
            self._mean, self._own = self._own.copy_(w), None
        self.newest = round_

    async def settle(self) -> None:
        """After a death: all survivors have the newest average, and each has its own model. Collective."""
        trainer, w = self._trainer, self._trainer._flat.trainable
        if self._own is not None:
            w.copy_(self._own)
        rounds = (await trainer.comm.allgather(torch.tensor(self.newest))).tolist()
        if len(set(rounds)) == 1:
            return
        source = rounds.index(max(rounds))
        given = await replicas.sent(trainer.comm, {"mean": self._mean} if trainer.comm.rank == source else {}, source)
        if self.newest < max(rounds):
            self._mean, self._own, self.newest = given["mean"].to(w.device), None, max(rounds)
            w.copy_(self._mean)
