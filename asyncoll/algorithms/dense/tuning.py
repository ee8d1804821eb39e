"""The sizes that choose between algorithms in memory, and those of the pieces that arrays are cut into.

They depend on the number of ranks. `asyncoll bench tune` measures the best ones on a host. The environment variable
ASYNCOLL_SIZES overrides single values: `ASYNCOLL_SIZES=short=65536,window=2097152`. It must be the same at all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncoll.algorithms.dense.meeting_cells import ALIGNED
from asyncoll.errors import UsageError

VARIABLE = "ASYNCOLL_SIZES"


class Sizes(NamedTuple):
    """Sizes in bytes, and `calls`, a number."""

    short: int  # an array of up to this size is reduced for all ranks by the last one to arrive
    chunk: int  # the part of a longer registered array that one rank reduces at a time
    window: int  # the part of an array that is not registered that a rank shows at a time, if it is not to be reduced
    piece: int  # the part of such an array that all ranks reduce together
    whole: int  # such an array of up to this size is copied into shared memory as a whole, and reduced there
    # A longer one, of up to this size, is read in private memory, if the kernel allows it (`peers`). Still longer ones
    # do not stay in a cache until their result is read: pieces are faster.
    private_max: int
    shown: int = 1 << 15  # a short array from this size on is not copied if it is registered
    # The runtime's loop carries out longer calls: they would block the caller's loop for too long. It is some
    # milliseconds; to cross to the other loop and back took 5 to 8 of the 32 ms of 16 MiB with 8 ranks on 2 cores.
    long: int = 1 << 24
    # The part of a tensor of a device that is reduced while the next one arrives and the one before returns. Its copy
    # takes 80 us on a link of 50 GB/s, beside which the start of a copy is short. Not yet measured with a GPU.
    staged: int = 1 << 22
    # A tensor of a device of more than `device` bytes passes through blocks of device memory, in windows, if the ranks
    # can read each other's. A window costs several waits of the host for the device, and a block has room for 8 of
    # them. Not yet measured with a GPU.
    device: int = 1 << 18
    device_window: int = 1 << 23
    calls: int = 4  # calls of a communicator that may be under way at the same time; further ones wait


# By the least number of ranks. Measured on 2 cores; see benchmarks/. The kernel looks up each page of private memory
# for each rank that reads it: with 8 ranks that took twice as long as to copy into slots. With 4 ranks it takes 7.8 ms
# of processor time at 4 MiB, where slots take 9.3, and 54 at 25 MiB, where slots take 42. Two ranks take as long either
# way from 12 to 20 MiB, and at 25 MiB 8.1 and 7.3 ms, where slots take 6.1. With few cores each piece costs a turn of
# all ranks on them; to copy the whole array costs two turns, and memory for the copy.
# Up to `whole`, copies come first: they take the least processor time. On a busy machine 1, 2, 4 and 8 MiB of two ranks
# take 77, 136, 357 and 913 us a rank and call, in private memory 130, 261, 437 and 1,001 (530 where less disturbed); of
# four ranks 93, 197, 541 and 1,167, in private memory 186, 333, 575 and 1,443.
TABLE = {
    2: Sizes(short=1 << 18, chunk=1 << 18, window=1 << 21, piece=1 << 18, whole=1 << 21, private_max=1 << 24),
    3: Sizes(short=1 << 18, chunk=1 << 18, window=1 << 21, piece=1 << 20, whole=1 << 21, private_max=1 << 23),
    5: Sizes(short=1 << 16, chunk=1 << 18, window=1 << 21, piece=1 << 20, whole=1 << 22, private_max=0),
}


def choose(ranks: int, environ: Mapping[str, str]) -> Sizes:
    """The sizes for `ranks` ranks, with the overrides of ASYNCOLL_SIZES in `environ`.

    Raises UsageError for an unknown name, a value that is not a positive integer, and a size that is not a multiple of
    64 bytes. `private_max` may be 0: no array is read in private memory.
    """
    sizes = TABLE[max(least for least in TABLE if least <= ranks)]
    for entry in filter(None, environ.get(VARIABLE, "").split(",")):
        name, _, value = entry.partition("=")
        if name not in Sizes._fields or not value.isdecimal() or int(value) < (name != "private_max"):
            names = ", ".join(Sizes._fields)
            raise UsageError(f"{VARIABLE}: {entry!r} is not NAME=NUMBER; the names are {names}")
        if name != "calls" and int(value) % ALIGNED:
            raise UsageError(f"{VARIABLE}: {entry!r} is not a multiple of {ALIGNED} bytes")
        sizes = sizes._replace(**{name: int(value)})
    return sizes
