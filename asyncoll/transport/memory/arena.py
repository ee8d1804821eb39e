"""The arena between the processes of one host: memory, the control blocks in it, and waiting for their cells.

Every rank creates a segment and maps the segments of all ranks. All segments have the same capacity, so an address is
the local rank of the owner times the capacity, plus the offset in the segment. `allocate` makes the kernel provide the
pages, so access to allocated memory never fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from asyncoll import _core, forks
from asyncoll._core import NativeCore
from asyncoll.errors import AsyncollError, ClosedError, ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport import ControlBlock, Loss, Turn, Wait
from asyncoll.transport.control_block import DOORBELLS, PythonControlBlock, RefusingMutex, control_block_bytes
from asyncoll.transport.lock_cells import MUTEX_BYTES
from asyncoll.transport.memory import futex
from asyncoll.transport.memory.doorbell import Doorbell, TurnQueue
from asyncoll.transport.memory.heap import Heap
from asyncoll.transport.memory.mutex import LockPolicy, RobustMutex
from asyncoll.transport.memory.pages import check_room, commit, give_back, mib, too_much
from asyncoll.transport.memory.segment import (
    HEAD_BYTES,
    PROCESS_OFFSET,
    Segment,
    capacity_of,
    close_segment,
    make_segment,
    map_segment,
)

# Addresses in the segment of local rank 0, between its header and its heap.
_LOCK = 64  # of the mutex of the directory
_DIRECTORY = 128
_CONTROL_BLOCKS_MAX = 4096  # entries of the directory, each of 24 bytes; they fit into HEAD_BYTES

# A waiter polls this many times before it sleeps, and calls sched_yield after each poll. With a core for each rank this
# takes 50 us: between 2 ranks, a round trip takes 10 us with polling, and 125 us if both ranks sleep. With fewer cores
# than ranks ("oversubscribed") a few polls still help: a barrier of 4 ranks on 2 cores took 140 us instead of 240, and
# half of the processor time.
_POLLS = 80
_POLLS_OVERSUBSCRIBED = 10
_YIELDING_POLL_S = 200e-6  # the same for a wait that lets the loop run between two polls
_YIELDING_POLL_S_OVERSUBSCRIBED = 25e-6
# sched_yield harms a waiter if another process computes: that process then keeps the core for a whole time slice of
# milliseconds, while a sleeping waiter preempts it when it is woken. So a rank that has lost the core for that long
# does not poll for a while. With 3 computing processes beside the 4 ranks, the barrier took 3.9 ms without this rule,
# and 0.25 ms with it, as without any polling.
_SLICE_S = 0.001
_NO_POLLING_S = 0.1


@contextlib.contextmanager
def local_world(
    size: int, natives: Sequence[NativeCore | None] = (_core.native,), ranks: Sequence[int] = ()
) -> Iterator[list[HostArena]]:
    """One arena for each of `size` ranks inside this process, over real shared memory.

    They are `ranks` of their world; by default the first ones. They take the compiled cores of `natives` in turn.
    """
    capacity = capacity_of(size)
    with contextlib.ExitStack() as undo:
        segments = []
        for local_rank in range(size):
            segments.append(make_segment(local_rank, capacity))
            undo.callback(close_segment, segments[-1])
        arenas = [
            HostArena(local_rank, tuple(ranks or range(size)), segments, natives[local_rank % len(natives)])
            for local_rank in range(size)
        ]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


class HostArena:
    """An `Arena` between processes.

    Set `runtime_loop` if the runtime has a loop of its own: it listens to another doorbell than the loops of callers.
    `locks.patience_s` is how long a waiter tolerates a stopped owner of a lock; initially infinite.
    """

    def __init__(
        self,
        local_rank: int,
        ranks: tuple[int, ...],
        segments: Sequence[Segment],
        native: NativeCore | None = _core.native,
    ) -> None:
        """`segments` has one entry for each rank, by local rank. Their descriptors are copied. `native` is the compiled
        core, or None to do without it.

        The arena of local rank 0 must exist before any rank uses a control block: it initializes the directory.
        """
        self.native = native
        self.local_rank = local_rank
        self.ranks = ranks
        self.locks = LockPolicy()
        self.runtime_loop: asyncio.AbstractEventLoop | None = None
        self.cores = min(len(ranks), len(os.sched_getaffinity(0)))
        self.polls = _POLLS if self.cores == len(ranks) else _POLLS_OVERSUBSCRIBED
        self._yielding_poll_s = _YIELDING_POLL_S if self.cores == len(ranks) else _YIELDING_POLL_S_OVERSUBSCRIBED
        self._no_polling_until_s = 0.0
        self._capacity = os.fstat(segments[local_rank].memory).st_size
        self._control_blocks: dict[int, ControlBlock] = {}
        self._heap = Heap(HEAD_BYTES, self._capacity, mmap.PAGESIZE)
        self._heap_lock = threading.Lock()
        self._parent: int | None = None  # in a forked child: the process that owns this arena
        self._is_closed = False  # then other files may have the numbers of its descriptors
        with contextlib.ExitStack() as undo:
            self._memory = _copy(undo, segments[local_rank].memory)
            # By the number of the doorbell, which is DOORBELLS * local rank + 0 for callers, or 1 for the runtime.
            self._eventfds = [_copy(undo, doorbell) for segment in segments for doorbell in segment[1:]]
            self.segments = [
                map_segment(segment.memory, self._capacity, own=segment is segments[local_rank]) for segment in segments
            ]
            self.locks.processes = [segment[PROCESS_OFFSET:][:8].view(np.int64) for segment in self.segments]
            self.locks.processes[local_rank][0] = os.getpid()
            if local_rank == 0:
                RobustMutex.initialize(self._lock_of_directory())
            self._descriptors = undo.pop_all()
        self._base = forks.address_of(self.segments[local_rank])
        self._turns = TurnQueue()
        self._doorbells = [
            Doorbell(number, self._eventfds[number])
            for number in range(local_rank * DOORBELLS, (local_rank + 1) * DOORBELLS)
        ]
        forks.register(self)

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        if self._parent is not None:
            raise forks.refusal(self._parent)
        if self._is_closed:
            raise ClosedError("this rank has left the world, and its shared memory is closed")
        check_room(nbytes)
        with self._heap_lock:
            try:
                offset = self._heap.allocate(nbytes)
            except MemoryError:
                why = f"a rank's segment of it has {mib(self._capacity)}, or no free block of that size"
                raise too_much(nbytes, why) from None
            extent = self._heap.extent(offset)
        address = offset + self.local_rank * self._capacity
        # Outside the lock: the kernel takes milliseconds to clear the pages of a large block.
        try:
            commit(self._memory, offset, extent)
        except UsageError:
            self.free(address)
            raise
        return address

    def free(self, address: int) -> None:
        if self._parent is not None or self._is_closed:
            return
        offset = address - self.local_rank * self._capacity
        # Its pages are given back before another thread can allocate the block: their content would be lost.
        give_back(self._memory, offset, self._heap.extent(offset))
        with self._heap_lock:
            self._heap.free(offset)

    def view(self, address: int, nbytes: int) -> Array:
        local_rank, offset = divmod(address, self._capacity)
        return self.segments[local_rank][offset : offset + nbytes]

    def locate(self, flat: Array) -> int | None:
        offset = forks.address_of(flat) - self._base
        return offset + self.local_rank * self._capacity if 0 <= offset < self._capacity else None

    # -- control blocks ---------------------------------------------------------------------------

    def control_block(self, context: int, cells: int) -> ControlBlock:
        if context not in self._control_blocks:
            with self._directory() as entries:
                self._control_blocks.setdefault(context, self._open_control_block(entries, context, cells))
        control_block = self._control_blocks[context]
        if len(control_block.cells) != cells:
            raise ProtocolError(f"control block {context:x} has {len(control_block.cells)} cells, and not {cells}")
        return control_block

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Array]:
        """Hold the lock of the directory, and yield its entries: context, address and bytes.

        Unused entries are zero. It is a control block for whose changes nothing waits.
        """
        memory = self.view(_DIRECTORY, control_block_bytes(3 * _CONTROL_BLOCKS_MAX, 0)).data
        mutex = RobustMutex(self._lock_of_directory(), self.local_rank, self.ranks, self.locks)
        with PythonControlBlock(memory, 0, mutex, self, created=False) as directory:
            yield np.frombuffer(directory.cells, np.uint64).reshape(-1, 3)

    def _lock_of_directory(self) -> memoryview:
        return self.view(_LOCK, MUTEX_BYTES).data

    def _open_control_block(self, entries: Array, context: int, cells: int) -> ControlBlock:
        entry = _entry_of(entries, context)
        created = entry is None
        if entry is None:
            entry = self._add_control_block(entries, context, cells)
        # A peer may have written this entry, and `view` checks nothing.
        _, address, nbytes = map(int, entries[entry])
        local_rank, offset = divmod(address, self._capacity)
        if local_rank >= len(self.segments) or offset + nbytes > self._capacity or nbytes < MUTEX_BYTES:
            raise ProtocolError(f"the directory of control blocks is corrupt: {nbytes} bytes at {address}")
        memory = self.view(address, nbytes).data
        mutex = RobustMutex(memory[:MUTEX_BYTES], self.local_rank, self.ranks, self.locks)
        if self.native is not None:
            doorbells = tuple(self._eventfds)
            block: ControlBlock = self.native.ControlBlock(
                memory, doorbells, mutex, self.local_rank, AsyncollError, created
            )
            return block
        return PythonControlBlock(memory[MUTEX_BYTES:], len(self.ranks), mutex, self, created=created)

    def _add_control_block(self, entries: Array, context: int, cells: int) -> int:
        """Make a control block. Returns the index of its entry."""
        entry = int(entries[:, 2].argmin())
        if entries[entry, 2]:
            raise UsageError(
                f"the ranks of this host have {_CONTROL_BLOCKS_MAX} control blocks in shared memory, and there is "
                "no room for another: use fewer communicators and names, close those that are not needed any more, or "
                "--transport zmq"
            )
        nbytes = MUTEX_BYTES + control_block_bytes(cells, len(self.ranks))
        address = self.allocate(nbytes)
        memory = self.view(address, nbytes)
        memory[:] = 0  # an allocated block has arbitrary content
        RobustMutex.initialize(memory[:MUTEX_BYTES].data)
        entries[entry] = context, address, nbytes
        return entry

    def forget_control_block(self, context: int) -> None:
        self._control_blocks.pop(context, None)

    def free_control_block(self, context: int) -> None:
        with self._directory() as entries:
            entry = _entry_of(entries, context)
            assert entry is not None, f"there is no control block {context:x}"
            address = int(entries[entry, 1])
            entries[entry] = 0
        self.free(address)

    # -- waiting ----------------------------------------------------------------------------------

    now_s = staticmethod(time.monotonic)  # noqa: TID251 (loops have clocks of their own, which may lag by milliseconds)

    def ring(self, doorbells: Iterable[int]) -> None:
        for doorbell in doorbells:
            os.eventfd_write(self._eventfds[doorbell], 1)

    wake_futex = staticmethod(futex.wake_all)

    def never_poll(self) -> None:
        """For a world on one loop: no other rank acts while this one polls, or sleeps without the loop."""
        self.polls = 0
        self._no_polling_until_s = float("inf")

    async def wait(
        self, wait: Wait, check: Callable[[], None], describe: Callable[[], str], *, yielding: bool = False
    ) -> None:
        # Polls read the cells without the lock, so a success is only a hint.
        if await self._poll_yielding(wait.ready) if yielding else self.look(wait.ready, wait.patience):
            with wait.control_block:
                if wait.ready():
                    return
        doorbell = self._doorbells[asyncio.get_running_loop() is self.runtime_loop]
        waiter = doorbell.add_waiter(describe)
        try:
            while True:
                woken = waiter.arm()
                # The flag is set under the lock, so no wake-up is lost: a rank that makes the condition true has held
                # the lock before, and `ready` sees it, or acquires the lock later, and finds the flag.
                with wait.control_block as control_block:
                    if wait.ready():
                        return
                    control_block.ring_at_next_wake(doorbell.number)
                check()
                await woken
                # Before the lock is acquired again: its owner may be lost or stopped. But what is there is no longer
                # waited for: a rank whose program is over may abort while this one has not seen the end of its call.
                if not wait.ready():
                    check()
        finally:
            doorbell.remove_waiter(waiter)

    async def wait_for_turn(self, turn: Turn, check: Callable[[], None], describe: Callable[[], str]) -> None:
        await self._turns.wait(turn, check, describe)

    def look(self, ready: Callable[[], bool], patience: int = 1) -> bool:
        now_s = self.now_s()
        if now_s < self._no_polling_until_s:
            return ready()
        for _ in range(patience * self.polls):
            if ready():
                return True
            os.sched_yield()
            before_s, now_s = now_s, self.now_s()
            if self._was_descheduled(before_s, now_s):
                return False
        return False

    async def _poll_yielding(self, ready: Callable[[], bool]) -> bool:
        """Poll for a short time; returns whether `ready()` became true. The loop runs other tasks between two polls."""
        now_s = self.now_s()
        until_s = now_s if now_s < self._no_polling_until_s else now_s + self._yielding_poll_s
        while not ready():
            if now_s >= until_s:
                return False
            os.sched_yield()
            if self._was_descheduled(now_s, self.now_s()):
                return False
            await asyncio.sleep(0)
            now_s = self.now_s()
        return True

    def _was_descheduled(self, before_s: float, now_s: float) -> bool:
        """Whether another process had the core for a whole time slice in between; if so, stop polling for a while."""
        if now_s - before_s <= _SLICE_S:
            return False
        self._no_polling_until_s = now_s + _NO_POLLING_S
        return True

    def recheck(self) -> None:
        self.ring(doorbell.number for doorbell in self._doorbells)
        self._turns.recheck()

    def on_loss(self, report: Callable[[Loss], AsyncollError]) -> None:
        self.locks.report = report

    def peer_lost(self) -> None:
        self.locks.patience_s = 0.0
        self.recheck()

    def waiting(self) -> list[str]:
        asleep = [waiter.describe() for doorbell in self._doorbells for waiter in tuple(doorbell.waiters)]
        return asleep + self._turns.waiting()

    def close(self) -> None:
        """Release everything. Memory stays mapped, and valid, as long as views and control blocks of it exist."""
        self._is_closed = True
        forks.unregister(self)
        for doorbell in self._doorbells:
            doorbell.close()
        if self._parent is None and self.locks.processes:
            self.locks.processes[self.local_rank][0] = 0
        self.locks.processes.clear()
        self._control_blocks.clear()
        self.segments.clear()
        self._descriptors.close()

    def abandon(self, parent: int) -> None:
        """Give up locks and doorbells in a forked child. `segment` replaces the mapped memory there."""
        self._parent = parent
        forks.give_up(doorbell.descriptor for doorbell in self._doorbells)
        forks.give_up(self._eventfds)
        for control_block in self._control_blocks.values():
            control_block.abandon(RefusingMutex(lambda: forks.refusal(parent)))


def _entry_of(entries: Array, context: int) -> int | None:
    """The index of the entry of control block `context`; None if there is none."""
    (known,) = (entries[:, 0] == context).nonzero()
    return next((entry for entry in known.tolist() if entries[entry, 2]), None)


def _copy(undo: contextlib.ExitStack, descriptor: int) -> int:
    copy = os.dup(descriptor)
    undo.callback(os.close, copy)
    return copy
