"""Memory between the processes of one host, the boards in it, and the bells that wake who sleeps at them.

Every rank owns one memfd, as large as the host's memory but empty, and maps everybody's: an address is a place and an
offset in its part. The size is sealed, and what is allocated is really there, so that touching it never fails. Nothing
has a name, so nothing is left when the ranks are gone, however they went.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncoll.errors import ProtocolError, UsageError
from asyncoll.tensors import Array
from asyncoll.transport.board import BELLS, Board, Wait, board_bytes
from asyncoll.transport.heap import Heap
from asyncoll.transport.mutex import MUTEX_BYTES, RobustMutex

LAYOUT = 1  # the version of everything that ranks read in each other's memory before any board
HEAD_BYTES = 1 << 17  # of each part: its header, and in place 0's the lock of the directory and the directory
_MAGIC = b"asyncoll"
_HEADER = struct.Struct("<8sIIQ")  # magic, layout, place, capacity
_LOCK = 64
_DIRECTORY = 128
_BOARDS_MAX = 4096

_ADDRESSES = 1 << 45  # bytes of a process's address space for all parts together: of 47 bits, a quarter
_LARGE = 1 << 20  # a block from here on is checked against what is left, and given back to the host when it is freed
_PIECE = 1 << 26  # is allocated at once: a signal makes the kernel undo all of such a piece and begin again
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL, which Python 3.11 has no name for; the kernel since 6.3
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_punch = ctypes.CDLL(None).fallocate  # lets go of the GIL
_punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]

# How often a waiter looks before it sleeps, giving way each time to whoever wants the processor. With a core for each
# rank it looks for 50 us: among 2 ranks, a message there and back takes 10 us, and 125 where both sleep. Without, a few
# looks still pay: of 4 ranks on 2 cores a barrier took 140 us instead of 240, for half of the processor time.
_LOOKS = 80
_LOOKS_WITHOUT_CORES = 10
# But whoever computes keeps a processor that it is given for a whole slice, of milliseconds, where a sleeper would get
# it as soon as it is woken. After such a slice nobody looks for a while. With 3 computing processes beside the 4 ranks
# the barrier took 3.9 ms without this rule, and 0.25 with it, as if all slept.
_SLICE_S = 0.001
_TRUCE_S = 0.1


class Part(NamedTuple):
    """The descriptors of what a rank brings: its memory and its bells."""

    memory: int
    caller: int
    runtime: int


def capacity_of(places: int) -> int:
    """The bytes of each part, most of which are never there: nobody can need more than the host has."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return min(host, _ADDRESSES // places) // mmap.PAGESIZE * mmap.PAGESIZE


def make_part(place: int, capacity: int) -> Part:
    """Raises OSError, or AttributeError on another platform, if this host cannot do it."""
    with contextlib.ExitStack() as undo:
        memory = _anonymous_file()
        undo.callback(os.close, memory)
        os.ftruncate(memory, capacity)
        _seal(memory)
        os.posix_fallocate(memory, 0, HEAD_BYTES)
        os.pwrite(memory, _HEADER.pack(_MAGIC, LAYOUT, place, capacity), 0)
        bells = []
        for _ in range(BELLS):
            bells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            undo.callback(os.close, bells[-1])
        undo.pop_all()
        return Part(memory, *bells)


def check_part(part: Part, place: int, capacity: int, like: Part) -> None:
    """Raises ProtocolError if `part`, which another rank has made, is not what it should be. `like` is one's own."""
    if (size := os.fstat(part.memory).st_size) != capacity:
        raise ProtocolError(f"it has {size} bytes, and not {capacity}")
    if _seals(part.memory) != _seals(like.memory):
        raise ProtocolError(
            "its size is not sealed as mine is; is memfd_create allowed at one of us only? Allow it at all"
        )
    found = _HEADER.unpack(os.pread(part.memory, _HEADER.size, 0))
    expected = (_MAGIC, LAYOUT, place, capacity)
    if found != expected:
        raise ProtocolError(f"its header is {found}, and not {expected}")


def close_part(part: Part) -> None:
    for descriptor in part:
        os.close(descriptor)


