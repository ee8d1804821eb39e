"""Wait-avoiding rounds in shared memory whose calls begin with a plain function.

The bookkeeping of a call costs more than the reduction of a short contribution, and as much as that of 512 KiB. So all
of a call up to its first wait is a plain function, in the compiled core if that is there. With a short contribution it
is one critical section. A coroutine does the rest, if the call has to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from asyncoll.algorithms.rounds.block_table import NONE
from asyncoll.algorithms.rounds.compiled import Begun, begun_of, compiled_rounds, whole_calls
from asyncoll.algorithms.rounds.in_memory import Call, OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.round_cells import BlockLayout, Kept
from asyncoll.algorithms.rounds.round_record import SHORT_BYTES
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Delivery, Parts, delivery_of, result_of
from asyncoll.transport.control_block import until


def rounds_in_memory(setting: Setting, operation: Operation, prompt_max: int) -> OneSidedRounds:
    """The rounds of `operation`. Calls of more than `prompt_max` bytes would block their callers' loops for too long.

    Raises what `OneSidedRounds` does.
    """
    nbytes = BlockLayout.of(operation).nbytes
    if setting.memory.arena.native is None and nbytes > SHORT_BYTES:
        return OneSidedRounds(setting, operation)
    rounds = PromptRounds(setting, operation)
    rounds.is_prompt = rounds.is_prompt and nbytes <= prompt_max
    return rounds


class PromptRounds(OneSidedRounds):
    """A persistent operation at one rank, in memory, of short contributions, or of any with the compiled core."""

    def __init__(self, setting: Setting, operation: Operation) -> None:
        super().__init__(setting, operation)
        arena, _, group = setting.memory
        self._is_short = self._layout.nbytes <= SHORT_BYTES
        # Blocks that a call may take: one for its contribution, and one for the result of each group.
        self._needed = 1 + (-(-group.size // operation.group_size) if self._keeps else 1)
        self._compiled = compiled_rounds(arena, group, operation, self._layout, self._rounds)
        # Ranks that share a thread use the coroutine, which has checkpoints between its steps.
        self.is_prompt = not self._control_block.interleaved and (self._is_short or self._compiled is not None)
        if self._compiled is not None and self._rounds.reduces_at_once:
            self.at_once = whole_calls(self._compiled, arena, group, operation, self._order, self._engine)

    def begin(self, contribution: Contribution) -> Delivery | Coroutine[Any, Any, Delivery]:
        """As `Rounds.begin`: all of the call up to its first wait."""
        own = self._arrays(contribution) if self._compiled is not None else None
        turn = next(self._order.numbers)
        if not self._order.is_now(turn) or (own is None and not self._is_short):
            return self._call(turn, contribution)
        try:
            if own is not None:
                answer = self._begin_compiled(own, contribution.weight)
                if not answer.round:
                    return self._wait_compiled(turn, answer, own)
                return self._deliver_compiled(answer, own, answer.missed or ())
            call = self._begin_short(contribution)
            if call.kept is None:
                return self._wait(turn, call)
            return self._deliver(call)
        except BaseException:
            self._order.end(turn)
            raise

    async def call(self, contribution: Contribution) -> Delivery:
        if self._compiled is None or self._is_short:
            return await super().call(contribution)
        answer = self.begin(contribution)
        return answer if isinstance(answer, Delivery) else await answer

    def _begin_short(self, contribution: Contribution) -> Call:
        """Begin a call, stage its short contribution, and open the round if this rank may, in one critical section."""
        rounds, blocks = self._rounds, self._rounds.blocks
        came_ns = self._now_ns()
        while True:
            with self._control_block:
                if blocks.free_count() >= self._needed:
                    call = self._begin(came_ns)
                    block = blocks.take()
                    address = blocks.address(block)
                    weight = self._fill(self._parts(address), contribution, rounds.staged())
                    call.ticket = rounds.put(block, address, weight)
                    self._come(call)
                    return call
            blocks.provide(self._needed)

    async def _wait(self, turn: int, call: Call) -> Delivery:
        """The rest of a call that `begin` has staged."""
        try:
            try:
                await self._take_part(call)
            except BaseException:
                self._drop_results(call)
                raise
            return self._deliver(call)
        except BaseException:
            self._order.end(turn)
            raise

    # -- in the compiled core ---------------------------------------------------------------------

    def _arrays(self, contribution: Contribution) -> Parts | None:
        """The contribution, packed and multiplied by its weight: in the caller's memory, or else in new arrays.

        None if a long one would have to be copied to new arrays: Python packs it into a block at once.
        """
        own = contribution.lend() if contribution.weight == 1 else None
        if own is None and self._is_short:
            own = [
                np.empty(count, dtype) for (_, count), dtype in zip(self.operation.layout, self._dtypes, strict=True)
            ]
            contribution.read(own)
        return own

    def _begin_compiled(self, own: Parts, weight: float) -> Begun:
        """As `_begin_short`, of the arrays `own`, which have the result if the call is over."""
        compiled, unused = self._compiled, list[int]()
        assert compiled is not None
        address = self.arena.locate(own[0]) if self._may_lend and len(own) == 1 else None
        lent = -1 if address is None else address
        while self._unused:
            unused.append(self._unused.popleft())
        self._engine.step_back()
        while isinstance(answer := compiled.begin(own, weight, self._engine.aim, unused, lent), int):
            unused = []
            self._prepare(answer)
        return begun_of(answer)

    def _prepare(self, wanted: int) -> None:
        """The compiled core wants the plan of round `wanted`, or, if that is negative, so many free blocks."""
        compiled, operation, size = self._compiled, self.operation, self._size
        assert compiled is not None
        if wanted < 0:
            self._rounds.blocks.provide(-wanted)
        else:
            compiled.plan(wanted, operation.drawn(wanted, size), tuple(operation.groups(wanted, size)))

    async def _wait_compiled(self, turn: int, begun: Begun, own: Parts) -> Delivery:
        """The rest of a call that `_begin_compiled` has staged."""
        compiled, number, aim = self._compiled, begun.number, self._engine.aim
        assert compiled is not None
        call = Call(number, begun.came_ns, [Kept(*missed) for missed in begun.missed or ()], begun.ticket)
        try:
            try:
                while True:
                    await until(self._control_block, lambda: compiled.is_needed(number))
                    answer = compiled.resume(own, aim, number, begun.came_ns, begun.ticket)
                    if isinstance(answer, int):
                        self._prepare(answer)
                    elif (ended := begun_of(answer)).round:
                        return self._deliver_compiled(ended, own, call.missed)
            except (Exception, asyncio.CancelledError):
                await self._give_up(call)
                raise
        except BaseException:
            self._order.end(turn)
            self._drop_results(call)
            raise

    def _deliver_compiled(self, ended: Begun, own: Parts, missed: Sequence[tuple[int, int, int, int, int]]) -> Delivery:
        """As `_deliver`, of a result that is in the arrays `own`."""
        number, ranks = ended.round, ended.ranks
        operation = self.operation
        members = operation.members(number, self._size, self._rank) if self._keeps else self._all_ranks
        synchronous = operation.sync_every > 0 and operation.is_synchronous(number) and not ended.absent
        fields = (number, own, ranks, members, ended.taken, synchronous, ended.weight, False, False, False, NONE)
        result = result_of(fields)
        kept = self._with_owed([Kept(*old) for old in missed] if missed else (), number)
        told = self._engine.deliver(ended.ticket, result, kept)
        results = (*map(self._result, told.missed), result) if told.missed else (result,)
        return delivery_of((results, told.included, told.skipped, told.lag))
