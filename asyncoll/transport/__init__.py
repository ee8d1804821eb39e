"""The two seams: messages between any two ranks, and memory that the ranks of one host see together.

`asyncoll.testing.check_transport` and `check_arena` are their contracts as tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.control_block import ControlBlock, Turn, Wait
from asyncoll.transport.wire import MAX_FRAME_BYTES, Buffer

__all__ = [
    "MAX_FRAME_BYTES",
    "START_TIMEOUT_S",
    "Arena",
    "Buffer",
    "ControlBlock",
    "Receiver",
    "Transport",
    "Turn",
    "Wait",
    "check_frames",
    "peers_view",
]
START_TIMEOUT_S = 300.0  # ranks may import and load for minutes before they join


class Receiver(Protocol):
    """Who is told what came in; both are called on the transport's loop and must not block."""

    def received(self, source: int, frames: list[Buffer]) -> None:
        """One message. The frames are the receiver's to keep and read-only."""

    def lost(self, source: int, cause: str, last_seen_s: float = 0.0) -> None:
        """`source` is gone, and was known to live `last_seen_s` seconds ago. Called at most once per source.

        Every message of it that will ever come has come.
        """


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
        """Stop, and let the peers know. Idempotent. `flush` gives what was sent a moment to leave."""


class Arena(Protocol):
    """Memory that the ranks of one host see together, as one of them sees it.

    An address is a number that means the same byte at each of them. What is allocated belongs to the rank that did it,
    and lasts until it frees it, even if that rank dies before. May be used from any thread of the rank.
    """

    runtime_loop: asyncio.AbstractEventLoop | None  # set by the runtime; whoever waits on another loop is a caller

    @property
    def local_rank(self) -> int:
        """Mine among the ranks of this host."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, by local rank."""

    @property
    def cores(self) -> int:
        """How many ranks of this host can run at once."""

    def allocate(self, nbytes: int) -> int:
        """The address of so much memory of this rank's own, aligned to 64 bytes, whose content is arbitrary.

        Raises UsageError, which says what to do, if the host has not so much left.
        """

    def free(self, address: int) -> None:
        """Give back what `allocate` returned: nobody uses it any more."""

    def view(self, address: int, nbytes: int) -> Array:
        """The bytes at `address`, of whichever rank, as a flat uint8 array. Cheap. They keep nothing alive."""

    def locate(self, flat: Array) -> int | None:
        """The address of a flat array that lies in this rank's part of the arena; None for any other."""

    def control_block(self, context: int, cells: int) -> ControlBlock:
        """The control block that all ranks of the host know as `context`, of so many cells, zero when it is made."""

    def now_s(self) -> float:
        """A clock that all ranks of the host share."""

    async def wait(
        self, wait: Wait, check: Callable[[], None], what: Callable[[], str], *, yielding: bool = False
    ) -> None:
        """Return once `wait.ready()` was true under the lock of its control block. Any number may wait, on any loop.

        If it will soon be true, whoever waits may find it out by looking. The other tasks of the loop stand still
        meanwhile, for some microseconds, or not at all if it is to be `yielding` between two looks.

        `check` raises if there is nothing to wait for any more; it is asked whenever `recheck` has been called. `what`
        says what is waited for, in case it is waited for for ever. Cancelling it has no effect but that.
        """

    async def wait_for_turn(self, turn: Turn, check: Callable[[], None], what: Callable[[], str]) -> None:
        """Return once `turn` has come; one at a time waits for it. `check` and `what` as above."""

    def recheck(self) -> None:
        """All who wait here, at this rank, ask their `check`. From any thread."""

    def peer_lost(self) -> None:
        """A rank of the host is gone: nobody here waits any more for a lock whose owner is stopped. And recheck."""

    def waiting(self) -> list[str]:
        """What those who sleep here, at this rank, wait for."""

    def close(self) -> None:
        """Let go of everything. Nobody waits here any more."""


def peers_view(arena: Arena, address: int, nbytes: int) -> Array | None:
    """What a peer says is there; None if it cannot be."""
    if address < 0 or nbytes < 0:
        return None
    try:
        view = arena.view(address, nbytes)
    except IndexError:
        return None
    return view if view.nbytes == nbytes else None


def check_frames(dest: int, size: int, frames: Sequence[Buffer]) -> None:
    """What every transport refuses to send. A frame is flat and of bytes, so its length is its size."""
    if not 0 <= dest < size:
        raise UsageError(f"there is no rank {dest} in a world of {size}")
    if (longest := max(map(len, frames))) > MAX_FRAME_BYTES:
        raise UsageError(f"a frame of {longest} bytes exceeds the limit of {MAX_FRAME_BYTES}")
