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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from asyncoll.algorithms.rounds import rules
from asyncoll.algorithms.rounds.block_table import NONE
from asyncoll.algorithms.rounds.engine import Engine
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.operation_registry import OperationRegistry
from asyncoll.algorithms.rounds.round_record import LENT, Chunk, Kept, Layout, RoundRecord
from asyncoll.algorithms.rounds.tally import OperationStatistics, Tally
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Delivery, Parts, Result
from asyncoll.errors import AsyncollError
from asyncoll.runtime.group import Group
from asyncoll.tensors.reductions import combiner, reducer, storage
from asyncoll.transport import Arena
from asyncoll.transport.control_block import Turn, checkpoint, turn_of, until

LENT_MIN_BYTES = 1 << 16  # copying less costs less than the check whether the memory is registered


@dataclass(slots=True)
class _Call:
    """The state of one call."""

    aim: int
    number: int  # the round that the call waits for; 0 if it is late, and waits for none
    came_ns: int
    missed: list[Kept]  # results of earlier rounds, kept for this call since its arrival
    ticket: int = 0  # the number of its contribution, once that is staged
    is_over: bool = False  # whether round `number` is over
    kept: Kept | None = None  # the result of that round; None if it was over before the call had arrived


@dataclass(frozen=True, slots=True)
class HeldDelivery(Delivery):
    """A delivery whose results lie in blocks, which are kept until it is released."""

    kept: tuple[Kept, ...] = ()


