"""The interface to the memory of a device, such as a GPU: tensors in it are copied from and to memory of the host.

The program queues its work on the *streams* of the device. A stream carries its work out one piece after the other, and
different streams are ordered only where one waits for another. The copies here go on streams of their own, so they
overlap with the work of the program. `asyncoll.testing.check_device` tests the contract below against any device, and
`asyncoll.testing.fake_device` is one without hardware.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.transport import settle_from_any_thread

HANDLE_BYTES = 96  # of a block: 64 of a handle of CUDA IPC, 16 of the UUID of its GPU, 8 of its size, 8 of a nonce


class Transfer(Protocol):
    """A copy between the device and the host. Its bytes arrive in order."""

    @property
    def nbytes(self) -> int:
        """The bytes that are copied."""

    @property
    def moved(self) -> int:
        """How many bytes have arrived. It never falls."""

    @property
    def error(self) -> BaseException | None:
        """Why the other bytes never arrive; None if they do."""

    def when_moved(self, nbytes: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, when `nbytes` have arrived or `error` is set: in any thread, or at once in this one.

        The callback must neither block nor raise. It tells nothing by itself: what goes on with the bytes reads `moved`
        first.
        """


class Mark(Protocol):
    """A tensor of the device, with the values that the program's work up to `Device.mark` gives it.

    It keeps the tensor alive. Until `join` the program does not write to the tensor.

    Copies wait for no work of other streams than the one that was current in `Device.mark`. Once the host has seen the
    end of one, those that are queued after it wait for no work of the program at all. So what the program queues on one
    stream, such as a `backward()`, or a call of NCCL that waits for other ranks, does not hold up what it copies on
    another one.
    """

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, which copies see packed, in the order of a contiguous tensor."""

    def come(self) -> Transfer:
        """A transfer of one byte, which copies nothing: it is over once the device has come to the mark."""

    def fetch(self, start: int, into: Array) -> Transfer:
        """Copy the bytes of the tensor from `start` on into the flat uint8 array `into`.

        Until they have arrived, the caller neither reads nor writes `into`, and does not unpin it. The device keeps it
        alive.
        """

    def put(self, source: Array, start: int) -> Transfer:
        """Copy the flat uint8 array `source` to the bytes of the tensor from `start` on.

        The host has seen the end of all `fetch`es of the bytes that it overwrites. Until `source` has been copied, the
        caller does not write it, and does not unpin it. The device keeps it alive.
        """

    def queue(
        self, work: Callable[..., object], *writes: Any, reads: Sequence[Any] = (), after: Sequence[Any] = ()
    ) -> Transfer:
        """Carry out `work(*writes, *reads)`, as of `Device.queue`, on a stream of the device.

        It comes after this mark, after the marks `after`, and after all their copies that were queued before; `join`
        comes after it. Returns a transfer of the bytes of `writes`, whose end is that of the work.
        """

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Makes a stream of the device the current one of this thread, for work that belongs to the mark.

        That comes after the mark and all its copies, and does not wait for what the program queues later.
        """

    def like(self, dtype: str, shape: tuple[int, ...]) -> tuple[Any, Mark]:
        """A new contiguous tensor with undefined content, as if the program had made it where it was in `Device.mark`.

        With a mark of it, so that `put` can give it its values.
        """

    def join(self) -> None:
        """Make the device, not the caller, wait: work that is queued from here on comes after the mark and its copies.

        That holds for the current stream, and for the one that was current in `Device.mark`. Called again, in another
        thread for instance, it changes nothing in the tensor.
        """


class RefusedError(Exception):
    """Why ranks cannot read each other's memory of a device."""


class BlockPart(NamedTuple):
    """`nbytes` bytes of the block of `rank`, from `offset` on, and of a tensor, from `start` on."""

    rank: int
    offset: int
    start: int
    nbytes: int


