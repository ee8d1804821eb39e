"""A model as flat tensors, so that one call reduces all of it.

Every parameter's data becomes a piece of `Flat.parameters` and every gradient a piece of `Flat.gradients`. `backward()`
accumulates into the flat tensor, and one collective reduces the whole step. One vector also means one decision of a
round for the whole model. With one collective per tensor, a step could include a rank for some tensors and not for
others, and the guarantees of a round would hold for each tensor alone (the proof of Li et al., PPoPP 2020, section 5.1,
assumes one vector).
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncoll.errors import UsageError
from asyncoll.tensors import registered
from asyncoll.tensors.reductions import DTYPES, dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn

_AGAIN = "flatten the model again"
_GRAD = operator.attrgetter("grad")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Flat:
    """The parameters, the gradients and, on request, the buffers of a model, as one flat tensor each.

    `flatten` makes it. Trainable parameters come first, in the model's order, frozen ones (`requires_grad` False) after
    them. `gradients` has the trainable ones only. An update changes `trainable`, the part of `parameters` that they
    belong to; a broadcast or an average of `parameters` also makes frozen layers equal. Tied parameters are there once.

    Reading a tensor checks that the model still uses it. It raises UsageError if a parameter or a gradient has left the
    flat tensor (after `model.to` another dtype, or `zero_grad()`), if the model has a parameter that was not flattened
    (a new head, `load_state_dict(assign=True)`), or if a parameter was frozen or unfrozen. A reduction would not reach
    such a parameter, and replicas would differ without an error. So read the tensor from the `Flat` at each use: a
    tensor that the program keeps in a variable is not checked. A deep copy of the model has parameters of its own, and
    needs a `Flat` of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[nn.Parameter],
        frozen: Sequence[nn.Parameter],
        buffers: Sequence[Tensor] | None,
    ) -> None:
        self._model = model
        self._contents = _Contents(model)
        self._trainable, self._frozen, self._kept = list(trainable), list(frozen), list(buffers or ())
        self._all = self._trainable + self._frozen
        self._parameters = _Pieces(self._all, self._all[0])
        self._gradients = _Pieces(self._trainable, self._all[0])
        self._buffers = None if buffers is None else _Pieces(self._kept, self._all[0])
        self._parameters.take(self._all)
        self._gradients.whole.zero_()
        self._piece_of = dict(zip(self._trainable, self._gradients.pieces, strict=True))
        for parameter in self._all:
            parameter.grad = None
        for parameter, piece in self._piece_of.items():
            # An alias of the piece: `model.to` changes the object that `grad` holds, and the piece must not change.
            parameter.grad = piece.detach()
        if self._buffers is not None:
            self._buffers.take(self._kept)

    @property
    def parameters(self) -> Tensor:
        """All parameters: one-dimensional, a tensor of the model's dtype and device. Writing to it changes the model.

        Raises UsageError if the model no longer uses it.
        """
        self._check_model()
        return self._parameters.whole

    @property
    def trainable(self) -> Tensor:
        """The part of `parameters` that an update changes: one-dimensional, in the order of `gradients`.

        Raises UsageError if the model no longer uses it. The gradients may be anywhere, as after `zero_grad()`.
        """
        return self.parameters[: self._gradients.whole.numel()]

    @property
    def gradients(self) -> Tensor:
        """The gradients of all trainable parameters: one-dimensional. `backward()` adds to it.

        Raises UsageError if the model no longer uses it.
        """
        self._check_model()
        index = self._gradients.lacks(list(map(_GRAD, self._trainable)))
        if index is not None:
            raise UsageError(
                f"the gradient of a parameter of shape {_shape(self._trainable[index])} is no longer in the flat "
                "tensor: clear gradients with zero_gradients() or with zero_grad(set_to_none=False)"
            )
        return self._gradients.whole

    @property
    def buffers(self) -> Tensor:
        """The persistent floating-point buffers: one-dimensional, of their dtype. Writing to it changes the model.

        Persistent buffers are those in `state_dict()`, such as the statistics of BatchNorm, in the order of
        `model.modules()`; a shared one is there once. It is empty if the model has none. It is without counters and
        masks of other dtypes, which have no average, and without buffers that a module can compute again.

        Raises UsageError if the model was flattened without `buffers=True`, or if a module has replaced, added or
        removed such a buffer (`register_buffer`, `load_state_dict(assign=True)`, `model.half()`) since then.
        """
        if self._buffers is None:
            raise UsageError("the buffers were not flattened: use flatten(model, buffers=True)")
        found = _persistent_buffers(self._model)
        if not _are_same(found, self._kept) or self._buffers.lacks(self._kept) is not None:
            raise UsageError(
                "a module has replaced, added or removed a buffer, or the model was converted, after it was flattened: "
                f"change buffers in place, or {_AGAIN}"
            )
        return self._buffers.whole

    def zero_gradients(self) -> None:
        """Set all gradients to 0, in place. A gradient that a step does not use stays 0, and does not become None.

        Raises UsageError if the model no longer uses `gradients`.
        """
        self.gradients.zero_()

    def collect_gradients(self) -> None:
        """Copy gradients that `backward()` has put elsewhere, after `zero_grad()`, into the flat tensor, for good.

        `gradients` then has what the parameters' `grad` has; 0 where that is None. Raises UsageError if the model no
        longer uses the flat tensors.
        """
        self._check_model()
        if self._gradients.lacks(list(map(_GRAD, self._trainable))) is not None:
            for parameter in self._trainable:
                self.collect_gradient(parameter)

    def collect_gradient(self, parameter: nn.Parameter) -> None:
        """Copy the gradient of one trainable parameter into the flat tensor, for good. Does not check the model."""
        piece = self._piece_of[parameter]
        if parameter.grad is None:
            piece.zero_()
        elif parameter.grad.data_ptr() == piece.data_ptr():
            return
        else:
            piece.copy_(parameter.grad)
        parameter.grad = piece.detach()

    def _check_model(self) -> None:
        """Raise UsageError if the flat tensors lack parameters of the model, or their gradients."""
        for parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise UsageError(
                    f"a parameter of shape {_shape(parameter)} was frozen when the model was flattened and "
                    f"is trained now: {_AGAIN} after unfreezing"
                )
        if not all(map(_REQUIRES_GRAD, self._trainable)):  # weight decay and momentum would still change it
            parameter = next(p for p in self._trainable if not p.requires_grad)
            raise UsageError(
                f"a parameter of shape {_shape(parameter)} was trained when the model was flattened and "
                f"is frozen now: {_AGAIN} after freezing"
            )
        if not self._contents.is_unchanged():
            self._check_contents()
        index = self._parameters.lacks(self._all)
        if index is not None:
            raise UsageError(
                f"a parameter of shape {_shape(self._all[index])} is no longer in the flat tensor: move or convert the "
                f"model (model.to, model.half, ...) first, and {_AGAIN} after a change"
            )

    def _check_contents(self) -> None:
        flattened = {id(parameter) for parameter in self._all}
        # As in `flatten`: a model may override `named_parameters`.
        for parameter in self._model.parameters():
            if id(parameter) not in flattened:
                names = [name for name, each in self._model.named_parameters() if each is parameter]
                shown = f"the parameter {names[0]}" if names else "a parameter"
                raise UsageError(
                    f"{shown} of shape {_shape(parameter)} was added to the model, or "
                    f"replaced, after it was flattened: {_AGAIN}, and give the optimizer its parameters"
                )
        self._contents.remember()  # parameters were only removed, or moved within the model


