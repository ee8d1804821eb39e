"""The steps of a learning-rate scheduler: one for each round."""

from __future__ import annotations

import math
import warnings

import torch
from torch.optim.lr_scheduler import LRScheduler

import asyncoll


class ScheduledRounds:
    """Steps a scheduler, if there is one, once for each round of a training."""

    def __init__(self, scheduler: LRScheduler | None) -> None:
        self._scheduler = scheduler
        self._has_stepped = False
        self._last = math.inf  # the newest round that has a step

    def step(self, round_: int) -> None:
        """Round `round_` has passed."""
        if self._scheduler is None or round_ > self._last:
            return
        if self._has_stepped:
            self._scheduler.step()
            return
        self._has_stepped = True
        with warnings.catch_warnings():
            # torch warns of a schedule that moves before the optimizer. A rank that begins late skips rounds, and an
            # algorithm may step without the optimizer.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            self._scheduler.step()

    async def end(self, comm: asyncoll.Communicator, round_: int) -> None:
        """The schedule ends with the newest round that a rank was in before it left its loop. Collective.

        `round_` is that of this rank. A last round takes what is staged then: it is applied, and has no step.
        """
        self._last = int(await comm.allreduce(torch.tensor(round_), asyncoll.MAX))