def _anonymous_file() -> int:
    """Of memory. Where there is no memfd (an old kernel, a sandbox), a file without a name does as well."""
    for flags in (_NOEXEC_SEAL, 0):
        with contextlib.suppress(OSError, AttributeError):
            return os.memfd_create("asyncoll", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryFile(prefix="asyncoll-", dir=folder) as file:
        return os.dup(file.fileno())


def _seal(memory: int) -> None:
    with contextlib.suppress(OSError):  # a file cannot be sealed; who has it open is its owner or got it from it
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _seals(memory: int) -> int:
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:
        return 0


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

    Set `runtime_loop` if there is one: whoever waits on any other loop is a caller.
    """

    def __init__(self, place: int, ranks: tuple[int, ...], parts: Sequence[Part]) -> None:
        """Copies the descriptors of `parts`, by place. Place 0's must be made before anybody asks for a board."""
        self.place = place
        self.ranks = ranks
        self.runtime_loop: asyncio.AbstractEventLoop | None = None
        self.cores = min(len(ranks), len(os.sched_getaffinity(0)))
        self._looks = _LOOKS if self.cores == len(ranks) else _LOOKS_WITHOUT_CORES
        self._sleeps_until_s = 0.0
        self._capacity = os.fstat(parts[place].memory).st_size
        self._boards: dict[int, Board] = {}
        self._heap = Heap(HEAD_BYTES, self._capacity, mmap.PAGESIZE)
        self._heap_lock = threading.Lock()
        with contextlib.ExitStack() as undo:
            self._memory = _copy(undo, parts[place].memory)
            self._eventfds = [_copy(undo, bell) for part in parts for bell in part[1:]]  # by the number of the bell
            self._bytes = [_map(part.memory, self._capacity, own=part is parts[place]) for part in parts]
            if place == 0:
                RobustMutex.initialize(self._lock_of_directory())
            self._descriptors = undo.pop_all()
        self._base = _pointer(self._bytes[place])
        self._bells = [_Bell(number, self._eventfds[number]) for number in range(place * BELLS, (place + 1) * BELLS)]

    # -- memory -----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        if nbytes >= _LARGE:
            _check_room(nbytes)
        with self._heap_lock:
            try:
                offset = self._heap.allocate(nbytes)
            except MemoryError:
                raise _too_much(
                    nbytes, f"a rank's part of it has {_mib(self._capacity)}, or not so much in a row"
                ) from None
            extent = self._heap.extent(offset)
        try:
            _commit(self._memory, offset, extent)
        except UsageError:
            self.free(offset + self.place * self._capacity)
            raise
        except OSError as error:
            self.free(offset + self.place * self._capacity)
            raise _too_much(nbytes, f"the kernel says {error.strerror!r}") from error
        return offset + self.place * self._capacity

    def free(self, address: int) -> None:
        offset = address - self.place * self._capacity
        extent = self._heap.extent(offset)
        if extent >= _LARGE:  # before anybody else is given the block; a file system that cannot do it keeps the memory
            _punch(self._memory, _PUNCH_HOLE | _KEEP_SIZE, offset, extent)
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
        mutex = RobustMutex(self._lock_of_directory(), self.place, self.ranks)
        mutex.acquire()
        try:
            yield self.view(_DIRECTORY, 24 * _BOARDS_MAX).view(np.uint64).reshape(-1, 3)
        finally:
            mutex.release()

    def _lock_of_directory(self) -> memoryview:
        return self.view(_LOCK, MUTEX_BYTES).data

    def _open_board(self, entries: Array, context: int, words: int) -> Board:
        used = int(np.count_nonzero(entries[:, 2]))
        known = np.flatnonzero(entries[:used, 0] == context)
        created = not len(known)
        if created:
            self._enter_board(entries, used, context, words)
        _, address, nbytes = map(int, entries[used if created else known[0]])
        memory = self.view(address, nbytes).data
        mutex = RobustMutex(memory[:MUTEX_BYTES], self.place, self.ranks)
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

    async def wait(self, wait: Wait, check: Callable[[], None], what: Callable[[], str]) -> None:
        if self._sees(wait.ready):
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
        finally:
            bell.leave(sleeper)

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
            if now_s - before_s > _SLICE_S:
                self._sleeps_until_s = now_s + _TRUCE_S
                return False
        return False

    def alarm(self) -> None:
        self.ring(bell.number for bell in self._bells)

    def waiting(self) -> list[str]:
        return [sleeper.what() for bell in self._bells for sleeper in tuple(bell.sleepers)]

    def close(self) -> None:
        """What others still hold, views and boards, stays mapped until they let it go, and is safe to touch."""
        self._boards.clear()
        self._bytes.clear()
        self._descriptors.close()


class _Sleeper:
    """Somebody at this rank who waits until a bell rings."""

    def __init__(self, what: Callable[[], str]) -> None:
        self.what = what
        self.loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] = self.loop.create_future()

    def lie_down(self) -> asyncio.Future[None]:
        if self._rung.done():
            self._rung = self.loop.create_future()
        return self._rung

    def rouse(self) -> None:
        if not self._rung.done():
            self._rung.set_result(None)


