"""The message seam: what a transport promises. `asyncoll.testing.check_transport` is its contract as a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncoll.errors import UsageError
from asyncoll.wire import MAX_FRAME_BYTES, Buffer

__all__ = ["MAX_FRAME_BYTES", "Buffer", "Receiver", "Transport", "check_frames"]


class Receiver(Protocol):
    """Who is told what came in; both are called on the transport's loop and must not block."""

    def received(self, source: int, frames: list[Buffer]) -> None:
        """One message. The frames are the receiver's to keep and read-only."""

    def lost(self, source: int, cause: str) -> None:
        """`source` is gone; every message of it that will ever come has come. Called at most once per source."""


class Transport(Protocol):
    """Moves messages between any two ranks of a world, itself included.

    Reliable, and first in, first out from one rank to another. Everything is called on one loop.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    async def start(self, receiver: Receiver) -> None:
        """Begin to receive. Returns once every peer can be reached.

        Raises PeerLostError for one that does not come in time.
        """

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        """Send one message of one to three frames. Never waits; the frames may be reused when it returns.

        Raises UsageError for a frame above MAX_FRAME_BYTES. What is sent to a lost or closed rank is dropped.
        """

    async def drain(self, dest: int) -> None:
        """Wait until little of what was sent to `dest` is still queued here. Returns at once if `dest` is lost."""

    async def close(self, *, flush: bool = False) -> None:
        """Stop, and let the peers know. Idempotent. `flush` gives what was sent up to a second to leave."""


def check_frames(dest: int, size: int, frames: Sequence[Buffer]) -> None:
    """What every transport refuses to send. A frame is flat and of bytes, so its length is its size."""
    if not 0 <= dest < size:
        raise UsageError(f"there is no rank {dest} in a world of {size}")
    if (longest := max(map(len, frames))) > MAX_FRAME_BYTES:
        raise UsageError(f"a frame of {longest} bytes exceeds the limit of {MAX_FRAME_BYTES}")
