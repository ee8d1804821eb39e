"""The rounds of one operation on a control block: staged contributions, the running round, and the kept results.

Methods are called under the control block's lock, unless their docstrings say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.block_table import BlockTable
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.policies import check_rank
from asyncoll.algorithms.rounds.round_cells import (
    BEGINNINGS,
    CHUNK_BYTES,
    COLUMN,
    HELPED,
    KEPT,
    KEPT_CELLS,
    LENT,
    NONE,
    ROW_CELLS,
    Head,
    Kept,
    RankCells,
    beginnings_at,
    counts_at,
    kept_rounds,
    results_at,
    rows_at,
    table_at,
    table_cells,
)
from asyncoll.algorithms.rounds.unpublished import unpublished, whole_results
from asyncoll.arguments import digest
from asyncoll.runtime.group import Group
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import Array
from asyncoll.transport import Arena

# So much is copied under the lock, in about a microsecond. To acquire the lock again takes longer.
SHORT_BYTES = 1 << 14

Groups = Sequence[tuple[tuple[int, ...], "slice | Array"]]


class StagedCells(NamedTuple):
    """The staged contribution of a rank."""

    block: int  # NONE, or LENT
    address: int  # 0 if there is none
    ticket: int  # the number of the rank's newest contribution
    weight: float


class Chunk(NamedTuple):
    """A piece of a round's work: reduce `nbytes` of each source."""

    into: int  # address of the result
    sources: tuple[int, ...]  # addresses, in order of ranks
    part: int  # index in the layout
    nbytes: int


class Memory(NamedTuple):
    """The memory in which the ranks of a group meet."""

    arena: Arena
    registry: OperationRegistry
    group: Group


