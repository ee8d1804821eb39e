"""Arrays in the private memory of the other ranks of a host: the kernel copies them, if it allows that.

The system call `process_vm_readv` reads the memory of another process without a copy in shared memory. The kernel
allows it where it would allow a debugger: for processes of the same user, unless a security module or a filter of
system calls forbids it. So each rank tries it before its first such call: it reads a token of each other rank. All
ranks show their private memory only if all of them can read all others. Otherwise the arrays go through slots
(`pieces`).

Ranks only read. To write the result into the memory of the others would save a wait, and is faster; but a rank that is
stopped, and goes on when the others have given it up, would then write into memory that has another use by now.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from asyncoll._core import NativeCore
from asyncoll.algorithms.dense.meeting_cells import (
    PAGE,
    PEER_ADDRESS,
    PEER_CAN_READ,
    PEER_CELLS,
    PEER_PID,
    PEER_TOKEN,
    SCRATCH,
)
from asyncoll.tensors.reductions import Array
from asyncoll.transport import ControlBlock


class PeerReduction(NamedTuple):
    """The reduction of one array of each rank."""

    pids: tuple[int, ...]  # by rank
    addresses: tuple[int, ...]
    kernel: int
    divisor: int


class Peers:
    """The private memory of the ranks of a communicator, as seen by one of them.

    Nothing here is called without the compiled core: the arrays have one of its kernels.
    """

    def __init__(
        self, native: NativeCore | None, control_block: ControlBlock, first: int, size: int, rank: int
    ) -> None:
        """`first` is the first of PEER_CELLS cells for each rank."""
        self._native = cast(NativeCore, native)
        self._control_block = control_block
        self._cells = control_block.cells
        self._first = first
        self._size = size
        self._rank = rank
        self._token = np.frombuffer(bytearray(os.urandom(8)), np.int64) >> 1 | 1
        self._spare: list[Array] = []
        self._has_agreed = False  # all ranks have found that they can read all others

    def can_read(self) -> bool:
        """Whether all ranks can read the memory of all others. A hint: the other ranks may decide otherwise now."""
        cells, mine = self._cells, self._first + PEER_CELLS * self._rank
        if not self._has_agreed:
            if not cells[mine + PEER_TOKEN]:
                self._show_token(mine)
            if not cells[mine + PEER_CAN_READ] and all(self._column(PEER_TOKEN)):
                cells[mine + PEER_CAN_READ] = 1 if self.has_read_all() else -1
            self._has_agreed = min(self._column(PEER_CAN_READ)) == 1  # no rank decides twice
        return self._has_agreed

    def _show_token(self, mine: int) -> None:
        with self._control_block:
            self._cells[mine + PEER_PID] = os.getpid()
            self._cells[mine + PEER_ADDRESS] = self._token.ctypes.data
            self._cells[mine + PEER_TOKEN] = int(self._token[0])

    def has_read_all(self) -> bool:
        """Whether the token of each rank is where it was: otherwise a rank has ended, or runs another program.

        Raises PermissionError if the kernel forbids now what it has allowed before.
        """
        found = np.zeros(1, np.int64)
        for pid, address, token in zip(*map(self._column, (PEER_PID, PEER_ADDRESS, PEER_TOKEN)), strict=True):
            try:
                self._native.read_memory(pid, address, found)
            except PermissionError:
                if self._has_agreed:
                    raise
                return False
            except OSError:
                return False
            if found[0] != token:  # a process of that number in another namespace
                return False
        return True

    def _column(self, cell: int) -> list[int]:
        last = self._first + PEER_CELLS * self._size
        column: list[int] = self._cells[self._first + cell : last : PEER_CELLS].tolist()
        return column

    def reduction(self, addresses: Sequence[int], kernel: int, divisor: int) -> PeerReduction:
        return PeerReduction(tuple(self._column(PEER_PID)), tuple(addresses), kernel, divisor)

    def reduce(self, reduction: PeerReduction, own: Array, chunk: slice) -> None:
        """Reduce these bytes of all arrays, in the order of ranks, into those of `own`, the array of this rank.

        Raises OSError if another rank has ended, or has returned its array. It is ProcessLookupError in the first case.
        """
        # `pop`, without a look before: calls of one communicator run in several threads at the same time.
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = np.empty(max(SCRATCH, PAGE * self._size), np.uint8)
        pids, addresses, kernel, divisor = reduction
        self._native.reduce_from_peers(
            kernel, pids, addresses, self._rank, own, chunk.start, chunk.stop, scratch, divisor
        )
        self._spare.append(scratch)

    def read(self, reduction: PeerReduction, rank: int, own: Array, chunk: slice) -> None:
        """Copy these bytes of the array of `rank` into those of `own`. Raises OSError as `reduce` does."""
        self._native.read_memory(
            reduction.pids[rank], reduction.addresses[rank] + chunk.start, own[chunk.start : chunk.stop]
        )
