"""Wait-avoiding rounds in shared memory: whoever opens a round takes what the others have staged, without asking them.

The round is the papers' shared object, literally (seed 000, section 3). A caller stages its contribution: a block that
it has filled, or its own registered memory. Whoever may open the round takes everything that is staged (that is
consumption: it can be taken once), those who are there reduce it, chunk by chunk, and the last of them publishes. A
rank whose caller computes, or whose process is stopped, takes part all the same; when its caller comes, the result is
there.

What is staged never changes: a contribution that is added to an older one is a new block, which replaces the old one
unless that has been taken meanwhile. Results never overwrite contributions either; a contribution that is alone in its
round is its result.
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
from asyncoll.errors import PeerLostError
from asyncoll.runtime.group import Group
from asyncoll.tensors.reductions import combiner, reducer, storage
from asyncoll.transport import Arena
from asyncoll.transport.control_block import Turn, checkpoint, turn_of, until

LENT_MIN_BYTES = 1 << 16  # a copy of less costs less than finding out whether it is registered


@dataclass(slots=True)
class _Call:
    """One call."""

    aim: int
    number: int  # the round that it waits for; 0 if it comes late, and waits for none
    came_ns: int
    missed: list[Kept]  # kept for it since it came
    ticket: int = 0  # the number of its contribution, once that is staged
    is_over: bool = False  # the round is, and then this is its result, unless it was over before
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class HeldDelivery(Delivery):
    """One whose results lie in blocks, which are kept until it is released."""

    kept: tuple[Kept, ...] = ()


class OneSidedRounds:
    """A persistent operation at one rank, in memory."""

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

        `has_lost` says whether a rank is lost, who may never finish what it has begun.
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
        self._unread: deque[Kept] = deque()  # results that nobody reads any more
        self._everybody = tuple(range(group.size))
        self._engine: Engine[Kept] = Engine(operation.history)
        self._calls = 0  # begun
        self._turn = 0  # over, in order
        self._over: set[int] = set()  # over before their turn
        self._turns: dict[int, Turn] = {}  # of the calls that wait for those before them

    # -- a call -----------------------------------------------------------------------------------

    async def call(self, contribution: Contribution) -> HeldDelivery:
        """Contribute when the calls before are done, and wait for the round aimed at.

        Cancelling the wait leaves the contribution in. The results stay where they are until `release`.
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
        mine = self._turns[turn] = Turn()
        try:
            if self._turn != turn:  # looked at after the entry was made: the call before may end in another thread
                await turn_of(mine)
        except asyncio.CancelledError:
            await self._put(contribution, _Call(0, 0, 0, []))
            raise
        finally:
            self._turns.pop(turn, None)

    def _end_turn(self, turn: int) -> None:
        """Call `turn` is over; if it was its turn, another's comes. Caller and runtime may do this at the same time."""
        if turn != self._turn:
            return
        following = turn
        while following in self._over:
            self._over.discard(following)
            following += 1
        self._turn = following
        if following in self._over:  # it ended this moment, and did not find that it was its turn
            self._end_turn(following)
        elif (waiting := self._turns.pop(following, None)) is not None:
            waiting.set()

    async def _call(self, contribution: Contribution) -> HeldDelivery:
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
        """Decide whether this call is in time for a round."""
        rounds, came_ns = self._rounds, self._now_ns()
        with self._control_block:
            while self._unread:
                rounds.drop(self._unread.popleft())
            latest = rounds.latest
            aim, number = self._engine.begin(latest, rounds.late_call_opens)
            rounds.count_late(aim, came_ns)
            missed: list[Kept] = []
            if number > aim:  # it is late, and waits all the same: what it has missed may be gone by then
                missed = rounds.keep(self._engine.first_missed(aim, latest), latest, self._rank)
            return _Call(aim, number, came_ns, missed)

    def _arrive(self, call: _Call) -> None:
        """Under the lock: what is staged is this caller's, who waits from now on."""
        if call.number:
            self._rounds.come(call.number)
            self._open(call)

    def _open(self, call: _Call) -> int:
        """Under the lock: open the round if this rank may; returns how many blocks are missing for it."""
        rounds, missing = self._rounds, 0
        if rounds.latest < call.number and rounds.may_open():
            missing = rounds.open(self._now_ns())
        if rounds.latest >= call.number:
            rounds.count_wait(call.number, call.came_ns, self._now_ns())
            call.kept = rounds.granted(call.number)
            call.is_over = True
        return missing

    async def _take_part(self, call: _Call) -> None:
        """Wait until the round is over; open it, if this rank may, and help to carry it out."""
        rounds = self._rounds
        try:
            while True:
                with self._control_block:
                    missing = self._open(call)
                    running = rounds.running
                    work = rounds.work() if rounds.is_help_wanted() and not call.is_over else []
                if call.is_over:
                    return
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
        """Reduce chunks of the round that runs, as long as there are any.

        Cancelling it waits for its end: there may be nobody else to carry the round out.
        """
        interrupted: BaseException | None = None
        while work:
            with self._control_block:
                place = self._rounds.claim(number)
            if place < 0:
                break
            interrupted = await self._outlast(checkpoint(self._control_block)) or interrupted
            self._reduce(work[place])
            with self._control_block:
                self._rounds.done()
        if interrupted is not None:
            raise interrupted

    async def _outlast(self, pause: Awaitable[None]) -> BaseException | None:
        """What came up in a pause, and must wait until the work is done."""
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
        """Stage the caller's own memory, if that is registered, and the next round, which it waits for, takes it."""
        if not call.number or self._keeps or self._layout.nbytes < LENT_MIN_BYTES:
            return False
        parts = contribution.lend()
        address = self._arena.locate(parts[0]) if parts is not None and len(parts) == 1 else None
        if address is None:
            return False
        rounds = self._rounds
        with self._control_block:
            if rounds.running or rounds.latest + 1 != call.number or rounds.staged()[0] != NONE:
                return False
            call.ticket = rounds.put(LENT, address)
            self._arrive(call)
        return True

    async def _put(self, contribution: Contribution, call: _Call) -> None:
        """Stage a block of its own, together with what is staged; from the start if that is taken meanwhile.

        Cancelling it waits for its end: the contribution stays in.
        """
        rounds = self._rounds
        interrupted: BaseException | None = None
        block, before = self._new_block()
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
        parts = self._parts(self._rounds.blocks.address(block))
        contribution.read(parts)
        if older:
            for combine, part, staged in zip(self._combines, parts, self._parts(older), strict=True):
                combine(part, staged)

    def _parts(self, address: int) -> Parts:
        """The arrays of the block at `address`, for which nothing but this operation uses its memory."""
        parts = self._views.get(address)
        if parts is None:
            layout, view = self._layout, self._arena.view
            places = zip(layout.offsets, layout.lengths, self._dtypes, strict=True)
            parts = [view(address + offset, length).view(dtype) for offset, length, dtype in places]
            self._views[address] = parts
        return parts

    def _new_block(self) -> tuple[int, tuple[int, int, int]]:
        """A block to fill, and what is staged now."""
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
        """The caller stops waiting: nobody must use its memory any more."""
        rounds = self._rounds
        with self._control_block:
            if not call.is_over:
                rounds.count_wait(call.number, call.came_ns, self._now_ns())
                call.kept = rounds.granted(call.number)
        self._drop([call.kept] if call.kept else [])
        self._move_in()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await until(self._control_block, lambda: not rounds.is_being_read() or self._has_lost())
                return

    def _move_in(self) -> None:
        """Hold in a block of our own what the caller has lent, unless a round has taken it."""
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
        """The round that was waited for, or else the newest."""
        kept, missed = call.kept, call.missed
        if kept is None:
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
            self._unread.extend(delivery.kept)  # small enough to wait for the next time that the lock is taken
        else:
            self._drop(delivery.kept)

    def take_back(self, delivery: Delivery) -> None:
        """As `WaitAvoiding.take_back`."""
        kept: list[Kept] = []
        if self.operation.history:
            numbers = [result.number for result in delivery.results]
            with contextlib.suppress(PeerLostError), self._control_block:
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
