"""Memory between the processes of one host, the boards in it, and the bells that wake who sleeps at them.

Every rank brings a part and maps everybody's: an address is a place and an offset in its part. What is allocated is
really there, so that touching it never fails.
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

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.control_block import BELLS, Board, Turn, Wait, board_bytes
from asyncoll.transport.memory.doorbell import Bell, Line
from asyncoll.transport.memory.heap import Heap
from asyncoll.transport.memory.mutex import MUTEX_BYTES, AbandonedMutex, Patience, RobustMutex
from asyncoll.transport.memory.pages import check_room, commit, give_back, mib, too_much
from asyncoll.transport.memory.segment import HEAD_BYTES, Part, capacity_of, close_part, make_part, map_part

_LOCK = 64
_DIRECTORY = 128
_BOARDS_MAX = 4096

# How often a waiter looks before it sleeps, giving way each time to whoever wants the processor. With a core for each
# rank it looks for 50 us: among 2 ranks, a message there and back takes 10 us, and 125 where both sleep. Without, a few
# looks still pay: of 4 ranks on 2 cores a barrier took 140 us instead of 240, for half of the processor time.
_LOOKS = 80
_LOOKS_WITHOUT_CORES = 10
_TURNS_S = 200e-6  # for so long those look who turn the loop meanwhile
_TURNS_S_WITHOUT_CORES = 25e-6
# But whoever computes keeps a processor that it is given for a whole slice, of milliseconds, where a sleeper would get
# it as soon as it is woken. After such a slice nobody looks for a while. With 3 computing processes beside the 4 ranks
# the barrier took 3.9 ms without this rule, and 0.25 with it, as if all slept.
_SLICE_S = 0.001
_TRUCE_S = 0.1


@contextlib.contextmanager
def local_world(size: int) -> Iterator[list[HostArena]]:
    """One arena for each rank of a world inside this process."""
    capacity = capacity_of(size)
    with contextlib.ExitStack() as parts_only:
        parts = []
        for place in range(size):
            parts.append(make_part(place, capacity))
            parts_only.callback(close_part, parts[-1])
        arenas = [HostArena(place, tuple(range(size)), parts) for place in range(size)]
    try:
        yield arenas
    finally:
        for arena in arenas:
            arena.close()


class HostArena:
    """An `Arena` between processes.

    Set `runtime_loop` if there is one: whoever waits on any other loop is a caller. `patience` is without end at first.
    """

    def __init__(self, place: int, ranks: tuple[int, ...], parts: Sequence[Part]) -> None:
        """Copies the descriptors of `parts`, by place. Place 0's must be made before anybody asks for a board."""
        self.place = place
        self.ranks = ranks
        self.patience = Patience()
        self.runtime_loop: asyncio.AbstractEventLoop | None = None
        self.cores = min(len(ranks), len(os.sched_getaffinity(0)))
        self._looks = _LOOKS if self.cores == len(ranks) else _LOOKS_WITHOUT_CORES
        self._turns_s = _TURNS_S if self.cores == len(ranks) else _TURNS_S_WITHOUT_CORES
        self._sleeps_until_s = 0.0
        self._capacity = os.fstat(parts[place].memory).st_size
        self._boards: dict[int, Board] = {}
        self._heap = Heap(HEAD_BYTES, self._capacity, mmap.PAGESIZE)
        self._heap_lock = threading.Lock()
        self._parent: int | None = None  # whose arena it is, in a forked child
        with contextlib.ExitStack() as undo:
            self._memory = _copy(undo, parts[place].memory)
            self._eventfds = [_copy(undo, bell) for part in parts for bell in part[1:]]  # by the number of the bell
            self._bytes = [map_part(part.memory, self._capacity, own=part is parts[place]) for part in parts]
            if place == 0:
                RobustMutex.initialize(self._lock_of_directory())
            self._descriptors = undo.pop_all()
        self._base = _pointer(self._bytes[place])
        self._line = Line()
        self._bells = [Bell(number, self._eventfds[number]) for number in range(place * BELLS, (place + 1) * BELLS)]
        forks.register(self)

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        if self._parent is not None:
            raise forks.refusal(self._parent)
        check_room(nbytes)
        with self._heap_lock:
            try:
                offset = self._heap.allocate(nbytes)
            except MemoryError:
                why = f"a rank's part of it has {mib(self._capacity)}, or not so much in a row"
                raise too_much(nbytes, why) from None
            extent = self._heap.extent(offset)
        address = offset + self.place * self._capacity
        try:
            commit(self._memory, offset, extent)
        except UsageError:
            self.free(address)
            raise
        return address

    def free(self, address: int) -> None:
        if self._parent is not None:
            return
        offset = address - self.place * self._capacity
        give_back(self._memory, offset, self._heap.extent(offset))  # before anybody else is given the block
        with self._heap_lock:
            self._heap.free(offset)

    def view(self, address: int, nbytes: int) -> Array:
        place, offset = divmod(address, self._capacity)
        return self._bytes[place][offset : offset + nbytes]

    def locate(self, flat: Array) -> int | None:
        offset = _pointer(flat) - self._base
        return offset + self.place * self._capacity if 0 <= offset < self._capacity else None

    # -- boards -----------------------------------------------------------------------------------

    def board(self, context: int, words: int) -> Board:
        if context not in self._boards:
            with self._directory() as entries:
                self._boards.setdefault(context, self._open_board(entries, context, words))
        board = self._boards[context]
        if len(board.words) != words:
            raise ProtocolError(f"board {context:x} has {len(board.words)} words, and not {words}")
        return board

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Array]:
        """The boards of all ranks, in the order in which they were made: context, address, bytes. Under its lock."""
        mutex = RobustMutex(self._lock_of_directory(), self.place, self.ranks, self.patience)
        with mutex:
            yield self.view(_DIRECTORY, 24 * _BOARDS_MAX).view(np.uint64).reshape(-1, 3)

    def _lock_of_directory(self) -> memoryview:
        return self.view(_LOCK, MUTEX_BYTES).data

    def _open_board(self, entries: Array, context: int, words: int) -> Board:
        used = int(np.count_nonzero(entries[:, 2]))
        known = np.flatnonzero(entries[:used, 0] == context)
        created = not len(known)
        if created:
            self._enter_board(entries, used, context, words)
        _, address, nbytes = map(int, entries[used if created else known[0]])
        place, offset = divmod(address, self._capacity)
        if place >= len(self._bytes) or offset + nbytes > self._capacity or nbytes < MUTEX_BYTES:
            raise ProtocolError(f"the directory of boards is corrupt: {nbytes} bytes at {address}")
        memory = self.view(address, nbytes).data
        mutex = RobustMutex(memory[:MUTEX_BYTES], self.place, self.ranks, self.patience)
        return Board(memory[MUTEX_BYTES:], len(self.ranks), mutex, self, created=created)

    def _enter_board(self, entries: Array, used: int, context: int, words: int) -> None:
        if used == _BOARDS_MAX:
            raise UsageError(
                f"the ranks of this host have {_BOARDS_MAX} boards in shared memory, and there is no room for another: "
                "use fewer communicators and names, or --transport zmq"
            )
        nbytes = MUTEX_BYTES + board_bytes(words, len(self.ranks))
        address = self.allocate(nbytes)
        memory = self.view(address, nbytes)
        memory[:] = 0
        RobustMutex.initialize(memory[:MUTEX_BYTES].data)
        entries[used] = context, address, nbytes

    # -- waiting ----------------------------------------------------------------------------------

    def now_s(self) -> float:
        return time.monotonic()  # noqa: TID251 (loops have clocks of their own, which may lag by milliseconds)

    def ring(self, bells: Iterable[int]) -> None:
        for bell in bells:
            os.eventfd_write(self._eventfds[bell], 1)

    async def wait(
        self, wait: Wait, check: Callable[[], None], what: Callable[[], str], *, turning: bool = False
    ) -> None:
        if await self._sees_between_turns(wait.ready) if turning else self._sees(wait.ready):
            with wait.board:
                if wait.ready():
                    return
        bell = self._bells[asyncio.get_running_loop() is self.runtime_loop]
        sleeper = bell.enter(what)
        try:
            while True:
                rung = sleeper.lie_down()
                with wait.board as board:  # whoever makes it ready has had the lock before, or will and finds a sleeper
                    if wait.ready():
                        return
                    board.sleep(bell.number)
                check()
                await rung
                check()  # before the lock, which a stopped process may have
        finally:
            bell.leave(sleeper)

    async def queue(self, turn: Turn, check: Callable[[], None], what: Callable[[], str]) -> None:
        await self._line.wait(turn, check, what)

    def _sees(self, ready: Callable[[], bool]) -> bool:
        """Whether it became ready soon. Meanwhile the other tasks of this loop stand still."""
        now_s = self.now_s()
        if now_s < self._sleeps_until_s:
            return False
        for _ in range(self._looks):
            if ready():
                return True
            os.sched_yield()
            before_s, now_s = now_s, self.now_s()
            if self._was_away(before_s, now_s):
                return False
        return False

    async def _sees_between_turns(self, ready: Callable[[], bool]) -> bool:
        """Whether it became ready soon. A loop that has much to do hardly notices."""
        now_s = self.now_s()
        until_s = now_s if now_s < self._sleeps_until_s else now_s + self._turns_s
        while not ready():
            if now_s >= until_s:
                return False
            os.sched_yield()
            if self._was_away(now_s, self.now_s()):
                return False
            await asyncio.sleep(0)
            now_s = self.now_s()
        return True

    def _was_away(self, before_s: float, now_s: float) -> bool:
        """Whether somebody else had the processor for a whole slice in between."""
        if now_s - before_s <= _SLICE_S:
            return False
        self._sleeps_until_s = now_s + _TRUCE_S
        return True

    def alarm(self) -> None:
        self.ring(bell.number for bell in self._bells)
        self._line.alarm()

    def bury(self) -> None:
        self.patience.seconds = 0.0
        self.alarm()

    def waiting(self) -> list[str]:
        return [sleeper.what() for bell in self._bells for sleeper in tuple(bell.sleepers)] + self._line.waiting()

    def close(self) -> None:
        """What others still hold, views and boards, stays mapped until they let it go, and is safe to touch."""
        forks.unregister(self)
        for bell in self._bells:
            bell.close()
        self._boards.clear()
        self._bytes.clear()
        self._descriptors.close()

    def abandon(self, parent: int) -> None:
        """In a forked child, where another mapping has taken the place of the memory: see `part`."""
        self._parent = parent
        forks.give_up(bell.descriptor for bell in self._bells)
        forks.give_up(self._eventfds)
        for board in self._boards.values():
            board.abandon(AbandonedMutex(parent))


def _pointer(flat: Array) -> int:
    return int(flat.__array_interface__["data"][0])


def _copy(undo: contextlib.ExitStack, descriptor: int) -> int:
    copy = os.dup(descriptor)
    undo.callback(os.close, copy)
    return copy
