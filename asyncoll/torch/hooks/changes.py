"""What the program must leave alone: gradients until the step of the optimizer, and parameters after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncoll.errors import UsageError


class GradientChanges:
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


class ParameterChanges:
    """Finds out whether parameters have changed since `note`. A change through `.data` counts no version."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] | None = None

    def note(self) -> None:
        """The parameters have the right values now."""
        self._versions = self._count()

    def check(self) -> None:
        """Raise UsageError if parameters have changed since the last `note`, if there was one."""
        if self._versions is not None and self._versions != self._count():
            raise UsageError(
                "the program has changed parameters after the step of the optimizer, by clamp_(), load_state_dict() or "
                "another DistributedDataParallel around the model: other ranks would not, or the hook would overwrite "
                "it. Change the loss instead, and wrap the model once; with eager_sgd change parameters after a round "
                "that is synchronous, at all ranks"
            )

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
