"""What a rank brings to the memory of its host: a memfd with a header, and its doorbells. Made here, checked by its
peers.

It is as large as the host's memory, but empty. Its size is sealed, and it has no name, so nothing is left of it when
the ranks are gone, however they went.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import tempfile
import weakref
from typing import NamedTuple

import numpy as np

from asyncoll import forks
from asyncoll.errors import ProtocolError, UsageError
from asyncoll.tensors.reductions import Array
from asyncoll.transport.control_block import DOORBELLS
from asyncoll.transport.memory.pages import check_room

LAYOUT = 1  # the version of everything that ranks read in each other's memory before any control_block
HEAD_BYTES = (
    1 << 17
)  # of each segment: its header, and in that of local rank 0 the lock of the directory and the directory
_MAGIC = b"asyncoll"
_HEADER = struct.Struct("<8sIIQ")  # magic, layout, local rank, capacity
_ADDRESSES = 1 << 45  # bytes of a process's address space for all parts together: of 47 bits, a quarter
_PROT_NONE, _MAP_FIXED = 0, 16  # which Python has no names for
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
logger = logging.getLogger("asyncoll")
_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL, which Python 3.11 has no name for; the kernel since 6.3


class Segment(NamedTuple):
    """The descriptors of what a rank brings: its memory and its doorbells."""

    memory: int
    caller: int
    runtime: int


def capacity_of(local_size: int) -> int:
    """The bytes of each segment, most of which are never there: nobody can need more than the host has."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return min(host, _ADDRESSES // local_size) // mmap.PAGESIZE * mmap.PAGESIZE


def make_segment(local_rank: int, capacity: int) -> Segment:
    """Raises OSError, or AttributeError on another platform, if this host cannot do it."""
    with contextlib.ExitStack() as undo:
        memory = _anonymous_file()
        undo.callback(os.close, memory)
        os.ftruncate(memory, capacity)
        _seal(memory)
        os.posix_fallocate(memory, 0, HEAD_BYTES)
        os.pwrite(memory, _HEADER.pack(_MAGIC, LAYOUT, local_rank, capacity), 0)
        doorbells = []
        for _ in range(DOORBELLS):
            doorbells.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            undo.callback(os.close, doorbells[-1])
        undo.pop_all()
        return Segment(memory, *doorbells)


def check_segment(segment: Segment, local_rank: int, capacity: int, like: Segment) -> None:
    """Raises ProtocolError if `segment`, which another rank has made, is not what it should be. `like` is one's own."""
    if (size := os.fstat(segment.memory).st_size) != capacity:
        raise ProtocolError(f"it has {size} bytes, and not {capacity}")
    if _seals(segment.memory) != _seals(like.memory):
        raise ProtocolError(
            "its size is not sealed as mine is; is memfd_create allowed at one of us only? Allow it at all"
        )
    found = _HEADER.unpack(os.pread(segment.memory, _HEADER.size, 0))
    expected = (_MAGIC, LAYOUT, local_rank, capacity)
    if found != expected:
        raise ProtocolError(f"its header is {found}, and not {expected}")


def close_segment(segment: Segment) -> None:
    for descriptor in segment:
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


def map_segment(memory: int, capacity: int, *, own: bool) -> Array:
    mapping = mmap.mmap(memory, capacity)
    with contextlib.suppress(OSError):  # a matter of speed, and not offered everywhere
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if not own:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump holds what the process itself has made
    whole = np.frombuffer(mapping, np.uint8)
    mapped = _Mapped(forks.address_of(whole), capacity, forks.identity(memory))
    forks.register(mapped)
    weakref.finalize(whole, mapped.unmapped).atexit = False  # so it lives as long as the memory is mapped
    return whole


class _Mapped:
    """A segment in the address space of this process, which a forked child must not write to."""

    def __init__(self, address: int, nbytes: int, file: forks.Identity) -> None:
        self._address = address
        self._nbytes = nbytes
        self._file = file

    def unmapped(self) -> None:
        pass

    def abandon(self, parent: int) -> None:
        """Replace it by private memory: copies of the tensors that are in use, and otherwise zeros to be read."""
        descriptors = forks.copies_of(self._file)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _map(self._address, self._nbytes, mmap.PROT_READ, flags, -1, 0) != self._address:
            raise OSError(ctypes.get_errno(), "mmap")
        arrays = list(forks.arrays_within(self._address, self._nbytes))
        try:
            check_room(sum(nbytes for _, nbytes in arrays))
        except UsageError as error:
            logger.warning(
                "this forked child gets no copies of registered tensors, and dies if it reads them: %s", error
            )
            for address, nbytes in arrays:
                _set_protection(address, nbytes, _PROT_NONE)
            arrays = []
        for address, nbytes in arrays:
            _set_protection(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            _read(descriptors[0], address - self._address, address, nbytes)
        forks.give_up(descriptors)


def _set_protection(address: int, nbytes: int, protection: int) -> None:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _protect(start, address + nbytes - start, protection):
        raise OSError(ctypes.get_errno(), "mprotect")


def _read(descriptor: int, offset: int, address: int, nbytes: int) -> None:
    """The bytes at `offset` of a file into memory at `address`."""
    while nbytes:
        count = os.preadv(descriptor, [(ctypes.c_char * nbytes).from_address(address)], offset)
        offset, address, nbytes = offset + count, address + count, nbytes - count
