"""The seam below RPC for tensors that go from the device of one rank to that of another, and not through the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from asyncoll.tensors.staged import Staged


@dataclass(eq=False)
class LandingTensor:
    """A new flat tensor of bytes, to which one that is shown comes."""

    like: Staged  # a tensor of its device, by which it was made
    x: Any
    mark: Any  # its `transport.staging.Mark`
    is_whole: bool = False  # the host has seen the end of all copies

    @property
    def device(self) -> Any:
        """Its `transport.staging.Device`."""
        return self.like.opened_device

    def join(self) -> None:
        """What the thread queues from here on comes after the copies. Raises DeviceError."""
        try:
            self.mark.join()
        except Exception as error:
            raise self.like.failure(error) from error


class Showing(Protocol):
    """One tensor at the rank that shows it."""

    async def run(self, number: int) -> bool:
        """Show it to its peer, which reads that number. Returns whether the peer has read it. Raises DeviceError.

        It ends when nobody uses the memory of the tensor any more. Cancelled only as the communicator ends.
        """

    def give_up(self) -> None:
        """The peer need not read the rest. The tensor may change after its `join`, which follows."""


class DeviceRoute(Protocol):
    """Moves tensors between the devices of two ranks. Peers are world ranks. `reads` and `shows` are for any thread."""

    def reads(self, peer: int, device: object) -> bool:
        """Whether tensors that `peer` shows may come to `device` here."""

    def shows(self, peer: int, tensor: Staged) -> bool:
        """Whether `tensor` may be shown to `peer`."""

    def showing(self, peer: int, tensor: Staged) -> Showing:
        """`tensor`, which does not change any more, for `peer`."""

    async def read(self, peer: int, number: int, nbytes: int, landing: LandingTensor | None) -> None:
        """Read that tensor of `peer`, which has so many bytes. None: tell the peer that nobody wants it."""
