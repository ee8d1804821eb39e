"""Operations of the matrix whose tensors are on devices without hardware."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array, build
from asyncoll.testing.devices import FakeDevice
from asyncoll.testing.devices.of_rank import device_of
from asyncoll.testing.faults import checked_calls
from asyncoll.testing.faults.checked_calls import CallMemory, Operation


class _OnDevice(CallMemory):
    """Tensors of a device, which have their values once it has done its work."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def full(self, elements: int, value: float) -> Any:
        x = self._device.tensor(build(np.empty(elements), "float64", (elements,), as_torch=True))
        self._device.compute(lambda array: array.fill(value), x)
        return x

    def values(self, x: Any) -> Array:
        return self._device.values(x)


def _staged(operation: Any) -> Operation:
    async def call(comm: Communicator, elements: int) -> None:
        with device_of(comm) as device:
            await operation(comm, elements, _OnDevice(device))

    return call


STAGED: dict[str, Operation] = {
    f"staged_{each.__name__}": _staged(each)
    for each in (checked_calls.allreduce, checked_calls.allgather, checked_calls.send_recv, checked_calls.solo)
}
