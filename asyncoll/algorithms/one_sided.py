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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncoll.algorithms.blocks import NONE
from asyncoll.algorithms.operation import Operation
from asyncoll.algorithms.roster import Roster
from asyncoll.algorithms.round_board import LENT, Chunk, Kept, Layout, RoundBoard
from asyncoll.algorithms.tally import OperationStatistics, Tally
from asyncoll.algorithms.wait_avoiding import Contribution, Delivery, Parts, Result
from asyncoll.group import Group
from asyncoll.tensors import combiner, reducer, storage
from asyncoll.transport import Arena
from asyncoll.transport.board import breathe, until


@dataclass(frozen=True, slots=True)
class HeldDelivery(Delivery):
    """One whose results lie in blocks, which are kept until it is released."""

    kept: tuple[Kept, ...] = ()


class OneSidedRounds:
    """A persistent operation at one rank, in memory."""

    def __init__(
        self,
        arena: Arena,
        roster: Roster,
        group: Group,
        operation: Operation,
        describe: Callable[[], str],
        has_failed: Callable[[], bool],
    ) -> None:
        """Raises DisagreementError if the ranks of the host know the operation as another.

        `has_failed` says whether there is nobody left to wait for.
        """
        self.operation = operation
        self.describe = describe
        self._arena = arena
        self._has_failed = has_failed
        self._rank, self._size = group.rank, group.size
        self._keeps = operation.group_size > 0  # contributions stay, and replace each other
        self._layout = Layout.of(operation)
        self._rounds = RoundBoard(arena, roster, operation, group.communicator, group.size, group.rank, self._layout)
        self._board = self._rounds.board
        self._dtypes = [storage(dtype) for dtype, _ in operation.layout]
        self._reduces = [reducer(operation.op, dtype) for dtype, _ in operation.layout]
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._tally = Tally(group.size)
        self._seen = 0  # the newest round that a caller here was given
        self._lost = 0  # rounds that were to be given to callers who were cancelled
        self._calls = 0  # begun
        self._turn = 0  # over, in order
        self._over: set[int] = set()  # over before their turn

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
            self._end_turn(turn)

    async def _queue(self, turn: int, contribution: Contribution) -> None:
        try:
            await until(self._board, lambda: self._turn == turn)
        except asyncio.CancelledError:
            await self._stage(contribution)
            raise

    def _end_turn(self, turn: int) -> None:
        self._over.add(turn)
        while self._turn in self._over:
            self._over.remove(self._turn)
            self._turn += 1
        if self._turn < self._calls:
            with self._board as board:
                board.wake()

    async def _call(self, contribution: Contribution) -> HeldDelivery:
        rounds, came_ns = self._rounds, self._now_ns()
        aim = self._seen + 1
        with self._board:
            rounds.count_late(aim, came_ns)
            latest = rounds.latest
            in_time = latest < aim or rounds.is_awaited(self._rank)
            missed = rounds.keep(max(aim, latest + 1 - self.operation.history), latest, self._rank) if in_time else []
        number = latest + 1 if in_time else 0
        try:
            ticket = await self._stage(contribution, lend_to=number)
            if in_time:
                await self._take_part(number, came_ns)
        except BaseException:
            self._drop(missed)
            raise
        return self._deliver(aim, number, ticket, missed)

    async def _take_part(self, number: int, came_ns: int) -> None:
        """Wait until round `number` is over; open it, if this rank may, and help to carry it out."""
        rounds = self._rounds
        try:
            with self._board:
                rounds.come(number)
            while True:
                with self._board:
                    needed = rounds.open(self._now_ns()) if rounds.latest < number and rounds.may_open() else 0
                    is_over, running = rounds.latest >= number, rounds.running
                    work = rounds.work() if rounds.is_help_wanted() and not is_over else []
                if is_over:
                    break
                rounds.blocks.provide(needed)
                await self._help(running, work)
                if not needed:
                    await until(self._board, lambda: rounds.latest >= number or self._is_needed())
        except asyncio.CancelledError:
            await self._give_up(number)
            raise
        finally:
            with self._board:
                rounds.count_wait(number, came_ns, self._now_ns())

    def _is_needed(self) -> bool:
        return self._rounds.is_help_wanted() or self._rounds.may_open()

    async def _help(self, number: int, work: Sequence[Chunk]) -> None:
        """Reduce chunks of the round that runs, as long as there are any.

        Cancelling it waits for its end: there may be nobody else to carry the round out.
        """
        interrupted: BaseException | None = None
        while work:
            with self._board:
                place = self._rounds.claim(number)
            if place < 0:
                break
            try:
                await breathe(self._board)
            except BaseException as error:
                interrupted = error
            self._reduce(work[place])
            with self._board:
                self._rounds.done()
        if interrupted is not None:
            raise interrupted

    def _reduce(self, chunk: Chunk) -> None:
        dtype, view = self._dtypes[chunk.part], self._arena.view
        sources = [view(source, chunk.nbytes).view(dtype) for source in chunk.sources]
        self._reduces[chunk.part](view(chunk.into, chunk.nbytes).view(dtype), sources, 1)

    # -- contributing -----------------------------------------------------------------------------

    async def _stage(self, contribution: Contribution, lend_to: int = 0) -> int:
        """Add to what is staged, or replace it; returns the contribution's number.

        Registered memory is lent to round `lend_to`, whose caller will wait, if that has not begun.
        """
        ticket = self._lend(contribution, lend_to) if lend_to and not self._keeps else 0
        return ticket or await self._put(contribution)

    def _lend(self, contribution: Contribution, number: int) -> int:
        parts = contribution.lend()
        address = self._arena.locate(parts[0]) if parts is not None and len(parts) == 1 else None
        if address is None:
            return 0
        rounds = self._rounds
        with self._board:
            if rounds.running or rounds.latest + 1 != number or rounds.staged()[0] != NONE:
                return 0
            return rounds.put(LENT, address)

    async def _put(self, contribution: Contribution) -> int:
        """In a block of its own, together with what is staged; from the start if that is taken meanwhile.

        Cancelling it waits for its end: the contribution stays in.
        """
        rounds, block = self._rounds, self._new_block()
        interrupted: BaseException | None = None
        ticket = 0
        while not ticket:
            with self._board:
                before = rounds.staged()
            self._fill(block, contribution, 0 if self._keeps else before[1])
            try:
                await breathe(self._board)
            except BaseException as error:
                interrupted = error
            with self._board:
                if self._keeps or rounds.staged() == before:
                    ticket = rounds.put(block, rounds.blocks.address(block))
        if interrupted is not None:
            raise interrupted
        return ticket

    def _fill(self, block: int, contribution: Contribution, older: int) -> None:
        parts = self._parts(self._rounds.blocks.address(block))
        contribution.read(parts)
        if older:
            for combine, part, staged in zip(self._combines, parts, self._parts(older), strict=True):
                combine(part, staged)

    def _parts(self, address: int) -> Parts:
        layout, view = self._layout, self._arena.view
        places = zip(layout.offsets, layout.lengths, self._dtypes, strict=True)
        return [view(address + offset, length).view(dtype) for offset, length, dtype in places]

    def _new_block(self) -> int:
        blocks = self._rounds.blocks
        while True:
            with self._board:
                block = blocks.take()
            if block != NONE:
                return block
            blocks.provide(1)

    def _drop_block(self, block: int) -> None:
        if block != NONE:
            with self._board:
                self._rounds.blocks.drop(block)

    # -- giving up --------------------------------------------------------------------------------

    async def _give_up(self, number: int) -> None:
        """The caller stops waiting for round `number`: nobody must use its memory any more."""
        rounds = self._rounds
        with self._board:
            kept = rounds.granted(number)
        self._drop([kept] if kept else [])
        self._move_in()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await until(self._board, lambda: not rounds.is_being_read() or self._has_failed())
                return

    def _move_in(self) -> None:
        """Hold in a block of our own what the caller has lent, unless a round has taken it."""
        rounds = self._rounds
        with self._board:
            staged, address = rounds.staged()
        if staged != LENT:
            return
        block = self._new_block()
        own = rounds.blocks.address(block)
        self._arena.view(own, self._layout.nbytes)[: self._layout.lengths[0]] = self._arena.view(
            address, self._layout.lengths[0]
        )
        with self._board:
            if rounds.staged() == (LENT, address):
                rounds.replace(block, own)
                block = NONE
        self._drop_block(block)

    # -- results ----------------------------------------------------------------------------------

    def _deliver(self, aim: int, waited_for: int, ticket: int, missed: list[Kept]) -> HeldDelivery:
        """The round that was waited for, or else the newest."""
        rounds = self._rounds
        with self._board:
            kept = rounds.granted(waited_for)
            newest = rounds.latest
            everything = rounds.keep(max(aim, newest - self.operation.history), newest, self._rank) if not kept else []
            has_begun = rounds.running > 0
        if kept is None:
            self._drop(missed)
            *missed, kept = everything
        result = self._result(kept)
        self._seen = result.number
        included = ticket == result.taken if self._keeps else ticket <= result.taken
        lag = result.number - aim
        self._tally.count_call(lag, included=included, next_has_begun=has_begun)
        skipped, self._lost = lag - len(missed) + self._lost, 0
        older = tuple(self._result(record) for record in missed)
        return HeldDelivery(result, included, skipped, older, (kept, *missed))

    def _result(self, kept: Kept) -> Result:
        return Result(
            number=kept.number,
            parts=self._parts(self._rounds.blocks.address(kept.block)) if kept.block else [],
            active=kept.active,
            members=self.operation.members(kept.number, self._size, self._rank),
            taken=kept.taken,
            synchronous=self.operation.is_synchronous(kept.number),
        )

    def release(self, delivery: Delivery) -> None:
        """The results have been read."""
        assert isinstance(delivery, HeldDelivery)
        self._drop(delivery.kept)

    def take_back(self, delivery: Delivery) -> None:
        """As `WaitAvoiding.take_back`."""
        if self.operation.history and self._seen == delivery.result.number:
            self._seen -= delivery.rounds
        else:
            self._lost += delivery.rounds

    def _drop(self, kept: Sequence[Kept]) -> None:
        if kept:
            with self._board:
                for record in kept:
                    self._rounds.drop(record)

    def statistics(self) -> OperationStatistics:
        with self._board:
            active, waits_s, late_s = self._rounds.totals()
            rounds = self._rounds.latest
        calls = self._tally.statistics()
        return replace(calls, rounds=rounds, active=active, waits_s=tuple(waits_s), late_s=tuple(late_s))

    def _now_ns(self) -> int:
        return int(self._arena.now_s() * 1e9)
