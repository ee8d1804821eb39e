"""The collectives over a lane, each by the algorithm that suits its size, and the tables that say which.

The choice by the length of the array follows Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 2005.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from asyncoll.algorithms.dense import on_lane
from asyncoll.algorithms.seam.ways import Shape, Way, begin
from asyncoll.runtime.group import Lane
from asyncoll.tensors.reductions import Array, Combine
from asyncoll.transport.wire import SEGMENT_BYTES

# Where the bandwidth of the ring and of Rabenseifner's algorithm begins to outweigh their extra messages. Measured with
# `asyncoll bench allreduce` over ZeroMQ; see benchmarks/history.
DOUBLING_MAX_BYTES = 1 << 18
RABENSEIFNER_MAX_BYTES = 1 << 21
# Segments of each message of a ring above which there are two rings, whose messages are still longer than a segment.
# With one ring of 25 MB between two hosts, links of 1 Gbit/s stood still for 4 % of the time.
RING_MAX_SEGMENTS = 2
# Beside other allreduces that are under way, a ring suits shorter arrays if its messages have this size: others fill
# the wire meanwhile. Four hosts of two ranks, links of 1 Gbit/s, 25 MB: 329 ms, with Rabenseifner's algorithm 349.
RING_MIN_MESSAGE_BYTES = 1 << 18
# The same if the ranks are no power of two: Rabenseifner's algorithm would carry the array of each extra rank twice.
RING_MIN_UNEVEN_MESSAGE_BYTES = 1 << 14
# Up to this size, broadcast, reduce and allgather use the algorithm with the fewest messages.
SMALL_MAX_BYTES = 1 << 20

# A tiny array goes through a tree of radix 8: 4 messages a rank on average, sent or received, instead of 2 log2 P, and
# fewer one after another. Each message takes processor time from the computation of its ranks. Measured: see
# benchmarks/history.
TREE_MIN_RANKS = 5
TREE_MAX_BYTES = 1 << 15  # enough for the participation list of a round, 16 bytes a rank, of two thousand ranks


async def allreduce(lane: Lane, x: Array, combine: Combine, whole: int = 0) -> None:
    """Reduce `x` in place at every rank, by the algorithm that suits its size.

    `whole`: the bytes of all arrays that pass the same link in calls of other lanes at the same time, if there are any.
    So much decides whether the link carries an array once in each step, or its pieces once altogether.
    """
    if lane.size > 1:
        shape = Shape(x.nbytes, link_nbytes=whole, has_parts=x.size >= lane.size)
        await begin(allreduce_ways(lane.size, beside=whole > 0), shape, lane, x, combine)


def broadcast(lane: Lane, x: Array, root: int, whole: int = 0) -> Coroutine[Any, Any, None]:
    """Copy the root's `x` to every rank. `whole`: as in `allreduce`."""
    return begin(broadcast_ways(lane.size), Shape(x.nbytes, link_nbytes=whole), lane, x, root)


def reduce(lane: Lane, x: Array, combine: Combine, root: int, whole: int = 0) -> Coroutine[Any, Any, None]:
    """Reduce into the root's `x`; elsewhere `x` keeps its value. `whole`: as in `allreduce`."""
    total = x if lane.rank == root else x.copy()
    shape = Shape(x.nbytes, link_nbytes=whole, has_parts=x.size >= lane.size)
    return begin(REDUCE_WAYS, shape, lane, total, combine, root)


def allgather(lane: Lane, blocks: Sequence[Array]) -> Coroutine[Any, Any, None]:
    """Fill `blocks`, one for each rank and of any sizes, given this rank's own."""
    return begin(ALLGATHER_WAYS, Shape(sum(block.nbytes for block in blocks)), lane, blocks)


@functools.cache
def allreduce_ways(ranks: int, *, beside: bool) -> tuple[Way[Coroutine[Any, Any, None]], ...]:
    """`beside`: others pass the same link at the same time."""
    way = partial(Way[Coroutine[Any, Any, None]], "allreduce")
    rabenseifner_max = min(RABENSEIFNER_MAX_BYTES, _ring_min(ranks) - 1) if beside else RABENSEIFNER_MAX_BYTES
    ways = [
        way("tree of radix 8", on_lane.tree, "the fewest messages a rank", up_to=TREE_MAX_BYTES, counts_link=True),
        way("recursive doubling", on_lane.recursive_doubling, "few steps", up_to=DOUBLING_MAX_BYTES, counts_link=True),
        way(
            "Rabenseifner",
            on_lane.rabenseifner,
            "the fewest bytes, in log2 P steps",
            up_to=rabenseifner_max,
            is_cut=True,
        ),
        way("ring", on_lane.ring, "the fewest bytes", up_to=RING_MAX_SEGMENTS * ranks * SEGMENT_BYTES, is_cut=True),
        way("two rings", on_lane.rings, "each fills the pauses of the other", is_cut=True),
        way("recursive doubling", on_lane.recursive_doubling, "fewer elements than ranks"),
    ]
    return tuple(ways if ranks >= TREE_MIN_RANKS else ways[1:])


def _ring_min(ranks: int) -> int:
    """The bytes from which on a ring suits an array, beside other allreduces."""
    is_uneven = ranks & (ranks - 1)
    return ranks * (RING_MIN_UNEVEN_MESSAGE_BYTES if is_uneven else RING_MIN_MESSAGE_BYTES)


@functools.cache
def broadcast_ways(ranks: int) -> tuple[Way[Coroutine[Any, Any, None]], ...]:
    way = partial(Way[Coroutine[Any, Any, None]], "broadcast")
    tree = partial(way, "binomial tree", on_lane.tree_broadcast, "few steps")
    if ranks == 2:
        return (tree(),)
    return (
        tree(up_to=SMALL_MAX_BYTES, counts_link=True),
        way("scatter, ring", on_lane.scattered_broadcast, "the root sends each byte twice"),
    )


REDUCE_WAYS: tuple[Way[Coroutine[Any, Any, None]], ...] = (
    Way("reduce", "binomial tree", on_lane.tree_reduce, "few steps", up_to=SMALL_MAX_BYTES, counts_link=True),
    Way("reduce", "reduce-scatter, gather", on_lane.scattered_reduce, "each rank reduces a part", is_cut=True),
    Way("reduce", "binomial tree", on_lane.tree_reduce, "fewer elements than ranks"),
)
ALLGATHER_WAYS: tuple[Way[Coroutine[Any, Any, None]], ...] = (
    Way("allgather", "Bruck", on_lane.bruck_allgather, "ceil(log2 P) messages", up_to=SMALL_MAX_BYTES),
    Way("allgather", "ring", on_lane.ring_allgather, "no copy"),
)
