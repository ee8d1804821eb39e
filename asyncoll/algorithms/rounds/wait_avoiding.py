"""Wait-avoiding allreduce: rounds that do not wait for all ranks.

Sources: solo and majority from Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, "Taming unbalanced training workloads in
deep learning with partial collective operations", PPoPP 2020, sections 4.1 and 4.2, with the semantics of section
5.1.1; groups from Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (global) barriers in
parallel stochastic optimization with wait-avoiding group averaging", TPDS 2021, section III.

A rank stages its contribution and opens the round if it may. Every rank takes part with its staged contribution, or
with none, whether or not its caller waits. A late contribution stays staged for a later round: none is lost or counted
twice. Gradients add up until a round takes them. Models replace each other and stay.

An operation is made at all ranks when a rank calls it first. If that rank's host has no room for it, the caller gets a
UsageError, no other rank is told, and the communicator goes on. If another host has no room, its part in the rounds is
missing, so a rank of that host aborts the communicator.

This module has the calls, contributions and results of both carriers by message, and carries out the instructions of
`engine`. `by_tree` (by all ranks, at any size) and `by_coordinator` (by one rank, for short contributions) say how a
round is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from asyncoll.algorithms.rounds.engine import (
    ARRIVED,
    GONE,
    JOINED,
    LATE,
    Accounted,
    Begin,
    Delivery,
    Engine,
    Instruction,
    NextRound,
    Parts,
    Result,
    Tell,
)
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.tally import OperationStatistics, Tally
from asyncoll.errors import ProtocolError
from asyncoll.runtime.port import Port
from asyncoll.tensors.reductions import Array, combiner, fill_neutral, storage
from asyncoll.transport.wire import Buffer

EARLY_MAX = 1 << 16  # rounds that another rank may be ahead of this one; bounds the signals that are kept for later


class Contribution(Protocol):
    """The contribution of one call: the caller's tensors, multiplied by its weight."""

    @property
    def weight(self) -> float:
        """Added up over the contributions of a round, if the operation is weighted."""

    def read(self, into: Parts) -> None:
        """Copy the contribution into these arrays."""

    def lend(self) -> Parts | None:
        """The caller's own memory, to be reduced in place; None if it is not flat arrays of the operation's layout."""

    def scale_lent(self) -> None:
        """Make the memory of `lend` the contribution. Before, it is not multiplied by the weight."""


