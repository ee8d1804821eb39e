"""The mirror of a tensor of a device, while it arrives: a wait that belongs to no loop, like all waits in memory."""

from __future__ import annotations

from asyncoll.tensors.staged import Staged
from asyncoll.transport.control_block import Turn, turn_of


async def arrived(staged: Staged, nbytes: int) -> None:
    """Return once the first `nbytes` have arrived. Raises DeviceError, and the failure of the communicator."""
    turn = Turn()
    staged.when_arrived(nbytes, turn.set)
    await turn_of(turn)
    staged.check_arrived(nbytes)
