"""The calls of one communicator at one rank: numbers them, starts them on the backend, tracks them until they end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from asyncoll.algorithms.seam.arrival import Arrival
from asyncoll.algorithms.seam.backend import Backend
from asyncoll.algorithms.seam.call import REDUCING, Call
from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.algorithms.seam.short_calls import signature_of
from asyncoll.algorithms.seam.ways import OWN, Shape, Way, begin, own, with_own
from asyncoll.errors import describe
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.member import Member
from asyncoll.runtime.numbering import Numbering
from asyncoll.runtime.pending import PendingCall, PendingCalls
from asyncoll.runtime.receives import FromAny, Receives, pair_context
from asyncoll.runtime.signature import Signature, Site
from asyncoll.runtime.standstill import Kind
from asyncoll.statistics import Ledger, Traffic
from asyncoll.tensors.reductions import Array
from asyncoll.tensors.registered import RegisteredMemory
from asyncoll.tensors.staged import Arriving, Staged

T = TypeVar("T")
_DIRECT_MAX_BYTES = 1 << 16  # a longer array is not copied in the thread of the caller, whose loop would stand still


class Calls:
    """Starts the collective and pair calls of one rank. Implements `seam.short_calls.GeneralCalls`."""

    def __init__(self, member: Member, backend: Backend, pending: PendingCalls, memory: RegisteredMemory) -> None:
        self._member = member
        self._trace = member.trace
        self._backend = backend
        self.unstarted: Signature | None = None
        self._memory = memory
        self.unused: Sized = memory.unused
        self._sends: defaultdict[int, Numbering] = defaultdict(Numbering)  # by dest
        self._receives = Receives(member)
        self._pending = pending
        self.ledger = Ledger()
        self.short = backend.short_calls(self)
        pending.newest = self._newest
        for ledger in (self.ledger, member.endpoint.in_memory):
            ledger.sources.append(self.collect)
        member.at_end(lambda: member.endpoint.in_memory.drop(self.collect))

    @property
    def last(self) -> int:
        """The number of the last collective call; 0 before the first."""
        return self.short.last

    def number(self, operation: str, dtype: str, count: int, detail: str, site: Site) -> Signature:
        """Number the next call. All checks that raise UsageError come before: a number that is taken must be used.

        Before each call, memory of tensors that are gone is given back.

        `count` is the number of elements, -1 if it does not matter. Raises UsageError in a thread without a running
        loop. Aborts the communicator if the last call was numbered and never started.
        """
        if self.unused:
            self._memory.give_back()
        self._member.check_caller()
        if self.unstarted is not None:
            self.check_started()
        number, epoch = self.short.last + 1, self._member.group.epoch
        if OWN:  # all ranks have the same here
            detail = ", ".join(filter(None, (detail, *(f"way {way.name!r}" for way in own()))))
        self.unstarted = call = Signature(operation, number, dtype, count, detail, site, epoch)
        self.short.last = call.number  # after `unstarted`: no number is taken that it does not tell
        return call

    def check_started(self) -> None:
        """Abort the communicator if the last call was numbered and never started.

        A signal handler may raise between the number of a call and its start. The other ranks wait for that call, so
        this rank cannot go on with the next one.
        """
        if self.unstarted is not None:
            self._member.abort(f"{self.unstarted} was interrupted before it had begun")

    def start(self, call: Call[T]) -> Coroutine[Any, Any, T]:
        """Start a call of all ranks. Returns a coroutine that waits for it.

        An exception here aborts the communicator.
        """
        signature = call.signature
        if OWN:
            call = with_own(call)
        try:
            pending = self._pending.enter(signature, Kind.COLLECTIVE, signature.number)
            self.unstarted = None  # not before: from here on an interruption is reported below
            collectives = self._backend.collectives(call)
            if call.staged:
                return self._start_staged(call, collectives, pending, self._backend.here)
            work = self._carry_out(signature, collectives, call.body, pending)
            if self._trace.sink is not None:
                work = self._traced(signature, pending, work, call.nbytes)
            return self._backend.start(work, signature.__str__, call.nbytes, call.discarded)
        except BaseException as error:
            self._pending.drop(signature)
            self._member.abort(f"{signature} was interrupted: {describe(error)}")
            raise

    def _start_staged(
        self,
        call: Call[T],
        collectives: Collectives,
        pending: PendingCall,
        here: Callable[[Coroutine[Any, Any, T], Callable[[], str]], Coroutine[Any, Any, T]],
    ) -> Coroutine[Any, Any, T]:
        """Start a call with tensors on devices, on the runtime's loop: the caller's thread waits for no device.

        The body runs once the tensors have arrived, unless `collectives` fetch what they use, and wait for it.
        """
        signature, body, overlaps = call.signature, call.body, collectives.overlaps
        arrival, runner = self._arrival(pending, call.staged), self._member.runner
        checked = body if overlaps else arrival.before(body)
        work = self._carry_out(signature, collectives, checked, pending)
        work = here(self._traced(signature, pending, work, call.nbytes), signature.__str__)
        return runner.resuming(runner.start(work if overlaps else arrival.then(work), call.discarded), arrival.join)

    def _arrival(self, pending: PendingCall, staged: Sequence[Arriving]) -> Arrival:
        arrival = Arrival(self._member, staged)
        self._pending.arrives(pending, staged)
        return arrival

    # -- messages ---------------------------------------------------------------------------------

    def number_send(self, dest: int, tag: int) -> int:
        """The number of the next message to `dest` with `tag`.

        All checks come before, `Member.check_caller` among them.
        """
        return self._sends[dest].next(tag)

    def start_send(
        self, call: Signature, dest: int, tag: int, data: Array, body: Body[None], staged: Sequence[Staged] = ()
    ) -> Coroutine[Any, Any, None]:
        """Start `call`, which sends `data` to `dest`. `staged` has its tensor, if that is on a device.

        A short message may be sent in the calling thread, and is over then. `body` sends others on the runtime's loop.
        """
        source = self._member.group.rank
        # Messages of one pair and tag have a context of their own, because calls of two ranks are not in the order of
        # the communicator's calls.
        context = pair_context(self._member.communicator, source, dest, tag)

        def start() -> Coroutine[Any, Any, None]:
            pending = self._enter_pair(call, source, dest)
            if not staged:
                return begin(SEND_WAYS, Shape(data.nbytes), self, call, context, dest, data, body, pending)
            pair = self._backend.pair(call, context, dest, staged[0])
            if pair.overlaps:
                staged[0].defer(may_share=True)
            return self._start_staged(Call(call, body, staged=staged), pair, pending, lambda work, _: work)

        return self._begin(call, start)

    def send_directly(
        self, call: Signature, context: int, dest: int, data: Array, body: Body[None], pending: PendingCall
    ) -> Coroutine[Any, Any, None] | None:
        """Send `data` in the calling thread. Declines if that cannot be done at once."""
        if not self._member.send_directly(call, context, dest, data):
            return None
        self._pending.leave(pending)
        traffic = Traffic()
        traffic.sent(data.nbytes)
        self.ledger.enter(call.operation, traffic)
        if (trace := self._trace).sink is not None:
            trace.over(call, call.nbytes, pending.since_s, call.number)
        return self._member.runner.done(None)

    def send_by_loop(
        self, call: Signature, context: int, dest: int, data: Array, body: Body[None], pending: PendingCall
    ) -> Coroutine[Any, Any, None]:
        """Send by `body`, on the runtime's loop."""
        work = self._carry_out(call, self._backend.pair(call, context, dest, None), body, pending)
        return self._member.runner.start(self._traced(call, pending, work))

    def start_receive(
        self, call: Signature, source: int, tag: int, body: Body[T], staged: Sequence[Staged] = ()
    ) -> Coroutine[Any, Any, T]:
        """Start `call`, which receives from `source`. It takes its number on the runtime's loop.

        `staged` has its tensor, if that is on a device. The call does not wait for it, of which it reads nothing.
        """

        def start() -> Coroutine[Any, Any, T]:
            pending, runner = self._enter_pair(call, source, self._member.group.rank), self._member.runner
            if staged and self._backend.pair(call, 0, source, staged[0]).overlaps:
                staged[0].defer(may_share=True)
            arrival = self._arrival(pending, staged) if staged else None  # before the message may be there
            work = self._receive(call, source, tag, body, pending, staged)
            started = runner.start(self._traced(call, pending, work))
            return started if arrival is None else runner.resuming(started, arrival.join)

        return self._begin(call, start)

    def start_receive_from_any(
        self,
        call: Callable[[int | None, int], Signature],
        tag: int,
        into: Array,
        result: Callable[[int], T],
        staged: Sequence[Arriving] = (),
    ) -> Coroutine[Any, Any, T]:
        """Start a receive of `into` from any source: `call(None, 0)`, and `call(source, number)` once it has a message.

        `result(source)` is called when `into` is complete. If no caller gets it, the message goes to the next receive.
        `staged` has the tensor of `into`, if that is on a device.
        """
        ranks, unserved = self._member.group.ranks, call(None, 0)

        def start() -> Coroutine[Any, Any, T]:
            pending = self._pending.enter(unserved, Kind.FROM_ANY)

            def taken(source: int, number: int) -> Signature:
                self._pending.narrow(pending, (ranks[source], ranks[self._member.group.rank]))
                return call(source, number)

            receive = FromAny(self._member, taken, tag, into)
            work = self._traced(unserved, pending, self._receive_from_any(receive, unserved, pending, result))
            arrival, runner = Arrival(self._member, staged) if staged else None, self._member.runner
            started = runner.start(work, partial(self._receives.discard, receive))
            return started if arrival is None else runner.resuming(started, arrival.join)

        return self._begin(unserved, start)

    def _begin(self, call: Signature, start: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        """`start()`, which enters and starts `call`. If a signal handler raises meanwhile, the call is not pending."""
        try:
            return start()
        except BaseException:
            self._pending.drop(call)
            raise

    def _enter_pair(self, call: Signature, source: int, dest: int) -> PendingCall:
        ranks = self._member.group.ranks
        return self._pending.enter(call, Kind.PAIR, ranks=(ranks[source], ranks[dest]))

    async def _receive(
        self, call: Signature, source: int, tag: int, body: Body[T], pending: PendingCall, staged: Sequence[Staged]
    ) -> T:
        number = self._receives.number_now(source, tag)
        if number is None:
            number = await self._wait_for_number(call, source, tag, pending)
        call = call._replace(number=number)
        self._pending.replace(pending, call)
        context = pair_context(self._member.communicator, source, self._member.group.rank, tag)
        pair = self._backend.pair(call, context, source, staged[0] if staged else None)
        return await self._carry_out(call, pair, body, pending)

    async def _wait_for_number(self, call: Signature, source: int, tag: int, pending: PendingCall) -> int:
        try:
            return await self._receives.number(source, tag)
        except BaseException as error:
            self._pending.leave(pending)
            self._member.failed(call, error)
            raise

    async def _receive_from_any(
        self, receive: FromAny, call: Signature, pending: PendingCall, result: Callable[[int], T]
    ) -> T:
        try:
            lane = await self._receives.from_any(receive, call.__str__)
        finally:
            self._pending.leave(pending)
        assert receive.source is not None
        self.ledger.enter(call.operation, lane.traffic)
        return result(receive.source)

    # -- `seam.short_calls.GeneralCalls` -------------------------------------------------------------------------------

    def resume(
        self, call: Signature, collectives: Collectives, body: Body[T], since_s: float, expires_s: float | None
    ) -> Coroutine[Any, Any, T]:
        since = (since_s, expires_s) if since_s else None
        pending = self._pending.enter(call, Kind.COLLECTIVE, call.number, since=since)
        work = self._carry_out(call, collectives, body, pending)
        trace, number = self._trace, call.number
        return work if trace.sink is None else trace.follow(call, number, work, self._ended(call), number)

    def collect(self) -> None:
        for plan, reduced, received in self.short.counts():
            for traffic, times in ((plan.reducing, reduced), (plan.receiving, received)):
                if times:
                    self.ledger.enter(plan.kind[0], traffic, times)
                    self._member.endpoint.in_memory.enter(plan.kind[0], traffic, times)

    def _newest(self) -> tuple[Signature, int, float] | None:
        latest = self.short.latest()
        if latest is None:
            return None
        call = signature_of(latest[0])
        return call, call.number, latest[1]

    # -- events -----------------------------------------------------------------------------------

    def _traced(
        self, call: Signature, pending: PendingCall, work: Coroutine[Any, Any, T], nbytes: int = 0
    ) -> Coroutine[Any, Any, T]:
        """`work`, which carries out `call`. In a trace the call begins here, and the other events of it follow."""
        trace = self._trace
        if trace.sink is None:
            return work
        key = trace.begin(call, nbytes or call.nbytes, pending.number)
        return trace.follow(call, key, work, self._ended(call), pending.number, arrives=True)

    def _ended(self, call: Signature) -> Callable[[int, object], None]:
        """Tells the end of `call`."""

        def end(key: int, result: object) -> None:
            if call.operation in REDUCING:
                self._trace.reduced(call, call.number, self._trace.everyone, key)
            self._trace.tell(What.END, call, key, call.number)

        return end

    async def _carry_out(self, call: Signature, collectives: Collectives, body: Body[T], pending: PendingCall) -> T:
        """The whole call, on whichever loop drives it."""
        try:
            async with collectives:
                self._member.check()
                return await body(collectives)
        finally:
            self._pending.leave(pending)
            self.ledger.enter(call.operation, collectives.traffic)


SEND_WAYS: tuple[Way[Coroutine[Any, Any, None]], ...] = (
    Way("send", "at once", Calls.send_directly, "no loop wakes", up_to=_DIRECT_MAX_BYTES, needs="room to send it"),
    Way("send", "by the loop", Calls.send_by_loop, "it waits there for room, or for its receiver"),
)
