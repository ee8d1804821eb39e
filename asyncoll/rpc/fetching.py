"""The tensors of devices in a message: it is sent once they have arrived at the host."""

from __future__ import annotations

from collections.abc import Sequence

from asyncoll.errors import DeviceError
from asyncoll.tensors.staged import Staged, begin_all


def begin(tensors: Sequence[Staged]) -> None:
    """Begin to fetch the tensors, in the thread that has queued the work that comes before. `join` follows.

    Raises DeviceError if one cannot begin.
    """
    begin_all(tensors, _NOTHING_RETURNS)


def begin_to_answer(tensors: Sequence[Staged]) -> None:
    """Begin to fetch what a function has returned or yielded, which its program may change before it is sent.

    What they queue on the same stream comes after the copies.
    """
    begin(tensors)
    for tensor in tensors:
        tensor.order()


async def arrived(tensors: Sequence[Staged]) -> None:
    """Return once the message can be sent. Raises DeviceError if the device fails."""
    for tensor in tensors:
        await tensor.arrived()


def join(tensors: Sequence[Staged]) -> None:
    """What the program queues from here on comes after the copies, also after those that have not arrived."""
    for tensor in tensors:
        tensor.join()


class _NothingReturns:
    """Implements `tensors.staged.CopiesBack`: a message copies nothing back.

    A device that fails only as its copies are joined has given the message its elements; the next call tells of it.
    """

    def begun(self) -> None: ...

    def ended(self, error: DeviceError | None) -> None: ...


_NOTHING_RETURNS = _NothingReturns()
