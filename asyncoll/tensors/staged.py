"""Tensors in memory that the host does not read, such as that of a GPU: calls use a mirror of them.

The library does not know the kinds of devices here. Each rank opens the devices of its tensors at their first call, by
the function that its `Devices` have got.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from asyncoll.errors import DeviceError
from asyncoll.tensors.reductions import Array


class Staged(Protocol):
    """A tensor of a device, and its mirror."""

    mirror: Array  # the elements, as flat bytes, once they have arrived

    @property
    def device(self) -> str:
        """The name of the device, for errors."""

    def begin(self, lost: Callable[[DeviceError], None]) -> None:
        """In the caller's thread: begin to copy the elements. The work that the program has queued comes before.

        `lost` is called, in any thread, if a copy back or `join` fails: nothing waits for that. Raises DeviceError if
        the device has failed.
        """

    async def arrived(self) -> None:
        """Return once the mirror has the elements. Raises DeviceError if the device fails."""

    def put(self) -> None:
        """The mirror has the result: copy it to the tensor. The mirror does not change any more. After `begin`."""

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor of the device, which gets the elements `flat`; they do not change any more. After `begin`.

        Raises DeviceError if the device has too little memory.
        """

    def join(self) -> None:
        """In a thread that goes on: the work that it queues from here on comes after all copies. The mirror is gone."""


class Stager(Protocol):
    """Stages the tensors of one device for one rank."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""

    def clone(self, x: Any) -> Any:
        """A copy of `x` on the device, made after the work that the program has queued."""

    def stage(self, x: Any, *, is_read: bool) -> Staged:
        """`x`, of any strides, with memory for its elements; unless `is_read`, that gets none.

        Raises UsageError if there is too little memory, or the device takes no copies now.
        """

    async def close(self) -> None:
        """Return once no copy is under way, and the memory of mirrors can be unmapped."""


class HiddenDevice(Protocol):
    """A device, such as one without hardware, whose tensors torch takes for those of the CPU."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""


hidden: list[HiddenDevice] = []  # that this process uses
stagers: list[Stager] = []  # that the ranks of this process have opened


def is_hidden(x: Any) -> bool:
    """Whether the torch tensor `x` is on a hidden device."""
    return any(device.holds(x) for device in hidden)


class Devices:
    """The devices of one rank's tensors."""

    def __init__(self, open_stager: Callable[[Any], Stager]) -> None:
        """`open_stager(x)` opens the device of the tensor `x`. Raises UsageError if it cannot be used."""
        self._open = open_stager
        self._stagers: list[Stager] = []
        self._lock = threading.Lock()

    def stager_of(self, x: Any) -> Stager:
        """What stages the torch tensor `x`, which is on a device. Raises UsageError if that cannot be used."""
        with self._lock:
            for known in self._stagers:
                if known.holds(x):
                    return known
            stager = self._open(x)
            self._stagers.append(stager)
            stagers.append(stager)
            return stager

    async def close(self) -> None:
        """Before the memory of mirrors is unmapped."""
        while self._stagers:
            stager = self._stagers.pop()
            stagers.remove(stager)
            await stager.close()
