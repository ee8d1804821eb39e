"""The segment of a rank: its part of the host's shared memory, a memfd with a header, and its doorbells.

The memfd is as large as the memory of the host, but sparse: only allocated pages exist. Its size is sealed, so no peer
can truncate memory that others use. It has no name, so the kernel frees it when all ranks have ended, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import weakref
from typing import NamedTuple

import numpy as np

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.control_block import DOORBELLS
from asyncoll.transport.memory.pages import check_room
from asyncoll.transport.system_calls import anonymous_file

LAYOUT = 2  # the version of the header, of the directory of control blocks and of their locks
HEAD_BYTES = 1 << 17  # of each segment: its header, and for local rank 0 the directory of control blocks and its lock
_MAGIC = b"asyncoll"
_HEADER = struct.Struct("<8sIIQ")  # magic, layout, local rank, capacity
PROCESS_OFFSET = 32  # of the process id of the rank, in 8 bytes; 0 while the rank uses no lock of shared memory
_ADDRESS_SPACE = 1 << 45  # bytes for the segments of all ranks together: a fourth of a process's 47 bits
_PROT_NONE, _MAP_FIXED = 0, 16  # constants of mmap that Python does not export
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
logger = logging.getLogger("asyncoll")


class Segment(NamedTuple):
    """The descriptors of a segment: the memory, and the doorbells for loops of callers and for the runtime's loop."""

    memory: int
    caller: int
    runtime: int


def capacity_of(local_size: int) -> int:
    """The size in bytes of each segment on a host of `local_size` ranks: the memory of the host, in whole pages."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return min(host, _ADDRESS_SPACE // local_size) // mmap.PAGESIZE * mmap.PAGESIZE


def make_segment(local_rank: int, capacity: int) -> Segment:
    """Create the segment of `local_rank`, of `capacity` bytes. The caller closes it.

    Raises OSError if the host does not support it, and AttributeError on other platforms than Linux.
    """
    with contextlib.ExitStack() as undo:
        memory = anonymous_file("asyncoll")
        undo.callback(os.close, memory)
        os.ftruncate(memory, capacity)
        # A plain file cannot be sealed; only ranks have it open.
        with contextlib.suppress(OSError):
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # The heap begins behind it, and commits its pages itself.
        os.posix_fallocate(memory, 0, HEAD_BYTES)
        os.pwrite(memory, _HEADER.pack(_MAGIC, LAYOUT, local_rank, capacity), 0)
        doorbells = []
        for _ in range(DOORBELLS):
            doorbells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            undo.callback(os.close, doorbells[-1])
        undo.pop_all()
        return Segment(memory, *doorbells)


def check_segment(segment: Segment, local_rank: int, capacity: int, own: Segment) -> None:
    """Raise ProtocolError unless `segment` is what rank `local_rank` must provide. `own` is the segment of this rank.

    Only this makes it safe to map: the memory of another size could shrink, and an access to it would be a SIGBUS.
    """
    if (size := os.fstat(segment.memory).st_size) != capacity:
        raise ProtocolError(f"it has {size} bytes, and not {capacity}")
    # Both may be without seals, in a sandbox without memfd_create. Only one without them could shrink later.
    if _seals(segment.memory) != _seals(own.memory):
        raise ProtocolError(
            "its size is not sealed as mine is; allow memfd_create at both of these ranks, or at neither"
        )
    found = _HEADER.unpack(os.pread(segment.memory, _HEADER.size, 0))
    expected = (_MAGIC, LAYOUT, local_rank, capacity)
    if found != expected:
        raise ProtocolError(f"its header is {found}, and not {expected}")


def close_segment(segment: Segment) -> None:
    for descriptor in segment:
        os.close(descriptor)


def _seals(memory: int) -> int:
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def map_segment(memory: int, capacity: int, *, own: bool) -> Array:
    """Map a segment, as a flat uint8 array. The memory stays mapped as long as the array or a view of it exists."""
    mapping = mmap.mmap(memory, capacity)
    # Huge pages only affect speed, and not every kernel supports them.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if not own:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump contains only the segment of its own rank
    whole = np.frombuffer(mapping, np.uint8)
    inherited = _InheritedMapping(forks.address_of(whole), capacity, forks.identity(memory))
    # It is a weak reference: the finalizer keeps the object alive as long as the array.
    forks.register(inherited)
    weakref.finalize(whole, lambda _: None, inherited).atexit = False
    return whole


class _InheritedMapping:
    """The mapping of a segment, which a forked child inherits and must not write to."""

    def __init__(self, address: int, nbytes: int, file: forks.Identity) -> None:
        self._address = address
        self._nbytes = nbytes
        self._file = file

    def abandon(self, parent: int) -> None:
        """In the child, replace the mapping by private memory.

        It contains copies of the tensors in use, and read-only zeros elsewhere. A private mapping of the memfd would
        not do: it shows later writes of other ranks to all pages that the child has not changed.
        """
        descriptors = forks.copies_of(self._file)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _map(self._address, self._nbytes, mmap.PROT_READ, flags, -1, 0) != self._address:
            raise OSError(ctypes.get_errno(), "mmap")
        arrays = list(forks.arrays_within(self._address, self._nbytes))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            check_room(sum(nbytes for _, nbytes in arrays))
        except UsageError as error:
            protection = _PROT_NONE
            logger.warning(
                "this forked child gets no copies of registered tensors, and dies if it reads them: %s", error
            )
        for address, nbytes in arrays:
            start, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + nbytes
            if _protect(start, end - start, protection):
                raise OSError(ctypes.get_errno(), "mprotect")
            while address < end and protection != _PROT_NONE:
                buffer = (ctypes.c_char * (end - address)).from_address(address)
                address += os.preadv(descriptors[0], [buffer], address - self._address)
        forks.give_up(descriptors)
