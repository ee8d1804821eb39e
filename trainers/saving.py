"""Checkpoints of a run: every rank saves all that it needs to go on, and a run that was stopped goes on from there."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

import asyncoll
from asyncoll.training import Checkpoints, Trainer
from trainers.algorithms import ALGORITHMS
from trainers.settings import Settings
from trainers.workloads import Workload


class Saving:
    """One rank's checkpoints. Each rank has a file of its own, because each has its own stream of batches."""

    def __init__(
        self,
        comm: asyncoll.Communicator,
        algorithm: str,
        settings: Settings,
        trainer: Trainer,
        scheduler: LRScheduler,
        workload: Workload,
    ) -> None:
        """Raises UsageError if the ranks would save different rounds."""
        self._every = settings.checkpoint_every
        self._trainer = trainer
        self._saved = 0  # the newest round that is in a file
        # What has a `state_dict`, by its name in the file. The workload first: its error names another workload.
        self._parts: dict[str, Any] = {
            "workload": workload,
            "trainer": trainer,
            "model": workload.model,
            "optimizer": trainer.optimizer,
            "scheduler": scheduler,
        }
        self._checkpoints: Checkpoints | None = None
        if settings.checkpoints is not None:
            _check(algorithm, settings)
            self._checkpoints = Checkpoints(comm, settings.checkpoints)
        self._rounds = settings.rounds

    async def resume(self) -> None:
        """Load the newest checkpoint that all ranks have, if there is one. Collective, before the training starts.

        Raises UsageError if it is of another run, or if that has ended.
        """
        saved = await self._checkpoints.newest() if self._checkpoints else None
        if saved is None:
            return
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        self._saved = self._trainer.round
        if self._saved >= self._rounds:
            raise asyncoll.UsageError(
                f"the checkpoint is of round {self._saved}, and --rounds is {self._rounds}: nothing is left to train"
            )

    def save(self) -> None:
        """Save the round that has just ended, if it is due. Local."""
        round_ = self._trainer.round
        if self._checkpoints and round_ > self._saved and round_ % self._every == 0:
            self._checkpoints.save(round_, **{name: part.state_dict() for name, part in self._parts.items()})
            self._saved = round_


def _check(algorithm: str, settings: Settings) -> None:
    if ALGORITHMS[algorithm].is_served:
        raise asyncoll.UsageError(
            f"{algorithm} has no --checkpoints: its ranks pass different rounds, and would save different ones"
        )
    sync_every = settings.options.get("sync_every")
    if sync_every is not None and (not sync_every or settings.checkpoint_every % sync_every):
        raise asyncoll.UsageError(
            f"a late rank skips rounds, and saves one in which all ranks are: set --sync-every, now {sync_every}, so "
            f"that it divides --checkpoint-every, {settings.checkpoint_every}"
        )
