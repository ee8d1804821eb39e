"""A flattened model: views, tied and frozen parameters, and the changes that break the views."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
from torch import nn

from asyncoll import Communicator
from asyncoll.errors import UsageError
from asyncoll.tensors.flat import flatten
from asyncoll.testing import run_ranks
from tests.support.places import SCRIPTS
from tests.support.processes import PATIENCE_S


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


def frozen(model: nn.Module) -> None:
    model[2].requires_grad_(False)  # type: ignore[operator]


def untied(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())  # type: ignore[operator]


def initialized_again(model: nn.Module) -> None:
    model[0].__init__(3, 4)  # type: ignore[operator, misc]


def copied_layer(model: nn.Module) -> None:
    model[2] = copy.deepcopy(model[2])  # type: ignore[operator]


def weight_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[2])  # type: ignore[operator]


def orthogonal(model: nn.Module) -> None:
    nn.utils.parametrizations.orthogonal(model[2])  # type: ignore[operator]


def pruned_for_good(model: nn.Module) -> None:
    nn.utils.prune.remove(nn.utils.prune.l1_unstructured(model[2], "weight", 0.5), "weight")  # type: ignore[operator]


def from_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())


def sent_to_a_process(model: nn.Module) -> None:
    """A queue of torch.multiprocessing does this to the tensors that it sends."""
    for value in model.state_dict().values():
        value.share_memory_()


def part_flattened_again(model: nn.Module) -> None:
    flatten(model[2])  # type: ignore[operator]


CHANGES = [assign, new_head, new_layer, new_parameter, unfrozen]
CHANGES += [double, half, half_and_back, double_by_swapping, new_data, frozen, untied, initialized_again]
CHANGES += [copied_layer, weight_norm, orthogonal, pruned_for_good, from_a_vector, sent_to_a_process]
CHANGES += [part_flattened_again]


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


def parametrized(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model[2], "weight", nn.Identity())  # type: ignore[operator]


def spectral_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.spectral_norm(model[2])  # type: ignore[operator]


def pruned(model: nn.Module) -> None:
    nn.utils.prune.l1_unstructured(model[2], "weight", 0.5)  # type: ignore[operator]


def compiled(model: nn.Module) -> None:
    model.compile(backend="aot_eager")


def averaged(model: nn.Module) -> None:
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)


def copied(model: nn.Module) -> None:
    backward(copy.deepcopy(model))


def called_with_others(model: nn.Module) -> None:
    others = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    torch.func.functional_call(model, others, (torch.ones(5, 3),))


@pytest.mark.parametrize(
    "change", [parametrized, spectral_norm, pruned, compiled, averaged, copied, called_with_others]
)
def test_a_change_that_keeps_the_parameters_is_accepted_and_right(change: Callable[[nn.Module], None]) -> None:
    model, reference = perceptron(), perceptron()
    flat = flatten(model)
    for each in (model, reference):
        torch.manual_seed(1)  # of the vectors of spectral_norm
        change(each)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference))
    for _ in range(2):
        flat.zero_gradients()
        plain.zero_grad()
        backward(model)
        backward(reference)
        assert flat.gradients.any()
        optimizer.step()
        plain.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    flat.parameters.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def save_parts() -> None:
    """Save parts of a flattened model, and compare with an ordinary one of the same values."""
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 2))
    reference = copy.deepcopy(model)
    flat = flatten(model, buffers=True)
    model(torch.ones(5, 64)).sum().backward()
    assert flat.gradients.any()
    reference.load_state_dict(model.state_dict())
    parts: list[Callable[[Any], Any]] = [lambda m: m[2].bias, lambda m: m[2], lambda m: m.state_dict(), lambda m: m]
    for part in [*parts, lambda m: m[0].running_mean, lambda m: m[2].state_dict()]:
        assert len(saved(part(model))) == len(saved(part(reference)))
    assert len(saved(model[2].bias.grad)) == len(saved(torch.zeros(2)))
    loaded = torch.load(io.BytesIO(saved(model.state_dict())), weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in reference.state_dict().items())
    whole = torch.load(io.BytesIO(saved(model)), weights_only=False)
    assert torch.equal(flatten(whole, buffers=True).buffers, flat.buffers)


def test_saving_a_part_of_a_model_saves_that_part() -> None:
    save_parts()


def test_saving_a_part_of_a_model_in_shared_memory_saves_that_part() -> None:
    async def main(comm: Communicator) -> None:
        save_parts()

    run_ranks(2, main, transport="shm")


def test_a_deep_copy_has_memory_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    flat = flatten(model, buffers=True)
    twin = copy.deepcopy(model)
    flat.parameters.fill_(7.0)
    flat.buffers.fill_(7.0)
    assert not any(bool((value == 7.0).any()) for value in twin.state_dict().values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in twin.state_dict().values())
    with pytest.raises(UsageError, match="flatten the model again"):
        _ = copy.deepcopy(flat).parameters


def test_a_flat_tensor_that_moved_is_an_error() -> None:
    flat = flatten(perceptron())
    flat.parameters.share_memory_()
    with pytest.raises(UsageError, match="flatten the model again"):
        _ = flat.parameters


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.register_buffer("scale", torch.full((2, 2), 3.0))
    model.register_buffer("cache", torch.zeros(5), persistent=False)
    return model


def test_buffers_are_the_persistent_floating_ones() -> None:
    model = normalized()
    flat = flatten(model, buffers=True)
    zeros, ones = torch.zeros(4), torch.ones(4)
    assert torch.equal(flat.buffers, torch.cat([torch.full((4,), 3.0), zeros, ones, zeros, ones]))
    backward(model)
    assert torch.equal(flat.buffers[4:8], model[1].running_mean)
    assert flat.buffers[4:8].any()
    assert int(model[1].num_batches_tracked) == 1
    flat.buffers.fill_(2.0)
    assert bool((model[2].running_var == 2.0).all())
    assert not model.cache.any()


def test_buffers_may_have_another_dtype_than_parameters() -> None:
    model = normalized()
    model[1].double()
    with pytest.raises(UsageError, match=r"the model's parameters have several: torch\.float32, torch\.float64"):
        flatten(model, buffers=True)
    for layer in model[1:]:
        layer.weight = layer.bias = None
        layer.double()
    model.scale = model.scale.double()
    flat = flatten(model, buffers=True)
    assert (flat.parameters.dtype, flat.buffers.dtype) == (torch.float32, torch.float64)


def buffer_replaced(model: nn.Module) -> None:
    model.register_buffer("scale", torch.zeros(2, 2))


def buffer_assigned(model: nn.Module) -> None:
    model.scale = torch.zeros(2, 2)  # type: ignore[assignment]


def buffer_added(model: nn.Module) -> None:
    model[0].register_buffer("mask", torch.zeros(3))  # type: ignore[operator]


def buffer_removed(model: nn.Module) -> None:
    del model.scale


def buffer_of_other_memory(model: nn.Module) -> None:
    model.scale.data = torch.zeros(2, 2)


def buffers_converted(model: nn.Module) -> None:
    model[1].half()  # type: ignore[operator]


CHANGES_OF_BUFFERS = [buffer_replaced, buffer_assigned, buffer_added, buffer_removed, buffer_of_other_memory, assign]


@pytest.mark.parametrize("change", [*CHANGES_OF_BUFFERS, buffers_converted])
def test_a_buffer_outside_of_the_flat_tensor_is_an_error(change: Callable[[nn.Module], None]) -> None:
    model = normalized()
    flat = flatten(model, buffers=True)
    change(model)
    with pytest.raises(UsageError, match="flatten the model again"):
        _ = flat.buffers


def test_other_buffers_may_be_replaced() -> None:
    model = normalized()
    flat = flatten(model, buffers=True)
    model.cache = torch.ones(9)
    model[1].num_batches_tracked = torch.tensor(5)
    assert flat.buffers.numel() == 20
    assert flat.parameters.any()


def test_a_replaced_buffer_does_not_matter_to_gradients() -> None:
    model = normalized()
    flat = flatten(model, buffers=True)
    buffer_replaced(model)
    backward(model)
    assert flat.gradients.any()


def test_buffers_are_flattened_on_request_only() -> None:
    model = normalized()
    with pytest.raises(UsageError, match="buffers=True"):
        _ = flatten(model).buffers
    flat = flatten(perceptron(), buffers=True)
    assert flat.buffers.shape == (0,)


def test_shared_buffers_are_there_once_and_aliased_ones_are_refused() -> None:
    model = normalized()
    model[2].running_mean = model[1].running_mean
    assert flatten(model, buffers=True).buffers.numel() == 16
    assert model[2].running_mean is model[1].running_mean
    model[2].running_mean = model[1].running_mean.detach()
    with pytest.raises(UsageError, match="two different buffers of the model share memory"):
        flatten(model, buffers=True)


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


class Listed(nn.Module):
    """Has a parameter that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [nn.Parameter(torch.ones(2, 3))]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((f"listed.{index}", parameter) for index, parameter in enumerate(self.listed))


