"""A model as two flat tensors, so that one call reduces all of it.

Every parameter's data becomes a view of `Flat.parameters` and every gradient a view of `Flat.gradients`. `backward()`
accumulates into the flat tensor, and one collective reduces the whole step. One vector also means one decision of a
round for the whole model. With one collective per tensor, a step could include a rank for some tensors and not for
others, and the guarantees of a round would hold for each tensor alone (the proof of Li et al., PPoPP 2020, section 5.1,
assumes one vector).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncoll.errors import UsageError
from asyncoll.tensors import registered
from asyncoll.tensors.reductions import DTYPES

if TYPE_CHECKING:
    from torch import Tensor, nn


class Flat:
    """The parameters and the gradients of a model, as one flat tensor each. `flatten` makes it.

    Trainable parameters come first, in the model's order, frozen ones (`requires_grad` False) after them. `gradients`
    has the trainable ones only: an update changes `parameters[: gradients.numel()]`, and a broadcast or an average of
    `parameters` also makes frozen layers equal. Tied parameters are there once.

    Reading either tensor checks that the model still uses it. It raises UsageError if a parameter or a gradient is no
    longer a view (after `model.to` another dtype, or `zero_grad()`), or if the model has a parameter that was not
    flattened (a new head, `load_state_dict(assign=True)`), or was frozen then. A reduction would not reach such a
    parameter, and replicas would differ without an error.
    """

    def __init__(self, model: nn.Module, trainable: Sequence[nn.Parameter], frozen: Sequence[nn.Parameter]) -> None:
        everything = (*trainable, *frozen)
        self._model = model
        self._found = _found(model)
        self._parameters = _flat(everything[0], sum(p.numel() for p in everything))
        self._gradients = _flat(everything[0], sum(p.numel() for p in trainable)).zero_()
        self._data_views = _views(self._parameters, everything)
        self._gradient_views = dict(_views(self._gradients, trainable))
        self._frozen = tuple(frozen)
        for parameter, view in self._data_views:
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = None
        for parameter, view in self._gradient_views.items():
            # An alias of the view: `model.to` changes the object that `grad` holds, and the view must not change.
            parameter.grad = view.detach()

    @property
    def parameters(self) -> Tensor:
        """All parameters: one-dimensional, a tensor of the model's dtype and device. Writing to it changes the model.

        Raises UsageError if the model no longer uses it.
        """
        self._check_model()
        return self._parameters

    @property
    def gradients(self) -> Tensor:
        """The gradients of all trainable parameters: one-dimensional. `backward()` adds to it.

        Raises UsageError if the model no longer uses it.
        """
        self._check_model()
        for parameter, view in self._gradient_views.items():
            if parameter.grad is None or not _same_memory(parameter.grad, view):
                raise UsageError(
                    f"the gradient of a parameter of shape {_shape(parameter)} is no longer in the flat "
                    "tensor: clear gradients with zero_gradients() or with zero_grad(set_to_none=False)"
                )
        return self._gradients

    def zero_gradients(self) -> None:
        """Set all gradients to 0, in place. A gradient that a step does not use stays 0, and does not become None.

        Raises UsageError if the model no longer uses `gradients`.
        """
        self.gradients.zero_()

    def collect_gradients(self) -> None:
        """Add gradients that `backward()` has put elsewhere, after `zero_grad()`, to the flat tensor; make them views.

        `gradients` then has everything that was computed since the last `zero_gradients()`. Raises UsageError if the
        model no longer uses the flat tensors.
        """
        self._check_model()
        for parameter in self._gradient_views:
            self.collect_gradient(parameter)

    def collect_gradient(self, parameter: nn.Parameter) -> None:
        """As `collect_gradients`, for one trainable parameter; without the check."""
        view = self._gradient_views[parameter]
        if parameter.grad is None:
            parameter.grad = view.detach()
        elif not _same_memory(parameter.grad, view):
            view.add_(parameter.grad)
            parameter.grad = view.detach()

    def _check_model(self) -> None:
        """Raise UsageError if the flat tensors lack parameters of the model, or their gradients."""
        for parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {_shape(parameter)} was frozen when the model was flattened and "
                    "is trained now: flatten the model again after unfreezing"
                )
        self._check_found()
        for parameter, view in self._data_views:
            if not _same_memory(parameter, view):
                raise UsageError(
                    f"a parameter of shape {_shape(parameter)} is no longer in the flat tensor: move or convert the "
                    "model (model.to, model.half, ...) first, and flatten the model again after a change"
                )

    def _check_found(self) -> None:
        found = _found(self._model)
        if len(found) == len(self._found) and all(map(operator.is_, found, self._found)):
            return
        flattened = {id(parameter) for parameter, _ in self._data_views}
        for parameter in self._model.parameters():  # as in `flatten`; a model may override `named_parameters`
            if id(parameter) not in flattened:
                names = [name for name, each in self._model.named_parameters() if each is parameter]
                shown = f"the parameter {names[0]}" if names else "a parameter"
                raise UsageError(
                    f"{shown} of shape {_shape(parameter)} was added to the model, or "
                    "replaced, after it was flattened: flatten the model again, and give the optimizer its parameters"
                )
        self._found = found  # parameters were only removed, or moved within the model


def flatten(model: nn.Module) -> Flat:
    """Make the parameters and gradients of `model` views of two flat tensors.

    Parameters keep their values; gradients start at 0. An optimizer that was built before or is built afterwards has
    the same parameters. Local: the other ranks need not call it.

    In a world (inside `asyncoll.run` or `asyncoll.connect`), both tensors are in registered memory, as those of
    `Communicator.empty` are: peers on this host read gradients where `backward()` has put them.

    Args:
        model: its parameters share one dtype and one device; none of them is lazy.

    Returns:
        A `Flat`, with the two tensors.

    Raises:
        UsageError: the model has no parameters, several dtypes or devices, or lazy parameters.

    Example:

        flat = asyncoll.flatten(model)
        await comm.broadcast(flat.parameters)
        for batch in batches:
            flat.zero_gradients()
            loss(model, batch).backward()
            await comm.allreduce(flat.gradients, op=asyncoll.AVG)
            optimizer.step()
    """
    from torch.nn.parameter import is_lazy

    parameters = list(model.parameters())  # each once, even if several modules share it
    if not parameters:
        raise UsageError("the model has no parameters to flatten")
    if any(is_lazy(p) for p in parameters):
        raise UsageError("the model has lazy parameters: run one batch through it before flattening")
    for what, kinds in (("dtype", {p.dtype for p in parameters}), ("device", {p.device for p in parameters})):
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise UsageError(f"one flat tensor has one {what}, but the model's parameters have several: {names}")
    trainable = [p for p in parameters if p.requires_grad]
    return Flat(model, trainable, [p for p in parameters if not p.requires_grad])


def _found(model: nn.Module) -> list[nn.Parameter | None]:
    """The parameters that the model's modules hold.

    A change of it is a hint to look closer. `model.parameters()`, which a model may override, takes five times as long.
    """
    found: list[nn.Parameter | None] = []
    modules, seen = [model], {model}
    while modules:
        module = modules.pop()
        found += module._parameters.values()
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return found


def _flat(like: nn.Parameter, count: int) -> Tensor:
    """Memory on the parameter's device; in a world, memory that the ranks of this host share."""
    if like.device.type != "cpu" or str(like.dtype).removeprefix("torch.") not in DTYPES:
        return like.data.new_empty(count)
    tensor: Tensor = registered.current().empty(count, like.dtype)
    return tensor


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its piece of `flat`, in its shape."""
    pieces = []
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        pieces.append((parameter, flat[start:end].view(parameter.shape)))
        start = end
    return pieces


def _same_memory(tensor: Tensor, view: Tensor) -> bool:
    return tensor.data_ptr() == view.data_ptr() and tensor.dtype == view.dtype


def _shape(parameter: nn.Parameter) -> str:
    return str(tuple(parameter.shape))
