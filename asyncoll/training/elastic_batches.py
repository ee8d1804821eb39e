"""Batches for a training that goes on after deaths: each of an epoch of the data once, whichever ranks there are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

import asyncoll
from asyncoll.training.trainer import Trainer
from asyncoll.training.training_epochs import TrainingEpoch, members_of


class ElasticBatches(Sampler[list[int]]):
    """The batches of this rank, for `DataLoader(data, batch_sampler=...)`: all epochs of the data, one after another.

    Each epoch has an order of its own, drawn from the seed, and is cut into batches, which are dealt to the ranks in
    turn. After a death `deal` deals what is left to the ranks that live and have not ended their loop. Every batch that
    a survivor has made a step with counts as used, and so does every batch of a dead rank whose gradient is in the
    model. So no sample is left out, and none is used twice in an epoch. At the end of the training all ranks have had
    the same number: fewer batches than there are ranks stay unused; and those of a rank that dies when all others have
    ended their loop.

    Every rank makes one, with equal arguments, and calls `step()` once for each batch, in order. Batches that a
    DataLoader has fetched ahead and that are in no step count as left. For `AllreduceSGD`, `OverlappedSGD` and
    `EagerSGD`, and for `LocalSGD`, where steps of a dead rank since the last average are in no model, and left.

    Args:
        samples: the number of samples of the data.
        batch_size: the number of samples in a batch; the last one of an epoch may have fewer.
        epochs: how often the data is used.
        seed: of the orders; None: the order of the data.

    Raises UsageError for numbers below 1.

    Example:

        batches = ElasticBatches(len(data), batch_size=32, epochs=10)
        loader = DataLoader(data, batch_sampler=batches)
        is_over = False
        while not is_over:
            batches.deal(sgd)
            for x, y in loader:
                loss(model(x), y).backward()
                step = await sgd.step()
                if batches.deal(sgd):
                    break  # the ranks are others: go on with what is left
            else:
                is_over = True
    """

    def __init__(self, samples: int, batch_size: int, epochs: int = 1, *, seed: int | None = 0) -> None:
        if min(samples, batch_size, epochs) < 1:
            raise asyncoll.UsageError(
                f"samples, batch_size and epochs are at least 1, not {samples}, {batch_size} and {epochs}"
            )
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._of_an_epoch = -(-samples // batch_size)
        self._left: NDArray[np.int64] = np.arange(epochs * self._of_an_epoch)  # the batches that were dealt last
        self._owners = np.full(len(self._left), -1)  # the members that they were dealt to
        self._members: list[int] = []  # these, each once
        self._steps: dict[int, int] = {}  # their calls of `step` before that
        self._number = -1  # of this rank
        self._dealt = 0  # epochs of the ranks

    def deal(self, trainer: Trainer) -> bool:
        """Deal the batches, and what is left of them after a death. Local: every rank calls it.

        Before the first step, and after each one. Returns whether they were dealt: then iterate anew. Raises UsageError
        for `WagmaSGD`.
        """
        if trainer._steps_together is None:
            raise asyncoll.UsageError(
                f"{type(trainer).__name__} does not tell which steps of a dead rank are in the model"
            )
        new = trainer._epochs[self._dealt :]
        for epoch in new:
            self._left = self._left[~self._are_used(epoch)]
            ended = [part.has_ended for part in epoch.parts.values()]
            if any(ended) and trainer._steps_together:
                self._left = self._left[:0]  # no rank may make a step more than another
            self._members = [member for member in epoch.members if not epoch.parts[member].has_ended]
            self._steps = epoch.steps
            self._owners = self._dealt_to(trainer._steps_together)
        self._dealt += len(new)
        self._number = members_of(trainer.comm)[trainer.comm.rank]
        return bool(new)

    def _are_used(self, epoch: TrainingEpoch) -> NDArray[np.bool_]:
        """Of what is left, the batches that the ranks have used of those that were theirs."""
        used = np.zeros(len(self._left), bool)
        for member in self._members:
            own = np.flatnonzero(self._owners == member)
            used[own[: epoch.steps[member] - self._steps[member]]] = True
        return used

    def _dealt_to(self, steps_together: bool) -> NDArray[np.int64]:
        """The member that gets each batch, in turn; -1 for those of a turn that not all get.

        Where ranks make the same number of steps, one that has made more of them than another begins in a later turn.
        """
        steps = [self._steps[member] for member in self._members]
        leads = [each - min(steps) if steps_together else 0 for each in steps]
        owners: list[int] = []
        turn = 0
        while self._members:
            next_ones = [member for member, lead in zip(self._members, leads, strict=True) if lead <= turn]
            turn += 1
            if turn > max(leads):  # all, from now on
                turns = (len(self._left) - len(owners)) // len(next_ones)
                owners += next_ones * max(0, turns)
                break
            owners += next_ones
        return np.array((owners + [-1] * len(self._left))[: len(self._left)], np.int64)

    def __len__(self) -> int:
        """The number of batches that this rank was dealt."""
        return int(np.count_nonzero(self._owners == self._number))

    def __iter__(self) -> Iterator[list[int]]:
        if not self._dealt:
            raise asyncoll.UsageError("call deal(trainer) first: the batches depend on the ranks")
        newest = -1, np.empty(0, int)
        for number in self._left[self._owners == self._number].tolist():
            epoch, at = divmod(number, self._of_an_epoch)
            if newest[0] != epoch:
                newest = epoch, self._order(epoch)
            yield newest[1][at * self._batch_size : (at + 1) * self._batch_size].tolist()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(self._samples)
        return np.random.default_rng([self._seed, epoch]).permutation(self._samples)
