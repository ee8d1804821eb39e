"""Memory that fake devices of one process share, as devices share it between processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncoll.tensors.reductions import Array, ReduceOp, reducer, storage
from asyncoll.testing.devices.streams import FakeTransfer
from asyncoll.transport.staging import HANDLE_BYTES, BlockPart, RefusedError, Transfer

POISON = 0xA5  # every byte of memory that has no content, or not yet
_lock = threading.Lock()
_blocks: dict[bytes, _FakeBlock] = {}  # those of this process, by handle
_freed: set[bytes] = set()  # handles


class _SharingDevice(Protocol):
    """What is used here of a fake device. A mark is its own."""

    def note(self, hazard: str) -> None: ...

    def check_share(self, what: str) -> None: ...

    def queue_copy(
        self,
        stream: str,
        other: Array,
        move: Callable[[int, int], None],
        of: tuple[Any, int] | None = None,
        *,
        writes: bool = False,
    ) -> FakeTransfer: ...


@dataclass(eq=False)
class _Use:
    """A copy, or a reduction, that uses bytes of a block."""

    start: int
    stop: int
    writes: bool
    transfer: FakeTransfer


@dataclass(eq=False)
class _FakeBlock:
    content: Array
    uses: list[_Use] = field(default_factory=list)
    readers: int = 0  # ranks that have opened it
    is_freed: bool = False


class FakeExchange:
    """Implements `transport.staging.Exchange`. It notices as hazards of its device:

    - bytes of a block are used, and the host has not seen the end of an earlier use, if one of the two writes;
    - a block is opened, or used, that is freed; it is freed while it is open.
    """

    def __init__(self, device: _SharingDevice, nbytes: int) -> None:
        self._device = device
        self._own = _FakeBlock(np.full(nbytes, POISON, np.uint8))
        self._opened: dict[int, _FakeBlock] = {}  # by rank
        self._transfers: list[FakeTransfer] = []
        with _lock:
            self.handle = os.urandom(HANDLE_BYTES)
            _blocks[self.handle] = self._own

    def open(self, handles: Mapping[int, bytes]) -> None:
        if any(handle != self.handle for handle in handles.values()):
            self._device.check_share("open memory")
        with _lock:
            known = {rank: _blocks[handle] for rank, handle in handles.items() if handle in _blocks}
        if not _freed.isdisjoint(handles.values()):
            self._device.note("a block was opened after it had been freed")
        if len(known) < len(handles):
            raise RefusedError("a block is in another process, and fake devices share none with that")
        if any(block.content.nbytes != self._own.content.nbytes for block in known.values()):
            raise RefusedError("the blocks have different sizes")
        for block in known.values():
            block.readers += 1
        self._opened |= known

    def reduces(self, op: ReduceOp, dtype: str) -> bool:
        return True

    def write(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        return _Joint([self._write(mark, part.offset, part.start, part.nbytes) for part in parts])

    def _write(self, mark: Any, offset: int, start: int, nbytes: int) -> FakeTransfer:
        into = self._own.content[offset : offset + nbytes]
        into[:] = POISON
        move = _mover(into, mark.elements[start : start + nbytes])
        return self._carry_out("write", [], offset, into, move, (mark, start))

    def read(self, mark: Any, parts: Sequence[BlockPart]) -> Transfer:
        return _Joint([self._read(mark, *part) for part in parts])

    def _read(self, mark: Any, rank: int, offset: int, start: int, nbytes: int) -> FakeTransfer:
        block, into = self._opened[rank], mark.elements[start : start + nbytes]
        move = _mover(into, block.content[offset : offset + nbytes])
        return self._carry_out("read", [block], offset, into, move, (mark, start))

    def reduce(self, op: ReduceOp, dtype: str, offset: int, nbytes: int) -> FakeTransfer:
        opened = [self._opened[rank] for rank in sorted(self._opened)]
        parts = [block.content[offset : offset + nbytes].view(storage(dtype)) for block in opened]
        into = self._own.content[offset : offset + nbytes]
        divisor = len(parts) if op is ReduceOp.AVG else 1

        def move(first: int, last: int) -> None:
            if last == nbytes:
                reducer(op, dtype)(into.view(storage(dtype)), [part.copy() for part in parts], divisor)

        others = [block for block in opened if block is not self._own]
        return self._carry_out("reduce", others, offset, into, move)

    def under_way(self) -> list[FakeTransfer]:
        return [transfer for transfer in self._transfers if not transfer.is_over]

    def shut(self) -> bool:
        self._device.check_share("close memory")
        if self.under_way():
            return False
        for block in self._opened.values():
            block.readers -= 1
        self._opened = {}
        return True

    def free(self) -> None:
        if self._own.readers:
            self._device.note("a block was freed while ranks had it open")
        self._own.is_freed = True
        with _lock:
            del _blocks[self.handle]
            _freed.add(self.handle)

    def _carry_out(
        self,
        kind: str,
        sources: list[_FakeBlock],
        offset: int,
        into: Array,
        move: Callable[[int, int], None],
        mark: tuple[Any, int] | None = None,
    ) -> FakeTransfer:
        """Queue `move`, which reads these bytes of `sources`, and writes to the own block unless it is a "read"."""
        transfer = self._device.queue_copy(f"exchange: {kind}", into, move, mark, writes=kind == "read")
        self._transfers = [*self.under_way(), transfer]
        written = [] if kind == "read" else [self._own]
        for block in (*sources, *written):
            self._use(block, _Use(offset, offset + into.nbytes, block in written, transfer))
        return transfer

    def _use(self, block: _FakeBlock, use: _Use) -> None:
        if block.is_freed:
            self._device.note("a block was used after it had been freed")
        with _lock:
            block.uses = [known for known in block.uses if not known.transfer.is_seen]
            for known in block.uses:
                if (use.writes or known.writes) and known.start < use.stop and use.start < known.stop:
                    doing, done = ("written" if each.writes else "read" for each in (use, known))
                    self._device.note(f"bytes of a block are {doing}, and no host has seen that they were {done}")
            block.uses.append(use)


class _Joint:
    """Several transfers as one. Their bytes arrive in any order."""

    def __init__(self, transfers: Sequence[FakeTransfer]) -> None:
        self.nbytes = sum(transfer.nbytes for transfer in transfers)
        self._transfers = transfers

    @property
    def moved(self) -> int:
        return sum(transfer.moved for transfer in self._transfers)

    @property
    def error(self) -> BaseException | None:
        return next((transfer.error for transfer in self._transfers if transfer.error is not None), None)

    def when_moved(self, nbytes: int, callback: Callable[[], None]) -> None:
        del nbytes
        waiting = iter(self._transfers)

        def go_on() -> None:
            transfer = next(waiting, None)
            if transfer is None:
                callback()
            else:
                transfer.when_moved(transfer.nbytes, go_on)

        go_on()


def blocks_in_use() -> int:
    """How many blocks of this process are not freed."""
    return len(_blocks)


def _mover(into: Array, source: Array) -> Callable[[int, int], None]:
    def move(first: int, last: int) -> None:
        into[first:last] = source[first:last]

    return move
