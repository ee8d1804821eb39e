"""Rounds in shared memory whose calls begin in the compiled core: all of a call up to its first wait is one call of C.

The bookkeeping of a call in Python costs more than the reduction of a short contribution, and as much as that of
512 KiB. asyncoll/_core/rounds.c works on the cells that `round_cells` declares. A call that has to
wait goes on in a coroutine, which looks again in the core. The core declines operations that it does not know: these
are left to `OneSidedRounds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncoll._core import NativeCore
from asyncoll.algorithms.rounds.block_layout import BlockLayout
from asyncoll.algorithms.rounds.directory import AtOnce
from asyncoll.algorithms.rounds.engine import Delivery, Parts, result_of
from asyncoll.algorithms.rounds.one_sided import OneSidedCall, OneSidedRounds, Setting
from asyncoll.algorithms.rounds.operation import Operation, Rule
from asyncoll.algorithms.rounds.reduction import SLOTS, Reduction
from asyncoll.algorithms.rounds.round_cells import NONE, Kept
from asyncoll.algorithms.rounds.round_record import SHORT_BYTES, RoundRecord
from asyncoll.algorithms.rounds.wait_avoiding import Contribution
from asyncoll.algorithms.seam.ways import Shape, Way, begin
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.group import Group
from asyncoll.runtime.progress import CALLS_PER_TURN
from asyncoll.runtime.trace import Event
from asyncoll.tensors.reductions import ReduceOp, kernel_number
from asyncoll.transport import Arena
from asyncoll.transport.control_block import until

if TYPE_CHECKING:
    from asyncoll._core.native import Rounds


class Begun(NamedTuple):
    """A call up to its first wait."""

    number: int  # the round that the call waits for; 0 if it is late, and waits for none
    came_ns: int
    ticket: int  # the number of its contribution
    missed: Sequence[tuple[int, int, int, int, int]] | None  # the cells of each `Kept`, oldest first
    round: int  # whose result the call is given; 0: it has to wait
    ranks: tuple[int, ...]  # those with a contribution in it, in order
    absent: int  # as of `Kept`, like `taken`
    taken: int
    weight: float  # of all contributions in it


# The core follows these options of an operation, or other code carries them out with the core as without it.
DECLARED = frozenset(
    (
        "quorum",
        "candidates",
        "seed",
        "sync_every",
        "sync_offset",
        "history",
        "group_size",
        "fixed",
        "weighted",
        "buckets",
        "epoch",
    )
)

begun_of: Callable[[tuple[Any, ...]], Begun] = partial(tuple.__new__, Begun)  # faster than `Begun(*fields)`


def rounds_in_memory(setting: Setting, operation: Operation, long: int) -> OneSidedRounds:
    """The rounds of `operation`. Calls of more than `long` bytes would block their callers' loops for too long.

    Raises what `OneSidedRounds` does.
    """
    return begin(rounds_ways(long), Shape(operation.nbytes), setting, operation)


def _compiled(kind: type[CompiledRounds], setting: Setting, operation: Operation) -> CompiledRounds | None:
    """Declines what the core does not carry out."""
    core = setting.memory.arena.native
    kernels = [kernel_number(operation.op, dtype, core) for dtype, _ in operation.layout]
    if not (is_known(operation) and all(kernels)):
        return None
    assert core is not None, "a kernel is one of the core"
    return kind(setting, operation, core)


@cache
def rounds_ways(long: int) -> tuple[Way[OneSidedRounds], ...]:
    """The ways of wait-avoiding rounds in memory."""
    in_c = partial(Way[OneSidedRounds], "rounds", needs="an operation of the core", by_core=True)
    at_once, later = partial(_compiled, PromptRounds), partial(_compiled, CompiledRounds)
    return (
        in_c("memory, in C, at once", at_once, "a call begins as one step in its caller's thread", up_to=long),
        in_c("memory, in C", later, "no caller's loop stands still"),
        Way("rounds", "memory, in Python", OneSidedRounds, "the reference"),
    )


def is_known(operation: Operation) -> bool:
    """Whether the core knows the options of `operation`, and the form of its rule."""
    rule = operation.rule
    return operation.options.keys() <= DECLARED and rule == Rule(ranks=rule.ranks, drawn=rule.drawn)


def rounds_of(
    core: NativeCore, arena: Arena, group: Group, operation: Operation, layout: BlockLayout, record: RoundRecord
) -> Rounds:
    """The rounds of `operation`, which the core knows, at one rank."""
    kernels = [core.find_kernel(operation.op.value, dtype) for dtype, _ in operation.layout]
    return core.Rounds(
        control_block=record.control_block,
        segments=tuple(arena.segments),
        size=group.size,
        rank=group.rank,
        history=operation.history,
        limit=record.blocks.limit,
        nbytes=layout.nbytes,
        ranks=operation.rule.ranks,
        drawn=operation.rule.drawn,
        sync_every=operation.sync_every,
        sync_offset=operation.sync_offset,
        keeps=operation.group_size > 0,
        long=not record.reduces_at_once,
        cores=arena.cores,
        parts=tuple(zip(layout.offsets, layout.lengths, kernels, strict=True)),
    )


class CompiledRounds(OneSidedRounds):
    """A persistent operation at one rank, in memory, in the compiled core."""

    def __init__(self, setting: Setting, operation: Operation, core: NativeCore) -> None:
        super().__init__(setting, operation)
        arena, _, group = setting.memory
        self._is_short = self._layout.nbytes <= SHORT_BYTES
        self._compiled = rounds_of(core, arena, group, operation, self._layout, self._rounds)
        setting.trace.compiled(lambda append: self._compiled.trace(append, self._opened))
        self.at_once = self._whole_calls() if self._rounds.reduces_at_once else None

    def _whole_calls(self) -> AtOnce | None:
        """`Rounds.at_once` in the core; None if calls of the operation are left to Python."""
        operation, order, engine = self.operation, self._order, self._engine
        if operation.group_size or operation.history or operation.weighted or len(operation.layout) > 1:
            return None
        divisor = {ReduceOp.AVG: self._size, ReduceOp.AVG_ACTIVE: 0}.get(operation.op, 1)
        turns = order.numbers, order.now, order.over, order.waiting
        self._compiled.attach(Reduction, SLOTS, turns, engine.owed, engine.cells, divisor, CALLS_PER_TURN)
        return self._compiled.at_once

    def _opened(self, what: int, at_s: float, number: int) -> Event:
        """The event of a round that the core has opened."""
        rank = self._trace.rank
        return Event(What(what), at_s, rank, self.operation, 0, number, (rank,))

    def _begin_here(self, contribution: Contribution) -> Delivery | Coroutine[Any, Any, Delivery]:
        """As far as a call comes without waiting: its delivery, or the coroutine of the rest, which ends the turn."""
        own, turn = self._arrays(contribution), next(self._order.numbers)
        if own is None or not self._order.is_now(turn):
            return self._call(turn, contribution)
        try:
            answer = self._begin_compiled(own, contribution.weight)
            if answer.round:
                return self._deliver_compiled(answer, own, answer.missed or ())
        except BaseException:
            self._order.end(turn)
            raise
        return self._wait_compiled(turn, answer, own)

    async def call(self, contribution: Contribution) -> Delivery:
        answer = self._begin_here(contribution)
        return answer if isinstance(answer, Delivery) else await answer

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
        """Begin a call of the arrays `own`, which have the result if it is over.

        In one critical section it takes part, stages a short contribution, and opens the round if this rank may.
        """
        unused = list[int]()
        address = self.arena.locate(own[0]) if self._may_lend and len(own) == 1 else None
        lent = -1 if address is None else address
        while self._unused:
            unused.append(self._unused.popleft())
        self._engine.step_back()
        while isinstance(answer := self._compiled.begin(own, weight, self._engine.aim, unused, lent), int):
            unused = []
            self._prepare(answer)
        return begun_of(answer)

    def _prepare(self, wanted: int) -> None:
        """The compiled core wants the plan of round `wanted`, or, if that is negative, so many free blocks."""
        operation, size = self.operation, self._size
        if wanted < 0:
            self._rounds.blocks.provide(-wanted)
        else:
            self._compiled.plan(wanted, operation.drawn(wanted, size), tuple(operation.groups(wanted, size)))

    async def _wait_compiled(self, turn: int, begun: Begun, own: Parts) -> Delivery:
        """The rest of a call that `_begin_compiled` has staged."""
        compiled, number, aim = self._compiled, begun.number, self._engine.aim
        call = OneSidedCall(number, begun.came_ns, [Kept(*missed) for missed in begun.missed or ()], begun.ticket)
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
        """The answer to a call whose result is in the arrays `own`, with the results of `missed` before it."""
        number, ranks = ended.round, ended.ranks
        operation = self.operation
        members = operation.members(number, self._size, self._rank) if self._keeps else self._all_ranks
        synchronous = operation.sync_every > 0 and operation.is_synchronous(number) and not ended.absent
        deserted, lent, averaged, block = False, False, False, NONE
        fields = (number, own, ranks, members, ended.taken, synchronous, ended.weight, deserted, lent, averaged, block)
        result = result_of(fields)
        kept = self._with_owed([Kept(*old) for old in missed] if missed else (), number)
        return self._engine.deliver(ended.ticket, (*map(self._result, kept), result) if kept else (result,))


class PromptRounds(CompiledRounds):
    """The same of short contributions, whose calls begin in their callers' threads."""

    begin = CompiledRounds._begin_here
