"""A flattened model: views, tied and frozen parameters, and the changes that break the views."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from asyncoll.errors import UsageError
from asyncoll.tensors.flat import flatten


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def backward(model: nn.Module) -> None:
    model(torch.ones(5, 3)).square().sum().backward()


def test_values_are_kept_and_parameters_are_views_in_the_models_order() -> None:
    model = perceptron()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    flat = flatten(model)
    assert torch.equal(flat.parameters, before)
    flat.parameters.fill_(2.0)
    assert all(bool((p == 2.0).all()) for p in model.parameters())


def test_backward_accumulates_into_the_flat_gradients() -> None:
    model, reference = perceptron(), perceptron()
    flat = flatten(model)
    backward(reference)
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    backward(model)
    assert torch.equal(flat.gradients, expected)
    backward(model)
    torch.testing.assert_close(flat.gradients, 2 * expected)
    flat.zero_gradients()
    assert not flat.gradients.any()


@pytest.mark.parametrize("first", ["optimizer", "flatten"])
def test_an_optimizer_built_before_or_after_updates_the_flat_parameters(first: str) -> None:
    model, reference = perceptron(), perceptron()
    if first == "flatten":
        flat = flatten(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first == "optimizer":
        flat = flatten(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        flat.zero_gradients()
        backward(model)
        optimizer.step()
        plain.zero_grad()
        backward(reference)
        plain.step()
    assert torch.equal(flat.parameters, torch.cat([p.detach().flatten() for p in reference.parameters()]))


def test_loading_a_state_keeps_the_views() -> None:
    model = perceptron()
    flat = flatten(model)
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    assert bool((flat.parameters == 1.0).all())


def test_tied_parameters_are_there_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = flatten(model)
    assert flat.parameters.numel() == flat.gradients.numel() == 9
    backward(model)
    assert model[0].weight is model[1].weight
    assert flat.gradients.any()


def test_frozen_parameters_come_last_and_have_no_gradient() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    flat = flatten(model)
    assert flat.gradients.numel() == 4 * 2 + 2
    assert flat.parameters.numel() == 3 * 4 + 4 + 4 * 2 + 2
    assert torch.equal(flat.parameters[:8].view(2, 4), model[2].weight)
    assert torch.equal(flat.parameters[10:22].view(4, 3), model[0].weight)
    backward(model)
    assert flat.gradients.any()
    assert model[0].weight.grad is None


def test_unfreezing_a_flattened_parameter_is_an_error() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    flat = flatten(model)
    model[0].requires_grad_(True)
    backward(model)
    with pytest.raises(UsageError, match="flatten the model again"):
        _ = flat.gradients
    assert flatten(model).gradients.numel() == 26


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def new_head(model: nn.Module) -> None:
    model[2] = nn.Linear(4, 5)  # type: ignore[operator]


def new_layer(model: nn.Module) -> None:
    model.add_module("last", nn.Linear(2, 2))


def new_parameter(model: nn.Module) -> None:
    model[0].register_parameter("scale", nn.Parameter(torch.ones(3)))  # type: ignore[operator]


def unfrozen(model: nn.Module) -> None:
    model[0].requires_grad_(True)  # type: ignore[operator]


def double(model: nn.Module) -> None:
    model.double()


def half(model: nn.Module) -> None:
    model.to(torch.float16)


def half_and_back(model: nn.Module) -> None:
    model.half().float()


def double_by_swapping(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


CHANGES = [assign, new_head, new_layer, new_parameter, unfrozen]
CHANGES += [double, half, half_and_back, double_by_swapping, new_data]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tensor", ["parameters", "gradients"])
def test_a_parameter_outside_of_the_flat_tensor_is_an_error(tensor: str, change: Callable[[nn.Module], None]) -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    flat = flatten(model)
    change(model)
    with pytest.raises(UsageError, match="flatten the model again"):
        getattr(flat, tensor)
    flat = flatten(model)
    assert flat.parameters.numel() == sum(p.numel() for p in model.parameters())
    assert flat.gradients.numel() == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_parameters_may_move_within_the_model_or_leave_it() -> None:
    model = perceptron()
    flat = flatten(model)
    model.add_module("wrapped", nn.Sequential(model[2]))
    model[2] = nn.Identity()
    backward(model)
    assert flat.gradients.any()
    model[0] = nn.Identity()
    assert flat.parameters.numel() == 26


class Adapter(nn.Module):
    """Trains a part of itself: `named_parameters`, and so `parameters`, leaves out the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.head.named_parameters(*args, **kwargs)


def test_a_model_may_override_named_parameters() -> None:
    model = Adapter()
    flat = flatten(model)
    model.base = nn.Linear(3, 4)
    assert flat.parameters.numel() == 4 * 2 + 2
    model.head = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"weight of shape \(2, 4\) was added to the model, or replaced"):
        _ = flat.parameters


class Adapting(nn.Module):
    """Trains a part of itself, as `Adapter` does, but overrides `parameters` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)


def test_parameters_that_an_override_leaves_out_may_be_replaced() -> None:
    model = Adapting()
    flat = flatten(model)
    model.base = nn.Linear(3, 4)
    assert flat.parameters.numel() == flat.gradients.numel() == 4 * 2 + 2
    model.head = nn.Linear(4, 2)
    with pytest.raises(UsageError, match=r"head.weight of shape \(2, 4\) was added to the model, or replaced"):
        _ = flat.parameters


def test_a_replaced_gradient_is_an_error() -> None:
    model = perceptron()
    flat = flatten(model)
    model.zero_grad(set_to_none=False)
    assert not flat.gradients.any()
    model.zero_grad(set_to_none=True)
    with pytest.raises(UsageError, match=r"zero_gradients\(\) or with zero_grad\(set_to_none=False\)"):
        _ = flat.gradients
    backward(model)  # makes new gradients elsewhere
    with pytest.raises(UsageError, match="is no longer in the flat tensor"):
        flat.zero_gradients()


def test_a_conversion_that_changes_nothing_is_accepted() -> None:
    model = perceptron()
    flat = flatten(model)
    model.float().to("cpu").to(torch.float32)
    backward(model)
    assert flat.gradients.any()
    assert flat.parameters.any()


def test_a_model_can_be_flattened_again() -> None:
    model = perceptron()
    flatten(model)
    backward(model)
    flat = flatten(model)
    assert not flat.gradients.any()
    backward(model)
    assert flat.gradients.any()


def test_models_that_cannot_be_flattened_are_refused() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        flatten(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UsageError, match=r"one dtype.*torch\.float32, torch\.float64"):
        flatten(mixed)
    scattered = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"one device.*cpu, meta"):
        flatten(scattered)
    with pytest.raises(UsageError, match="lazy"):
        flatten(nn.LazyLinear(2))


def test_importing_flat_does_not_import_torch() -> None:
    code = "import sys, asyncoll.tensors.flat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
