"""Asynchronous calls whose `Work` nothing keeps, nor their inputs: they end all the same, and leave nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_tests.features import feature

CALLS = 10_000
FIRST = 2_000  # in which everything is made that is made once
TOGETHER = 500  # calls under way at once
LIMIT_S = 30  # for their end
COUNT = 12  # elements: a multiple of 2, 3 and 4
GIVEN, NOT_YET = 7.0, -1.0  # what inputs hold, and outputs before their call is over

Call = Callable[[Tensor], float]  # makes a call whose output this is, and returns what it is to hold


class Held(NamedTuple):
    """What this process holds."""

    objects: int  # that the garbage collector knows
    blocks: int  # of Python's allocator
    allocated: int  # bytes of the allocator of C
    resident: int  # bytes of memory in use
    mappings: int
    descriptors: int
    threads: int


MORE = Held(objects=400, blocks=1_600, allocated=256 << 10, resident=8 << 20, mappings=8, descriptors=0, threads=0)
"""What the calls after the first ones may add: noise, far from an object for each of them, or 100 bytes.

Memory in use grows by more than what is allocated: freed pieces lie between others, and shared pages are used first.
"""


class _Allocator(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


_c = ctypes.CDLL(None)
_c.mallinfo2.restype = _Allocator


def held() -> Held:
    gc.collect()
    sizes = _c.mallinfo2().sizes
    with open("/proc/self/statm") as pages, open("/proc/self/maps") as maps:
        return Held(
            objects=len(gc.get_objects()),
            blocks=sys.getallocatedblocks(),
            allocated=sizes[4] + sizes[7],  # hblkhd, uordblks
            resident=int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            mappings=len(maps.readlines()),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
        )


def given(count: int) -> Tensor:
    return torch.full((count,), GIVEN)


def all_reduce(output: Tensor) -> float:
    dist.all_reduce(output, async_op=True)
    return NOT_YET * dist.get_world_size()


def all_gather(output: Tensor) -> float:
    dist.all_gather_into_tensor(output, given(COUNT // dist.get_world_size()), async_op=True)
    return GIVEN


def reduce_scatter(output: Tensor) -> float:
    dist.reduce_scatter_tensor(output, given(COUNT * dist.get_world_size()), async_op=True)
    return GIVEN * dist.get_world_size()


def all_to_all(output: Tensor) -> float:
    dist.all_to_all_single(output, given(COUNT), async_op=True)
    return GIVEN


def messages(output: Tensor) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    receive = dist.P2POp(dist.irecv, output, (rank - 1) % size)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, given(COUNT), (rank + 1) % size), receive])
    return GIVEN


def make(calls: tuple[Call, ...]) -> Held:
    """Make a block of the calls, in turn. Returns what this process holds then.

    The calls are over when their outputs hold the results: nothing else tells.
    """
    outputs = torch.full((TOGETHER, COUNT), NOT_YET)
    expected = torch.tensor([[calls[number % len(calls)](output)] for number, output in enumerate(outputs)])
    until = time.monotonic() + LIMIT_S
    while not (outputs == expected).all():
        assert time.monotonic() < until, f"{(outputs != expected).any(1).sum()} of {TOGETHER} calls are not over"
        os.sched_yield()
    dist.barrier()
    now = held()
    dist.barrier()  # no rank has begun the next calls before
    return now


def leave_nothing(*calls: Call) -> None:
    """The least that is held after a block counts: the ends of some calls take a moment more."""
    blocks = [make(calls) for _ in range(CALLS // TOGETHER)]
    some = FIRST // TOGETHER
    least = [Held(*map(min, zip(*part, strict=True))) for part in (blocks[:some], blocks[-some:])]
    left = {name: after - before for name, before, after in zip(Held._fields, *least, strict=True)}
    assert all(left[name] <= getattr(MORE, name) for name in left), f"{CALLS - FIRST} calls have left {left}"


@feature()
def dropped_collectives(backend: str) -> None:
    leave_nothing(all_reduce, all_gather, reduce_scatter, all_to_all)


@feature()
def dropped_messages(backend: str) -> None:
    leave_nothing(messages)
