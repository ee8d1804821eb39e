"""Which device a tensor is on, and how a rank opens it. It imports what it needs when there is such a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Stager, hidden
from asyncoll.transport.staging import Device


def open_stager(x: Any, pages: Callable[[int], Array], owner: str) -> Stager:
    """What stages the tensors of the device of `x`, for one rank. Mirrors are in the memory that `pages(nbytes)` gives.

    `owner` names the rank in errors. Raises UsageError if the device cannot be used.
    """
    from asyncoll.transport.staging.mirrors import DeviceStager

    for known in hidden:
        if known.holds(x):
            return DeviceStager(cast(Device, known), pages, owner)  # `staging` has put it there
    if x.device.type != "cuda":
        raise UsageError(f"tensors on {x.device} are not supported: use those of the CPU or of CUDA")
    from asyncoll.transport.staging.cuda import open_device

    return DeviceStager(open_device(x.device.index), pages, owner, owns=True)
