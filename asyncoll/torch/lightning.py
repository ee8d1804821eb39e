"""A strategy for Lightning: DistributedDataParallel on asyncoll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import strategies
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Register = Callable[[DistributedDataParallel, Sequence[Optimizer]], object]
_Base: Any = strategies.DDPStrategy  # whether or not Lightning is installed for mypy


class DDPStrategy(_Base):  # type: ignore[misc]
    """Lightning's `DDPStrategy` with the backend asyncoll, and with communication hooks on the CPU.

    Lightning's own strategy takes `process_group_backend="asyncoll"` too. It registers hooks for CUDA models only, and
    ignores them silently for others.
    """

    def __init__(
        self,
        *,
        process_group_backend: str = "asyncoll",
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        register_hook: Register | None = None,
        **settings: Any,
    ) -> None:
        """The `settings` go to Lightning's strategy.

        `ddp_comm_hook` and `ddp_comm_state` go to the model's `register_comm_hook`. For a state that is made from the
        wrapped model, or from its optimizers, there is `register_hook` instead: it is called with both when fitting
        begins, and registers the hook itself.

        With a hook, a step of an optimizer evaluates its closure first, in which Lightning computes the gradients, and
        only once: not for LBFGS. Lightning's exchange before each batch, whether rank 0 has received SIGTERM, is left
        out: ranks would wait for each other. A rank that ends by SIGTERM is lost for the others.
        """
        super().__init__(process_group_backend=process_group_backend, **settings)
        if ddp_comm_hook is not None and register_hook is not None:
            raise ValueError("a model has one communication hook: give ddp_comm_hook or register_hook")
        if ddp_comm_hook is not None:
            register_hook = lambda model, _: model.register_comm_hook(ddp_comm_state, ddp_comm_hook)  # noqa: E731
        self._register_hook = register_hook

    def setup(self, trainer: Any) -> None:
        """Wrap the model, make the optimizers, and register the hook."""
        super().setup(trainer)
        if self._register_hook is not None and isinstance(self.model, DistributedDataParallel):
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(_evaluate_closure)  # before those of the communication hook
            self._register_hook(self.model, self.optimizers)
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def _evaluate_closure(
    optimizer: Optimizer, args: tuple[Any, ...], settings: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take the closure out of a step: a communication hook acts between the gradients and the step."""
    if closure := settings.pop("closure", None):  # not in the steps that a hook makes
        with torch.enable_grad():
            closure()  # Lightning keeps what it returns
    return args, settings
