"""The rounds of one operation on a control block: what is staged, the round that runs, and the results that are kept.

Methods are called under the control block's lock, except where they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.block_table import NONE, BlockTable
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.arguments import digest
from asyncoll.tensors.reductions import Array, storage
from asyncoll.transport import Arena

CHUNK_BYTES = 1 << 17  # that one rank reduces at a time
_HELPED = 4  # a round of more chunks wakes those who sleep, to reduce it with them
_BEGINNINGS = 64  # rounds whose beginning is remembered
_ALIGNED = 64  # bytes

LENT = -1  # instead of a block: the memory of a caller who waits

# Cells: whether each rank is gone (`OperationRegistry` sets them), these, a row for each rank, and tables by round.
_LATEST, _RUNNING, _CLAIMED, _DONE, _CHUNKS = range(5)
_HEAD = 5
# A row. Staged: its block, its address, the number of the newest contribution. Taken by the round that runs: likewise.
# The block for the result of the rank's group. The round that its caller waits for, and the record that was granted to
# it: round, and a record's cells. How long its callers have waited, and how late they came.
_STAGED, _STAGED_AT, _TICKET, _SOURCE, _SOURCE_AT, _TAKEN, _DEST, _HERE = range(8)
_GRANT, _WAITED_NS, _LATE_NS, _ROW = 8, 12, 13, 14
_RECORD = 3  # for each rank: the block of its group's result, the contributors in it, its own newest one in it


Parts = Sequence[tuple[tuple[int, ...], "slice | Array"]]


class Kept(NamedTuple):
    """The record of a result, as one rank has it. Its block is kept until it is dropped."""

    number: int
    block: int
    active: int
    taken: int


class Chunk(NamedTuple):
    """A piece of a round's work."""

    into: int
    sources: tuple[int, ...]
    part: int  # of the layout
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a contribution lies in a block."""

    offsets: tuple[int, ...]  # of its parts
    lengths: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, operation: Operation) -> Layout:
        lengths = tuple(count * storage(dtype).itemsize for dtype, count in operation.layout)
        ends = tuple(accumulate((-(-length // _ALIGNED) * _ALIGNED for length in lengths), initial=0))
        return cls(ends[:-1], lengths, max(ends[-1], _ALIGNED))


class RoundRecord:
    """As one of the ranks sees it."""

    def __init__(
        self,
        arena: Arena,
        registry: OperationRegistry,
        operation: Operation,
        communicator: int,
        size: int,
        rank: int,
        layout: Layout,
    ) -> None:
        """Raises DisagreementError if the ranks of the host know the operation as another. Not under the lock."""
        self._operation = operation
        self._rank = rank
        self._drawn: tuple[int, Sequence[int]] = (0, ())  # for the round of that number
        self._layout = layout
        self.size = size
        self._cores = arena.cores
        self._keeps = operation.group_size > 0  # contributions stay, and replace each other
        self._everybody = tuple(range(size))
        self._head = size
        self._rows = self._head + _HEAD
        self._mine = self._rows + _ROW * rank
        self._records = self._rows + _ROW * size
        self._kept_rounds = operation.history + 1
        self._stride = 1 + _RECORD * size
        self._begun = self._records + self._kept_rounds * self._stride
        self._counts = self._begun + _BEGINNINGS
        blocks = self._counts + size + 1
        # A rank may fill one, have one staged, one in a round and one granted to it, and read as many as are kept. It
        # may hold as many again for the call after one that was cancelled.
        limit = size * (3 * operation.history + 12) + 16
        context = digest(communicator, "rounds", operation.name)
        self.control_block = registry.enter(context, operation.fingerprint(), blocks + BlockTable.cells(limit))
        self.cells = self.control_block.cells
        self.blocks = BlockTable(arena, self.control_block, blocks, limit, layout.nbytes)
        # The same cells as arrays: with many ranks, a loop over all cells of their rows would be most of a round.
        self._gone = np.frombuffer(self.cells[:size], np.int64)
        self._table = np.frombuffer(self.cells[self._rows : self._records], np.int64).reshape(size, _ROW)
        self._results = np.frombuffer(self.cells[self._records : self._begun], np.int64).reshape(-1, self._stride)
        self._all = [(self._everybody, slice(None))]
        self._chunks_of_block = len(self._chunks(0, ()))

    @property
    def latest(self) -> int:
        """The newest round that is over."""
        return self.cells[self._head + _LATEST]

    @property
    def running(self) -> int:
        """The round that runs; 0 if none does."""
        return self.cells[self._head + _RUNNING]

    # -- contributions ----------------------------------------------------------------------------

    def staged(self) -> tuple[int, int, int]:
        """The block and the address of what this rank has staged, NONE and 0 if nothing; its newest contribution."""
        cells, mine = self.cells, self._mine
        return cells[mine + _STAGED], cells[mine + _STAGED_AT], cells[mine + _TICKET]

    def put(self, block: int, address: int) -> int:
        """Stage this instead of what is staged; returns the contribution's number."""
        cells, mine = self.cells, self._mine
        self._drop(cells[mine + _STAGED])
        cells[mine + _STAGED], cells[mine + _STAGED_AT] = block, address
        cells[mine + _TICKET] += 1
        return cells[mine + _TICKET]

    def replace(self, block: int, address: int) -> None:
        """The same contribution lies here now."""
        self.cells[self._mine + _STAGED], self.cells[self._mine + _STAGED_AT] = block, address

    def is_being_read(self) -> bool:
        """Whether a round that runs reads this rank's caller's own memory."""
        return self.running > 0 and self.cells[self._mine + _SOURCE] == LENT

    # -- opening a round --------------------------------------------------------------------------

    def come(self, number: int) -> None:
        """This rank's caller waits for round `number`; 0: for none."""
        self.cells[self._mine + _HERE] = number

    def may_open(self) -> bool:
        """Whether the next round may be opened."""
        return not self.running and rules.may_open(self._operation, self)

    def late_call_opens(self) -> bool:
        """Whether a late call of this rank opens the next round."""
        return not self.running and rules.late_call_opens(self._operation, self, self._rank)

    # As a `rules.RoundView` of the next round:

    @property
    def number(self) -> int:
        return self.latest + 1

    @property
    def drawn(self) -> Sequence[int]:
        number = self.latest + 1
        if self._drawn[0] != number:
            self._drawn = number, self._operation.drawn(number, self.size)
        return self._drawn[1]

    @property
    def has_caller(self) -> bool:
        return True  # only a caller that waits for the round asks whether it may open it

    @property
    def waiting(self) -> int:
        return int(np.count_nonzero(self._table[:, _HERE] == self.latest + 1))

    def count(self) -> int:
        return int(np.count_nonzero((self._table[:, _HERE] == self.latest + 1) | (self._gone > 0)))

    def has(self, rank: int) -> bool:
        return self.cells[self._rows + _ROW * rank + _HERE] == self.latest + 1 or self.cells[rank] > 0

    def open(self, now_ns: int) -> int:
        """Open the next round and take what is staged. Returns how many free blocks it needs, if there are too few."""
        number = self.latest + 1
        parts = self._parts(number)
        if self.blocks.free_count() < len(parts):
            return len(parts)
        cells, head, table = self.cells, self._head, self._table
        cells[head + _RUNNING] = number
        cells[head + _CLAIMED] = cells[head + _DONE] = 0
        cells[self._begun + number % _BEGINNINGS] = now_ns
        table[:, _SOURCE : _SOURCE_AT + 1] = table[:, _STAGED : _STAGED_AT + 1]
        chunks = 0
        for places, index in parts:
            staged = table[index, _SOURCE].tolist()
            taken = [self._rows + _ROW * place for place, block in zip(places, staged, strict=True) if block != NONE]
            for row in taken:
                self._take(row)
            dest = self._destination(taken)
            table[index, _DEST] = dest
            if taken and dest != cells[taken[0] + _SOURCE]:
                chunks += self._chunks_of_block
        cells[head + _CHUNKS] = chunks
        if not chunks:
            self._publish()
        elif chunks > _HELPED:
            self.control_block.wake(min(chunks, self._cores) - 1)
        return 0

    def _parts(self, number: int) -> Parts:
        """The groups of a round, each with the index of its rows."""
        if not self._keeps or self._operation.is_synchronous(number):
            return self._all
        return [(places, np.array(places)) for places in self._operation.groups(number, self.size)]

    def _take(self, row: int) -> None:
        """What is staged there is a source of the round that runs."""
        cells = self.cells
        cells[row + _TAKEN] = cells[row + _TICKET]
        if self._keeps:
            self.blocks.keep(cells[row + _STAGED])
        else:
            cells[row + _STAGED], cells[row + _STAGED_AT] = NONE, 0

    def _destination(self, taken: list[int]) -> int:
        """The block for the result: that of a contribution which is alone."""
        if not taken:
            return NONE
        alone = self.cells[taken[0] + _SOURCE]
        if len(taken) > 1 or alone == LENT:
            return self.blocks.take()
        self.blocks.keep(alone)
        return alone

    # -- carrying it out --------------------------------------------------------------------------

    def work(self) -> list[Chunk]:
        """What is to be done in the round that runs, the same at all ranks. It stands until that is over."""
        chunks: list[Chunk] = []
        for places, index in self._parts(self.running):
            blocks, addresses = self._table[index, _SOURCE].tolist(), self._table[index, _SOURCE_AT].tolist()
            sources = tuple([address for block, address in zip(blocks, addresses, strict=True) if block != NONE])
            dest = self.cells[self._rows + _ROW * places[0] + _DEST]
            if sources and dest not in blocks:
                chunks += self._chunks(self.blocks.address(dest), sources)
        return chunks

    def _chunks(self, into: int, sources: tuple[int, ...]) -> list[Chunk]:
        layout = self._layout
        return [
            Chunk(into + at, tuple(source + at for source in sources), part, min(CHUNK_BYTES, offset + length - at))
            for part, (offset, length) in enumerate(zip(layout.offsets, layout.lengths, strict=True))
            for at in range(offset, offset + length, CHUNK_BYTES)
        ]

    def is_help_wanted(self) -> bool:
        """Whether there is something to be claimed."""
        head = self._head
        return self.running > 0 and self.cells[head + _CLAIMED] < self.cells[head + _CHUNKS]

    def claim(self, number: int) -> int:
        """The place in `work` of a chunk for this rank to reduce; -1 if there is none, or round `number` is over."""
        cells, claimed = self.cells, self._head + _CLAIMED
        if self.running != number or not self.is_help_wanted():
            return -1
        cells[claimed] += 1
        return cells[claimed] - 1

    def done(self) -> None:
        """A chunk is reduced. The last one publishes the round."""
        cells, head = self.cells, self._head
        cells[head + _DONE] += 1
        if cells[head + _DONE] == cells[head + _CHUNKS]:
            self._publish()

    def _publish(self) -> None:
        cells, table, number = self.cells, self._table, self.running
        sources = table[:, _SOURCE].tolist()
        for block in sources:
            self._drop(block)
        record = self._results[number % self._kept_rounds]
        for block in set(record[1::_RECORD].tolist()):  # the results of an older round are kept no longer
            self._drop(block)
        record[0] = number
        columns = record[1:].reshape(self.size, _RECORD)
        columns[:, 0], columns[:, 2] = table[:, _DEST], table[:, _TAKEN]
        for places, index in self._parts(number):
            active = sum([sources[place] != NONE for place in places])
            columns[index, 1] = active
            cells[self._counts + active] += 1
        for place, waits_for in enumerate(table[:, _HERE].tolist()):
            if waits_for == number:
                table[place, _GRANT] = number
                table[place, _GRANT + 1 : _WAITED_NS] = columns[place]
                self.blocks.keep(cells[self._rows + _ROW * place + _DEST])
        cells[self._head + _LATEST], cells[self._head + _RUNNING] = number, 0
        self.control_block.wake()

    def _drop(self, block: int) -> None:
        if block > NONE:
            self.blocks.drop(block)

    # -- results ----------------------------------------------------------------------------------

    def granted(self, number: int) -> Kept | None:
        """What this rank's caller has waited for, and waits for no more; None if round `number` was over before."""
        cells, mine = self.cells, self._mine
        cells[mine + _HERE] = 0
        grant = cells[mine + _GRANT : mine + _GRANT + 4].tolist()
        cells[mine + _GRANT] = 0
        return Kept(*grant) if number and grant[0] == number else None

    def keep(self, first: int, last: int, rank: int) -> list[Kept]:
        """The results of rounds `first` to `last` that are still there, oldest first."""
        found = []
        for number in range(max(first, self.latest - self._kept_rounds + 1, 1), last + 1):
            record = self._records + number % self._kept_rounds * self._stride
            column = record + 1 + _RECORD * rank
            kept = Kept(number, *self.cells[column : column + _RECORD].tolist())
            self.blocks.keep(kept.block)
            found.append(kept)
        return found

    def drop(self, kept: Kept) -> None:
        self._drop(kept.block)

    # -- who waits for whom -----------------------------------------------------------------------

    def count_late(self, aim: int, now_ns: int) -> None:
        """This rank's caller, who aims at round `aim`, comes now."""
        newest = max(self.latest, self.running)
        if newest >= aim:
            begun = self.cells[self._begun + max(aim, newest - _BEGINNINGS + 1) % _BEGINNINGS]
            self.cells[self._mine + _LATE_NS] += max(0, now_ns - begun)

    def count_wait(self, number: int, since_ns: int, now_ns: int) -> None:
        """It has waited for the beginning of round `number`, or until now if that has not begun."""
        has_begun = max(self.latest, self.running) >= number
        until_ns = self.cells[self._begun + number % _BEGINNINGS] if has_begun else now_ns
        self.cells[self._mine + _WAITED_NS] += max(0, until_ns - since_ns)

    def totals(self) -> tuple[dict[int, int], list[float], list[float]]:
        """Results by number of contributors; seconds that each rank has waited, and has come late."""
        counts = self.cells[self._counts : self._counts + self.size + 1].tolist()
        waited, late = ((self._table[:, which] / 1e9).tolist() for which in (_WAITED_NS, _LATE_NS))
        return {active: count for active, count in enumerate(counts) if count}, waited, late
