"""What the program must leave alone: gradients until the step of the optimizer, and parameters after it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncoll.errors import UsageError
from asyncoll.torch.hooks.buckets import Layout


def check_gradients(optimizer: torch.optim.Optimizer, layout: Layout, flat: Tensor) -> None:
    """Raise UsageError unless the step has the gradients of all parameters that `backward()` has left, those in `flat`.

    Reads all elements: a change through `.data` counts no version.
    """
    for parameter in layout.parameters:
        if parameter.grad is None:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} has no gradient after backward(), so that a rank "
                "that applies missed results would step differently: use every parameter in each step, or freeze it"
            )
    # Fused optimizers get the scale of a GradScaler as an attribute.
    if getattr(optimizer, "grad_scale", None) is not None or not layout.are_gradients(flat):
        raise UsageError(
            "the gradients have changed between backward() and the step, by clipping or a GradScaler for example: "
            "the results of rounds that a rank has missed would not. Give clip_norm to the state of the hook, and "
            "train without a GradScaler"
        )


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