def flatten(model: nn.Module, buffers: bool = False) -> Flat:
    """Make the parameters and gradients of `model` pieces of two flat tensors.

    Parameters keep their values; gradients start at 0. An optimizer that was built before or is built afterwards has
    the same parameters. Local: the other ranks need not call it.

    In a world (inside `asyncoll.run` or `asyncoll.connect`), the flat tensors are in registered memory, as those of
    `Communicator.empty` are: peers on this host read gradients where `backward()` has put them. Those of a model on
    another device than the CPU are on that device, whose memory the host neither reads nor writes here.

    Each parameter, gradient and buffer has a torch storage of its own, which is a part of the flat tensor's memory.
    `torch.save` of one layer writes that layer only, and `copy.deepcopy` copies that layer only.

    Args:
        model: its parameters share one dtype and one device; none of them is lazy, sharded, or on the meta device.
        buffers: also make the persistent floating-point buffers pieces of a flat tensor, `Flat.buffers`, so that one
            broadcast or one average makes them equal. They share one dtype and one device, which may be others than
            those of the parameters. An average suits statistics; it may round constants and overflow on masks of the
            lowest finite number.

    Returns:
        A `Flat`, with the tensors.

    Raises:
        UsageError: the model has no parameters, or lazy ones, or several dtypes or devices, or is on the meta device.
            The model is sharded (FSDP, DTensor): a rank has only a part of each parameter. Its tensors are not dense,
            or are of a subclass with memory of another form (quantized weights). Two different parameters share memory.
            The model is not changed.

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
    _check_not_sharded(model, parameters)
    _check_tensors("parameter", parameters)
    kept = _persistent_buffers(model) if buffers else None
    if kept:
        _check_tensors("buffer", kept)
    trainable = [p for p in parameters if p.requires_grad]
    return Flat(model, trainable, [p for p in parameters if not p.requires_grad], kept)


def _check_not_sharded(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    # Its classes are found only where the program has imported it. Importing it takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    classes = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    sharding = tuple(found for found in classes if found is not None)
    is_sharded = any(isinstance(module, sharding) for module in model.modules())
    if is_sharded or any(type(p).__name__ == "DTensor" or hasattr(p, "_is_flat_param") for p in parameters):
        raise UsageError(
            "the model is sharded (FSDP or DTensor): a rank has only a part of each parameter, so that one flat tensor "
            "has no whole model to reduce, and FSDP reduces gradients itself: flatten a model that each rank has whole"
        )


def _check_tensors(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise UsageError if the tensors cannot be pieces of one flat tensor."""
    import torch

    for tensor in tensors:
        kind = type(tensor)
        has_own_memory = issubclass(kind, torch.nn.Parameter) or kind is torch.Tensor
        if not has_own_memory or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UsageError(
                f"a {what} of shape {_shape(tensor)} is a {kind.__name__}, whose memory is not that of a plain tensor, "
                "and cannot be a piece of a flat tensor: flatten the model before converting it, or without this layer"
            )
        if tensor.layout != torch.strided:
            raise UsageError(
                f"a {what} of shape {_shape(tensor)} is {tensor.layout}, and a flat tensor is dense: "
                "use to_dense() before flattening"
            )
    for shared, kinds in (("dtype", {t.dtype for t in tensors}), ("device", {t.device for t in tensors})):
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise UsageError(f"one flat tensor has one {shared}, but the model's {what}s have several: {names}")
    if tensors[0].device.type == "meta":
        raise UsageError(
            f"the model's {what}s are on the meta device and have no memory: use model.to_empty(device='cpu') and set "
            "their values before flattening"
        )
    spans = sorted((t.data_ptr(), t.data_ptr() + (t.nbytes if t.is_contiguous() else 1)) for t in tensors if t.numel())
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise UsageError(
            f"two different {what}s of the model share memory, and would not in a flat tensor: tie them by giving both "
            "modules the same object"
        )


