"""How the ranks' models are made equal: at the start, at the end, and after a rank has lost results for good.

Every algorithm treats the parts of a model, and the optimizer, by the same rules:

- Start: all ranks take the parameters, the buffers and the optimizer (its state, and the hyper-parameters in its
  `param_groups`) of one rank, to the bit. So it is enough that rank 0 loads a checkpoint of the model and the
  optimizer. A learning-rate scheduler is not part of the optimizer: its state must be loaded at every rank.
- Parameters that are frozen (`requires_grad` False) at the start do not change afterwards.
- Buffers, such as the statistics of BatchNorm, of all dtypes: while a rank trains, they follow its own batches. Where
  ranks share them, all take rank 0's, to the bit, as in torch's DistributedDataParallel. An average of them is a choice
  of the program: integers have none, (c + c + c) / 3 may differ from a constant c, and a mask of the lowest finite
  numbers would overflow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy
import torch
from torch import Tensor

import asyncoll

_PLAIN = (bool, int, float, str, type(None))
_NOTHING = torch.empty(0, dtype=torch.uint8)


def flattened(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> asyncoll.Flat:
    """Flatten the model, whose parameters `optimizer` trains. Local.

    Raises UsageError if the optimizer trains a tensor outside of the model, and as `asyncoll.flatten` does.
    """
    _check_trained(model, optimizer)
    flat = asyncoll.flatten(model)
    _make_contiguous(optimizer)
    return flat


async def share(
    comm: asyncoll.Communicator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    flat: asyncoll.Flat,
    root: int = 0,
) -> None:
    """Give every rank the model and the optimizer of rank `root`, to the bit. Collective.

    Raises UsageError at a rank whose model has other parameters or buffers than rank 0's, or whose optimizer has
    another type or other parameter groups; and if the optimizer has a state that cannot be sent.
    """
    await check_same(comm, model, optimizer)
    await comm.broadcast(flat.parameters, root=root)
    await share_buffers(comm, model, root)
    await _share_optimizer(comm, optimizer, root=root)


async def share_buffers(comm: asyncoll.Communicator, model: torch.nn.Module, root: int = 0) -> None:
    """Give every rank the buffers of rank `root`. Collective.

    A buffer that has another shape at this rank, such as a cache, takes the root's shape.
    """
    buffers = dict(model.named_buffers())  # read at each call, because modules replace buffers by new tensors
    if not buffers:
        return
    layout = {name: [_dtype(buffer), list(buffer.shape)] for name, buffer in buffers.items()}
    place = next((buffer.device for buffer in buffers.values() if not buffer.is_cpu), torch.device("cpu"))
    packed = _NOTHING
    # At the root first: each copy from a GPU waits for it.
    if comm.rank == root:
        packed = torch.cat([_bytes(buffer).to(place) for buffer in buffers.values()]).cpu()
    layout, packed = await _from_root(comm, layout, packed, root)
    if comm.rank == root:
        return
    theirs = {f"buffer {name}": dtype for name, (dtype, _) in layout.items()}
    _compare({f"buffer {name}": _dtype(buffer) for name, buffer in buffers.items()}, theirs, comm.rank, root)
    packed, start = packed.to(place), 0
    for name, (_, shape) in layout.items():
        stop = start + torch.Size(shape).numel() * buffers[name].itemsize
        value = (
            packed[start:stop].clone().view(buffers[name].dtype).view(shape)
        )  # a copy: a view with a wider dtype must be aligned
        _assign(buffers[name], value)
        start = stop


async def average_buffers(comm: asyncoll.Communicator, model: torch.nn.Module) -> None:
    """Replace the floating buffers by their mean over all ranks. Collective.

    Raises MismatchError if they have other sizes at another rank.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        if buffer.is_floating_point():
            kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():
        mean = await comm.allreduce(torch.cat([buffer.detach().flatten() for buffer in buffers]), op=asyncoll.AVG)
        for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
            _assign(buffer, part.view(buffer.shape).clone())


async def resynchronise(
    comm: asyncoll.Communicator,
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    lost: int,
) -> None:
    """Make replicas equal to the bit: if any rank has `lost` results, all get one state of parameters and optimizer.

    Collective: every rank calls it at the same round, after at least one step. `parameters` are all of the model's, or
    the flat tensor that has them. They and the optimizer become those of the lowest of the ranks that have lost least.
    If a rank has lost nothing, that is the state of a run without losses.
    """
    losses = (await comm.allgather(torch.tensor(lost))).tolist()
    if not any(losses):
        return
    source = losses.index(min(losses))
    for tensor in parameters:
        await comm.broadcast(tensor, root=source)
    await _share_optimizer(comm, optimizer, root=source)


