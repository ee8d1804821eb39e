"""Tensors in memory that the host does not read, such as that of a GPU: calls use a mirror of them.

The library does not know the kinds of devices here. Whoever opens a device adds a `Stager` for its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncoll.errors import DeviceError, UsageError
from asyncoll.tensors.reductions import Array

Work = Callable[..., object]  # operations of torch on tensors of a device; see `Device.queue`
stagers: list[Stager] = []  # of the devices that this process uses


class CopiesBack(Protocol):
    """Is told of each copy of a result to a device: no call waits for it."""

    def begun(self) -> None:
        """In the thread that makes the copy."""

    def ended(self, error: DeviceError | None) -> None:
        """In any thread. Neither blocks nor raises."""


class Arriving(Protocol):
    """What comes from a device before the algorithm of a call runs."""

    def begin(self, back: CopiesBack) -> None:
        """In the caller's thread: begin to copy the elements. The work that the program has queued comes before.

        `back` is told of the copies of results.
        """

    async def arrived(self) -> None:
        """Return once the host has the elements. On the runtime's loop. Raises DeviceError if the device fails."""

    def join(self) -> None:
        """In a thread that goes on: the work that it queues from here on comes after all copies. Mirrors are gone."""


class Staged(Arriving, Protocol):
    """A tensor of a device, and its mirror."""

    mirror: Array  # the elements, as flat bytes, once they have arrived

    def when_arrived(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, in any thread or at once, when the first `nbytes` have arrived, or never will.

        It must neither block nor raise. `check_arrived` follows.
        """

    def check_arrived(self, nbytes: int) -> None:
        """The first `nbytes` are used from here on. Raises DeviceError if they have not arrived."""

    def put(self, nbytes: int | None = None) -> None:
        """The first `nbytes` of the mirror, or all, have the result: copy those to the tensor that were not copied yet.

        They have arrived, and do not change any more. After `begin`.
        """

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor of the device, which gets the elements `flat`; they do not change any more."""

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after all copies to it so far; `join` comes after it."""


class Stager(Protocol):
    """Stages the tensors of one device."""

    @property
    def name(self) -> str:
        """As programs give it: "cuda:0"."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new contiguous tensor on the device, with undefined content. Raises DeviceError if it cannot be made."""

    def queue(self, work: Work, *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Carry out `work(*writes, *reads)` on the device, after the work that the program has queued."""

    def clone(self, x: Any) -> Any:
        """A copy of `x` on the device, made after the work that the program has queued."""

    def stage(self, x: Any, *, is_read: bool) -> Staged:
        """`x`, of any strides, with memory for its elements; unless `is_read`, that gets none.

        Raises UsageError if there is too little memory.
        """

    def take(self, x: Any, back: CopiesBack) -> Any:
        """A new tensor of the device with the elements of `x`, a contiguous CPU tensor which does not change any more.

        The work that the current thread queues from here on comes after the copy; the host does not wait. `back` is
        that of `Staged.begin`. Raises DeviceError if the device has too little memory, for instance.
        """


def stager_of(x: Any) -> Stager | None:
    """What stages the torch tensor `x`; None: the host reads its memory, or the device is unknown."""
    return next((stager for stager in stagers if stager.holds(x)), None)


def stager_named(device: object) -> Stager:
    """The stager of a device that the program names, such as "cuda:0". Raises UsageError if it is not in use."""
    for stager in stagers:
        if stager.name == str(device):
            return stager
    used = ", ".join(stager.name for stager in stagers) or "none"
    raise UsageError(f"calls of this process take no tensors of a device {device!s:.60}; devices in use: {used}")