def test_a_replaced_parameter_that_no_module_holds_is_an_error() -> None:
    model = Listed()
    flat = flatten(model)
    assert flat.parameters.numel() == 6
    model.listed[0] = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"listed.0 of shape \(2, 3\) was added to the model, or replaced"):
        _ = flat.parameters


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


class Dispatching(nn.Parameter):
    """A parameter that decides itself what each operator does."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Labelled(nn.Parameter):
    """A parameter with attributes, in ordinary memory."""


def with_weight(weight: nn.Parameter) -> nn.Sequential:
    model = perceptron()
    model[0].weight = weight
    return model


def test_models_on_a_gpu_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to export their tensors by the method that other libraries call."""

    def refused(*_: object, **__: object) -> None:
        raise BufferError("Can't export tensors on a different CUDA device index")

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refused)
    model = nn.Linear(2, 3)
    flat = flatten(model)
    flat.parameters.fill_(2)
    assert (model.weight == 2).all()


def test_models_that_cannot_be_flattened_are_refused() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        flatten(nn.ReLU())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(UsageError, match=r"one dtype.*torch\.float32, torch\.float64"):
        flatten(mixed)
    scattered = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"one device.*cpu, meta"):
        flatten(scattered)
    with pytest.raises(UsageError, match=r"meta device.*to_empty"):
        flatten(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match="lazy"):
        flatten(nn.LazyLinear(2))


