"""A strategy for Lightning: DistributedDataParallel on asyncoll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch import strategies
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Register = Callable[[DistributedDataParallel, Sequence[Optimizer]], object]
_BROADCAST = "_broadcast_sigterm_tensor"
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
        ddp_comm_wrapper: Callable[[Any], Any] | None = None,
        register_hook: Register | None = None,
        **settings: Any,
    ) -> None:
        """The `settings` go to Lightning's strategy.

        `ddp_comm_hook` and `ddp_comm_state` go to the model's `register_comm_hook`, with a `ddp_comm_wrapper` the hook
        that it makes of `ddp_comm_hook`. For a state that is made from the wrapped model, or from its optimizers, there
        is `register_hook` instead: it is called with both when fitting begins, and registers the hook itself.

        With a hook, a step of an optimizer evaluates its closure first, in which Lightning computes the gradients, and
        only once: not for LBFGS. Lightning's exchange before each batch, whether rank 0 has received SIGTERM, is left
        out: ranks would wait for each other. A rank that ends by SIGTERM is lost for the others.

        Raises ValueError for both kinds of hook, and for a state or a wrapper without `ddp_comm_hook`.
        """
        # Lightning averages models on any device, if it gets the state of that hook.
        super().__init__(process_group_backend=process_group_backend, ddp_comm_state=ddp_comm_state, **settings)
        if ddp_comm_hook is not None and register_hook is not None:
            raise ValueError("a model has one communication hook: give ddp_comm_hook or register_hook")
        if ddp_comm_hook is not None:
            hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
            register_hook = lambda model, _: model.register_comm_hook(ddp_comm_state, hook)  # noqa: E731
        elif ddp_comm_state is not None or ddp_comm_wrapper is not None:
            raise ValueError("ddp_comm_state and ddp_comm_wrapper are those of ddp_comm_hook: give it, too")
        self._register_hook = register_hook

    def setup(self, trainer: Any) -> None:
        """Wrap the model, make the optimizers, and register the hook."""
        super().setup(trainer)
        if self._register_hook is not None and isinstance(self.model, DistributedDataParallel):
            for optimizer in self.optimizers:
                # Before the hooks of the communication hook, which act between the gradients and the step.
                optimizer.register_step_pre_hook(_evaluate_closure)
            self._register_hook(self.model, self.optimizers)
            _leave_out_broadcast(trainer)


def _leave_out_broadcast(trainer: Any) -> None:
    """Leave out the exchange before each batch, whether rank 0 has received SIGTERM."""
    # Lightning has no setting for it. A version without this method would keep the exchange without a word.
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, _BROADCAST):
        raise RuntimeError(
            f"this strategy replaces {_BROADCAST} of Lightning, which Lightning {lightning.__version__} has not, so "
            "its ranks may wait for each other before each batch: install lightning==2.6.6 to train with a hook"
        )
    setattr(loop, _BROADCAST, lambda: None)


def _evaluate_closure(
    optimizer: Optimizer, args: tuple[Any, ...], settings: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take the closure out of a step: a communication hook acts between the gradients and the step."""
    # A step that a hook makes has no closure: its gradients are there already.
    if closure := settings.pop("closure", None):
        with torch.enable_grad():
            closure()  # Lightning keeps what it returns
    return args, settings
