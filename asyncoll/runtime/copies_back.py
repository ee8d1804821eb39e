"""The copies of results back to devices, as the calls of one communicator make them."""

from __future__ import annotations

import contextlib
from functools import partial

from asyncoll.errors import DeviceError
from asyncoll.runtime.member import Member


class CommunicatorCopiesBack:
    """Implements `tensors.staged.CopiesBack`: one that fails aborts the communicator.

    It does not refer to the tensors: a cycle would keep their memory until Python looks for cycles.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def begun(self) -> None:
        self._member.endpoint.returns.begun()

    def ended(self, error: DeviceError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the runtime's loop is closed: this rank has left with an error
            self._member.post(partial(self._ended, error))

    def _ended(self, error: DeviceError | None) -> None:
        self._member.endpoint.returns.ended(error)
        if error is not None:
            self._member.abort(str(error))
