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
        self._all = np.arange(epochs * self._of_an_epoch)
        self._of_member: dict[int, NDArray[np.int64]] = {}  # the batches of each, by its number of the step
        self._own: NDArray[np.int64] = self._all[:0]  # those that this rank was dealt last
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
        number = members_of(trainer.comm)[trainer.comm.rank]
        for epoch in new:
            for member, batches in self._of_member.items():
                self._of_member[member] = batches[: epoch.steps.get(member, len(batches))]
            left = np.setdiff1d(self._all, np.concatenate([self._all[:0], *self._of_member.values()]))
            owners = dealt(epoch, len(left), steps_together=trainer._steps_together)
            self._own = left[owners == number]
            for member in epoch.members:
                before = self._of_member.get(member, self._all[:0])
                self._of_member[member] = np.concatenate([before, left[owners == member]])
        self._dealt += len(new)
        return bool(new)

    def __len__(self) -> int:
        """The number of batches that this rank was dealt."""
        return len(self._own)

    def __iter__(self) -> Iterator[list[int]]:
        if not self._dealt:
            raise asyncoll.UsageError("call deal(trainer) first: the batches depend on the ranks")
        newest = -1, np.empty(0, int)
        for number in self._own.tolist():
            epoch, at = divmod(number, self._of_an_epoch)
            if newest[0] != epoch:
                newest = epoch, self._order(epoch)
            yield newest[1][at * self._batch_size : (at + 1) * self._batch_size].tolist()

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(self._samples)
        return np.random.default_rng([self._seed, epoch]).permutation(self._samples)


def dealt(epoch: TrainingEpoch, count: int, *, steps_together: bool) -> NDArray[np.int64]:
    """The member that gets each of `count` batches, in turn; -1 for those of a turn that is not whole.

    Where ranks make the same number of steps, one that has made more of them than another begins in a later turn, and
    none gets any once one has ended its loop.
    """
    owners = np.full(count, -1)
    members = [member for member in epoch.members if not epoch.parts[member].has_ended]
    if not members or (steps_together and len(members) < len(epoch.members)):
        return owners
    steps = [epoch.steps[member] for member in members]
    leads = [each - min(steps) if steps_together else 0 for each in steps]
    first = [member for turn in range(max(leads)) for member, lead in zip(members, leads, strict=True) if lead <= turn]
    turns = (count - len(first)) // len(members)
    if turns >= 0:
        owners[: len(first) + turns * len(members)] = first + members * turns
    return owners
