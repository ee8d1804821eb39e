"""Mirrors: blocks of registered memory that hold the elements of a device's tensors during a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from asyncoll.errors import DeviceError, describe
from asyncoll.tensors import registered
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import stagers
from asyncoll.transport.staging import Device, Mark, Transfer, arrived

_NOTHING = np.empty(0, np.uint8)


class Mirror:
    """Implements `tensors.staged.Staged`. The block is freed once the call and the device have released it."""

    def __init__(self, device: Device, x: Any, *, is_read: bool) -> None:
        self._device = device
        self._x = x
        self._is_read = is_read
        self._lost: Callable[[DeviceError], None] | None = None
        self._marks: list[Mark] = []  # of the tensor, and of new ones
        self._fetched: Transfer | None = None
        self.mirror: Array = registered.current().empty(x.numel() * x.itemsize, np.uint8)

    def begin(self, lost: Callable[[DeviceError], None]) -> None:
        self._lost = lost
        self._marks.append(self._device.mark(self._x))
        if self._is_read:
            self._fetched = self._marks[0].fetch(0, self.mirror)

    async def arrived(self) -> None:
        if self._fetched is None:
            return
        try:
            await arrived(self._fetched)
        except Exception as error:
            raise self._failed(error) from error

    def put(self) -> None:
        self._put(self.mirror, self._marks[0])

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        x, mark = self._marks[0].like(dtype, shape)
        self._marks.append(mark)
        self._put(flat.view(np.uint8), mark)
        return x

    def join(self) -> None:
        self.mirror, self._fetched = _NOTHING, None
        for mark in self._marks:
            mark.join()

    def _put(self, source: Array, mark: Mark) -> None:
        transfer, lost = mark.put(source, 0), self._lost
        assert lost is not None, "the call has begun"

        def ended() -> None:
            if transfer.error is not None:
                lost(self._failed(transfer.error))

        transfer.when_moved(transfer.nbytes, ended)

    def _failed(self, error: BaseException) -> DeviceError:
        return DeviceError(f"{self._device.name} has failed: {describe(error)}")


class DeviceStager:
    """Implements `tensors.staged.Stager`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.holds = device.holds
        self.clone = device.clone

    def stage(self, x: Any, *, is_read: bool) -> Mirror:
        return Mirror(self._device, x, is_read=is_read)


@contextlib.contextmanager
def staging(device: Device) -> Iterator[None]:
    """Calls of this process take tensors of `device`."""
    stager = DeviceStager(device)
    stagers.append(stager)
    try:
        yield
    finally:
        stagers.remove(stager)
