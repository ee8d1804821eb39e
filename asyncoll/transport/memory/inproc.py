"""The arena of ranks that share one event loop: the same contract without processes, in real or virtual time."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np

from asyncoll._core import NativeCore
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.forks import address_of
from asyncoll.tensors.reductions import Array
from asyncoll.transport import ControlBlock, Loss, Turn, Wait, settle
from asyncoll.transport.control_block import DOORBELLS, PythonControlBlock, control_block_bytes
from asyncoll.transport.memory.doorbell import TurnQueue


def arenas(
    size: int, pause: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0), ranks: Sequence[int] = ()
) -> list[InprocArena]:
    """One arena for each of `size` ranks inside this process: `ranks` of their world; by default the first ones.

    Each wait first awaits `pause()`, so that other ranks run where ranks in processes could run.
    """
    memory = _InprocMemory(size)
    return [InprocArena(local_rank, memory, pause, tuple(ranks or range(size))) for local_rank in range(size)]


class _InprocMemory:
    """The memory that the ranks share, by address, and the tasks that wait for doorbells."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[int, Array] = {}  # by address
        self.addresses: list[int] = []  # of the blocks, in ascending order
        # An address is never used again, and memory that is free has no view. So a stale address is noticed.
        self.next = 64
        self.control_blocks: dict[int, Array] = {}  # by context
        # By doorbell, and woken in the order in which they came: a set of futures has another order in each run.
        self.waiters: dict[int, dict[asyncio.Future[None], None]] = {}

    def ring(self, doorbells: Iterable[int]) -> None:
        for doorbell in doorbells:
            for future in self.waiters.pop(doorbell, ()):
                settle(future)

    def wake_futex(self, cell: memoryview) -> None:
        """No thread sleeps in a futex: all ranks share one thread."""


class _NoLock:
    """The mutex of ranks on one loop: no other rank runs while it is held, because no await is under a lock."""

    def acquire(self) -> None: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...


class InprocArena:
    """An `Arena` whose peers live on the same loop. Each rank uses the first of its doorbells only."""

    native: NativeCore | None = None  # the compiled core does not interleave the ranks of one thread
    segments: Sequence[Array] = ()
    polls = 0

    def __init__(
        self, local_rank: int, memory: _InprocMemory, pause: Callable[[], Awaitable[None]], ranks: tuple[int, ...]
    ) -> None:
        self.local_rank = local_rank
        self.ranks = ranks
        # Fewer than ranks, so that algorithms also take their paths for few cores.
        self.cores = min(2, memory.size)
        self._memory = memory
        self.runtime_loop: asyncio.AbstractEventLoop | None = None
        self._pause = pause
        self._control_blocks: dict[int, ControlBlock] = {}
        self._asleep: dict[asyncio.Future[None], Callable[[], str]] = {}
        self._turns = TurnQueue()

    def allocate(self, nbytes: int) -> int:
        memory = self._memory
        address = memory.next
        memory.next += -(-max(nbytes, 1) // 64) * 64
        # numpy aligns to 16 bytes, or less. Blocks of real arenas begin at a cache line.
        raw = np.empty(nbytes + 64, np.uint8)
        start = -address_of(raw) % 64
        memory.blocks[address] = raw[start : start + nbytes]
        memory.addresses.append(address)
        return address

    def free(self, address: int) -> None:
        del self._memory.blocks[address]
        self._memory.addresses.remove(address)

    def view(self, address: int, nbytes: int) -> Array:
        memory = self._memory
        index = bisect_right(memory.addresses, address) - 1
        start = memory.addresses[index] if index >= 0 else address
        offset, block = address - start, memory.blocks.get(start)
        # In real memory such a view would show, or overwrite, what another owner has there by now.
        if block is None or offset + nbytes > block.nbytes:
            raise IndexError(f"{nbytes} bytes at address {address} are not allocated")
        return block[offset : offset + nbytes]

    def locate(self, flat: Array) -> int | None:
        first = address_of(flat)
        for address, block in self._memory.blocks.items():
            offset = first - address_of(block)
            if offset >= 0 and offset + flat.nbytes <= block.nbytes:
                return address + offset
        return None

    def look(self, ready: Callable[[], bool], patience: int = 1) -> bool:
        return ready()

    def control_block(self, context: int, cells: int) -> ControlBlock:
        if context not in self._control_blocks:
            size = control_block_bytes(cells, self._memory.size)
            created = context not in self._memory.control_blocks
            raw = self._memory.control_blocks.setdefault(context, np.zeros(size, np.uint8))
            if raw.nbytes != size:
                raise UsageError(f"control block {context:x} has {raw.nbytes} bytes at another rank, and {size} here")
            self._control_blocks[context] = PythonControlBlock(
                raw.data, self._memory.size, _NoLock(), self._memory, created=created, interleaved=True
            )
        return self._control_blocks[context]

    def forget_control_block(self, context: int) -> None:
        self._control_blocks.pop(context, None)

    def free_control_block(self, context: int) -> None:
        del self._memory.control_blocks[context]

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(
        self, wait: Wait, check: Callable[[], None], describe: Callable[[], str], *, yielding: bool = False
    ) -> None:
        # Among processes the other ranks may run here, also if the condition holds already.
        await self._pause()
        while True:
            with wait.control_block as control_block:
                if wait.ready():
                    return
                # Under the lock: a rank that changes the cells afterwards finds this rank among those to wake.
                control_block.ring_at_next_wake(self.local_rank * DOORBELLS)
            check()
            future = asyncio.get_running_loop().create_future()
            sleepers = self._memory.waiters.setdefault(self.local_rank * DOORBELLS, {})
            sleepers[future] = None
            self._asleep[future] = describe
            try:
                await future
            finally:
                del self._asleep[future]
                sleepers.pop(future, None)

    async def wait_for_turn(self, turn: Turn, check: Callable[[], None], describe: Callable[[], str]) -> None:
        await self._turns.wait(turn, check, describe)

    def recheck(self) -> None:
        self._memory.ring([self.local_rank * DOORBELLS])
        self._turns.recheck()

    def on_loss(self, report: Callable[[Loss], AsyncollError]) -> None:
        """No lock has an owner that can die."""

    def peer_lost(self) -> None:
        self.recheck()

    def waiting(self) -> list[str]:
        return [describe() for describe in self._asleep.values()] + self._turns.waiting()

    def close(self) -> None:
        self._control_blocks.clear()
