"""The cells of a `RoundRecord`, and how a contribution lies in a block. asyncoll/_core/rounds.h has the same in C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.tensors.reductions import Array, storage

_ALIGNED = 64  # bytes: a cache line


class Head(NamedTuple):
    """The cells of the round as a whole."""

    latest: int  # the newest round that is over
    running: int  # the round that runs; 0 if none does
    claimed: int  # chunks of it that a rank has begun to reduce
    done: int  # chunks of it that are reduced
    chunks: int  # all of them


class RankCells(NamedTuple):
    """The cells of one rank.

    Its own process writes `staged`, `staged_at`, `ticket`, `weight`, `here`, `waits_for` and the times, and clears
    `granted`. The rank that opens or publishes a round writes the others, and clears `staged` once the contribution is
    in `source`, or in a published round. `unpublished` tells what a rank leaves that dies in between.

    A caller that is cancelled while it waits has arrived nevertheless: `here` stays, because its contribution does. A
    result is granted to a waiting caller when the round is published. So the caller gets its own round, even if later
    rounds are over when it runs.
    """

    staged: int  # the block of the staged contribution; NONE, or LENT
    staged_at: int  # its address
    ticket: int  # the number of the newest contribution
    weight: int  # of the staged contribution; a float64
    source: int  # as `staged`: the contribution that the running round has taken
    source_at: int
    round: int  # the `Kept` that the running round is to have
    block: int
    active: int
    absent: int
    taken: int
    here: int  # the newest round that a caller of it has arrived at; 0: none
    waits_for: int  # that round as long as the caller waits for it; 0: none
    granted: int  # the `Kept` that was granted to its caller; 0: none
    granted_block: int
    granted_active: int
    granted_absent: int
    granted_taken: int
    waited_ns: int  # the time that its callers have waited for rounds to begin
    late_ns: int  # the time from the beginning of rounds until its callers arrived


class Kept(NamedTuple):
    """The cells of a kept result, as one rank has it."""

    number: int  # of its round
    block: int  # the result of the rank's group
    active: int  # the number of contributors
    absent: int  # the number of ranks that made no more calls when the round began
    taken: int  # the ticket of the rank's newest contribution when the round took the staged one


class StagedCells(NamedTuple):
    """The staged contribution of a rank."""

    block: int  # NONE, or LENT
    address: int  # 0 if there is none
    ticket: int  # the number of the rank's newest contribution
    weight: float


COLUMN = RankCells(*range(len(RankCells._fields)))  # of the table of all rows
KEPT = Kept(*range(len(Kept._fields)))  # of the tables of kept results


Groups = Sequence[tuple[tuple[int, ...], "slice | Array"]]


class Chunk(NamedTuple):
    """A piece of a round's work: reduce `nbytes` of each source."""

    into: int  # address of the result
    sources: tuple[int, ...]  # addresses, in order of ranks
    part: int  # index in the layout
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a contribution lies in a block."""

    offsets: tuple[int, ...]  # of its parts
    lengths: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, operation: Operation) -> BlockLayout:
        lengths = tuple(count * storage(dtype).itemsize for dtype, count in operation.layout)
        ends = tuple(accumulate((-(-length // _ALIGNED) * _ALIGNED for length in lengths), initial=0))
        return cls(ends[:-1], lengths, max(ends[-1], _ALIGNED))
