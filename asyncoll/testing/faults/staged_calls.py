"""Operations of the matrix whose tensors are on devices without hardware."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import build
from asyncoll.testing.devices import FakeDevice
from asyncoll.testing.devices.of_rank import device_of
from asyncoll.testing.faults.checked_calls import Operation, all_are


async def staged_allreduce(comm: Communicator, elements: int) -> None:
    with device_of(comm) as device:
        x = _full(device, elements, 1)
        await comm.allreduce(x)
        all_are(device.values(x), comm.size)


async def staged_allgather(comm: Communicator, elements: int) -> None:
    with device_of(comm) as device:
        rows = await comm.allgather(_full(device, elements, comm.rank))
        for rank in range(comm.size):
            all_are(device.values(rows[rank]), rank)


async def staged_send_recv(comm: Communicator, elements: int) -> None:
    """Send to the next rank of a ring, and receive from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with device_of(comm) as device:
        sending = comm.send(_full(device, elements, comm.rank), after)
        receiving = comm.recv(x := _full(device, elements, 0), before)
        for outcome in await asyncio.gather(receiving, sending, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        all_are(device.values(x), before)


async def staged_solo(comm: Communicator, elements: int) -> None:
    with device_of(comm) as device:
        x = _full(device, elements, 1)
        await comm.solo_allreduce(x, name="staged")
        assert np.ptp(device.values(x)) == 0, "parts of different rounds"


STAGED: dict[str, Operation] = {
    each.__name__: each for each in (staged_allreduce, staged_allgather, staged_send_recv, staged_solo)
}


def _full(device: FakeDevice, elements: int, value: float) -> Any:
    """A tensor of the device that has this value once the device has done its work."""
    x = device.tensor(build(np.empty(elements), "float64", (elements,), as_torch=True))
    device.compute(lambda array: array.fill(value), x)
    return x
