"""The two interfaces below everything else: messages between any two ranks, and memory that the ranks of a host share.

`Transport` moves messages and `Arena` provides shared memory. Each has implementations between processes, inside one
process, and in simulated time. `asyncoll.testing.check_transport` and `check_arena` test the contracts below against
any implementation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncoll._core import NativeCore
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.transport.control_block import ControlBlock, Turn, Wait
from asyncoll.transport.wire import MAX_FRAME_BYTES, Buffer

if TYPE_CHECKING:  # the launcher loads this package, and neither asyncio nor numpy
    import asyncio

    from asyncoll.tensors.reductions import Array

__all__ = [
    "MAX_FRAME_BYTES",
    "START_TIMEOUT_S",
    "Arena",
    "Buffer",
    "ControlBlock",
    "Loss",
    "Receiver",
    "Transport",
    "Turn",
    "Wait",
    "check_frames",
    "peers_view",
    "settle",
    "settle_from_any_thread",
]
START_TIMEOUT_S = 300.0  # ranks may import modules and load data for minutes before they join


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a rank, noticed at this rank: by a transport, or by a lock in shared memory whose owner has died.

    A loss that another rank has noticed comes as a message, `wire.Lost`.
    """

    rank: int  # the lost rank, in the world
    cause: str  # how the loss was noticed, for the error
    last_seen_s: float = 0.0  # seconds since its last sign of life


class Receiver(Protocol):
    """The callbacks of a transport. The transport calls both on its loop; neither may block."""

    def received(self, source: int, frames: list[Buffer]) -> None:
        """Handle one message from rank `source`.

        The frames are read-only. The receiver owns them and may keep them for as long as it likes.
        """

    def lost(self, loss: Loss) -> None:
        """Handle the loss of a rank.

        The transport calls this at most once for each rank, and delivers no message of that rank afterwards.
        """


class Transport(Protocol):
    """Moves messages between any two ranks of a world, and from a rank to itself.

    A message is a sequence of one to four frames. Delivery is reliable and in order between each pair of ranks; there
    is no order among messages from different sources. All methods but `send_directly` are called on one loop, the loop
    of `start`. But `close` may be called on another one if `start` was not called.
    """

    rank: int  # this rank in the world
    size: int  # the number of ranks in the world

    async def start(self, receiver: Receiver) -> None:
        """Begin to receive, and return once every peer can be reached. Every rank calls this once.

        `receiver` may get messages before this returns.

        Raises PeerLostError if a peer is known to have ended, and DeadlineError if a peer does not come in time.
        """

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        """Send one message to rank `dest`.

        This never waits: the transport queues messages without bound, and `drain` is the back-pressure. It copies the
        frames, so the caller may change them when it returns. A message to a lost or closed rank is dropped.

        Raises UsageError for a rank outside the world and for a frame above MAX_FRAME_BYTES.
        """

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        """Send one message to another rank, as `send` does, if this thread can do that at once. Returns whether it has.

        May be called in any thread after `start`, at the same time as all other methods. The message comes after all
        messages that this rank has sent to `dest` before. A transport may refuse any message. The call must not be
        interrupted: no signal handler may raise in this thread.
        """

    async def drain(self, dest: int) -> None:
        """Wait until few messages to `dest` are still queued at this rank. Returns at once if `dest` is lost.

        Cancelling this has no effect on the messages.
        """

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        """Go on with another receiver, among these ranks only: this one and others that this transport has not lost.

        Messages to the others are dropped from now on, and their losses are not reported. Messages of theirs may still
        come. The processes of the ranks `to_kill`, which are on this host, have ended when this returns, unless a
        debugger traces them.
        """

    async def close(self, *, flush: bool = False) -> None:
        """Stop sending and receiving, and tell the peers. Idempotent.

        Queued messages are dropped. With `flush`, they first get a short time to leave. The receiver is not called
        after this has begun.
        """