class _Pieces:
    """A flat tensor, and its pieces, each of the shape of one tensor of the model.

    A piece has a torch storage of its own. A view would have the storage of the flat tensor, all of which `torch.save`
    writes for any part of it.
    """

    def __init__(self, tensors: Sequence[Tensor], otherwise: Tensor) -> None:
        import torch

        self.whole = _empty(tensors[0] if tensors else otherwise, sum(tensor.numel() for tensor in tensors))
        self.pieces: list[Tensor] = []
        start = 0
        for tensor in tensors:
            end = start + tensor.numel()
            self.pieces.append(_alias(self.whole[start:end]).view(tensor.shape))
            start = end
        self._address = self.whole.data_ptr()
        # In a `map`, a method of a class takes half the time of a call.
        self._data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
        self._addresses = [piece.data_ptr() for piece in self.pieces]

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pieces, and make the pieces their data."""
        for tensor, piece in zip(tensors, self.pieces, strict=True):
            piece.copy_(tensor.data)
            tensor.data = piece

    def lacks(self, tensors: Sequence[Tensor | None]) -> int | None:
        """The index of the first of the tensors that is not in its piece, or None.

        The pieces stay allocated, so that a tensor at the address of a piece is in it. The flat tensor itself may have
        moved too, by `share_memory_()`.
        """
        try:
            addresses: list[int | None] = list(map(self._data_ptr, tensors))
        except TypeError:  # a gradient is None
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if addresses == self._addresses and self.whole.data_ptr() == self._address:
            return None
        differ = map(operator.ne, addresses, self._addresses)
        return next((index for index, is_other in enumerate(differ) if is_other), 0)


class _Contents:
    """The parameters and the submodules that each module of a model holds.

    A change of it is a hint to look closer. `model.parameters()`, which a model may override, takes five times as long.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch import nn

        self._model = model
        methods = [(model.parameters, nn.Module.parameters), (model.named_parameters, nn.Module.named_parameters)]
        # A model that overrides them may have parameters that no module holds.
        self._is_complete = all(getattr(own, "__func__", None) is plain for own, plain in methods)
        self.remember()

    def remember(self) -> None:
        self._modules = list(self._model.modules())
        self._held = _held(self._modules)

    def is_unchanged(self) -> bool:
        return self._is_complete and _are_same(_held(self._modules), self._held)


def _held(modules: Sequence[nn.Module]) -> list[object]:
    """What the modules hold. Their dicts are read anew, as `module.__init__()` and `__setstate__` replace them."""
    held: list[object] = []
    for module in modules:
        if (
            parameters := module._parameters
        ):  # most modules lack one of both, and the test is faster than adding nothing
            held += parameters.values()
        if submodules := module._modules:
            held += submodules.values()
    return held


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The floating-point buffers that `state_dict()` contains, each once."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                continue
            found[id(buffer)] = buffer
    return list(found.values())


def _empty(like: Tensor, count: int) -> Tensor:
    """Memory on the tensor's device; in a world, memory that the ranks of this host share."""
    if like.device.type != "cpu" or dtype_name(like.dtype) not in DTYPES:
        return like.data.new_empty(count)
    tensor: Tensor = registered.current().empty(count, like.dtype)
    return tensor


def _alias(view: Tensor) -> Tensor:
    """The memory of a one-dimensional view, with a storage that has no more than it."""
    import torch
    import torch.utils.dlpack

    dlpack: Any = torch.utils.dlpack  # its types do not show all that it has
    as_bytes = view.view(torch.uint8)  # DLPack does not have all dtypes
    # Not `from_dlpack(as_bytes)`: by that torch exports no tensor of a GPU that is not the current one.
    alias: Tensor = dlpack.from_dlpack(dlpack.to_dlpack(as_bytes)).view(view.dtype)
    return alias


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
