"""The cells of a `RoundRecord` and of its `BlockTable`, and the arithmetic on them.

The compiled core is generated from this module (`hatch_build.py`), which imports nothing but the standard library. A
function here is one expression of integers that are not negative.
"""

from __future__ import annotations

from typing import NamedTuple


class Head(NamedTuple):
    """The cells of the round as a whole."""

    closed: int  # 1: the communicator has failed, and no rank opens a round any more
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
    round: int  # this and the next four: this rank's `Kept` of the running round, until it is published
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


HEAD_CELLS, ROW_CELLS, KEPT_CELLS = (len(kind._fields) for kind in (Head, RankCells, Kept))
COLUMN = RankCells(*range(ROW_CELLS))  # of the table of all rows
KEPT = Kept(*range(KEPT_CELLS))  # of the tables of kept results

# Instead of a block.
NONE = 0  # no memory
LENT = -1  # the memory of a caller that waits

FREE, MADE, TABLE_HEAD = range(3)  # cells of the head of the table: the number of free blocks, and of all blocks
BITMAP_BITS = 63  # of a bitmap in one cell: all but the sign

# The cells of an `Engine`, which are in the memory of its process: the round that the next call aims at; the number of
# calls whose contribution was not in their result; and from LAGS on the number of calls that were given a round so many
# rounds after their aim.
AIM, STALE, LAGS = range(3)
ENGINE_CELLS = 64

CHUNK_BYTES = 1 << 17  # one rank reduces so much at a time
HELPED = 4  # a round of more chunks wakes sleeping ranks to reduce some of them
BEGINNINGS = 64  # rounds whose time of beginning is kept


def is_synchronous(number: int, every: int, offset: int) -> bool:
    """Whether round `number` waits for every rank: every so many do, of rounds that a program counts from `offset`."""
    return every > 0 and (number + offset) % every == 0


def ranks_needed(ranks: int, size: int, synchronous: bool) -> int:
    """How many ranks have to have arrived, or be gone, before a round may begin: so many, unless it waits for all."""
    return size if synchronous else ranks


def needs_drawn(drawn: bool, synchronous: bool) -> bool:
    """Whether one of them has to be drawn for the round. Then a late call of one that is drawn may open it, too."""
    return drawn and not synchronous


def are_enough(arrived: int, size: int) -> bool:
    """Whether so many ranks that wait are enough for a late call to open their round: at least half of all."""
    return 2 * arrived >= size


def first_missed(aim: int, latest: int, history: int) -> int:
    """The oldest round that a call is told of as missed, if it aims at round `aim`, and `latest` is the newest of them.

    A call tells of the results of the last `history` rounds before its own, and skips the older ones.
    """
    return max(aim, latest + 1 - history)


def oldest_whole(latest: int, history: int) -> int:
    """The oldest round whose result is whole: that of the round before may have lost its blocks."""
    return max(1, latest - history)


# A control block has in order: whether each rank is gone, the head (`OperationRegistry` sets these, and `closed`), a
# row for each rank, the results of the rounds that are kept, when the last rounds have begun, how many rounds had how
# many contributors, and the table of blocks. These functions return the first cell of each.


def rows_at(size: int) -> int:
    return size + HEAD_CELLS


def results_at(size: int) -> int:
    return rows_at(size) + size * ROW_CELLS


def kept_rounds(history: int) -> int:
    """How many rounds there are results of: the newest one, those of history, and one that is being written."""
    return history + 2


def beginnings_at(size: int, history: int) -> int:
    return results_at(size) + kept_rounds(history) * size * KEPT_CELLS


def counts_at(size: int, history: int) -> int:
    return beginnings_at(size, history) + BEGINNINGS


def table_at(size: int, history: int, contributors: int) -> int:
    """So many ranks may contribute to a result."""
    return counts_at(size, history) + contributors + 1


# A table of blocks begins at cell `table` and has room for `limit` blocks: the stack of the free ones; the address, the
# keepers and the weight of each; the bitmap of its contributors. Blocks count from 1, so the cell of block 0 would be
# the one before the first.


def stack_at(table: int) -> int:
    return table + TABLE_HEAD


def block_addresses_at(table: int, limit: int) -> int:
    return stack_at(table) + limit - 1


def keepers_at(table: int, limit: int) -> int:
    return block_addresses_at(table, limit) + limit


def weights_at(table: int, limit: int) -> int:
    return keepers_at(table, limit) + limit


def bitmap_words(contributors: int) -> int:
    """The number of cells of a bitmap."""
    return (contributors + BITMAP_BITS - 1) // BITMAP_BITS


def bitmaps_at(table: int, limit: int, contributors: int) -> int:
    return weights_at(table, limit) + limit + 1 - bitmap_words(contributors)


def table_cells(limit: int, contributors: int) -> int:
    """How many cells the table has."""
    return TABLE_HEAD + (4 + bitmap_words(contributors)) * limit
