"""Rounds in the compiled core: all of a call up to its first wait is one call of C.

`CompiledRounds` is the interface. asyncoll/_core/rounds.c implements it, on the cells that `round_record` and
`block_table` declare.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from asyncoll.algorithms.rounds.call_order import CallOrder
from asyncoll.algorithms.rounds.directory import AtOnce
from asyncoll.algorithms.rounds.engine import Engine
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.reduction import SLOTS, Reduction
from asyncoll.algorithms.rounds.round_cells import BlockLayout
from asyncoll.algorithms.rounds.round_record import RoundRecord
from asyncoll.runtime.group import Group
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.transport import Arena


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
    )
)

begun_of: Callable[[tuple[Any, ...]], Begun] = partial(tuple.__new__, Begun)  # faster than `Begun(*fields)`


class CompiledRounds(Protocol):
    """The rounds of one operation at one rank. All methods but `plan` raise the error of a lost lock.

    `arrays` are the contribution, one flat array for each entry of the operation's layout. If the call is over, they
    have its result. ValueError: a peer has written cells that make no sense.
    """

    def begin(
        self, arrays: Sequence[Array], weight: float, aim: int, unused: Sequence[int], lent: int, /
    ) -> tuple[Any, ...] | int:
        """Drop the blocks `unused`, and begin a call that aims at round `aim`. Returns the fields of `Begun`.

        `lent` is the address of the one array if it is registered, so that rounds may read it in place; or -1. Long
        contributions are copied and reduced without the GIL.
        A number says instead what is missing: the `plan` of the round of that number, or, if it is negative, so many
        free blocks. The call has contributed nothing then; the blocks `unused` are dropped.
        """

    def resume(self, arrays: Sequence[Array], aim: int, number: int, came_ns: int, ticket: int, /) -> Any:
        """Look again for a call that waits for round `number`: open it if this rank may, and reduce chunks of it.

        Returns as `begin`.
        """

    def attach(
        self,
        answer: type,
        reduction: type,
        slots: tuple[Any, ...],
        turns: tuple[Iterator[int], list[int], set[int], dict[int, Any]],
        owed: Any,
        cells: memoryview,
        divisor: int,
        /,
    ) -> None:
        """Before the first `at_once`. `answer` is the awaitable's type, `reduction` its result's, which has `slots`.

        `turns` are the attributes of the `CallOrder`, `owed` and `cells` those of the `Engine`.
        Results are divided by `divisor`, or, if that is 0, by the number of contributors.
        """

    def at_once(self, array: Array, /) -> Any:
        """As `Rounds.at_once`."""

    def is_needed(self, number: int, /) -> bool:
        """Whether a call that waits for round `number` has to look again. Without the lock the answer is a hint."""

    def plan(self, number: int, drawn: tuple[int, ...], groups: tuple[Sequence[int], ...], /) -> None:
        """The ranks that are drawn for round `number`, and its groups."""


def compiled_rounds(
    arena: Arena, group: Group, operation: Operation, layout: BlockLayout, rounds: RoundRecord
) -> CompiledRounds | None:
    """The rounds in the compiled core; None if that is not there, or cannot carry out the operation.

    It carries out no operation with an opening or an option that it does not know, or with a dtype without a kernel.
    """
    native = arena.native
    if native is None or operation.opening.value not in native.openings or not operation.options().keys() <= DECLARED:
        return None
    kernels = [native.find_kernel(operation.op.value, dtype) for dtype, _ in operation.layout]
    if not all(kernels):
        return None
    compiled: CompiledRounds = native.Rounds(
        control_block=rounds.control_block,
        segments=tuple(arena.segments),
        size=group.size,
        rank=group.rank,
        history=operation.history,
        limit=rounds.blocks.limit,
        nbytes=layout.nbytes,
        opening=native.openings.index(operation.opening.value),
        quorum=operation.quorum,
        sync_every=operation.sync_every,
        sync_offset=operation.sync_offset,
        keeps=operation.group_size > 0,
        long=not rounds.reduces_at_once,
        cores=arena.cores,
        parts=tuple(zip(layout.offsets, layout.lengths, kernels, strict=True)),
    )
    return compiled


def whole_calls(
    compiled: CompiledRounds, arena: Arena, group: Group, operation: Operation, order: CallOrder, engine: Engine[Any]
) -> AtOnce | None:
    """`Rounds.at_once` in the compiled core; None if calls of `operation` are left to Python."""
    native = arena.native
    if native is None or operation.group_size or operation.history or operation.weighted or len(operation.layout) > 1:
        return None
    Coroutine.register(native.Answer)  # a task takes it only then
    divisor = {ReduceOp.AVG: group.size, ReduceOp.AVG_ACTIVE: 0}.get(operation.op, 1)
    turns = order.numbers, order.now, order.over, order.waiting
    compiled.attach(native.Answer, Reduction, SLOTS, turns, engine.owed, engine.cells, divisor)
    return compiled.at_once