@pytest.mark.parametrize("weight", [nn.Parameter(Tagged(torch.ones(4, 3))), Dispatching(torch.ones(4, 3))])
def test_tensor_subclasses_are_refused(weight: nn.Parameter) -> None:
    with pytest.raises(UsageError, match=f"{type(weight).__name__}, whose memory is not that of a plain tensor"):
        flatten(with_weight(weight))


def test_parameters_of_other_layouts_are_refused() -> None:
    with pytest.raises(UsageError, match=r"is torch\.sparse_coo"):
        flatten(with_weight(nn.Parameter(torch.ones(4, 3).to_sparse())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_parameters_without_dimensions_or_elements_and_of_other_dtypes(dtype: torch.dtype) -> None:
    shapes = [(), (0, 3), (1, 3), (3, 1), (2, 0), (2, 2)]
    model = nn.ParameterList([torch.ones(shape, dtype=dtype) for shape in shapes])
    flat = flatten(model)
    assert flat.parameters.shape == flat.gradients.shape == (1 + 3 + 3 + 4,)
    assert [tuple(parameter.shape) for parameter in model] == shapes
    sum((parameter * 2).real.sum() for parameter in model).backward()
    assert bool((flat.gradients == 2).all())
    flat.parameters.fill_(5)
    assert all(bool((parameter == 5).all()) for parameter in model)


def test_a_plain_subclass_of_parameter_is_accepted() -> None:
    model = with_weight(Labelled(torch.ones(4, 3)))
    assert flatten(model).parameters[:12].sum() == 12
    assert isinstance(model[0].weight, Labelled)


@pytest.mark.parametrize("start", [0, 1])
def test_different_parameters_that_share_memory_are_refused(start: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight.data = model[0].weight.data[start : start + 2]
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(UsageError, match="two different parameters of the model share memory"):
        flatten(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_a_parameter_that_shares_memory_since_flattening_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    flat = flatten(model)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(UsageError, match="is no longer in the flat tensor"):
        _ = flat.parameters


def test_parameters_that_are_disjoint_parts_of_one_tensor_are_accepted() -> None:
    both = torch.arange(18.0).view(3, 6)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[0].weight.data, model[1].weight.data = both[:, :3], both[:, 3:]
    assert torch.equal(flatten(model).parameters, torch.cat([both[:, :3].flatten(), both[:, 3:].flatten()]))


@pytest.mark.slow
def test_sharded_models_are_refused(forked: Callable[..., tuple[int, str, str]]) -> None:
    _, out, err = forked(dict(os.environ), SCRIPTS / "tensors/sharded_models.py")
    assert out.split() == ["fsdp2", "part", "unsharded", "fsdp1", "original", "dtensor"], err


def test_sharding_is_looked_for_without_importing_it() -> None:
    code = "import sys, torch, asyncoll; asyncoll.flatten(torch.nn.Linear(2, 2)); "
    code += "sys.exit(any(f'torch.distributed.{name}' in sys.modules for name in ('fsdp', 'tensor')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


def test_importing_flat_does_not_import_torch() -> None:
    code = "import sys, asyncoll.tensors.flat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
