"""The arena of P ranks on one loop: the same contract without processes, so that algorithms run in virtual time too."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable

import numpy as np

from asyncoll.errors import UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.control_block import DOORBELLS, ControlBlock, Turn, Wait, control_block_bytes
from asyncoll.transport.memory.doorbell import TurnQueue


def arenas(size: int, pause_s: Callable[[], float] = lambda: 0.0) -> list[InprocArena]:
    """One arena for each rank of a world inside this process.

    Wherever ranks of several processes may come between, others are given a turn here, of `pause_s()` seconds.
    """
    memory = _Memory(size)
    return [InprocArena(local_rank, memory, pause_s) for local_rank in range(size)]


class _Memory:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[int, Array] = {}  # by address
        self.addresses: list[int] = []  # of the blocks, in order
        self.next = 64
        self.control_blocks: dict[int, Array] = {}  # by context
        self.waiters: dict[int, set[asyncio.Future[None]]] = {}  # by doorbell

    def ring(self, doorbells: Iterable[int]) -> None:
        for doorbell in doorbells:
            for future in self.waiters.pop(doorbell, ()):
                if not future.done():
                    future.set_result(None)


class _Alone:
    """The lock where only one thread is: it is never held when somebody else runs."""

    def acquire(self) -> None: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...


class InprocArena:
    """An `Arena` whose peers live on the same loop."""

    def __init__(self, local_rank: int, memory: _Memory, pause_s: Callable[[], float]) -> None:
        self.local_rank = local_rank
        self.ranks = tuple(range(memory.size))
        self.cores = min(2, memory.size)
        self._memory = memory
        self.runtime_loop: asyncio.AbstractEventLoop | None = None
        self._pause_s = pause_s
        self._control_blocks: dict[int, ControlBlock] = {}
        self._waiting: dict[asyncio.Future[None], Callable[[], str]] = {}
        self._turns = TurnQueue()

    def allocate(self, nbytes: int) -> int:
        memory = self._memory
        address = memory.next
        memory.next += -(-max(nbytes, 1) // 64) * 64
        raw = np.empty(nbytes + 64, np.uint8)  # numpy aligns to 16 bytes, or less
        start = -_pointer(raw) % 64
        memory.blocks[address] = raw[start : start + nbytes]
        memory.addresses.append(address)
        return address

    def free(self, address: int) -> None:
        del self._memory.blocks[address]
        self._memory.addresses.remove(address)

    def view(self, address: int, nbytes: int) -> Array:
        memory = self._memory
        start = memory.addresses[bisect_right(memory.addresses, address) - 1]
        offset = address - start
        return memory.blocks[start][offset : offset + nbytes]

    def locate(self, flat: Array) -> int | None:
        first = _pointer(flat)
        for address, block in self._memory.blocks.items():
            offset = first - _pointer(block)
            if offset >= 0 and offset + flat.nbytes <= block.nbytes:
                return address + offset
        return None

    def control_block(self, context: int, cells: int) -> ControlBlock:
        if context not in self._control_blocks:
            size = control_block_bytes(cells, self._memory.size)
            created = context not in self._memory.control_blocks
            raw = self._memory.control_blocks.setdefault(context, np.zeros(size, np.uint8))
            if raw.nbytes != size:
                raise UsageError(f"control block {context:x} has {raw.nbytes} bytes at another rank, and {size} here")
            self._control_blocks[context] = ControlBlock(
                raw.data, self._memory.size, _Alone(), self._memory, created=created, interleaved=True
            )
        return self._control_blocks[context]

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(
        self, wait: Wait, check: Callable[[], None], what: Callable[[], str], *, yielding: bool = False
    ) -> None:
        await asyncio.sleep(self._pause_s())
        while True:
            check()
            with wait.control_block as control_block:
                if wait.ready():
                    return
                control_block.ring_at_next_wake(self.local_rank * DOORBELLS)
            await self._rung(what)

    async def wait_for_turn(self, turn: Turn, check: Callable[[], None], what: Callable[[], str]) -> None:
        await self._turns.wait(turn, check, what)

    async def _rung(self, what: Callable[[], str]) -> None:
        future = asyncio.get_running_loop().create_future()
        self._memory.waiters.setdefault(self.local_rank * DOORBELLS, set()).add(future)
        self._waiting[future] = what
        try:
            await future
        finally:
            del self._waiting[future]
            self._memory.waiters.get(self.local_rank * DOORBELLS, set()).discard(future)

    def recheck(self) -> None:
        self._memory.ring([self.local_rank * DOORBELLS])
        self._turns.recheck()

    def peer_lost(self) -> None:
        self.recheck()

    def waiting(self) -> list[str]:
        return [what() for what in self._waiting.values()] + self._turns.waiting()

    def close(self) -> None:
        self._control_blocks.clear()


def _pointer(flat: Array) -> int:
    pointer: int = flat.__array_interface__["data"][0]
    return pointer