class Arena(Protocol):
    """The memory that the ranks of one host share, as one of these ranks sees it.

    An address is an integer that means the same byte at every rank of the host. A block belongs to the rank that has
    allocated it. It exists until that rank frees it, even if the rank dies earlier. All methods except `wait` and
    `wait_for_turn`, which need a running loop, may be called in any thread of the rank.
    """

    runtime_loop: asyncio.AbstractEventLoop | None  # set by the runtime; waits on all other loops are those of callers

    native: NativeCore | None  # the compiled core that this rank uses; None without one
    polls: int  # how often a wait looks at its condition before it sleeps
    local_rank: int  # the number of this rank among the ranks of its host, from 0
    ranks: tuple[int, ...]  # the world ranks of this host, by local rank; equal at all of them
    cores: int  # the number of ranks of this host that can run at the same time

    @property
    def segments(self) -> Sequence[Array]:
        """The memory of each rank, by local rank, all of one size: byte `address` of them in a row is at `address`.

        Without `native` it is empty.
        """

    def allocate(self, nbytes: int) -> int:
        """Allocate a block of `nbytes` bytes that belongs to this rank, and return its address.

        The address is a multiple of 64. The content is arbitrary. Access to the block never fails later: the host
        provides its pages now.

        Raises UsageError, with the remedy, if the host has too little memory left, and ClosedError after this rank has
        left the world.
        """

    def free(self, address: int) -> None:
        """Free a block of this rank, from `allocate`. No rank may use it any more. Without effect in a closed arena."""

    def view(self, address: int, nbytes: int) -> Array:
        """Return the `nbytes` bytes at `address`, in the memory of any rank, as a flat uint8 array.

        This is cheap. The array does not keep the block allocated. An address that no rank has raises IndexError or
        gives an array of fewer bytes: use `peers_view` for an address that a peer has supplied.
        """

    def locate(self, flat: Array) -> int | None:
        """Return the address of a flat array in this rank's own memory, or None for any other array."""

    def control_block(self, context: int, cells: int) -> ControlBlock:
        """Return the control block `context`, which all ranks of the host share, with `cells` cells of 64 bits.

        The first call at any rank makes the control block, with all cells zero. Control blocks live as long as the
        arena, or until that rank frees them.

        Raises ProtocolError or UsageError if the control block exists with another number of cells, and UsageError if
        there is no room for another one.
        """

    def forget_control_block(self, context: int) -> None:
        """This rank uses the control block `context` no more."""

    def free_control_block(self, context: int) -> None:
        """Free a control block that this rank has made (`ControlBlock.created`). No rank may use it any more."""

    def now_s(self) -> float:
        """Return the time in seconds of a clock that all ranks of the host share. It never goes back."""

    async def wait(
        self, wait: Wait, check: Callable[[], None], describe: Callable[[], str], *, yielding: bool = False
    ) -> None:
        """Return once `wait.ready()` has been true under the lock of its control block.

        Any number of tasks may wait, on any loops. The wait may begin with polling, for some microseconds, because
        sleeping and waking cost more than a short wait. By default the other tasks of the loop do not run while it
        polls; with `yielding` they run between two polls.

        `check` raises if the wait has become pointless, for instance because a peer is lost; its exception ends the
        wait. It is called before the task sleeps and after each `recheck`, unless `wait.ready()` is true. `describe`
        says what the task waits for; `waiting` shows it.

        Cancelling this changes no cell and affects no other waiter.
        """

    def look(self, ready: Callable[[], bool], patience: int = 1) -> bool:
        """Poll for a short time; returns whether `ready()` became true. The other tasks of this loop do not run.

        `patience`: how many times as long as usual.

        `ready` is called without the lock, so the answer is only a hint.
        """

    async def wait_for_turn(self, turn: Turn, check: Callable[[], None], describe: Callable[[], str]) -> None:
        """Return once `turn` is set. At most one task may wait for a turn. `check` and `describe` are as in `wait`.

        Cancelling this does not change the turn.
        """

    def recheck(self) -> None:
        """Make every task that waits at this rank call its `check`. May be called in any thread."""

    def on_loss(self, report: Callable[[Loss], AsyncollError]) -> None:
        """Make every lock that meets a dead or stopped owner call `report`, in any thread, and raise what it returns.

        Before this is called, such a lock raises a PeerLostError.
        """

    def peer_lost(self) -> None:
        """Handle the loss of a rank of this host: stop waiting for locks with a stopped owner, and `recheck`.

        A rank in a stopped process may never release its lock. Before a loss, waiters allow it some time to continue.
        """

    def waiting(self) -> list[str]:
        """Return the descriptions of all waits that sleep at this rank."""

    def close(self) -> None:
        """Release everything. No task of this rank may wait any more. Views remain valid until they are dropped."""


def peers_view(arena: Arena, address: int, nbytes: int) -> Array | None:
    """Return the `nbytes` bytes at `address`, both of which a peer has supplied; None if no such memory exists."""
    if address < 0 or nbytes < 0:
        return None
    try:
        view = arena.view(address, nbytes)
    except IndexError:
        return None
    return view if view.nbytes == nbytes else None


def check_frames(dest: int, size: int, frames: Sequence[Buffer]) -> None:
    """Raise UsageError for a message that no transport sends: to a rank outside the world, or with too long a frame.

    The length of a frame must be its size in bytes: frames are flat and of bytes.
    """
    if not 0 <= dest < size:
        raise UsageError(f"there is no rank {dest} in a world of {size}")
    if (longest := max(map(len, frames))) > MAX_FRAME_BYTES:
        raise UsageError(f"a frame of {longest} bytes exceeds the limit of {MAX_FRAME_BYTES}")


def settle(future: asyncio.Future[None]) -> None:
    """End the wait for `future`, on its loop. Without effect if it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(None)


def settle_from_any_thread(future: asyncio.Future[None]) -> None:
    """End the wait for `future`. Without effect if its loop is closed, and with that the task that waits."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(settle, future)