class OneSidedRounds:
    """A persistent operation at one rank, in memory.

    A call runs in its caller's thread or on the runtime's loop, and may change between them at each await. So two calls
    of one rank may run in two threads at the same time. Their common state is under the control block's lock, or is
    ordered as the comments say.
    """

    def __init__(
        self,
        arena: Arena,
        registry: OperationRegistry,
        group: Group,
        operation: Operation,
        describe: Callable[[], str],
        has_lost: Callable[[], bool],
    ) -> None:
        """Raises DisagreementError if the ranks of the host know the operation as another.

        `has_lost` says whether a rank is lost: that rank may never finish a chunk that it has claimed.
        """
        self.operation = operation
        self.describe = describe
        self._arena = arena
        self._has_lost = has_lost
        self._rank, self._size = group.rank, group.size
        self._keeps = operation.group_size > 0  # contributions stay, and replace each other
        self._layout = Layout.of(operation)
        self._rounds = RoundRecord(arena, registry, operation, group.communicator, group.size, group.rank, self._layout)
        self._control_block = self._rounds.control_block
        self._dtypes = [storage(dtype) for dtype, _ in operation.layout]
        self._reduces = [reducer(operation.op, dtype) for dtype, _ in operation.layout]
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._views: dict[int, Parts] = {}  # of blocks, by address
        self._tally = Tally(group.size)
        self._unread: deque[Kept] = deque()  # results that have been read, to be dropped under the next lock
        self._everybody = tuple(range(group.size))
        self._engine: Engine[Kept] = Engine(operation.history)
        self._calls = 0  # the number of calls begun
        self._turn = 0  # the number of the call whose turn it is
        self._over: set[int] = set()  # calls that ended before their turn
        self._turns: dict[int, Turn] = {}  # by call: those that wait for their turn

    # -- a call -----------------------------------------------------------------------------------

    async def call(self, contribution: Contribution) -> HeldDelivery:
        """Contribute when the calls before are over, and wait for the round that this call aims at.

        Cancelling the wait leaves the contribution in, and returns when no round uses the caller's memory. The results
        stay where they are until `release`.
        """
        turn = self._calls
        self._calls += 1
        try:
            if turn != self._turn:
                await self._queue(turn, contribution)
            return await self._call(contribution)
        finally:
            self._over.add(turn)
            self._end_turn(turn)

    async def _queue(self, turn: int, contribution: Contribution) -> None:
        """Wait for turn `turn`. If that is cancelled, the contribution is staged without waiting for a round."""
        mine = self._turns[turn] = Turn()
        try:
            # Compared after the entry is made: the call before may end in another thread. It either finds the entry or
            # has changed `_turn` before this line.
            if self._turn != turn:
                await turn_of(mine)
        except asyncio.CancelledError:
            await self._put(contribution, _Call(0, 0, 0, []))
            raise
        finally:
            self._turns.pop(turn, None)

    def _end_turn(self, turn: int) -> None:
        """Call `turn` is over. If it had the turn, the next call gets it. Two threads may do this at the same time."""
        if turn != self._turn:
            return
        following = turn
        while following in self._over:
            self._over.discard(following)
            following += 1
        self._turn = following
        # Again, after `_turn` is set: a call that ended just before did not have the turn, so it has passed nothing on.
        if following in self._over:
            self._end_turn(following)
        elif (waiting := self._turns.pop(following, None)) is not None:
            waiting.set()

    async def _call(self, contribution: Contribution) -> HeldDelivery:
        """The call, when it has its turn."""
        call = self._begin()
        try:
            if not self._lend(contribution, call):
                await self._put(contribution, call)
            if call.number and not call.is_over:
                await self._take_part(call)
        except BaseException:
            self._drop(call.missed)
            raise
        return self._deliver(call)

    def _begin(self) -> _Call:
        """Decide whether this call waits for a round, and keep the results that it has missed."""
        rounds, came_ns = self._rounds, self._now_ns()
        with self._control_block:
            while self._unread:
                rounds.drop(self._unread.popleft())
            latest = rounds.latest
            aim, number = self._engine.begin(latest, rounds.late_call_opens)
            rounds.count_late(aim, came_ns)
            missed: list[Kept] = []
            # A late call that opens a round waits for it. The missed results are kept now: the round may replace them.
            if number > aim:
                missed = rounds.keep(self._engine.first_missed(aim, latest), latest, self._rank)
            return _Call(aim, number, came_ns, missed)

    def _arrive(self, call: _Call) -> None:
        """Under the lock: the contribution is staged, and its caller waits from now on, if it waits for a round.

        In one critical section with the staging. Otherwise a round could take the contribution and end before this
        caller is registered for its result.
        """
        if call.number:
            self._rounds.come(call.number)
            self._open(call)

    def _open(self, call: _Call) -> int:
        """Under the lock: open the round if this rank may, and note in `call` whether it is over.

        Returns how many free blocks the round needs if there are too few, otherwise 0.
        """
        rounds, missing = self._rounds, 0
        if rounds.latest < call.number and rounds.may_open():
            missing = rounds.open(self._now_ns())
        if rounds.latest >= call.number:
            rounds.count_wait(call.number, call.came_ns, self._now_ns())
            call.kept = rounds.granted(call.number)
            call.is_over = True
        return missing

    async def _take_part(self, call: _Call) -> None:
        """Wait until the round is over. Open it if this rank may, and reduce chunks of it."""
        rounds = self._rounds
        try:
            while True:
                with self._control_block:
                    missing = self._open(call)
                    running = rounds.running
                    work = rounds.work() if rounds.is_help_wanted() and not call.is_over else []
                if call.is_over:
                    return
                # Outside the lock. Another rank may take the new blocks first, or open the round: the loop looks again.
                rounds.blocks.provide(missing)
                await self._help(running, work)
                if not missing:
                    await until(self._control_block, lambda: rounds.latest >= call.number or self._is_needed())
        except (Exception, asyncio.CancelledError):
            await self._give_up(call)
            raise

    def _is_needed(self) -> bool:
        return self._rounds.is_help_wanted() or self._rounds.may_open()

    async def _help(self, number: int, work: Sequence[Chunk]) -> None:
        """Reduce chunks of round `number`, as long as there are any.

        A cancellation is raised only at the end, because there may be no other rank that could carry the round out.
        """
        interrupted: BaseException | None = None
        while work:
            with self._control_block:
                place = self._rounds.claim(number)
            if place < 0:
                break
            interrupted = await self._outlast(checkpoint(self._control_block)) or interrupted
            # Without the lock: the claim gives this rank the chunk's part of the result, and the sources do not change.
            self._reduce(work[place])
            with self._control_block:
                self._rounds.done()
        if interrupted is not None:
            raise interrupted

    async def _outlast(self, pause: Awaitable[None]) -> BaseException | None:
        """The exception that `pause` has raised, if any: the caller raises it when the work is done."""
        try:
            await pause
        except BaseException as error:
            return error
        return None

    def _reduce(self, chunk: Chunk) -> None:
        dtype, view = self._dtypes[chunk.part], self._arena.view
        sources = [view(source, chunk.nbytes).view(dtype) for source in chunk.sources]
        self._reduces[chunk.part](view(chunk.into, chunk.nbytes).view(dtype), sources, 1)

    # -- contributing -----------------------------------------------------------------------------

    def _lend(self, contribution: Contribution, call: _Call) -> bool:
        """Stage the caller's own memory, if it is registered and the round that the caller waits for will take it.

        Only a caller that waits lends memory: after its call the program may change or free it.
        """
        if not call.number or self._keeps or self._layout.nbytes < LENT_MIN_BYTES:
            return False
        parts = contribution.lend()
        address = self._arena.locate(parts[0]) if parts is not None and len(parts) == 1 else None
        if address is None:
            return False
        rounds = self._rounds
        with self._control_block:
            # Since `_begin` a round may have begun, which does not take this contribution any more. And older staged
            # contributions have to be added up, in a block.
            if rounds.running or rounds.latest + 1 != call.number or rounds.staged()[0] != NONE:
                return False
            call.ticket = rounds.put(LENT, address)
            self._arrive(call)
        return True

    async def _put(self, contribution: Contribution, call: _Call) -> None:
        """Stage the sum of `contribution` and the staged one, in a new block; in groups, `contribution` alone.

        A cancellation is raised only at the end: the contribution stays in.
        """
        rounds = self._rounds
        interrupted: BaseException | None = None
        block, before = self._new_block()
        # The block is filled without the lock, because a copy is too long to hold it. Meanwhile a round may take the
        # staged block. Then the sum would contribute it twice, so the block is filled again.
        while not call.ticket:
            self._fill(block, contribution, 0 if self._keeps else before[1])
            interrupted = await self._outlast(checkpoint(self._control_block)) or interrupted
            with self._control_block:
                if self._keeps or rounds.staged() == before:
                    call.ticket = rounds.put(block, rounds.blocks.address(block))
                    self._arrive(call)
                before = rounds.staged()
        if interrupted is not None:
            if call.number:
                await self._give_up(call)
            raise interrupted

    def _fill(self, block: int, contribution: Contribution, older: int) -> None:
        """Copy `contribution` into `block`, and add the one at address `older`, unless that is 0."""
        parts = self._parts(self._rounds.blocks.address(block))
        contribution.read(parts)
        if older:
            for combine, part, staged in zip(self._combines, parts, self._parts(older), strict=True):
                combine(part, staged)

    def _parts(self, address: int) -> Parts:
        """The arrays of the block at `address`. Made once: blocks belong to this operation and never move."""
        parts = self._views.get(address)
        if parts is None:
            layout, view = self._layout, self._arena.view
            places = zip(layout.offsets, layout.lengths, self._dtypes, strict=True)
            parts = [view(address + offset, length).view(dtype) for offset, length, dtype in places]
            self._views[address] = parts
        return parts

    def _new_block(self) -> tuple[int, tuple[int, int, int]]:
        """A free block to fill, and the staged contribution as of `RoundRecord.staged`."""
        rounds = self._rounds
        while True:
            with self._control_block:
                block, staged = rounds.blocks.take(), rounds.staged()
            if block != NONE:
                return block, staged
            rounds.blocks.provide(1)

    def _drop_block(self, block: int) -> None:
        if block != NONE:
            with self._control_block:
                self._rounds.blocks.drop(block)

    # -- giving up --------------------------------------------------------------------------------

    async def _give_up(self, call: _Call) -> None:
        """The caller stops waiting: return when no round uses its memory any more."""
        rounds = self._rounds
        with self._control_block:
            if not call.is_over:
                rounds.count_wait(call.number, call.came_ns, self._now_ns())
                call.kept = rounds.granted(call.number)
        self._drop([call.kept] if call.kept else [])
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
        staged, address, _ = before
        if staged != LENT:
            self._drop_block(block)
            return
        own = rounds.blocks.address(block)
        self._arena.view(own, self._layout.nbytes)[: self._layout.lengths[0]] = self._arena.view(
            address, self._layout.lengths[0]
        )
        with self._control_block:
            if rounds.staged() == before:
                rounds.replace(block, own)
                block = NONE
        self._drop_block(block)

    # -- results ----------------------------------------------------------------------------------

    def _deliver(self, call: _Call) -> HeldDelivery:
        """The result of the round that the call has waited for, or else the newest."""
        kept, missed = call.kept, call.missed
        if kept is None:
            # The missed results are looked up again, in one critical section with the newest: they end just before it.
            rounds = self._rounds
            self._drop(missed)
            with self._control_block:
                newest = rounds.latest
                *missed, kept = rounds.keep(self._engine.first_missed(call.aim, newest - 1), newest, self._rank)
        result = self._result(kept)
        included = rules.is_included(self.operation, call.ticket, result.taken)
        self._tally.count_call(result.number - call.aim, included=included, next_has_begun=False)
        told = self._engine.deliver(kept.number, missed)
        self._drop(told.dropped)
        older = tuple([self._result(record) for record in told.missed])
        return HeldDelivery(result, included, told.skipped, older, (kept, *told.missed))

    def _result(self, kept: Kept) -> Result:
        """The result that `kept` records. Its parts are the block itself, not a copy."""
        return Result(
            number=kept.number,
            parts=self._parts(self._rounds.blocks.address(kept.block)) if kept.block else [],
            active=kept.active,
            members=self.operation.members(kept.number, self._size, self._rank) if self._keeps else self._everybody,
            taken=kept.taken,
            synchronous=self.operation.is_synchronous(kept.number),
        )

    def release(self, delivery: Delivery) -> None:
        """The results have been read."""
        assert isinstance(delivery, HeldDelivery)
        if self._layout.nbytes < LENT_MIN_BYTES:
            self._unread.extend(delivery.kept)  # small: dropped by the next call, which saves taking the lock now
        else:
            self._drop(delivery.kept)

    def take_back(self, delivery: Delivery) -> None:
        """As `WaitAvoiding.take_back`."""
        kept: list[Kept] = []
        # `release` has dropped the blocks, or will: those that history still has are kept anew, for the next call.
        if self.operation.history:
            numbers = [result.number for result in delivery.results]
            with contextlib.suppress(AsyncollError), self._control_block:
                kept = [record for number in numbers for record in self._rounds.keep(number, number, self._rank)]
        self._engine.take_back(kept, len(delivery.results) - len(kept) + delivery.skipped)

    def _drop(self, kept: Sequence[Kept]) -> None:
        if kept:
            with self._control_block:
                for record in kept:
                    self._rounds.drop(record)

    def statistics(self) -> OperationStatistics:
        with self._control_block:
            active, waits_s, late_s = self._rounds.totals()
            rounds = self._rounds.latest
        calls = self._tally.statistics()
        return replace(calls, rounds=rounds, active=active, waits_s=tuple(waits_s), late_s=tuple(late_s))

    def _now_ns(self) -> int:
        return int(self._arena.now_s() * 1e9)
