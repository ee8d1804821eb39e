"""Results that are off by one: a test of the tests."""

from __future__ import annotations

from typing import Any

import torch

SABOTAGES = ("floats", "bytes")
OUTPUTS_FIRST = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
)


def named(backend: str) -> str:
    """The backend's name for torch; if `backend` is the name of a sabotage, that is done."""
    if backend not in SABOTAGES:
        return backend
    sabotage(backend)
    return "asyncoll"


def sabotage(dtypes: str) -> None:
    """Every collective of asyncoll waits and then adds one to its outputs, and every message is sent with one added."""
    from asyncoll.torch.process_group import ProcessGroup
    from asyncoll.torch.uncompiled import uncompiled

    group: Any = ProcessGroup
    for name in OUTPUTS_FIRST:
        setattr(group, name, uncompiled(_spoiling(getattr(group, name), dtypes)))
    send = group.send

    def spoiled_send(self: Any, tensors: Any, *args: Any) -> Any:
        copies = [x.clone() for x in tensors]
        _add_one(copies, dtypes)
        self.__dict__.setdefault("_spoiled", []).append(copies)  # kept as long as the group
        return send(self, copies, *args)

    group.send = uncompiled(spoiled_send)


def _spoiling(method: Any, dtypes: str) -> Any:
    def spoiled(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        work = method(self, outputs, *args, **kwargs)
        if not getattr(work, "_spoiled", False):  # a method that calls another spoils once
            work.wait()
            _add_one(outputs, dtypes)
            work._spoiled = True
        return work

    return spoiled


def _add_one(outputs: Any, dtypes: str) -> None:
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point() or outputs.is_complex() or dtypes == "bytes":
            with torch.no_grad():
                outputs.detach().add_(1)
    else:
        for output in outputs:
            _add_one(output, dtypes)