class _Bell:
    """One of this rank's bells, and its sleepers, on any loops. A loop listens as long as somebody sleeps on it."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self.sleepers: list[_Sleeper] = []  # changed and copied by several threads, each time in one step of the GIL
        self._descriptor = descriptor

    def enter(self, what: Callable[[], str]) -> _Sleeper:
        sleeper = _Sleeper(what)
        if not self._has_sleepers(sleeper.loop):
            sleeper.loop.add_reader(self._descriptor, self._heard)
        self.sleepers.append(sleeper)
        return sleeper

    def leave(self, sleeper: _Sleeper) -> None:
        self.sleepers.remove(sleeper)
        if not self._has_sleepers(sleeper.loop) and not sleeper.loop.is_closed():
            sleeper.loop.remove_reader(self._descriptor)

    def _has_sleepers(self, loop: asyncio.AbstractEventLoop) -> bool:
        return any(sleeper.loop is loop for sleeper in tuple(self.sleepers))

    def _heard(self) -> None:
        """Whichever loop hears it first silences the bell, so it must rouse the sleepers of all."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        here = asyncio.get_running_loop()
        for sleeper in tuple(self.sleepers):
            if sleeper.loop is here:
                sleeper.rouse()
                continue
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is left to be roused
                sleeper.loop.call_soon_threadsafe(sleeper.rouse)


# -- of the kernel --------------------------------------------------------------------------------


def _map(memory: int, capacity: int, *, own: bool) -> Array:
    mapping = mmap.mmap(memory, capacity)
    with contextlib.suppress(OSError):  # a matter of speed, and not offered everywhere
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if not own:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump holds what the process itself has made
    return np.frombuffer(mapping, np.uint8)


def _pointer(flat: Array) -> int:
    return int(flat.__array_interface__["data"][0])


def _copy(undo: contextlib.ExitStack, descriptor: int) -> int:
    copy = os.dup(descriptor)
    undo.callback(os.close, copy)
    return copy


def _commit(memory: int, offset: int, nbytes: int) -> None:
    """Make the kernel provide the pages now, so that whoever touches them is never killed for it."""
    for start in range(offset, offset + nbytes, _PIECE):
        if nbytes >= _LARGE:
            _check_room(min(_PIECE, offset + nbytes - start))  # other ranks take memory at the same time
        os.posix_fallocate(memory, start, min(_PIECE, offset + nbytes - start))


def _too_much(nbytes: int, why: str) -> UsageError:
    return UsageError(
        f"cannot allocate {_mib(nbytes)} of memory that the ranks of this host share: {why}; use smaller tensors, "
        "fewer ranks on this host or more memory, or start with --transport zmq"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _check_room(nbytes: int) -> None:
    """Raises UsageError if so much is not left: asked for more, the kernel might kill a process to provide it."""
    left, where = _left()
    if nbytes > left:
        raise _too_much(nbytes, f"{where} has {_mib(left)} left")


def _left() -> tuple[int, str]:
    """The bytes that the host and our control groups have left, and which of them has the least."""
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    host = int(known["MemAvailable"].split()[0]) * 1024
    return min([(host, "this host"), *_left_in_groups()])


def _left_in_groups(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, str]]:
    """In either version of the interface, from our group up to the root; a container sees its own as the root."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (root / "memory", _V1) if controllers else (root, _V2)
        own = base / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                with contextlib.suppress(OSError, LookupError, ValueError):  # no such group here, or no limit
                    yield _left_in_group(folder, *files), f"the control group {folder}"


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def _left_in_group(folder: Path, limit: str, usage: str, *reclaimable: str) -> int:
    """Cached files count as used, but give way."""
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cached = sum(int(statistics[name]) for name in reclaimable)
    return int((folder / limit).read_text()) - int((folder / usage).read_text()) + cached
