"""Wait-avoiding rounds in shared memory: the rank that opens a round takes all staged contributions without asking.

A round is a shared object as in section 5.1.1 of Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced
training workloads in deep learning with partial collective operations", PPoPP 2020. A caller stages its contribution: a
block that it has filled, or its own registered memory. A rank that may open the round takes all staged contributions;
each can be taken once. The ranks whose callers wait reduce them, chunk by chunk. The rank that reduces the last chunk
publishes the result. A rank whose caller computes, or whose process is stopped, takes part nevertheless. When its
caller arrives, the result is there.

A staged block never changes, because a round may read it at any time without the lock. To add a contribution to a
staged one, a caller fills a new block, which replaces the old one unless a round has taken that meanwhile. Results do
not overwrite contributions either. A contribution that is alone in its round is the result itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.call_order import CallOrder
from asyncoll.algorithms.rounds.engine import Accounted, Delivery, Engine, Parts, Result, result_of
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.round_cells import LENT, NONE, Kept
from asyncoll.algorithms.rounds.round_record import Chunk, Memory, RoundRecord, StagedCells
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Contribution
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import combiner, reducer, storage
from asyncoll.transport.control_block import checkpoint, until

LENT_MIN_BYTES = 1 << 16  # copying less costs less than the check whether the memory is registered


@dataclass(slots=True)
class OneSidedCall:
    """The state of one call."""

    number: int  # the round that the call waits for; 0 if it is late, and waits for none
    came_ns: int
    missed: list[Kept]  # results of earlier rounds, kept for this call
    ticket: int = 0  # the number of its contribution, once that is staged
    kept: Kept | None = None  # the result that the call is given, once there is one


class Setting(NamedTuple):
    """What an operation in memory needs of its rank."""

    memory: Memory
    describe: Callable[[], str]  # the operation, for errors
    trace: Trace
    has_lost: Callable[[], bool]  # whether a rank is lost: that rank may never finish a chunk that it has claimed


class OneSidedRounds(Accounted):
    """A persistent operation at one rank, in memory.

    A call runs in its caller's thread or on the runtime's loop, and may change between them at each await. So two calls
    of one rank may run in two threads at the same time. Their common state is under the control block's lock, or is
    ordered as the comments say.
    """

    def __init__(self, setting: Setting, operation: Operation) -> None:
        """Raises DisagreementError if the ranks of the host know the operation as another."""
        self._memory, self.describe, self._trace, self._has_lost = setting
        arena, _, group = self._memory
        self.operation = operation
        self.arena = arena
        self._rank, self._size = group.rank, group.size
        self._keeps = operation.group_size > 0  # contributions stay, and replace each other
        self._layout = BlockLayout.of(operation)
        self._may_lend = not self._keeps and self._layout.nbytes >= LENT_MIN_BYTES
        self._rounds = self._record()
        self._control_block = self._rounds.control_block
        self._dtypes = [storage(dtype) for dtype, _ in operation.layout]
        self._reduces = [reducer(operation.op, dtype, arena.native) for dtype, _ in operation.layout]
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._views: dict[int, Parts] = {}  # of blocks, by address
        self._unused: deque[int] = deque()  # blocks of results that have been read, to be dropped under the next lock
        self._all_ranks = tuple(range(group.size))
        self._engine = Engine(operation)
        self._order = CallOrder()

    def _record(self) -> RoundRecord:
        return RoundRecord(self._memory, self.operation, self._layout, self._reduce_blocks, self._trace)

    def last_round(self, rank: int) -> int:
        return self._rounds.last_round(rank)

    @property
    def newest(self) -> int:
        return self._rounds.latest

    def taken(self, number: int) -> Sequence[int]:
        return self._rounds.taken_of_ranks(number)

    def kept(self, first: int, last: int) -> Sequence[Result]:
        # Without keepers of their own: no round ends any more, or the caller looks at none of them.
        return [self._result(kept) for kept in self._rounds.kept(first, last)]

    def is_idle(self) -> bool:
        """Whether no call is under way at this rank."""
        return self._order.is_idle()

    # -- a call -----------------------------------------------------------------------------------

    async def call(self, contribution: Contribution) -> Delivery:
        """Contribute when the calls before are over, and wait for the round that this call aims at.

        Cancelling the wait leaves the contribution in, and returns when no round uses the caller's memory. This rank
        still counts as arrived at that round, which any other caller that waits for it opens and reduces. The results
        stay where they are until `release`.
        """
        return await self._call(next(self._order.numbers), contribution)

    async def _call(self, turn: int, contribution: Contribution) -> Delivery:
        """Call number `turn` of this rank."""
        try:
            if not self._order.is_now(turn):
                await self._queue(turn, contribution)
            with self._control_block:
                call = self._begin(self._now_ns())
            try:
                if not (self._may_lend and call.number and self._lend(contribution, call)):
                    await self._put(contribution, call)
                if call.kept is None:
                    await self._take_part(call)
            except BaseException:
                self._drop_results(call)
                raise
            return self._deliver(call)
        except BaseException:
            self._order.end(turn)
            raise

    async def join(self) -> Delivery | None:
        """Contribute no more, and wait until no rank does. Ranks that have joined open the last round and reduce it."""
        turn, delivery = next(self._order.numbers), None
        try:
            if not self._order.is_now(turn):
                await self._order.wait(turn)
            delivery = await self._conclude()
            return delivery
        finally:
            # Otherwise `release` ends the call.
            if delivery is None:
                self._order.end(turn)

    async def _conclude(self) -> Delivery | None:
        rounds, engine = self._rounds, self._engine
        self._mark_joined()
        if self.operation.group_size:
            return None
        while not await self._close():
            await until(self._control_block, lambda: rounds.is_over() or self._is_work_left())
        with self._control_block:
            latest = rounds.latest
            if not engine.has_news(latest):
                return None
            kept = rounds.keep(min(engine.first_missed(latest - 1), latest), latest)
            ticket = rounds.staged().ticket
        return engine.tell(ticket, tuple(map(self._result, kept)))

    def _mark_joined(self) -> None:
        with self._control_block:
            self._rounds.join()

    def _is_work_left(self) -> bool:
        return self._rounds.is_help_wanted() or self._rounds.may_close()

    async def _close(self) -> bool:
        """Open the last round if all ranks have joined, and reduce chunks of it. Returns whether it is over."""
        rounds = self._rounds
        while True:
            with self._control_block:
                missing, is_over = rounds.close(self._now_ns()), rounds.is_over()
                running = rounds.running
            rounds.blocks.provide(missing)
            await self._help(running)
            if not missing:
                return is_over

    async def _queue(self, turn: int, contribution: Contribution) -> None:
        """Wait for turn `turn`. If that is cancelled, the contribution is staged without waiting for a round."""
        try:
            await self._order.wait(turn)
        except asyncio.CancelledError:
            await self._put(contribution, None)
            raise

    def _begin(self, came_ns: int) -> OneSidedCall:
        """Under the lock: decide whether this call waits for a round, and keep the results that it has missed."""
        rounds, engine = self._rounds, self._engine
        while self._unused:
            rounds.blocks.drop(self._unused.popleft())
        latest = rounds.latest
        number = engine.begin(latest, rounds.late_call_opens)
        rounds.count_late(engine.aim, came_ns)
        # A late call that opens a round waits for it. The missed results are kept now: the round may replace them.
        missed = rounds.keep(engine.first_missed(latest), latest) if number > engine.aim else []
        return OneSidedCall(number, came_ns, missed)

    def _come(self, call: OneSidedCall) -> int:
        """Under the lock: open the round of the call if this rank may, and note the result of the call if there is one.

        In one critical section with the swap that stages the contribution. Otherwise a round could take that and end
        before this caller is registered for its result, or a late call could be given a round after the one that has
        taken its contribution. Returns how many blocks have to be provided until the round can be opened.
        """
        rounds, missing = self._rounds, 0
        if call.number:
            now_ns = self._now_ns()
            missing = rounds.come(call.number, now_ns)
            if rounds.latest < call.number:
                return missing
            call.kept = rounds.leave(call.number, call.came_ns, now_ns)
        # The call is late, or its round was over before it came: it is given the newest result.
        if call.kept is None:
            for old in call.missed:
                rounds.blocks.drop(old.block)
            newest = rounds.latest
            *call.missed, call.kept = rounds.keep(self._engine.first_missed(newest - 1), newest)
        return missing

    async def _take_part(self, call: OneSidedCall) -> None:
        """Wait until the round is over. Open it if this rank may, and reduce chunks of it."""
        rounds = self._rounds
        try:
            while not await self._advance(call):
                await until(self._control_block, lambda: rounds.latest >= call.number or self._is_needed())
        except (Exception, asyncio.CancelledError):
            await self._give_up(call)
            raise

    async def _advance(self, call: OneSidedCall) -> bool:
        """Open the round if this rank may, and reduce chunks of it. Returns whether the call has a result."""
        rounds = self._rounds
        while call.kept is None:
            with self._control_block:
                missing = self._come(call)
                running = rounds.running
            if call.kept is None:
                # Outside the lock. Another rank may take the new blocks first, or open the round: the loop looks again.
                rounds.blocks.provide(missing)
                await self._help(running)
                if not missing:
                    return False
        return True

    def _is_needed(self) -> bool:
        return self._rounds.is_help_wanted() or self._rounds.may_open()

    async def _help(self, number: int) -> None:
        """Reduce chunks of round `number`, as long as there are any. 0: no round was running.

        A cancellation is raised only at the end, because there may be no other rank that could carry the round out.
        """
        if not number or not self._rounds.is_help_wanted():
            return
        interrupted: BaseException | None = None
        work = self._rounds.work(number)
        with self._control_block:
            index = self._rounds.claim(number)
        while index >= 0:
            interrupted = await self._pause() or interrupted
            # Without the lock: the claim gives this rank the chunk's part of the result, and the sources do not change.
            self._reduce(work[index])
            with self._control_block:
                self._rounds.done()
                index = self._rounds.claim(number)
        if interrupted is not None:
            raise interrupted

    async def _pause(self) -> BaseException | None:
        """Let other ranks run (`checkpoint`). Returns an exception, which the caller raises when its work is done."""
        try:
            await checkpoint(self._control_block)
        except BaseException as error:
            return error
        return None

    def _reduce(self, chunk: Chunk) -> None:
        dtype, view = self._dtypes[chunk.part], self.arena.view
        sources = [view(source, chunk.nbytes).view(dtype) for source in chunk.sources]
        self._reduces[chunk.part](view(chunk.into, chunk.nbytes).view(dtype), sources, 1)

    def _reduce_blocks(self, into: int, sources: Sequence[int]) -> None:
        """Reduce whole blocks, at these addresses, in order of ranks."""
        parts = zip(*map(self._parts, sources), strict=True)
        for reduce, result, arrays in zip(self._reduces, self._parts(into), parts, strict=True):
            reduce(result, arrays, 1)

    # -- contributing -----------------------------------------------------------------------------

    def _lend(self, contribution: Contribution, call: OneSidedCall) -> bool:
        """Stage the caller's own memory, if it is registered and the round that the caller waits for will take it.

        Only for a caller that waits: after its call the program may change or free the memory.
        """
        parts = contribution.lend()
        address = self.arena.locate(parts[0]) if parts is not None and len(parts) == 1 else None
        if address is None:
            return False
        contribution.scale_lent()
        rounds = self._rounds
        with self._control_block:
            # Since `_begin` a round may have begun, which does not take this contribution any more. And older staged
            # contributions have to be added up, in a block.
            if rounds.running or rounds.latest + 1 != call.number or rounds.staged().block != NONE:
                return False
            call.ticket = rounds.put(LENT, address, contribution.weight)
            self._come(call)
        return True

    async def _put(self, contribution: Contribution, call: OneSidedCall | None) -> None:
        """Stage the sum of `contribution` and the staged one, in a new block; in groups, `contribution` alone.

        `call` is None if the call was cancelled before its turn. A cancellation is raised only at the end: the
        contribution stays in.
        """
        rounds = self._rounds
        interrupted: BaseException | None = None
        block, before = self._new_block()
        address = rounds.blocks.address(block)
        parts = self._parts(address)
        # The block is filled without the lock, because a copy is too long to hold it. Meanwhile a round may take the
        # staged block. Then the sum would contribute it twice, so the block is filled again.
        ticket = 0
        while not ticket:
            weight = self._fill(parts, contribution, before)
            interrupted = await self._pause() or interrupted
            with self._control_block:
                now = rounds.staged()
                if self._keeps or now == before:
                    ticket = rounds.put(block, address, weight)
                    if call is not None:
                        call.ticket = ticket
                        self._come(call)
                before = now
        if interrupted is not None:
            if call is not None and call.number:
                # This rank has arrived, so the others may have to wait for it to open the round, and to reduce it.
                try:
                    await self._advance(call)
                finally:
                    await self._give_up(call)
            raise interrupted

    def _fill(self, parts: Parts, contribution: Contribution, staged: StagedCells) -> float:
        """Put the sum of `contribution` and the staged one into `parts`; in groups, `contribution` alone.

        Returns the weight of that.
        """
        contribution.read(parts)
        if staged.block == NONE or self._keeps:
            return contribution.weight
        for combine, part, before in zip(self._combines, parts, self._parts(staged.address), strict=True):
            combine(part, before)
        return contribution.weight + staged.weight

    def _parts(self, address: int) -> Parts:
        """The arrays at `address`. Made once: the same blocks, and the same lent arrays, come again and again."""
        parts = self._views.get(address)
        if parts is None:
            layout, view = self._layout, self.arena.view
            pieces = zip(layout.offsets, layout.lengths, self._dtypes, strict=True)
            parts = [view(address + offset, length).view(dtype) for offset, length, dtype in pieces]
            self._views[address] = parts
        return parts

    def _new_block(self) -> tuple[int, StagedCells]:
        """A free block to fill, and the staged contribution as of `RoundRecord.staged`."""
        rounds = self._rounds
        while True:
            with self._control_block:
                block, staged = rounds.blocks.take(), rounds.staged()
            if block != NONE:
                return block, staged
            rounds.blocks.provide(1)

    def _drop_results(self, call: OneSidedCall) -> None:
        """The caller is given none of the results that are kept for it."""
        self._drop([old.block for old in (*call.missed, call.kept) if old is not None])

    def _drop(self, blocks: Sequence[int]) -> None:
        """This rank does not use these blocks any more."""
        if blocks:
            with self._control_block:
                for block in blocks:
                    self._rounds.blocks.drop(block)

    # -- giving up --------------------------------------------------------------------------------

    async def _give_up(self, call: OneSidedCall) -> None:
        """The caller stops waiting: return when no round uses its memory any more."""
        rounds = self._rounds
        with self._control_block:
            if call.kept is None:
                call.kept = rounds.leave(call.number, call.came_ns, self._now_ns())
        # First replace the lent memory, so that no later round takes it. Then wait for a round that has taken it.
        self._move_in()
        # A further cancellation does not end the wait, only a lost rank does: the round may never end then.
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await until(self._control_block, lambda: not rounds.is_being_read() or self._has_lost())
                return

    def _move_in(self) -> None:
        """Copy a lent contribution into a block, and stage that instead, unless a round has taken it meanwhile."""
        rounds = self._rounds
        block, before = self._new_block()
        if before.block == LENT:
            own, length, view = rounds.blocks.address(block), self._layout.lengths[0], self.arena.view
            view(own, length)[:] = view(before.address, length)
            with self._control_block:
                if rounds.staged() == before:
                    rounds.replace(block, own)
                    return
        self._drop([block])

    # -- results ----------------------------------------------------------------------------------

    def _deliver(self, call: OneSidedCall) -> Delivery:
        assert call.kept is not None
        missed = self._with_owed(call.missed, call.kept.number)
        return self._engine.deliver(call.ticket, tuple(map(self._result, (*missed, call.kept))))

    def _with_owed(self, missed: Sequence[Kept], number: int) -> Sequence[Kept]:
        """`missed` of the call that is given round `number`, after the results of an answer taken back as it waited."""
        engine = self._engine
        aim = engine.aim
        if not engine.step_back():
            return missed
        with self._control_block:
            return [*self._rounds.keep(engine.first_missed(number - 1), aim - 1), *missed]

    def _result(self, kept: Kept) -> Result:
        """The result that `kept` records. Its parts are the block itself, not a copy."""
        number, block, _, absent, taken = kept
        operation, blocks = self.operation, self._rounds.blocks
        members = operation.members(number, self._size, self._rank) if self._keeps else self._all_ranks
        synchronous = operation.sync_every > 0 and operation.is_synchronous(number) and not absent
        if not block:
            return Result(number, [], (), members, taken, synchronous, 0.0)
        parts, ranks = self._parts(blocks.address(block)), _ranks_of(blocks.contributors(block))
        fields = (number, parts, ranks, members, taken, synchronous, blocks.weight(block), False, False, False, block)
        return result_of(fields)

    def release(self, delivery: Delivery) -> None:
        """The results have been read, and the call is over.

        Not before: the next call, perhaps in another thread, has to know whether this answer has a receiver.
        """
        self._order.end_now()
        blocks = [result.block for result in delivery.results if result.block]
        if self._layout.nbytes < LENT_MIN_BYTES:
            self._unused.extend(blocks)  # small: dropped by the next call, which saves taking the lock now
        else:
            self._drop(blocks)

    def statistics(self) -> OperationStatistics:
        with self._control_block:
            return self._engine.statistics(self._rounds.latest, *self._rounds.totals())

    def _now_ns(self) -> int:
        return int(self.arena.now_s() * 1e9)


@lru_cache(maxsize=256)
def _ranks_of(bitmap: int) -> tuple[int, ...]:
    """The ranks of a bitmap, which has bit r for rank r, in order."""
    return tuple([rank for rank in range(bitmap.bit_length()) if bitmap >> rank & 1])
