"""Tensors in memory that the host does not read, such as that of a GPU: calls use a mirror of them.

The library does not know the kinds of devices here. Whoever opens a device adds a `Stager` for its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncoll.errors import DeviceError
from asyncoll.tensors.reductions import Array

Work = Callable[..., object]  # operations of torch on tensors of a device; see `Device.queue`
stagers: list[Stager] = []  # of the devices that this process uses


class Arriving(Protocol):
    """What comes from a device before the algorithm of a call runs."""

    def begin(self, lost: Callable[[DeviceError], None]) -> None:
        """In the caller's thread: begin to copy the elements. The work that the program has queued comes before.

        `lost` is called, in any thread, if a copy back fails: nothing waits for that.
        """

    async def arrived(self) -> None:
        """Return once the host has the elements. On the runtime's loop. Raises DeviceError if the device fails."""

    def join(self) -> None:
        """In a thread that goes on: the work that it queues from here on comes after all copies. Mirrors are gone."""


class Staged(Arriving, Protocol):
    """A tensor of a device, and its mirror."""

    mirror: Array  # the elements, as flat bytes, once they have arrived

    def put(self) -> None:
        """The mirror has the result: copy it to the tensor. The mirror does not change any more. After `begin`."""

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor of the device, which gets the elements `flat`; they do not change any more."""

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after all copies to it so far; `join` comes after it."""


class Stager(Protocol):
    """Stages the tensors of one device."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new contiguous tensor on the device, with undefined content."""

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after the work that the program has queued."""

    def clone(self, x: Any) -> Any:
        """A copy of `x` on the device, made after the work that the program has queued."""

    def stage(self, x: Any, *, is_read: bool) -> Staged:
        """`x`, of any strides, with memory for its elements; unless `is_read`, that gets none.

        Raises UsageError if there is too little memory.
        """


def stager_of(x: Any) -> Stager | None:
    """What stages the torch tensor `x`; None: the host reads its memory, or the device is unknown."""
    return next((stager for stager in stagers if stager.holds(x)), None)