async def sent(comm: asyncoll.Communicator, replica: dict[str, Any], root: int) -> dict[str, Any]:
    """What rank `root` has `copied` as `replica`, in memory of its own at every rank. Collective."""
    tensors: list[Tensor] = []
    text = _encoded(replica, tensors) if comm.rank == root else None
    packed = torch.cat([_bytes(tensor).cpu() for tensor in tensors]) if tensors else _NOTHING
    text, packed = await _from_root(comm, text, packed, root)
    made: list[Tensor] = []
    replica = _decoded(text, None, made, torch.device("cpu"))
    for tensor, value in zip(made, packed.split([tensor.nbytes for tensor in made]), strict=True):
        tensor.copy_(value.clone().view(tensor.dtype).view(tensor.shape))
    return replica


def copied(
    model: torch.nn.Module, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, *, buffers: bool
) -> dict[str, Any]:
    """A copy of a replica, for `put_back` at another rank: values that calls of functions carry. Local.

    `parameters` are all of the model's, or the flat tensor that has them. Raises UsageError if the optimizer has a
    state that cannot be sent.
    """
    described, tensors = _described(optimizer)
    return {
        "parameters": [tensor.detach().clone() for tensor in parameters],
        "optimizer": json.dumps(described),
        "tensors": [tensor.detach().clone() for tensor in tensors],
        "buffers": {name: buffer.detach().clone() for name, buffer in model.named_buffers()} if buffers else {},
    }