class WaitAvoiding(Accounted, ABC):
    """A persistent operation at one rank: its calls, its staged contribution, its results. On the runtime's loop."""

    arena = None

    def __init__(self, port: Port, operation: Operation, describe: Callable[[], str]) -> None:
        self.operation = operation
        self.describe = describe
        self._port = port
        self._group = group = port.group
        self._combines = [combiner(operation.op, dtype) for dtype, _ in operation.layout]
        self._turn = asyncio.Lock()  # fair: the calls of this rank run one after another, in their order
        self._tally = Tally(group.size, weighted=operation.weighted)
        self._staged: Parts | None = None
        self._staged_weight = 0.0  # of `staged`; undefined without it
        self._spare: Parts | None = None  # arrays that are free to be used again
        self._submitted = 0  # contributions staged here so far
        self._engine = Engine(operation)
        self._history: deque[Result] = deque(maxlen=operation.history)  # before the latest
        self._latest = Result(0, [], (), (), 0, synchronous=False, weight=0.0)
        self._taken_back: tuple[Result | None, Parts] = None, []  # the newest lent result that was, and a copy
        self._handed: Result | None = None  # given to a caller that may not have read it yet
        self._waiting: dict[int, asyncio.Future[Result]] = {}  # by round
        self._has_joined = False  # this rank makes no more calls of this operation
        self._is_over = False  # the same holds of all ranks
        self._joining: asyncio.Future[None] | None = None  # the caller that waits for that
        self._early: dict[int, list[tuple[int, int, Buffer]]] = {}  # signals by round: (group rank, step, payload)
        self._round = self._arm(1)  # the round that is armed or running here

    def serve(self) -> None:
        # Handles the signals that have arrived already. Then a rank that has left takes part.
        self._port.open(self._received, self._take_part_if_gone)
        self._take_part_if_gone()

    async def call(self, contribution: Contribution) -> Delivery:
        """Contribute when the calls before are over, and wait for the round that this call aims at.

        Cancelling the wait leaves the contribution in, because the round belongs to the runtime. Use the results at
        once: their memory is used again when `history` drops them.
        """
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            # Also a call that is cancelled before its turn contributes: the caller cannot know how far the call came.
            self._stage(contribution)
            self._follow(self._round.here(LATE))
            raise
        try:
            self._port.check()
            self._handed = None
            self._tally.came(self._port.now_s())
            number = self._engine.begin(self._latest.number, self._round.late_call_opens)
            # A late call lends nothing: memory is lent only by a caller that waits, because it must not change until a
            # round has taken it.
            ticket = self._stage(contribution, may_lend=number > 0)
            if number:
                result = await self._wait(number)
            else:
                self._follow(self._round.here(LATE))
                self._own()
                result = self._latest
            self._tally.returned(next_has_begun=self._round.has_begun)
            return self._engine.deliver(ticket, self._up_to(result))
        finally:
            self._turn.release()

    def _up_to(self, result: Result) -> tuple[Result, ...]:
        """The results that history has of the rounds from the aim of this call on, and `result`."""
        self._engine.step_back()
        return (*[old for old in self._history if self._engine.aim <= old.number < result.number], result)

    async def join(self) -> Delivery | None:
        """Contribute no more, and wait until no rank does. Returns the rounds that this rank was not told of, if any.

        A rank of which all calls are over takes part in each round as one that is gone. The first round in which all
        ranks are gone is the last one, and the list of participation tells all ranks so. A last round without
        contributors is none.
        """
        async with self._turn:
            self._port.check()
            self._handed, self._has_joined = None, True
            if self.operation.group_size:
                self._take_part_if_gone()
                return None
            if not self._is_over:
                with self._port.watch(f"{self.describe()}: ranks that have not joined") as self._joining:
                    self._take_part_if_gone()
                    await self._joining
            result = self._latest
            if not self._engine.has_news(result.number):
                return None
            return self._engine.tell(self._submitted, self._up_to(result))

    async def _wait(self, number: int) -> Result:
        """The caller waits for round `number`; its contribution is staged."""
        try:
            with self._result_of(number) as future:
                self._follow(self._round.here(ARRIVED))
                return await future
        except asyncio.CancelledError:
            self._tally.left(self._port.now_s())
            await self._reclaim(number)
            raise

    @contextlib.contextmanager
    def _result_of(self, number: int) -> Iterator[asyncio.Future[Result]]:
        """A future that gets the result of round `number`."""
        with self._port.watch(f"{self.describe()}: round {number}") as future:
            self._waiting[number] = future
            try:
                yield future
            finally:
                del self._waiting[number]

    def take_back(self, delivery: Delivery) -> None:
        newest = delivery.results[-1]
        if newest.lent:  # it is the caller's memory, which the program may change as soon as this returns
            self._taken_back = newest, [part.copy() for part in newest.parts]
        super().take_back(delivery)

    def _own(self) -> None:
        """A late call is given the newest result, which its first caller did not get: it leaves that one's memory."""
        latest, (result, parts) = self._latest, self._taken_back
        if latest.lent:
            own = parts if latest is result else [part.copy() for part in latest.parts]
            self._latest = latest._replace(parts=own, lent=False, averaged=True)

    def release(self, delivery: Delivery) -> None:
        """The results of `delivery` have been read."""

    def statistics(self) -> OperationStatistics:
        tally = self._tally
        return self._engine.statistics(tally.rounds, tally.active, *tally.times_s.tolist())

    def last_round(self, rank: int) -> int:
        return int(self._tally.newest[rank])

    @property
    def newest(self) -> int:
        return self._latest.number

    def taken(self, number: int) -> Sequence[int]:
        del number  # of no other one than the newest
        return [int(count) for count in self._tally.taken]

    def kept(self, first: int, last: int) -> Sequence[Result]:
        return [result for result in (*self._history, self._latest) if max(first, 1) <= result.number <= last]

    def _stage(self, contribution: Contribution, *, may_lend: bool = False) -> int:
        """Add `contribution` to the staged one, or replace that in groups. Returns its number, the ticket.

        `may_lend`: the caller waits for the next round, so that round may reduce in the caller's memory. A caller that
        does not wait returns, and its program may change or free the memory before a round takes it.
        """
        del may_lend  # for carriers that reduce in place
        fresh = self._memory()
        contribution.read(fresh)
        if self._staged is None:
            self._staged, self._staged_weight = fresh, contribution.weight
        elif self.operation.group_size:
            self._staged, self._staged_weight, self._spare = fresh, contribution.weight, self._staged
        else:
            self._combine(self._staged, fresh)
            self._staged_weight += contribution.weight
            self._spare = fresh
        self._submitted += 1
        return self._submitted

    def _combine(self, into: Parts, other: Parts) -> None:
        for combine, mine, theirs in zip(self._combines, into, other, strict=True):
            combine(mine, theirs)

    def _neutral(self) -> Parts:
        """The contribution of a rank that has none."""
        parts = self._memory()
        for part, (dtype, _) in zip(parts, self.operation.layout, strict=True):
            fill_neutral(part, self.operation.op, dtype)
        return parts

    def _memory(self) -> Parts:
        """Arrays for a contribution, used ones if possible: page faults of new ones cost more than the reduction."""
        spare, self._spare = self._spare, None
        return spare or [np.empty(count, storage(dtype)) for dtype, count in self.operation.layout]

    # -- a round ----------------------------------------------------------------------------------

    @property
    def _is_gone(self) -> bool:
        """Whether this rank makes no more calls."""
        return self._has_joined or self._port.departed

    def _end_round(self, result: Result, gone: int) -> None:
        """The round that was armed is over, and so many ranks made no more calls."""
        self._is_over = self._has_joined and not self.operation.group_size and gone == self._group.size
        if result.ranks or not self._is_over:
            self._publish(result)
        if self._is_over and self._joining is not None and not self._joining.done():
            self._joining.set_result(None)

    def _publish(self, result: Result) -> None:
        """Give `result` of the armed round to its caller, and arm the next round."""
        self._retire(self._latest)
        self._latest = result
        # At once, whether or not a caller waits: this rank takes part in the next round in any case.
        self._round = self._arm(result.number + 1)
        # These signals came too late, and have no effect any more.
        self._early.pop(result.number, None)
        waiter = self._waiting.get(result.number)
        if waiter is not None and not waiter.done():
            self._handed = result
            waiter.set_result(result)
        self._take_part_if_gone()

    def _retire(self, result: Result) -> None:
        """`result` is the newest no longer: put it into history. The memory of the result that history drops is free.

        It is not free if a caller has been given that result and has not run since, as several rounds may end in one
        turn of the loop. A result in a caller's memory is not kept.
        """
        if not result.number or result.lent:
            return
        kept = self._history
        oldest = result if not kept.maxlen else kept[0] if len(kept) == kept.maxlen else None
        kept.append(result)
        if oldest is not None and oldest is not self._handed:
            self._spare = oldest.parts

    def _take_part_if_gone(self) -> None:
        """If this rank makes no more calls: take its part in the armed round, with the staged contribution.

        Called when the rank joins or makes its last call, and after each round. After the last round, and after a
        synchronous round in which all ranks were gone, it does nothing. Otherwise the gone ranks would carry out one
        synchronous round after another, without any caller, as long as the world exists.
        """
        if self._is_gone and not self._is_over and not self._latest.deserted:
            waits = self._has_joined and not self.operation.group_size
            self._follow(self._round.here(JOINED if waits else GONE))

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the instructions of the armed round."""
        number = self._round.number
        if self._round.is_opener and Begin() in instructions:
            self._port.trace.opened(self.operation, number)  # before any other rank is told
        for instruction in instructions:
            if isinstance(instruction, Tell):
                self._port.send(instruction.rank, number, instruction.step, self._payload(instruction.step))
            else:
                self._tally.began(self._port.now_s())
                self._port.spawn(self._carry_out())

    def _received(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """A signal of group rank `rank`. One for a round that is over has no effect any more, and is dropped.

        Its fields are untrusted; raises ProtocolError.
        """
        armed = self._round.number
        if number > armed + EARLY_MAX:
            raise ProtocolError(f"a signal for round {number} of {self.operation} while round {armed} is open")
        if number >= armed:
            self._accept(rank, number, step, payload)
            self._early.setdefault(number, []).append((rank, step, payload))
            self._handle_signals()

    def _handle_signals(self) -> None:
        """Handle the signals for the armed round that have arrived."""
        # The number is read anew each time: a signal may end the round, and the signals of the next one may be here.
        while signals := self._early.get(self._round.number):
            self._handle(*signals.pop(0))

    def _handle(self, rank: int, step: int, payload: Buffer) -> None:
        """A signal of group rank `rank` for the armed round."""
        self._follow(self._round.signalled(rank, step))

    # -- supplied by a carrier --------------------------------------------------------------------

    @abstractmethod
    def _arm(self, number: int) -> NextRound:
        """Prepare round `number`."""

    @abstractmethod
    def _accept(self, rank: int, number: int, step: int, payload: Buffer) -> None:
        """A signal has arrived, for the armed round or a later one. Raises ProtocolError if no such signal exists."""

    def _payload(self, step: int) -> bytes:
        """The payload of the signal `step` of this rank."""
        return b""

    @abstractmethod
    async def _carry_out(self) -> None:
        """The armed round is open: take this rank's part in it. It is a task of its own."""

    async def _reclaim(self, number: int) -> None:
        """The caller stops waiting for round `number`: return when no round uses its memory any more."""


def packed(arrays: Iterable[Array]) -> bytes:
    """Several arrays as the payload of one signal: one after another, without a header."""
    return b"".join([array.view(np.uint8).data for array in arrays])


def unpack(payload: Buffer, into: Iterable[Array]) -> None:
    """Copy a payload into the arrays that it consists of. A payload is read-only, and may be unaligned."""
    raw, start = np.frombuffer(payload, np.uint8), 0
    for array in into:
        end = start + array.nbytes
        array.view(np.uint8)[...] = raw[start:end]
        start = end
