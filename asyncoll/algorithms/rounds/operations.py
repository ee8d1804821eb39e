"""Calls of wait-avoiding operations: contributions, results, and answers that did not reach their callers.

These calls are not numbered like those of dense collectives: a rank that is late for one call must not hold up the next
call of the others.

Many calls need no other rank: the caller opens the round itself, or is late. Such a call completes in its caller's
thread (`_PromptCall`), without a coroutine and without a record among the pending calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from asyncoll.algorithms.rounds.directory import Rounds, RoundsBackend
from asyncoll.algorithms.rounds.engine import Delivery, Result
from asyncoll.algorithms.rounds.operation import Operation, RoundCall
from asyncoll.algorithms.rounds.policies import PolicyError
from asyncoll.algorithms.rounds.reduction import Reduction, reduction_of
from asyncoll.algorithms.rounds.repeats import NO_REPEAT, NoRepeat, Repeat
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.seam.arrival import Arrival, to_its_end
from asyncoll.errors import UsageError, text_of
from asyncoll.runtime import deadlines
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.shared_work import SharedWork
from asyncoll.runtime.signature import Site
from asyncoll.tensors.operands import Bundle, Single, bundle
from asyncoll.tensors.reductions import ReduceOp, storage

T = TypeVar("T")
Rest = Coroutine[Any, Any, Delivery]  # of a call that has begun


class Receipt:
    """Returns the delivery of one call to its operation if the caller is cancelled before it gets the result.

    The next call then reports the rounds of that delivery. `sign` and `take_back` may be called in two threads at the
    same time, and in any order.
    """

    __slots__ = ("_given", "_is_unwanted", "key")

    def __init__(self) -> None:
        self.key = 0  # of the call in a trace
        self._given: list[tuple[Rounds, Delivery]] = []
        self._is_unwanted = False

    def sign(self, operation: Rounds, delivery: Delivery) -> None:
        """The call was given `delivery`. Takes it back at once if its caller is gone already."""
        # Each thread writes first and then reads the other thread's variable: `sign` appends and reads the flag,
        # `take_back` sets the flag and pops. So at least one of them sees both, and `pop` lets only one succeed.
        self._given.append((operation, delivery))
        if self._is_unwanted:
            self.take_back()

    def take_back(self) -> None:
        """No caller gets the delivery of this call, whether it exists yet or not."""
        self._is_unwanted = True
        # There is no delivery yet, or the other thread has taken it back.
        with contextlib.suppress(IndexError):
            operation, delivery = self._given.pop()
            operation.take_back(delivery)


class Operations:
    """The wait-avoiding operations of one communicator at one rank."""

    def __init__(self, member: Member, backend: RoundsBackend, pending: PendingCalls) -> None:
        self.member = member
        self.trace = member.trace
        self._backend = backend
        self.pending = pending
        self._known = backend.operations.known
        self.now_s = deadlines.clock()
        self.repeats: dict[str, Repeat | NoRepeat] = {}  # by name
        self._called: dict[str, Operation] = {}  # by name: those that this rank has called
        self._joined: set[str] = set()  # the names of those that this rank has joined
        # By name: the turns of calls, from the first one on whose tensors were on a device. Waiters get them in order.
        self._turns: dict[str, asyncio.Lock] = {}
        pending.makes_rounds = lambda: not self._joined.issuperset(tuple(self._called))

    def start(self, spec: Operation, given: Bundle | Single, site: Site) -> Coroutine[Any, Any, Reduction]:
        """Start a call of the operation `spec`. Returns a coroutine that waits for the result.

        `given` is the contribution, and is overwritten with the result. Cancelling the coroutine leaves the
        contribution in, and waits until no round uses the memory of `given`.
        """
        member, name = self.member, spec.name
        member.check_caller()
        if name in self._joined:
            raise UsageError(f"this rank has joined {name!r}, and contributes no more: use another name")
        self._called[name] = spec
        call: RoundCall = tuple.__new__(RoundCall, (spec, site, False))  # in half the time of `RoundCall(...)`
        rounds = self._known.get(name)
        # Identity spares the comparison of all fields in the usual case, that the same call is repeated.
        begins = rounds is not None and rounds.begin is not None and rounds.operation is spec
        if rounds is not None and begins and not given.staged and name not in self._turns:
            return self._begin(rounds, call, given)
        return self._start(call, given, self.contribute)

    def _start(
        self,
        call: RoundCall,
        given: Bundle | Single,
        work: Callable[[RoundCall, Bundle | Single, Receipt, PendingCall], Coroutine[Any, Any, T]],
    ) -> Coroutine[Any, Any, T]:
        """Start a call, which `work` carries out.

        If tensors are on devices, it starts once they have arrived from there, and the call before is over. Until then
        the call counts as not made: a round goes on without this rank, or waits for it.
        """
        receipt, pending, name = Receipt(), self.pending.enter(call), call.operation.name
        try:
            if not given.staged and name not in self._turns:
                body = self._traced(call, receipt, work(call, given, receipt, pending))
                return self._backend.start(body, call.__str__, call.operation.nbytes, receipt.take_back)
            arrival, runner = Arrival(self.member, given.staged), self.member.runner
            self.pending.arrives(pending, given.staged)
            # Repeated calls would not wait for their turn.
            self.repeats.pop(name, None)
            turn = self._turns.setdefault(name, asyncio.Lock())
            rest = self._in_turn(turn, arrival, call, partial(work, call, given, receipt, pending), pending)
            return runner.resuming(runner.start(self._traced(call, receipt, rest), receipt.take_back), arrival.join)
        except BaseException:
            self.pending.leave(pending)
            raise

    async def _in_turn(
        self,
        turn: asyncio.Lock,
        arrival: Arrival,
        call: RoundCall,
        work: Callable[[], Coroutine[Any, Any, T]],
        pending: PendingCall,
    ) -> T:
        """`work`, once the calls before are over and the tensors have arrived. Cancelled, it is begun all the same."""
        try:
            await to_its_end(turn.acquire())
        except BaseException:
            self.pending.leave(pending)
            raise
        try:
            await to_its_end(arrival.complete())
        except BaseException as error:
            turn.release()
            self.pending.leave(pending)
            if isinstance(error, Exception):
                self.failed(call, error)
            raise
        try:
            return await self._backend.here(work(), call.__str__)
        finally:
            turn.release()

    def _begin(self, rounds: Rounds, call: RoundCall, given: Bundle | Single) -> Coroutine[Any, Any, Reduction]:
        """Begin a call of `rounds` now, in the caller's thread."""
        receipt = Receipt()
        if self.trace.sink is not None:
            receipt.key = self.trace.begin(call, call.operation.nbytes)
        return self.member.runner.drive(_PromptCall(self, call, rounds, given, receipt), receipt.take_back)

    def expect(self, spec: Operation, arguments: tuple[object, ...], x: object) -> None:
        """Calls of `spec` with the same arguments and an array as `x` may follow: note them in `repeats`, if they can.

        Not the first call of an operation, which nothing is known of yet.
        """
        rounds = self._known.get(spec.name)
        if rounds is None or rounds.operation is not spec or spec.name in self._joined:
            return
        if rounds.at_once is None:
            self.repeats[spec.name] = NO_REPEAT
        # Otherwise it has to be packed in another dtype, or in native byte order.
        elif type(x) is np.ndarray and x.dtype == storage(spec.layout[0][0]):
            at_once, pending, begin = rounds.at_once, self.pending, partial(self._begin, rounds)
            self.repeats[spec.name] = Repeat(
                spec, arguments, x.dtype, at_once, self.member, pending, begin, self.failed
            )

    async def contribute(
        self,
        call: RoundCall,
        given: Bundle | Single,
        receipt: Receipt,
        pending: PendingCall | None = None,
        begun: tuple[Rounds, Rest] | None = None,
    ) -> Reduction:
        """The whole call, on whichever loop drives it; or what is left of one that has `begun` in its caller's thread.

        Raises PeerLostError if a rank is lost, and UsageError if this host has no memory for the contribution. An
        exception that the other ranks do not know aborts the communicator.
        """
        pending = pending or self.pending.enter(call)
        try:
            if begun is None:
                self.member.check()
                if self.trace.sink is not None:
                    self.trace.tell(What.ARRIVE, call, receipt.key)
                rounds = await self._find_or_open(call)
                begun = rounds, rounds.call(given)
            rounds, rest = begun
            delivery = await rest
            # Without an await up to the signature: when the call is over for the operation, only the caller can lose
            # its rounds.
            try:
                return self.hand_over(call.operation, delivery, given, self.pending.age_s(pending))
            finally:
                receipt.sign(rounds, delivery)
                rounds.release(delivery)
        except Exception as error:
            self.failed(call, error)
            raise
        finally:
            self.pending.leave(pending)

    # -- events -----------------------------------------------------------------------------------

    def _traced(self, call: RoundCall, receipt: Receipt, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """`work`, which carries out `call`. In a trace the call begins here, and the other events of it follow."""
        if self.trace.sink is None:
            return work
        receipt.key = self.trace.begin(call, call.operation.nbytes)
        return self.followed(call, receipt, work)

    def followed(self, call: RoundCall, receipt: Receipt, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """`work`, which carries out `call` or the rest of it. If there is a trace, its end is told."""
        trace = self.trace
        return work if trace.sink is None else trace.follow(call, receipt.key, work, partial(self.tell_end, call))

    def tell_end(self, call: RoundCall, key: int, reduction: object) -> None:
        """The call is over, and its caller gets `reduction`; None if there was nothing to tell."""
        if isinstance(reduction, Reduction):
            self.trace.tell(What.END, call, key, reduction.round, included=reduction.included)
        else:
            self.trace.tell(What.END, call, key)

    def failed(self, call: RoundCall, error: BaseException) -> None:
        """Abort the communicator, unless this host has no room for the contribution: the others' rounds can go on."""
        self._end_without_answer(error)
        if not isinstance(error, UsageError):
            self.member.failed(call, error)

    def _end_without_answer(self, error: BaseException) -> None:
        """Abort the communicator, and raise its error, if `error` is that of a policy: all ranks raise the same."""
        if isinstance(error, PolicyError):
            self.member.abort(text_of(error))
            self.member.check()

    async def _find_or_open(self, call: RoundCall) -> Rounds:
        spec, site, operations = call.operation, call.site, self._backend.operations
        return operations.find(spec, self.member.group.rank, site) or await self._backend.open(spec, site)

    def join(self, name: str, x: object, site: Site) -> Coroutine[Any, Any, Reduction | None]:
        """Start the call by which this rank joins the operation `name`. Returns a coroutine that waits for the others.

        `x` is overwritten with the newest result.
        """
        self.member.check_caller()
        spec = self._called.get(name)
        if spec is None:
            raise UsageError(f"this rank has made no call named {name!r:.60}: make at least one before it joins")
        given = bundle(x, spec.op, is_read=False)
        if (given.layout, given.boundaries) != (spec.layout, spec.buckets):
            raise UsageError(f"x is not as in the calls of {spec}: pass tensors of the same dtypes and sizes")
        self._joined.add(name)
        self.repeats.pop(name, None)
        return self._start(RoundCall(spec, site, joins=True), given, self._conclude)

    async def _conclude(
        self, call: RoundCall, given: Bundle | Single, receipt: Receipt, pending: PendingCall
    ) -> Reduction | None:
        """The whole call to join, on whichever loop drives it. A cancellation aborts the communicator."""
        del receipt  # a result that has no receiver is not told again: this rank makes no more calls
        try:
            self.member.check()
            rounds = await self._find_or_open(call)
            delivery = await rounds.join()
            if delivery is None:
                return self._only_skipped(call.operation, rounds, self.pending.age_s(pending))
            try:
                return self.hand_over(call.operation, delivery, given, self.pending.age_s(pending))
            finally:
                rounds.release(delivery)
        except (Exception, asyncio.CancelledError) as error:
            self._end_without_answer(error)
            self.member.failed(call, error)
            raise
        finally:
            self.pending.leave(pending)

    def hand_over(self, spec: Operation, delivery: Delivery, given: Bundle | Single, waited_s: float) -> Reduction:
        """Write the result into `given`, and copy the missed results: `release` ends their memory's use."""
        results, included, skipped, lag = delivery
        if self.trace.sink is not None:
            for result in results:
                self.trace.reduced(spec, result.number, result.ranks)
        result = results[-1]
        ranks = result.ranks
        # A round without contributors has no result, and leaves `given` as it is.
        if ranks:
            given.write(result.parts, self._divisor(spec, result) if spec.divides else 1)
        missed: tuple[Any, ...] = ()
        if len(results) > 1:
            missed = tuple([given.like(old.parts, self._divisor(spec, old)) for old in results[:-1]])
        told = result.number, len(ranks), included, skipped, result.synchronous, missed, result.members, ranks
        return reduction_of(*told, lag, waited_s, given.given if ranks else None)

    def _only_skipped(self, spec: Operation, rounds: Rounds, waited_s: float) -> Reduction | None:
        """What a join without news tells: the rounds of calls that were given up after a newer answer; None if none."""
        newest, skipped = rounds.end()
        if not skipped or spec.group_size:
            return None
        everyone = tuple(range(self.member.group.size))
        return reduction_of(newest, 0, True, skipped, False, (), everyone, (), 0, waited_s, None)

    # -- what is left of the operation `name` once its epoch has ended; a rank may not know the operation --------

    def newest(self, name: str) -> int:
        """The newest round that this rank knows the result of; 0: none."""
        rounds = self._known.get(name)
        return rounds.newest if rounds else 0

    def taken(self, name: str, number: int) -> Sequence[int]:
        """How many calls of each rank are in the rounds up to `number`, which is `newest` of this rank."""
        rounds = self._known.get(name)
        return rounds.taken(number) if rounds and number else [0] * self.member.group.size

    def results(self, name: str, x: object, first: int, last: int) -> list[tuple[int, Any]]:
        """Of rounds `first` to `last` that are kept, oldest first: the number, and the result as new tensors like `x`.

        None in place of the result of a round that no rank has contributed to. `x` may lack the metrics of the calls.
        """
        rounds = self._known.get(name)
        if rounds is None:
            return []
        spec, given = rounds.operation, bundle(x, rounds.operation.op, is_read=False)

        def read(result: Result) -> Any:
            return given.like(result.parts[: len(given.layout)], self._divisor(spec, result) if spec.divides else 1)

        return [(result.number, read(result) if result.ranks else None) for result in rounds.kept(first, last)]

    def statistics(self) -> dict[str, OperationStatistics]:
        """The totals of each operation that this rank knows, by name."""
        return {rounds.operation.name: rounds.statistics() for rounds in self._backend.operations}

    def _divisor(self, spec: Operation, result: Result) -> float:
        """The divisor of AVG and AVG_ACTIVE, and 1 for other reductions.

        If all weights of a round are 0, its sum is 0, and so is its average.
        AVG in groups divides by the number of models in the result. Otherwise it divides by the number of ranks,
        contributing or not, as in the algorithm of section 5 of the PPoPP 2020 paper.
        """
        if result.averaged:
            return 1
        if spec.weighted:
            return result.weight or 1.0
        if spec.op is ReduceOp.AVG and not spec.group_size:
            return self.member.group.size
        return max(1, len(result.ranks)) if spec.op in (ReduceOp.AVG, ReduceOp.AVG_ACTIVE) else 1


class _PromptCall(SharedWork[Reduction]):
    """A call that begins with a plain function. A coroutine does the rest, if the call has to wait."""

    # Not `is_atomic`: a signal handler may raise between the end of the round and the accounting of this call.
    __slots__ = ("_call", "_given", "_operations", "_receipt", "_rounds")

    def __init__(
        self, operations: Operations, call: RoundCall, rounds: Rounds, given: Bundle | Single, receipt: Receipt
    ) -> None:
        self._wait = self._error = None  # of `SharedWork`, whose `__init__` runs when there is a coroutine
        self.is_over = False
        self._operations = operations
        self._call = call
        self._rounds = rounds
        self._given = given
        self._receipt = receipt

    def begin(self) -> None:
        """Complete the call, or make the coroutine and run that until it waits. An exception is kept for `result`."""
        operations, call, rounds, given = self._operations, self._call, self._rounds, self._given
        came_s, trace = operations.now_s(), operations.trace
        try:
            operations.member.check()
            if trace.sink is not None:
                trace.tell(What.ARRIVE, call, self._receipt.key)
            assert rounds.begin is not None, "these begin in their callers' threads"
            answer = rounds.begin(given)
            if isinstance(answer, Delivery):
                operations.pending.note(call)
                try:
                    self._result = operations.hand_over(call.operation, answer, given, operations.now_s() - came_s)
                finally:
                    self._receipt.sign(rounds, answer)
                    rounds.release(answer)
                self.is_over = True
                if trace.sink is not None:
                    operations.tell_end(call, self._receipt.key, self._result)
                return
        except BaseException as error:
            if isinstance(error, Exception):
                operations.failed(call, error)
            if trace.sink is not None:
                trace.give_up(call, self._receipt.key, error)
            self._error = error
            self.is_over = True
            return
        assert rounds.arena is not None
        rest = operations.contribute(call, given, self._receipt, begun=(rounds, answer))
        body = operations.followed(call, self._receipt, rest)
        super().__init__(rounds.arena, body, operations.member.check, call.__str__)
        super().begin()