class Exchange(Protocol):
    """A block of a device's memory of this rank, which the other ranks of the host read; and theirs, which it reads.

    It is one block of fixed size. The program's own tensors are never shared: their memory may be reused at any time.

    No event orders what different ranks do. A rank tells the others to read bytes once its host has seen the end of the
    copy or the reduction that wrote them. It overwrites them once their readers' hosts have seen the ends of their
    copies, and have told it.
    """

    handle: bytes  # HANDLE_BYTES bytes, by which other ranks open the block

    def open(self, handles: Mapping[int, bytes]) -> None:
        """Open the blocks of these ranks, beside those that are open. A rank uses its own once it has opened it.

        Raises RefusedError, with the reason, if one of them cannot be read here, or is not of the size of this one.
        Then none of them is open.
        """

    def reduces(self, op: ReduceOp, dtype: str) -> bool:
        """Whether `reduce` gives the bits of the host."""

    def write(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        """Copy parts of a tensor into the block of this rank. `mark` is a `Mark` of the device."""

    def read(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        """Copy parts of blocks into a tensor.

        The host has seen the end of all copies of the bytes that it overwrites.
        """

    def reduce(self, op: ReduceOp, dtype: str, offset: int, nbytes: int) -> Transfer:
        """Reduce these bytes of all open blocks, in the order of ranks, into those of this rank's block."""

    def under_way(self) -> Sequence[Transfer]:
        """The copies and reductions of this rank that are not over."""

    def shut(self) -> bool:
        """Use the blocks of the other ranks no more. Returns False, and does nothing, if copies are under way.

        Raises RefusedError, as `free` does, if the device refuses.
        """

    def free(self) -> None:
        """Free the block of this rank, or keep it for the next `Device.share`. All other ranks have shut.

        It does not wait for the device.
        """


class Device(Protocol):
    """One device, as one rank uses it. All methods may be called in any thread; none waits for the device.

    Each thread has a current stream, on which the program queues its work.
    """

    name: str  # for errors: "cuda:0"

    def holds(self, x: Any) -> bool:
        """Whether the torch tensor `x` is on this device."""

    def check(self) -> None:
        """Raise UsageError if no copy can be part of the work that the program queues on the current stream now."""

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new contiguous tensor on this device, with undefined content."""

    def clone(self, x: Any) -> Any:
        """A contiguous copy of `x` on this device, made on the current stream."""

    def queue(self, work: Callable[..., object], *writes: Any, reads: Sequence[Any] = ()) -> None:
        """Queue `work(*writes, *reads)` on the current stream: operations of torch that change the tensors `writes`.

        All tensors are on this device, and have no gradients. `work` is deterministic, and does not wait for the
        device: it looks at no element, and makes no tensor whose size depends on one.
        """

    def mark(self, x: Any) -> Mark:
        """Note the work that the program has queued on the current stream: copies of `x` come after it.

        `x` may have any layout.
        """

    def pin(self, block: Array) -> bool:
        """Pin whole pages, which are then copied at full speed, and while the program's work goes on.

        Returns False if the driver refuses. Copies of memory that is not pinned are slower, and just as right.
        """

    def pinned(self, nbytes: int) -> Array | None:
        """New memory that the driver has pinned itself, for when `pin` is refused. None if it has none."""

    def unpin(self, block: Array) -> None:
        """Undo `pin`, with the same block, or give up one of `pinned`. No copy of it is under way."""

    def share(self, nbytes: int) -> Exchange:
        """Allocate a block of `nbytes` bytes, which other ranks of this host can open.

        Raises RefusedError, with the reason, if this device cannot share memory, or has too little.
        """

    def close(self) -> bool:
        """Wait for all copies, a few seconds at most, and release the device. No more are made.

        Returns whether all have ended. If not, the memory that they use must stay.
        """


async def arrived(transfer: Transfer, nbytes: int | None = None) -> None:
    """Return once `nbytes` of the copy have arrived; None: all. Raises the error of the transfer.

    Cancellation ends the wait, and the copy goes on.
    """
    wanted = transfer.nbytes if nbytes is None else nbytes
    if transfer.moved >= wanted:
        return
    ended = asyncio.get_running_loop().create_future()
    set_when_moved(transfer, wanted, ended)
    await ended
    if transfer.moved < wanted and transfer.error is not None:
        raise transfer.error


def set_when_moved(transfer: Transfer, nbytes: int, ended: asyncio.Future[None]) -> None:
    """Set `ended` once `nbytes` of the copy have arrived, or never will; unless it is done by then."""
    transfer.when_moved(nbytes, partial(settle_from_any_thread, ended))
