"""The common steps of the sparse allreduces: how the ranks exchange parts of a vector.

They are written once, over `Collectives`, so each algorithm goes by message or through shared memory. If the ranks are
on several hosts, those of one host add up their parts first, in its memory: an element that several of them give
crosses the network once. Its bits depend on the placement then, and are the same at every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from asyncoll.algorithms.dense.on_lane import bounds
from asyncoll.algorithms.dense.two_level import TwoLevelCall
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.sparse.parts import SparsePacking, join, nothing, sum_parts
from asyncoll.algorithms.sparse.selection import Part
from asyncoll.errors import NonFiniteError
from asyncoll.tensors.reductions import Array

# -- sizes and refusals --------------------------------------------------------------------------


async def tell_sizes(collectives: Collectives, size: int) -> Array:
    """Every rank's `size`, as int64. A negative one is a `refusal`: then every rank raises NonFiniteError."""
    sizes = np.empty(collectives.size, np.int64)
    sizes[collectives.rank] = size
    await collectives.allgather(list(sizes.reshape(-1, 1)))
    check_refusals(sizes)
    return sizes


def refusal(rank: int) -> int:
    """The number that `rank` sends in place of the size of a part that is not finite."""
    return -1 - rank


def check_refusals(sizes: Array) -> None:
    """Raise NonFiniteError, with the ranks that have refused, if any of `sizes` is a refusal."""
    refused = sizes[sizes < 0]
    if refused.size:
        raise NonFiniteError(tuple(sorted({-1 - int(size) for size in refused})))


# -- regions -------------------------------------------------------------------------------------


def owners(collectives: Collectives) -> tuple[int, ...]:
    """The ranks that have a region of the vector, ascending: all, or on several hosts the leaders of all hosts."""
    if isinstance(collectives, TwoLevelCall):
        hosts = collectives.hosts
        return tuple(sorted(rank for ranks in hosts.ranks for rank in ranks[: hosts.leaders]))
    return tuple(range(collectives.size))


def branches(collectives: Collectives) -> list[tuple[Sequence[int], int]]:
    """The levels of a reduction along binary trees to rank 0: the ranks of a tree, and the distance of two that meet.

    On several hosts there is a tree on each host first, and one of their first ranks then. Each rank is told of all
    levels, and may be in none of a level's trees.
    """
    if not isinstance(collectives, TwoLevelCall):
        return [(range(collectives.size), distance) for distance in _doubling(collectives.size)]
    hosts = collectives.hosts
    within = [(hosts.here, distance) for distance in _doubling(max(map(len, hosts.ranks)))]
    firsts = [ranks[0] for ranks in hosts.ranks]
    return within + [(firsts, distance) for distance in _doubling(len(firsts))]


def _doubling(end: int) -> Iterator[int]:
    """The powers of 2 below `end`."""
    return (1 << level for level in range((end - 1).bit_length()))


async def deal_parts(collectives: Collectives, given: Part, edges: Array) -> Part:
    """Give each owner the elements in its region. Returns the sum of the parts for this rank's region.

    The region of owner i lies from `edges[i]` to below `edges[i + 1]`. Parts are added in the order of ranks, on
    several hosts those of each host first. A rank that owns no region gets an empty sum. This is "split and reduce"
    (Li, Hoefler, PPoPP 2022, section 3.1.1).
    """
    regions = dict(zip(owners(collectives), pairwise(edges.tolist()), strict=True))
    if not isinstance(collectives, TwoLevelCall):
        parts = await _alltoall(collectives, _split(given, regions.values()))
        return sum_parts(parts, *regions[collectives.rank])
    hosts, between = collectives.hosts, collectives.between
    slices = dict(zip(regions, _split(given, regions.values()), strict=True))
    of_teams = [join([slices[rank] for rank in sorted(team)]) for team in hosts.teams]
    idle = [nothing(given)] * (len(hosts.here) - hosts.leaders)
    parts = await collectives.on_host(lambda within: _alltoall(within, [*of_teams, *idle]))
    here = sum_parts(parts, 0, int(edges[-1]))
    if not between:
        return here
    parts = await _alltoall(between[0], _split(here, [regions[rank] for rank in hosts.team]))
    return sum_parts(parts, *regions[collectives.rank])


async def sum_on_host(collectives: Collectives, given: Part, count: int) -> Part:
    """A share of the sum over the ranks of this host, of vectors of `count` elements; `given` on one level.

    The shares of the ranks of a host make up its sum.
    """
    if not isinstance(collectives, TwoLevelCall):
        return given
    regions = [(start, stop) for start, stop in bounds(count, len(collectives.hosts.here))]
    parts = await collectives.on_host(lambda within: _alltoall(within, _split(given, regions)))
    return sum_parts(parts, *regions[collectives.hosts.place])


def _split(part: Part, regions: Iterable[tuple[int, int]]) -> list[Part]:
    """The elements of `part` in each region."""
    # Edges of the dtype of the indices, which would be copied otherwise. It holds the last index, perhaps not the end.
    before = (np.array(list(regions), np.int64) - 1).astype(part.indices.dtype)
    return [part.slice(start, stop) for start, stop in np.searchsorted(part.indices, before, side="right").tolist()]


# -- exchanges -----------------------------------------------------------------------------------


async def _alltoall(among: Collectives, outgoing: Sequence[Part]) -> list[Part]:
    """Give each of the ranks its part of `outgoing`. Returns what each of them has given to this rank."""
    counts = np.array([[part.size] for part in outgoing], np.int64)
    coming = np.empty_like(counts)
    await among.alltoall(list(counts), list(coming))
    packing = SparsePacking(outgoing[0])
    incoming = [packing.room(int(count)) for count in coming.flat]
    await among.alltoall([packing.pack(part) for part in outgoing], incoming)
    return [packing.unpack(raw) for raw in incoming]


async def gather_parts(collectives: Collectives, mine: Part, sizes: Array) -> list[Part]:
    """Every rank's part, given the sizes of all parts."""
    packing = SparsePacking(mine)
    blocks = [packing.room(int(size)) for size in sizes]
    blocks[collectives.rank][...] = packing.pack(mine)
    await collectives.allgather(blocks)
    return [packing.unpack(block) for block in blocks]
