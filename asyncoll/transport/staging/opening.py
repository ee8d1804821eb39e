"""Which device a tensor is on, and how a rank opens it. It imports what it needs when there is such a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import Stager, hidden
from asyncoll.transport.staging import Device


def open_stager(x: Any, pages: Callable[[int], Array]) -> Stager:
    """What stages the tensors of the device of `x`, for one rank. Mirrors are in the memory that `pages(nbytes)` gives.

    Raises UsageError if the device cannot be used.
    """
    from asyncoll.transport.staging.mirrors import DeviceStager

    for known in hidden:
        if known.holds(x):
            return DeviceStager(cast(Device, known), pages)  # `staging` has put it there
    return DeviceStager(_opened(x), pages, owns=True)


def _opened(x: Any) -> Device:
    if x.device.type != "cuda":
        raise UsageError(f"a tensor on {x.device} is not supported: pass x.cpu(), and copy the result back")
    from asyncoll.transport.staging.cuda import open_device

    return open_device(x.device.index)
