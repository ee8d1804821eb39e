"""The device of one rank, in each kind of world."""

from __future__ import annotations

import contextlib

from asyncoll.communicator import Communicator
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing.devices.fake import FakeDevice, fake_device


def device_of(comm: Communicator, seed: int = 0) -> contextlib.AbstractContextManager[FakeDevice]:
    """A device that the loop turns where all ranks are on one loop, and a thread of its own elsewhere."""
    is_shared = isinstance(comm._core.member.runner, SharedLoop)
    return fake_device(seed + comm.rank, "loop" if is_shared else "thread", f"fake:{comm.rank}")
