"""The steps of an optimizer between two backward passes: exactly one, with the gradient that the hook has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asyncoll.errors import UsageError


class OptimizerSteps:
    """Calls `before` and `after` around each step of the optimizer that the program makes.

    Refuses a step without a backward pass, and a backward pass without a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._before = before
        self._after = after
        self._is_expected = False
        self._is_own = False
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def expect(self) -> None:
        """A backward pass has begun."""
        if self._is_expected:
            raise UsageError(
                "two backward passes without a step of the optimizer between them: step after each one, and accumulate "
                "gradients in no_sync()"
            )
        self._is_expected = True

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


class Untouched:
    """Finds out whether the program has changed the gradients since the backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._versions: list[tuple[Tensor | None, int]] = []
        self._samples = torch.empty(0)

    def note_after_backward(self) -> None:
        """Remember the gradients at the end of the backward pass under way, when DDP has copied the results to them."""
        # DDP queues its own callback after the hook has returned. This one comes before, and queues another behind.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._note))

    def check(self) -> None:
        """Raise UsageError if a gradient is another one than after the backward pass, or was missing then."""
        for parameter, (gradient, _) in zip(self._parameters, self._versions, strict=True):
            if gradient is None:
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} has no gradient after backward(), so that a rank "
                    "that applies missed results would step differently: use every parameter in each step, or freeze it"
                )
        is_same = all(a is b and v == w for (a, v), (b, w) in zip(self._versions, self._count(), strict=True))
        # Fused optimizers get the scale as an attribute. Otherwise a GradScaler divides without counting a version.
        is_scaled = getattr(self._optimizer, "grad_scale", None) is not None
        if is_scaled or not is_same or not torch.equal(self._samples, self._sample()):
            raise UsageError(
                "the gradients have changed between backward() and the step, by clipping or a GradScaler for example: "
                "the results of rounds that a rank has missed would not. Give clip_norm to the state of the hook, and "
                "train without a GradScaler"
            )

    def _note(self) -> None:
        self._versions = self._count()
        self._samples = self._sample()

    def _count(self) -> list[tuple[Tensor | None, int]]:
        gradients = [parameter.grad for parameter in self._parameters]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def _sample(self) -> Tensor:
        """Some elements of each gradient."""
        gradients = [parameter.grad.detach() for parameter in self._parameters if parameter.grad is not None]
        return torch.cat([x.as_strided((min(x.numel(), 8),), (max(x.numel() // 8, 1),)) for x in gradients])
