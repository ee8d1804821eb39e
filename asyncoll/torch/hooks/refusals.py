"""Features of DistributedDataParallel with which a hook would train wrongly, or wait for ranks that it need not."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from asyncoll.errors import UsageError
from asyncoll.torch.hooks.optimizer_steps import OptimizerSteps


def check_wrapped(ddp: object) -> None:
    """Raise UsageError for what is no DistributedDataParallel."""
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(f"a hook belongs to a DistributedDataParallel, not to a {type(ddp).__name__}: wrap the model")


def check_always(ddp: DistributedDataParallel) -> None:
    """Raise UsageError for features that bypass every hook."""
    _refuse(ddp.mixed_precision is not None, "mixed_precision has a hook of its own: use torch.autocast")
    _refuse(ddp._delay_all_reduce_params, "delay_all_reduce_named_params bypasses the hook: leave it out")
    _refuse(ddp._use_python_reducer, "the python_reducer of torch.compile calls hooks without buckets: switch it off")
    skips = getattr(ddp, "skip_all_reduce_unused_params", False)  # missing if DDP delays all parameters
    _refuse(skips, "skip_all_reduce_unused_params skips the hook, too: leave it out")


def check_all_reduced(ddp: DistributedDataParallel) -> None:
    """Raise UsageError for features with which a gradient reaches the optimizer past the hook."""
    ignored = [
        name
        for name, parameter in ddp.module.named_parameters()
        if name in ddp.parameters_to_ignore and parameter.requires_grad
    ]
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters())
    _refuse(ignored, f"DDP ignores {', '.join(ignored[:3])}, so ranks would not share it: freeze it")
    _refuse(in_backward, "an optimizer that steps in backward() comes before the hook: let it step afterwards")


def check_without_lockstep(ddp: DistributedDataParallel) -> None:
    """Raise UsageError for features that make a rank wait for all others in each step."""
    option = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"  # torch < 2.13
    _refuse(
        getattr(ddp, option) and ddp.modules_buffers,
        "broadcasting buffers in each forward pass makes ranks wait for each other: wrap the model with "
        f"{option}=False (finish() gives all ranks rank 0's buffers)",
    )
    _refuse(
        ddp.find_unused_parameters,
        "find_unused_parameters makes ranks wait for each other in each step: use every parameter in each step, or "
        "freeze it",
    )


def check_all_used(ddp: DistributedDataParallel) -> None:
    """Raise UsageError for features with which DDP ignores what a hook returns for some parameters."""
    _refuse(
        ddp.find_unused_parameters and not ddp.static_graph,
        "find_unused_parameters leaves out the gradients of parameters that no rank has used in a step, and "
        "residuals that are sent to them would be lost: use every parameter in each step, or freeze it, and wrap "
        "the model with find_unused_parameters=False (the Trainer of transformers: ddp_find_unused_parameters)",
    )


def check_join(ddp: DistributedDataParallel) -> None:
    """Raise UsageError inside of `Join`: ranks without data would have to shadow rounds that do not wait for them."""
    _refuse(ddp._join_config.enable, "join() shadows allreduces that this hook does not make: call finish()")


def check_join_divides(ddp: DistributedDataParallel) -> None:
    """Raise UsageError inside of `Join` if DDP would divide by the number of ranks that still have data."""
    _refuse(
        ddp._join_config.enable and not ddp._divide_by_initial_world_size,
        "this hook divides by the number of all ranks, also when some have no more data: leave out "
        "divide_by_initial_world_size=False of join(), or the hook",
    )


def check_optimizer(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless this optimizer, and nothing else, trains all parameters of the model, by itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"give the state the optimizer that trains the model, not a {type(optimizer).__name__}")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(f"a {type(optimizer).__name__} takes no hooks: give the state the optimizer that it wraps")
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in ddp.module.named_parameters() if p.requires_grad and p not in trained]
    others = trained - set(ddp.module.parameters())
    is_taken = any(
        isinstance(getattr(hook, "__self__", None), OptimizerSteps)
        for hook in optimizer._optimizer_step_pre_hooks.values()
    )
    sends = type(optimizer).__module__.startswith("torch.distributed")
    _refuse(sends, f"{type(optimizer).__name__} sends messages in each step: use an optimizer of torch.optim")
    _refuse(is_taken, "this optimizer belongs to the state of another hook: call its finish(), or make a new optimizer")
    _refuse(left, f"the optimizer does not train {', '.join(left[:3])}: give all parameters to one optimizer")
    _refuse(others, "the optimizer trains tensors outside of the model: give it the model's parameters alone")


def changed_parameters() -> UsageError:
    """The error for parameters that were frozen or unfrozen too late."""
    return UsageError(
        "requires_grad of a parameter has changed since the model was wrapped, and DDP reduces the gradients of the "
        "parameters that had it then: wrap the model again"
    )


def _refuse(is_used: object, text: str) -> None:
    """Raise UsageError if a feature is used. `text` says what to do instead."""
    if is_used:
        raise UsageError(text)
