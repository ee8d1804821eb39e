"""Textbook collectives over a lane, for any number of ranks.

All ranks of the lane call the same function. Arrays are flat and contiguous. The array of a reduction or a broadcast
has the same length at every rank. Each element is reduced once, in an order that depends on the group ranks alone, and
the result is copied. So all ranks get the same bits, in every run. In costs, n is the number of elements and P the
number of ranks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from asyncoll.runtime.group import Lane
from asyncoll.runtime.matching import Receive
from asyncoll.tensors.reductions import Array, Combine

Allreduce = Callable[[Lane, Array, Combine], Coroutine[Any, Any, None]]
TREE_RADIX = 8  # of the tree of an allreduce of a tiny array

# Messages of an alltoall that are under way at once: the bucket of Li, Hoefler, "Near-optimal sparse allreduce for
# distributed deep learning" (Ok-Topk), PPoPP 2022, section 3.1.1, with the size of the authors' code.
ALLTOALL_AHEAD = 4


def bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Where each of `parts` consecutive chunks of `count` elements begins and ends; sizes differ by at most one."""
    small, larger = divmod(count, parts)
    ends = accumulate(small + (part < larger) for part in range(parts))
    starts = [0, *ends]
    return list(pairwise(starts))


def _chunks(x: Array, parts: int) -> list[Array]:
    return [x[start:end] for start, end in bounds(x.size, parts)]


async def barrier(lane: Lane) -> None:
    """Return once every rank has called it: in step j of ceil(log2 P), rank r sends to rank r + 2^j.

    The dissemination barrier of Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", IJPP 1988.
    """
    empty = np.empty(0, np.uint8)
    distance = 1
    while distance < lane.size:
        dest, source = (lane.rank + distance) % lane.size, (lane.rank - distance) % lane.size
        await lane.exchange(dest, empty, source, empty, step=distance)
        distance *= 2


# -- allreduce -----------------------------------------------------------------------------------


async def tree(lane: Lane, x: Array, combine: Combine) -> None:
    """Reduce and broadcast: 2(P-1) messages in total. The tree has log8 P levels, passed up and down."""
    await tree_reduce(lane, x, combine, 0, TREE_RADIX)
    await tree_broadcast(lane, x, 0, TREE_RADIX)


# Algorithms for a power of two of ranks: each rank beyond the largest power lends its array to one of the first ranks
# before, and gets the result back after. The steps are the last ones, which no algorithm uses.
_FOLD_STEP, _UNFOLD_STEP = (1 << 32) - 2, (1 << 32) - 1


def _among_a_power_of_two(reduce: Callable[[Lane, Array, Combine, int], Coroutine[Any, Any, None]]) -> Allreduce:
    """An allreduce by `reduce(lane, x, combine, power)`, which the first `power` ranks carry out."""

    @functools.wraps(reduce)
    async def allreduce(lane: Lane, x: Array, combine: Combine) -> None:
        power = 1 << (lane.size.bit_length() - 1)
        if lane.rank >= power:
            await lane.send(lane.rank - power, _FOLD_STEP, x)
            await lane.recv(lane.rank - power, _UNFOLD_STEP, x)
            return
        has_guest = lane.rank < lane.size - power
        if has_guest:
            await lane.recv(lane.rank + power, _FOLD_STEP, x, combine)
        await reduce(lane, x, combine, power)
        if has_guest:
            await lane.send(lane.rank + power, _UNFOLD_STEP, x)

    return allreduce


@_among_a_power_of_two
async def recursive_doubling(lane: Lane, x: Array, combine: Combine, power: int) -> None:
    """log2 P exchanges of the whole array: few messages, n log2 P elements sent."""
    mine, other = x, np.empty_like(x)
    distance = 1
    while distance < power:
        partner = lane.rank ^ distance
        await lane.exchange(partner, mine, partner, other, step=distance)
        # The array of the lower rank is always the left operand, so both get the same bits.
        if partner < lane.rank:
            combine(other, mine)
            mine, other = other, mine
        else:
            combine(mine, other)
        distance *= 2
    if mine is not x:
        x[...] = mine