class RoundRecord:
    """The rounds of one operation, as one of the ranks sees them."""

    def __init__(
        self,
        memory: Memory,
        operation: Operation,
        layout: BlockLayout,
        reduce: Callable[[int, Sequence[int]], None],
        trace: Trace,
        *,
        contributors: int = 0,
        more: int = 0,
    ) -> None:
        """Raises DisagreementError if the ranks of the host know the operation as another. Not under the lock.

        `reduce(into, sources)` reduces whole blocks, given by their addresses. So many ranks may contribute to a
        result: by default those of the group. `more` is the number of cells from `more` on that a subclass uses.
        """
        arena, registry, group = memory
        self._operation = operation
        self._trace = trace
        self._rank = group.rank
        self.size = size = group.size
        self._contributors = contributors or size
        self._drawn: tuple[int, Sequence[int]] = (0, ())  # for the round of that number
        self._layout = layout
        self._cores = arena.cores
        self._keeps = operation.group_size > 0  # contributions stay, and replace each other
        self._rows, self._results_at = rows_at(size), results_at(size)
        self._head = Head(*range(size, self._rows))
        ends = range(self._rows, self._results_at + ROW_CELLS, ROW_CELLS)
        self._row = [RankCells(*range(first, end)) for first, end in pairwise(ends)]  # of each rank
        self._mine = self._row[group.rank]
        self._history = history = operation.history
        self._kept_rounds = kept_rounds(history)
        self._begun = beginnings_at(size, history)
        self._counts = counts_at(size, history)
        blocks = table_at(size, history, self._contributors)
        # The blocks of one rank: one that it fills, one staged, one in a round, one granted to it, and as many to read
        # as results are kept. It may hold as many again for the call after one that was cancelled. Between hosts there
        # are, of each group, what the host has given to two rounds, and a copy for each attempt.
        limit = size * (3 * history + 16) + 16
        self.more = blocks + table_cells(limit, self._contributors)
        context = digest(group.communicator, *self._context(operation))
        self.control_block = registry.enter(context, operation.fingerprint(), self.more + more)
        self.cells = self.control_block.cells
        self._reals = self.cells.cast("B").cast("d")  # the same cells as float64
        self.blocks = BlockTable(arena, self.control_block, blocks, limit, layout.nbytes, self._contributors)
        # The same cells as arrays: with many ranks, a loop over all cells of their rows would be most of a round.
        self._gone = np.frombuffer(self.cells[:size], np.int64)
        self._table = np.frombuffer(self.cells[self._rows : self._results_at], np.int64).reshape(size, ROW_CELLS)
        kept = np.frombuffer(self.cells[self._results_at : self._begun], np.int64)
        self._results = kept.reshape(self._kept_rounds, size, KEPT_CELLS)  # of round n, at n modulo their number
        self._all = [(tuple(range(size)), slice(None))]
        self._chunks_of_block = len(self._chunks(0, ()))
        # The rank that opens a short round reduces it, still under the lock: that takes less time than to acquire it
        # again. Ranks that share a thread do not, so that others run while a round does.
        self._reduce = reduce
        is_short = layout.nbytes <= SHORT_BYTES and size * layout.nbytes <= CHUNK_BYTES
        self.reduces_at_once = is_short and not self.control_block.interleaved

    @staticmethod
    def _context(operation: Operation) -> tuple[str | int, ...]:
        """What the context of the control block is made of, beside the communicator."""
        return "rounds", operation.name

    @property
    def latest(self) -> int:
        """The newest round that is over."""
        return self.cells[self._head.latest]

    @property
    def running(self) -> int:
        """The round that runs; 0 if none does."""
        return self.cells[self._head.running]

    # -- contributions ----------------------------------------------------------------------------

    def staged(self) -> StagedCells:
        """The staged contribution of this rank."""
        cells, mine = self.cells, self._mine
        return StagedCells(cells[mine.staged], cells[mine.staged_at], cells[mine.ticket], self._reals[mine.weight])

    def put(self, block: int, address: int, weight: float) -> int:
        """Stage this contribution instead of the staged one. Returns its number, the ticket."""
        cells, mine = self.cells, self._mine
        self.blocks.drop(cells[mine.staged])
        cells[mine.staged], cells[mine.staged_at] = block, address
        cells[mine.ticket] += 1
        self._reals[mine.weight] = weight
        return cells[mine.ticket]

    def replace(self, block: int, address: int) -> None:
        """The staged contribution, which was lent, lies in `block` now. Its ticket stays."""
        self.cells[self._mine.staged], self.cells[self._mine.staged_at] = block, address

    def unpublished(self) -> list[int]:
        """The addresses of this rank's contributions that are in no published round, as of `unpublished.unpublished`.

        Also without the lock, if that is lost: no rank changes the cells then.
        """
        head, row = ([self.cells[cell] for cell in cells] for cells in (self._head, self._mine))
        return unpublished(Head(*head), RankCells(*row), self.published)

    @property
    def published(self) -> int:
        """The ticket of this rank's newest contribution in a published round."""
        return int(self._results[self.latest % self._kept_rounds, self._rank, KEPT.taken])

    def taken_of_ranks(self, number: int) -> list[int]:
        """How many contributions of each rank are in round `number`, which is kept, and in those before it."""
        taken: list[int] = self._results[number % self._kept_rounds, :, KEPT.taken].tolist()
        return taken

    def last_round(self, rank: int) -> int:
        """The newest round that `rank` has arrived at, or has a contribution in, as far as is known; 0: none.

        Without the lock, which a rank that died may hold.
        """
        latest = self.latest
        before, newest = (self._results[number % self._kept_rounds, rank] for number in (latest - 1, latest))
        is_in_newest = newest[KEPT.taken] > before[KEPT.taken]
        return max(self.cells[self._row[rank].here], latest if is_in_newest else 0)

    def is_being_read(self) -> bool:
        """Whether the running round reads memory that this rank's caller has lent."""
        return self.running > 0 and self.cells[self._mine.source] == LENT

    # -- opening a round --------------------------------------------------------------------------

    def come(self, number: int, now_ns: int) -> int:
        """This rank's caller waits for round `number`. Opens the round if it may be opened.

        Returns how many free blocks the round needs if there are too few, otherwise 0.
        """
        self.cells[self._mine.here] = self.cells[self._mine.waits_for] = number
        return self._open(now_ns) if self.latest < number and self.may_open() else 0

    def may_open(self) -> bool:
        """Whether the next round, at which this rank's caller has arrived, may be opened."""
        return self._is_free() and rules.may_open(self._operation, self)

    def late_call_opens(self) -> bool:
        """Whether a late call of this rank opens the next round."""
        return self._is_free() and rules.late_call_opens(self._operation, self, self._rank)

    def _is_free(self) -> bool:
        """Whether the rule may let a round begin: none runs, and the communicator has not failed.

        After a failure a caller that would open a round waits instead, until it hears of the failure, and raises.
        """
        return not self.running and not self.cells[self._head.closed]

    # -- the last round ---------------------------------------------------------------------------

    def join(self) -> None:
        """This rank makes no more calls of this operation: mark it as gone, and wake the callers that wait for it."""
        self.cells[self._rank] = 1
        self.control_block.wake()

    def may_close(self) -> bool:
        """Whether the last round may be opened: no rank makes calls any more, and contributions are still staged."""
        return self._is_free() and self._is_idle() and bool(self._table[:, COLUMN.staged].any())

    def is_over(self) -> bool:
        """Whether no rank makes calls any more, and nothing is staged."""
        return self._is_idle() and not self._table[:, COLUMN.staged].any()

    def _is_idle(self) -> bool:
        return not self.running and bool(self._gone.all())

    def close(self, now_ns: int) -> int:
        """Open the last round if it may be opened. Returns how many free blocks it needs if there are too few."""
        return self._open(now_ns) if self.may_close() else 0

    # As a `rules.RoundView` of the next round. The ranks' rows are read as arrays, without a loop over all ranks:

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
    def arrived(self) -> int:
        return int(np.count_nonzero(self._table[:, COLUMN.here] == self.latest + 1))

    def count(self) -> int:
        return int(np.count_nonzero((self._table[:, COLUMN.here] == self.latest + 1) | (self._gone > 0)))

    def has(self, rank: int) -> bool:
        check_rank(rank, self.size)
        return self.cells[self._row[rank].here] == self.latest + 1 or self.cells[rank] > 0

    def _open(self, now_ns: int) -> int:
        """Open the next round and take all staged contributions.

        Returns 0. If there are too few free blocks, it changes nothing and returns how many the round needs.
        """
        number, missing = self.number, self._start(now_ns)
        if not missing:
            self._trace.opened(self._operation, number)
        return missing

    def _start(self, now_ns: int) -> int:
        """Take the staged contributions. Ranks reduce them together; short ones are reduced and published here.

        Returns 0, or how many free blocks the round needs if there are too few.
        """
        cells, head, table = self.cells, self._head, self._table
        number = cells[head.latest] + 1
        groups = self._groups_of(number)
        if self.blocks.free_count() < len(groups):
            return len(groups)
        cells[head.running] = number
        cells[head.claimed] = cells[head.done] = 0
        cells[self._begun + number % BEGINNINGS] = now_ns
        table[:, COLUMN.source : COLUMN.source_at + 1] = table[:, COLUMN.staged : COLUMN.staged_at + 1]
        chunks, absent = 0, int(np.count_nonzero(self._gone))
        for ranks, index in groups:
            taken, contributors, weight = [], 0, 0.0
            for rank, block in zip(ranks, table[index, COLUMN.source].tolist(), strict=True):
                if block == NONE:
                    continue
                taken.append(block)
                contributors |= 1 << rank
                row = self._row[rank]
                weight += self._reals[row.weight]
                cells[row.taken] = cells[row.ticket]
                if self._keeps:  # it stays staged for later rounds too, so the block has another keeper
                    self.blocks.keep(block)
                else:  # the round is its keeper now; no other round can take it
                    cells[row.staged], cells[row.staged_at] = NONE, 0
            dest = NONE
            if len(taken) == 1 and self._may_be_result(taken[0]):  # nothing to reduce
                dest = taken[0]
                self.blocks.keep(dest)
            elif taken:  # lent memory is never the result: other ranks read that when the caller has its memory back
                dest = self.blocks.take()
                if self.reduces_at_once:
                    self._reduce(self.blocks.address(dest), [self.blocks.address(block) for block in taken])
                else:
                    chunks += self._chunks_of_block
            self.blocks.sign(dest, contributors, weight)
            table[index, COLUMN.round : COLUMN.taken] = number, dest, len(taken), absent
        cells[head.chunks] = chunks
        # There will be no last chunk, whose end publishes a round.
        if not chunks:
            self._publish()
        elif chunks > HELPED:
            self.control_block.wake(min(chunks, self._cores) - 1)
        return 0

    def _may_be_result(self, block: int) -> bool:
        """Whether a contribution that is alone is the result of its round."""
        return block != LENT

    def _forget(self, number: int) -> None:
        """Round `number` is published: drop the results of the round that history keeps no longer."""
        results = self._results[(number + 1) % self._kept_rounds]  # where the next round writes its own
        for block in set(results[:, KEPT.block].tolist()):
            self.blocks.drop(block)

    def _groups_of(self, number: int) -> Groups:
        """The groups of a round, each with the index of its rows."""
        if not self._keeps:
            return self._all
        return [(ranks, np.array(ranks)) for ranks in self._operation.groups(number, self.size)]

    # -- carrying it out --------------------------------------------------------------------------

    def work(self, number: int) -> list[Chunk]:
        """The chunks of round `number`, which runs, in the same order at all ranks. Without the lock.

        They are valid if a later `claim` of that round finds one: until then its cells have not changed.
        """
        chunks: list[Chunk] = []
        for ranks, index in self._groups_of(number):
            blocks, addresses = self._table[index, COLUMN.source : COLUMN.source_at + 1].T.tolist()
            sources = tuple([address for block, address in zip(blocks, addresses, strict=True) if block != NONE])
            dest = self.cells[self._row[ranks[0]].block]
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
        """Whether the running round has a chunk that no rank has claimed. A hint without the lock."""
        head = self._head
        return self.running > 0 and self.cells[head.claimed] < self.cells[head.chunks]

    def claim(self, number: int) -> int:
        """The index in `work` of a chunk for this rank to reduce; -1 if there is none, or round `number` is over."""
        cells, claimed = self.cells, self._head.claimed
        if self.running != number or not self.is_help_wanted():
            return -1
        cells[claimed] += 1
        return cells[claimed] - 1

    def done(self) -> None:
        """A chunk is reduced. The last one publishes the round."""
        cells, head = self.cells, self._head
        cells[head.done] += 1
        if cells[head.done] == cells[head.chunks]:
            self._publish()

    def _publish(self) -> None:
        """The running round is over: keep its result, grant it to the callers that wait, and wake them."""
        cells, table, blocks, number = self.cells, self._table, self.blocks, self.running
        results = self._results[number % self._kept_rounds]
        results[:] = table[:, COLUMN.round : COLUMN.taken + 1]
        for ranks, _ in self._groups_of(number):
            cells[self._counts + cells[self._row[ranks[0]].active]] += 1
        for rank, waits_for in enumerate(table[:, COLUMN.waits_for].tolist()):
            if waits_for == number:
                table[rank, COLUMN.granted : COLUMN.granted_taken + 1] = results[rank]
                blocks.keep(cells[self._row[rank].block])
        cells[self._head.latest] = number
        cells[self._head.running] = 0
        for block in table[:, COLUMN.source].tolist():
            blocks.drop(block)
        self._forget(number)
        self.control_block.wake()

    # -- results ----------------------------------------------------------------------------------

    def leave(self, number: int, came_ns: int, now_ns: int) -> Kept | None:
        """This rank's caller, which has waited for round `number` since `came_ns`, waits no longer.

        Returns the result that was granted to it, whose block is kept until the caller of this method drops it; None if
        the round is not over, or was over before its caller waited for it. Counts the time until the round has begun,
        or until `now_ns` if it has not. If the round has not begun, this rank still counts as arrived at it.
        """
        cells, mine = self.cells, self._mine
        has_begun = max(self.latest, self.running) >= number
        until_ns = cells[self._begun + number % BEGINNINGS] if has_begun else now_ns
        cells[mine.waited_ns] += max(0, until_ns - came_ns)
        granted = Kept(*cells[mine.granted : mine.granted_taken + 1].tolist())
        cells[mine.waits_for] = cells[mine.granted] = 0
        return granted if granted.number == number else None

    def keep(self, first: int, last: int) -> list[Kept]:
        """The results of rounds `first` to `last` that history still has, oldest first, as this rank has them.

        Their blocks are kept until the caller of this method drops them.
        """
        found = self.kept(first, last)
        for kept in found:
            self.blocks.keep(kept.block)
        return found

    def kept(self, first: int, last: int) -> list[Kept]:
        """The results of rounds `first` to `last` that history still has. Their blocks are not kept for the caller."""
        numbers = range(max(first, whole_results(self.latest, self._history).start), last + 1)
        return [Kept(*self._results[number % self._kept_rounds, self._rank].tolist()) for number in numbers]

    # -- times ------------------------------------------------------------------------------------

    def count_late(self, aim: int, now_ns: int) -> None:
        """This rank's caller, which aims at round `aim`, arrives at `now_ns`. Counts how late that is."""
        newest = max(self.latest, self.running)
        if newest >= aim:
            # A caller more than 64 rounds late is counted from the oldest beginning that is still kept.
            begun = self.cells[self._begun + max(aim, newest - BEGINNINGS + 1) % BEGINNINGS]
            self.cells[self._mine.late_ns] += max(0, now_ns - begun)

    def totals(self) -> tuple[dict[int, int], list[float], list[float]]:
        """Number of results by number of contributors; seconds that each rank has waited, and has been late."""
        counts = self.cells[self._counts : self._counts + self._contributors + 1].tolist()
        waited, late = ((self._table[:, which] / 1e9).tolist() for which in (COLUMN.waited_ns, COLUMN.late_ns))
        return {active: count for active, count in enumerate(counts) if count}, waited, late
