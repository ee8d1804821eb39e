"""The learning rate, and the other options of an optimizer, as functions of the round."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from asyncoll.errors import UsageError
from asyncoll.training import saved
from asyncoll.training.scheduled import ScheduledRounds

_Options = list[dict[str, Any]]
_PLAIN = (bool, int, float, str, tuple, Tensor, type(None))


class OptionSchedule(ScheduledRounds):
    """Steps a scheduler once for each round, and finds out whether the program changes options in between.

    A rank that applies the result of a round later than the others must do it with the same options.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau needs a metric: step it in the program, after a round that is synchronous, with a "
                "metric that is equal at all ranks"
            )
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise UsageError("the scheduler belongs to another optimizer")
        super().__init__(scheduler)
        self._optimizer = optimizer
        self._options: _Options = []

    def kind(self) -> str:
        """The class of the scheduler."""
        return "none" if self._scheduler is None else type(self._scheduler).__name__

    def values(self) -> list[dict[str, Any]]:
        """The options of each group, as values that print in full."""
        return [
            {name: value.tolist() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in _plain_options_of(self._optimizer)
        ]

    def state(self) -> dict[str, Any] | None:
        """The state of the scheduler, for a checkpoint."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on with the scheduler where `state` was saved.

        Raises UsageError if one of the two has no scheduler, or `state` is that of another class, or damaged.
        """
        if (state is None) is not (self._scheduler is None):
            there, here = ("none", "one") if state is None else ("one", "none")
            raise UsageError(
                f"the state was saved with {there} for the option scheduler, and this one has {here}: make both alike"
            )
        if self._scheduler is not None and state is not None:
            own = self._scheduler.state_dict()
            if "last_epoch" in own:  # a ChainedScheduler has none
                saved.count(state, "last_epoch")
            for name, value in own.items():  # the saved ones may be those of another version of torch
                is_alike = lambda there, here=value: _are_alike(here, there)  # noqa: E731
                if name in state:
                    saved.entry(state, name, is_alike, f"a {type(value).__name__}")
            self._scheduler.load_state_dict(state)

    def note(self) -> None:
        """All ranks have these options now, or get them with the result of this round."""
        self._options = _options_of(self._optimizer)

    def check(self) -> None:
        """Raise UsageError if the options are others than at the last `note`, or about to be."""
        if self._scheduler is None and hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            raise UsageError(
                "a scheduler of this optimizer would give ranks different learning rates in one round: give it to the "
                "state of the hook, which steps it once for each round"
            )
        if not _are_equal(self._options, _options_of(self._optimizer)):
            raise UsageError(
                "the program has changed the learning rate or another option of the optimizer, or added parameters: "
                "ranks would apply one result with different options. Give a scheduler to the state of the hook, or "
                "change options after a round that is synchronous, at all ranks"
            )


def _are_alike(here: Any, there: Any) -> bool:
    """Whether `there` may be a later value of `here`: of the same type, or both numbers that are not NaN."""
    if isinstance(here, (int, float)) and not isinstance(here, bool):
        return isinstance(there, (int, float)) and not isinstance(there, bool) and there == there
    if isinstance(here, (list, tuple)):
        return type(there) is type(here) and (not here or all(_are_alike(here[0], each) for each in there))
    return isinstance(there, type(here))


def _plain_options_of(optimizer: torch.optim.Optimizer) -> _Options:
    """The options of all groups that can be compared."""
    return [
        {name: value for name, value in group.items() if isinstance(value, _PLAIN)} for group in optimizer.param_groups
    ]


def _options_of(optimizer: torch.optim.Optimizer) -> _Options:
    """A copy of the options of all groups, and the identities of their parameters."""
    members = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    options = copy.deepcopy(_plain_options_of(optimizer))
    return [group | {"params": ids} for group, ids in zip(options, members, strict=True)]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)