@_among_a_power_of_two
async def rabenseifner(lane: Lane, x: Array, combine: Combine, power: int) -> None:
    """Recursive halving (reduce-scatter), then recursive doubling (allgather).

    2 log2 P messages and 2n(P-1)/P elements for each rank, if P is a power of two.
    """
    edges = [start for start, _ in bounds(x.size, power)] + [x.size]
    low, high = 0, power  # the range of chunks that this rank still reduces
    distance = power // 2
    while distance:
        middle = (low + high) // 2
        partner = lane.rank ^ distance
        lower, upper = x[edges[low] : edges[middle]], x[edges[middle] : edges[high]]
        keep, give = (upper, lower) if lane.rank & distance else (lower, upper)
        await lane.exchange(partner, give, partner, keep, distance, combine)
        low, high = (middle, high) if lane.rank & distance else (low, middle)
        distance //= 2
    distance = 1
    while distance < power:
        partner = lane.rank ^ distance
        theirs = low ^ distance  # first chunk of the partner: blocks of `distance` chunks are aligned
        mine = x[edges[low] : edges[low + distance]]
        await lane.exchange(partner, mine, partner, x[edges[theirs] : edges[theirs + distance]], power + distance)
        low = min(low, theirs)
        distance *= 2


async def ring(lane: Lane, x: Array, combine: Combine, first: int = 0) -> None:
    """Each chunk goes around the ring twice: it is reduced, then copied. 2(P-1) messages, 2n(P-1)/P elements a rank.

    The steps are numbered from `first` on.

    Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """
    # All receives are posted at the start, so that no message waits at its sender. The second receive of a chunk cannot
    # overwrite it too early: the reduced chunk arrives only after this rank has sent its own partial sum of it.
    size, rank = lane.size, lane.rank
    chunks = _chunks(x, size)
    last = size - 1
    before, after = (rank - 1) % size, (rank + 1) % size
    receives = [lane.post(before, first + step, chunks[(rank - step - 1) % size], combine) for step in range(last)]
    receives += [lane.post(before, first + last + step, chunks[(rank - step) % size]) for step in range(last)]
    for step, receive in enumerate(receives):
        outgoing = (rank - step) % size if step < last else (rank + 1 - (step - last)) % size
        await lane.send(after, first + step, chunks[outgoing])
        await lane.wait(receive)


async def rings(lane: Lane, x: Array, combine: Combine) -> None:
    """A ring for each half of `x`, at the same time: while a rank waits for one half, the other one fills the wire."""
    halves, steps = _chunks(x, 2), 2 * (lane.size - 1)
    await asyncio.gather(*(ring(lane, half, combine, turn * steps) for turn, half in enumerate(halves)))


# -- one root ------------------------------------------------------------------------------------


async def scattered_broadcast(lane: Lane, x: Array, root: int) -> None:
    """Copy the root's `x` to every rank: scatter, and allgather around the ring."""
    chunks = _chunks(x, lane.size)
    if lane.rank == root:
        for rank in range(lane.size):
            if rank != root:
                await lane.send(rank, 0, chunks[rank])
    else:
        await lane.recv(root, 0, chunks[lane.rank])
    await ring_allgather(lane, chunks)


async def tree_broadcast(lane: Lane, x: Array, root: int, radix: int = 2) -> None:
    """Copy the root's `x` to every rank, down a k-nomial tree.

    Ranks are numbered from the root. The parent of a number is that number with its lowest nonzero digit, in base
    `radix`, set to 0.
    """
    relative = (lane.rank - root) % lane.size
    if relative:
        await lane.recv((root + _parent(relative, lane.size, radix)) % lane.size, 0, x)
    for child in children(relative, lane.size, radix):
        await lane.send((root + child) % lane.size, 0, x)


async def tree_reduce(lane: Lane, total: Array, combine: Combine, root: int, radix: int = 2) -> None:
    """Reduce into the root's `total`, up the tree of `tree_broadcast`. Elsewhere `total` gets that of the subtree."""
    relative = (lane.rank - root) % lane.size
    # Children are combined in a fixed order, not in that of their arrival, so that the bits do not depend on timing.
    for child in reversed(children(relative, lane.size, radix)):
        await lane.recv((root + child) % lane.size, 0, total, combine)
    if relative:
        await lane.send((root + _parent(relative, lane.size, radix)) % lane.size, 0, total)


def _span(relative: int, size: int, radix: int) -> int:
    """The size of the full subtree of `relative`: the power of `radix` at the lowest nonzero digit of `relative`."""
    span = 1
    while span < size and not relative // span % radix:
        span *= radix
    return span


def _parent(relative: int, size: int, radix: int) -> int:
    span = _span(relative, size, radix)
    return relative - relative // span % radix * span


@functools.lru_cache(maxsize=1 << 12)
def children(relative: int, size: int, radix: int) -> tuple[int, ...]:
    """The children of `relative` in a k-nomial tree with root 0: the one with the largest subtree first."""
    span, step = _span(relative, size, radix), 1
    nearest_first: list[int] = []
    while step < span:
        nearest_first += [relative + digit * step for digit in range(1, radix) if relative + digit * step < size]
        step *= radix
    return tuple(nearest_first[::-1])