@torch.no_grad()
def put_back(
    replica: dict[str, Any], model: torch.nn.Module, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Make this rank's model and optimizer those that another rank has `copied`, to the bit. Local."""
    for tensor, value in zip(parameters, replica["parameters"], strict=True):
        tensor.copy_(value)
    for tensor, value in zip(_arranged(optimizer, json.loads(replica["optimizer"])), replica["tensors"], strict=True):
        tensor.copy_(value)
    own = dict(model.named_buffers())
    for name, value in replica["buffers"].items():
        _assign(own[name], value)


def _check_trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the optimizer trains a tensor that is not in the model: ranks would not share it."""
    known = set(model.parameters())
    for index, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if tensor.requires_grad and tensor not in known:
                raise asyncoll.UsageError(
                    f"parameter group {index} of the optimizer has a tensor of shape {list(tensor.shape)} that is no "
                    "parameter of the model, so that ranks would not share it: register it in the model as a parameter"
                )


def _make_contiguous(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of a flattened parameter the parameter's strides.

    A state that was made before the model was flattened may be in another memory format. Fused optimizers pair the
    elements of a parameter and of its state by their positions in memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.layout == torch.strided:
                    # It is the same tensor if it is contiguous already.
                    state[name] = value.contiguous()


async def check_same(comm: asyncoll.Communicator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError at a rank whose model or optimizer has another structure than rank 0's. Collective."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = {"the optimizer": type(optimizer).__name__}
    for name, parameter in model.named_parameters():
        trained = "trained" if parameter.requires_grad else "frozen"
        own[f"parameter {name}"] = f"{_dtype(parameter)} of shape {list(parameter.shape)}, {trained}"
    own |= {f"buffer {name}": _dtype(buffer) for name, buffer in model.named_buffers()}
    for index, group in enumerate(optimizer.param_groups):
        members = [names.get(parameter, "a tensor outside of the model") for parameter in group["params"]]
        own[f"parameter group {index}"] = ", ".join(members)
    theirs, _ = await _from_root(comm, own, _NOTHING, root=0)
    _compare(own, theirs, comm.rank, 0)


def _compare(own: dict[str, str], theirs: dict[str, str], rank: int, root: int) -> None:
    for what in own | theirs:
        here, there = own.get(what, "missing"), theirs.get(what, "missing")
        if here != there:
            raise asyncoll.UsageError(
                f"{what} is {here} on rank {rank}, but {there} on rank {root}: "
                "build the same model, and the same optimizer, on all ranks"
            )


async def _share_optimizer(comm: asyncoll.Communicator, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the hyper-parameters and the state of the optimizer of rank `root`.

    A hyper-parameter that cannot be sent, such as a function, stays each rank's own.
    """
    described, tensors = _described(optimizer) if comm.rank == root else ({}, [])
    described, _ = await _from_root(comm, described, _NOTHING, root)
    if comm.rank != root:
        tensors = _arranged(optimizer, described)
    for tensor in tensors:
        await comm.broadcast(tensor, root=root)


def _members(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _described(optimizer: torch.optim.Optimizer) -> tuple[dict[str, list[Any]], list[Tensor]]:
    """The hyper-parameters and the state for JSON, and their tensors.

    Raises UsageError for a state that cannot be sent.
    """
    tensors: list[Tensor] = []
    described: dict[str, list[Any]] = {
        "groups": [_options(group, tensors) for group in optimizer.param_groups],
        "states": [_items(optimizer, optimizer.state.get(p, {}), tensors) for p in _members(optimizer)],
        "others": _items(optimizer, _others(optimizer), tensors),
    }
    return described, tensors


def _arranged(optimizer: torch.optim.Optimizer, described: dict[str, list[Any]]) -> list[Tensor]:
    """Give the optimizer what another one's `_described` says. Returns its tensors, which have yet to be filled."""
    tensors: list[Tensor] = []
    parameters = _members(optimizer)
    device = parameters[0].device
    for group, options in zip(optimizer.param_groups, described["groups"], strict=True):
        values = {name: _decoded(value, group.get(name), tensors, device) for name, value in options.items()}
        values["params"] = group["params"]
        group.clear()
        group.update(values)
    for parameter, state in zip(parameters, described["states"], strict=True):
        own = optimizer.state.pop(parameter, {})
        if state:  # some optimizers initialize a state only if there is no entry
            optimizer.state[parameter] = _decoded({"dict": state}, own, tensors, device)
    own = _others(optimizer)
    for key in own:
        del optimizer.state[key]
    optimizer.state.update(_decoded({"dict": described["others"]}, own, tensors, device))
    return tensors


def _options(group: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    options = {}
    for name, value in group.items():
        if name == "params":
            continue
        found: list[Tensor] = []
        try:
            options[name] = _encoded(value, found)
            tensors += found
        except TypeError:
            options[name] = {"own": []}
    return options


def _others(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """The entries of the state that belong to no parameter, such as a count of steps."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def _items(optimizer: torch.optim.Optimizer, state: dict[Any, Any], tensors: list[Tensor]) -> list[list[Any]]:
    items = []
    for name, value in state.items():
        try:
            items.append([_encoded(name, tensors), _encoded(value, tensors)])
        except TypeError as error:
            raise asyncoll.UsageError(
                f"{type(optimizer).__name__} keeps {name!r} as a {type(value).__name__}, which cannot be sent to other "
                "ranks: use an optimizer whose state is tensors, numbers, strings, and lists, tuples and dicts of them"
            ) from error
    return items


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    """`value` for JSON. A tensor is appended to `tensors`: its dtype, its shape, and whether it is on the CPU stay."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [_dtype(value), list(value.shape), value.is_cpu]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(item, tensors) for item in value]}
    if type(value) is dict:
        return {"dict": [[_encoded(key, tensors), _encoded(item, tensors)] for key, item in value.items()]}
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {
            "numpy": [value.dtype.str, value.item()]
        }  # with its type, because float64 and float32 round differently
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _decoded(value: Any, own: Any, tensors: list[Tensor], device: torch.device) -> Any:
    """The value that was encoded; a tensor is memory that its broadcast fills: `own`, if it is of the same kind.

    A tensor of the host, such as a count of steps, stays there. Others go to `device`, which holds this rank's model.
    """
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "own":
        return own
    if kind == "tensor":
        dtype, shape, is_of_host = getattr(torch, content[0]), torch.Size(content[1]), content[2]
        place = torch.device("cpu") if is_of_host else device
        fits = isinstance(own, Tensor) and (own.dtype, own.shape, own.device) == (dtype, shape, place)
        tensors.append(own if fits else torch.empty(shape, dtype=dtype, device=place))
        return tensors[-1]
    if kind == "numpy":
        return numpy.dtype(content[0]).type(content[1])
    if kind == "dict":
        own, values = own if isinstance(own, dict) else {}, {}
        for key, item in content:
            name = _decoded(key, None, tensors, device)
            values[name] = _decoded(item, own.get(name), tensors, device)
        return values
    items = [_decoded(item, None, tensors, device) for item in content]
    return tuple(items) if kind == "tuple" else items


async def _from_root(comm: asyncoll.Communicator, described: Any, packed: Tensor, root: int) -> tuple[Any, Tensor]:
    """The description of rank `root`, as JSON represents it, and its bytes. This rank's may have other lengths."""
    text = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    lengths = torch.tensor([len(text), len(packed)])
    await comm.broadcast(lengths, root=root)
    whole = torch.cat([text, packed]) if comm.rank == root else torch.empty(int(lengths.sum()), dtype=torch.uint8)
    await comm.broadcast(whole, root=root)
    text, packed = whole.split(lengths.tolist())
    return json.loads(text.numpy().tobytes()), packed


def _assign(buffer: Tensor, value: Tensor) -> None:
    # A buffer that was made in inference mode (in a validation) can only be changed in it.
    with torch.inference_mode():
        if buffer.shape == value.shape and 0 not in buffer.stride():
            buffer.copy_(value)
        else:  # it has another size (a cache), or is expanded, so that its elements share memory
            buffer.set_(value.to(buffer.device))  # type: ignore[call-overload]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
