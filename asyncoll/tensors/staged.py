"""Tensors in memory that the host does not read, such as that of a GPU: calls use a mirror of them.

The library does not know the kinds of devices here. Whoever opens a device adds a `Stager` for its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from asyncoll.errors import DeviceError
from asyncoll.tensors.reductions import Array

stagers: list[Stager] = []  # of the devices that this process uses


class CopiesBack(Protocol):
    """Is told of each copy of a result to a device: no call waits for it."""

    def begun(self) -> None:
        """In the thread that makes the copy."""

    def ended(self, error: DeviceError | None) -> None:
        """In any thread. Neither blocks nor raises."""


class Staged(Protocol):
    """A tensor of a device, and its mirror."""

    mirror: Array  # the elements, as flat bytes, once they have arrived
    device: Any  # its `transport.staging.Device`

    @property
    def mark(self) -> Any:
        """Its `transport.staging.Mark`, once it has begun."""

    def begin(self, back: CopiesBack) -> None:
        """In the caller's thread: note the work that the program has queued. All copies come after it.

        `back` is told of the copies of results.
        """

    def fetch(self) -> None:
        """Begin to copy the elements to the mirror. After `begin`, at most once."""

    async def arrived(self) -> None:
        """Return once the mirror has the elements. Raises DeviceError if the device fails."""

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

    def result(self, nbytes: int) -> Any:
        """A mark of a new flat tensor of the same dtype. The device gives it its elements, and the next `like` it."""

    def has_result(self) -> None:
        """The tensor itself has got the result: `put` has no effect from here on."""

    def failure(self, error: BaseException) -> DeviceError:
        """What to raise for this error of a copy."""

    def like(self, flat: Array, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor of the device, which gets the elements `flat`; they do not change any more."""

    def join(self) -> None:
        """In a thread that goes on: the work that it queues from here on comes after all copies. The mirror is gone."""


class Stager(Protocol):
    """Stages the tensors of one device."""

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on the device."""

    def clone(self, x: Any) -> Any:
        """A copy of `x` on the device, made after the work that the program has queued."""

    def stage(self, x: Any, *, is_read: bool) -> Staged:
        """`x`, of any strides, with memory for its elements; unless `is_read`, that gets none.

        Raises UsageError if there is too little memory.
        """


def stager_of(x: Any) -> Stager | None:
    """What stages the torch tensor `x`; None: the host reads its memory, or the device is unknown."""
    return next((stager for stager in stagers if stager.holds(x)), None)
