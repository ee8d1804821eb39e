"""The steps of an optimizer between two backward passes: exactly one, with the gradient that the hook has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncoll.errors import UsageError


class OptimizerSteps:
    """Calls `before` and `after` around each step of the optimizer that the program makes.

    Refuses a step without a backward pass, and a backward pass without a step.
    """

    def __init__(
        self, hook: str, optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._hook = hook
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._has_hook_run = False
        self._is_expected = False
        self._is_own = False
        self._handles = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def expect(self) -> None:
        """A backward pass has begun."""
        if self._is_expected:
            raise UsageError(
                "two backward passes without a step of the optimizer between them: step after each one, and accumulate "
                "gradients in no_sync()"
            )
        self._is_expected = self._has_hook_run = True

    def check_done(self) -> None:
        """Raise UsageError if the step of the last backward pass is missing."""
        if self._is_expected:
            raise UsageError("the last backward pass had no step of the optimizer: step first")

    def make(self) -> None:
        """Take one step more, without `before` and `after`."""
        self._is_own = True
        try:
            self._optimizer.step()
        finally:
            self._is_own = False

    def remove(self) -> None:
        """Leave the optimizer to the program."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_own:
            return
        if any(each is not None for each in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise UsageError("a closure evaluates the loss in the step, where its gradient would not be reduced")
        if not self._has_hook_run:
            raise UsageError(
                f"no backward pass has called the hook {self._hook} before this step of the optimizer: register it by "
                f"ddp.register_comm_hook(state, hooks.{self._hook}), and call backward() of the wrapped model first"
            )
        if not self._is_expected:
            raise UsageError(
                "a step of the optimizer without a backward pass, which all ranks would not make, or after one without "
                "the gradients of all parameters: if a parameter was frozen, wrap the model again"
            )
        self._before()

    def _end(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_own:
            self._is_expected = False
            self._after()
