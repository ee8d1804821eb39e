"""Mirrors: blocks of registered memory that hold the elements of a device's tensors during a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from asyncoll.errors import DeviceError, describe
from asyncoll.tensors import registered
from asyncoll.tensors.operands import as_operand
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.staged import CopiesBack, Work, stagers
from asyncoll.transport.staging import Device, Mark, Transfer, arrived

_NOTHING = np.empty(0, np.uint8)


class Mirror:
    """Implements `tensors.staged.Staged`. The block is freed once the call and the device have released it."""

    def __init__(self, device: Device, x: Any, *, is_read: bool) -> None:
        self._device = device
        self._x = x
        self._is_read = is_read
        self._back: CopiesBack | None = None
        self._marks: list[Mark] = []  # of the tensor, and of new ones
        self._fetched: Transfer | None = None
        self._returned = 0  # the bytes that have been put
        self.mirror: Array = registered.current().empty(x.numel() * x.itemsize, np.uint8)

    def begin(self, back: CopiesBack) -> None:
        self._back = back
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

    def when_arrived(self, nbytes: int, callback: Callable[[], None]) -> None:
        if self._fetched is None:
            callback()
        else:
            self._fetched.when_moved(nbytes, callback)

    def check_arrived(self, nbytes: int) -> None:
        fetched = self._fetched
        if fetched is not None and fetched.moved < nbytes and fetched.error is not None:
            raise self._failed(fetched.error) from fetched.error

    def put(self, nbytes: int | None = None) -> None:
        start, self._returned = self._returned, self.mirror.nbytes if nbytes is None else nbytes
        if start < self._returned:
            self._put(self.mirror[start : self._returned], self._marks[0], start)

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        x = self._device.empty(dtype, shape)
        self._marks.append(self._device.mark(x))
        self._put(flat.view(np.uint8), self._marks[-1], 0)
        return x

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        self._marks[0].queue(work, *writes, reads=reads)

    def join(self) -> None:
        self.mirror, self._fetched = _NOTHING, None
        for mark in self._marks:
            mark.join()

    def _put(self, source: Array, mark: Mark, start: int) -> None:
        back, transfer = self._back, mark.put(source, start)
        assert back is not None, "the call has begun"

        def ended() -> None:
            back.ended(None if transfer.error is None else self._failed(transfer.error))

        back.begun()
        transfer.when_moved(transfer.nbytes, ended)

    def _failed(self, error: BaseException) -> DeviceError:
        return DeviceError(f"{self._device.name} has failed: {describe(error)}")


class DeviceStager:
    """Implements `tensors.staged.Stager`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.name = device.name
        self.holds = device.holds
        self.clone = device.clone
        self.queue = device.queue

    def stage(self, x: Any, *, is_read: bool) -> Mirror:
        return Mirror(self._device, x, is_read=is_read)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        try:
            return self._device.empty(dtype, shape)
        except Exception as error:
            raise self._failed(error) from error

    def take(self, x: Any, back: CopiesBack) -> Any:
        operand = as_operand(x)
        try:
            place = self.stage(self._device.empty(operand.dtype, (0,)), is_read=False)
            place.begin(back)
            taken = place.like(operand.flat, operand.dtype, operand.shape)
        except Exception as error:
            raise self._failed(error) from error
        place.join()
        return taken

    def _failed(self, error: Exception) -> DeviceError:
        """It is out of memory, for instance."""
        return DeviceError(f"{self.name} has failed: {describe(error)}")


@contextlib.contextmanager
def staging(device: Device) -> Iterator[None]:
    """Calls of this process take tensors of `device`."""
    stager = DeviceStager(device)
    stagers.append(stager)
    try:
        yield
    finally:
        stagers.remove(stager)