async def scattered_reduce(lane: Lane, total: Array, combine: Combine, root: int) -> None:
    """Reduce into the root's `total`: reduce-scatter, and gather. Elsewhere `total` is used up."""
    chunks = _chunks(total, lane.size)
    shard = chunks[lane.rank]
    await reduce_scatter(lane, chunks, shard, combine)
    await gather(lane, shard, chunks, root)


async def gather(lane: Lane, mine: Array, blocks: Sequence[Array], root: int) -> None:
    """Collect every rank's `mine` in the root's `blocks`; elsewhere `blocks` is not used."""
    if lane.rank != root:
        await lane.send(root, 0, mine)
        return
    receives = [lane.post(rank, 0, blocks[rank]) for rank in range(lane.size) if rank != root]
    if blocks[root] is not mine:
        blocks[root][...] = mine
    for receive in receives:
        await lane.wait(receive)


async def scatter(lane: Lane, blocks: Sequence[Array], mine: Array, root: int) -> None:
    """Copy the root's `blocks[rank]` into `mine` of each rank; elsewhere `blocks` is not used."""
    if lane.rank != root:
        await lane.recv(root, 0, mine)
        return
    for rank in range(lane.size):
        if rank != root:
            await lane.send(rank, 0, blocks[rank])
    mine[...] = blocks[root]


# -- every rank a part ---------------------------------------------------------------------------


async def reduce_scatter(lane: Lane, chunks: Sequence[Array], shard: Array, combine: Combine) -> None:
    """Reduce `chunks[rank]` of all ranks into the `shard` of each rank: pairwise, n(P-1)/P elements a rank.

    On entry `shard` holds this rank's own chunk. `chunks[lane.rank]` is not used; the other chunks are only read.
    """
    for step in range(1, lane.size):
        dest, source = (lane.rank + step) % lane.size, (lane.rank - step) % lane.size
        await lane.exchange(dest, chunks[dest], source, shard, step, combine)


async def bruck_allgather(lane: Lane, blocks: Sequence[Array]) -> None:
    """Fill `blocks`, given this rank's own, by ceil(log2 P) messages.

    The algorithm of Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in
    multiport message-passing systems", TPDS 1997.
    """
    size, rank = lane.size, lane.rank
    order = [(rank + turn) % size for turn in range(size)]
    ends = [0, *accumulate(blocks[source].size for source in order)]
    turned = np.empty(ends[-1], blocks[0].dtype)  # block i is that of rank + i, so that each message is contiguous
    turned[: ends[1]] = blocks[rank]
    have = 1
    while have < size:
        more = min(have, size - have)
        dest, source = (rank - have) % size, (rank + have) % size
        await lane.exchange(dest, turned[: ends[more]], source, turned[ends[have] : ends[have + more]], step=have)
        have += more
    for turn, source in enumerate(order):
        blocks[source][...] = turned[ends[turn] : ends[turn + 1]]


async def ring_allgather(lane: Lane, blocks: Sequence[Array]) -> None:
    """Fill `blocks`, one for each rank and of any sizes, given this rank's own: P-1 messages a rank."""
    size, rank = lane.size, lane.rank
    receives = [lane.post((rank - 1) % size, step, blocks[(rank - step - 1) % size]) for step in range(size - 1)]
    for step, receive in enumerate(receives):
        await lane.send((rank + 1) % size, step, blocks[(rank - step) % size])
        await lane.wait(receive)


async def alltoall(lane: Lane, outgoing: Sequence[Array], incoming: Sequence[Array]) -> None:
    """Copy `outgoing[dest]` into `incoming[rank]` of each `dest`: pairwise, P-1 messages a rank.

    In step s rank r sends to rank r + s, so that the ranks do not all send to the same one at once: the destination
    rotation of Ok-Topk, section 3.1.1. The messages of a few sources are on their way at once.
    """
    size, rank = lane.size, lane.rank
    incoming[rank][...] = outgoing[rank]
    sources = [(rank - step) % size for step in range(size)]
    receives: list[Receive] = []
    for step in range(1, size + ALLTOALL_AHEAD):
        if step < size:
            dest = (rank + step) % size
            receives.append(lane.post(sources[step], step, incoming[sources[step]]))
            await lane.send(dest, step, outgoing[dest])
        if 0 < (due := step - ALLTOALL_AHEAD + 1) < size:
            await lane.wait(receives[due - 1])
