"""Whole calls in the compiled core: allreduces of arrays that fit in memory, and barriers.

The first call of a kind goes the general way, and the core learns the kind from it: the dtype, the length and the
reduction. The core (asyncoll/_core/short_calls.c) carries out the next ones in their callers' threads. It declines what
is unusual in any way before anything has changed. A call that has begun there, and has to sleep or has failed, goes on
as any other call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncoll._core import NativeCore
from asyncoll.algorithms.dense.meeting_cells import BY_MEETING
from asyncoll.algorithms.dense.rendezvous import DisagreementError, RendezvousArea, signed
from asyncoll.algorithms.dense.shared_call import allreduce_ways
from asyncoll.algorithms.dense.tuning import Sizes
from asyncoll.algorithms.seam.collectives import Collectives
from asyncoll.algorithms.seam.short_calls import BegunCall, Entry, GeneralCalls, Plan, signature_of
from asyncoll.algorithms.seam.ways import OWN, Shape
from asyncoll.errors import AsyncollError
from asyncoll.runtime import deadlines
from asyncoll.runtime.event_kinds import What
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.member import Member
from asyncoll.runtime.progress import CALLS_PER_TURN
from asyncoll.runtime.shared_work import Driven, SharedWork
from asyncoll.runtime.signature import Signature, place_outside, reported
from asyncoll.runtime.trace import Event
from asyncoll.statistics import Traffic
from asyncoll.tensors.reductions import BFLOAT16, ReduceOp, kernel_number, reducer

if TYPE_CHECKING:
    from asyncoll._core.native import Meetings, ShortCall

_KINDS_MAX = 1024
LEARNT = ("allreduce", "barrier")  # whose calls are whole calls of the core
_SLEEP_NS = 200_000  # how long a call may block its caller's loop, after polling, instead of waking through the loop


def compiled_ways(sizes: Sizes, shape: Shape) -> int:
    """The sum of the ways that the core may take with arrays of `shape`: those that come before all others."""
    return sum(takewhile(bool, (way.compiled for way in allreduce_ways(sizes) if way.takes(shape))))


class Closing(Protocol):
    closed: bool


class KnownFailures(Protocol):
    any: bool


def meetings_of(area: RendezvousArea, core: NativeCore) -> Meetings:
    """The rendezvous of whole calls at this rank: one for each call."""
    sizes, arena = area.sizes, area.arena
    return core.Meetings(
        area.control_block,
        arena.view,
        DisagreementError,
        area.size,
        area.rank,
        sizes.calls,
        sizes.short,
        area.shown,
        sizes.chunk,
        arena.cores,
    )


class CompiledCalls:
    """The whole calls of one communicator at one rank: the kinds that they learn, and how one goes on that has to wait.

    `calls` is what carries them out: `seam.short_calls.ShortCalls`.
    """

    def __init__(
        self,
        core: NativeCore,
        area: RendezvousArea,
        general: GeneralCalls,
        member: Member,
        closing: Closing,
        failures: KnownFailures,
        note: Callable[[Entry], None],
        collectives: Callable[[Signature], BegunCall],
    ) -> None:
        """`closing.closed` says whether this rank has left, and `failures.any` whether anything has failed.

        `note` is told of each call, for reports of a mismatch. `collectives` makes those of a call.
        """
        self._core = core
        self._area = area
        self._general = general
        self._member = member
        self._collectives = collectives
        self._learnt: set[tuple[str, str, int, str]] = set()  # the kinds that the core knows, or declines
        arena, runner = area.arena, member.runner
        segment = arena.segments[arena.local_rank]
        unfinished, turns = area.under_way
        self.calls = core.ShortCalls(
            meetings_of(area, core),
            (segment.ctypes.data, segment.size, arena.locate(segment) or 0),
            arena.polls,
            # With fewer cores than ranks the others come later, and each wake-up through a loop keeps a core from them.
            _SLEEP_NS * -(-area.size // arena.cores) if arena.polls else 0,
            CALLS_PER_TURN,
            general=general,
            rest=self,
            runner=runner,
            home=runner.home if runner.held is None else None,
            held=runner.held,
            endpoint=closing,
            failures=failures,
            unused=general.unused,
            own=OWN,
            blocks=area.blocks,
            unfinished=unfinished,
            turns=turns,
            end=area.end,
            note=note,
            place_outside=place_outside,
            reported=reported.get,
            running_loop=runner.caller,
            expiry=deadlines.expiry.get,
            array_type=np.ndarray,
            may_raise=may_interrupt,
        )
        member.trace.compiled(lambda append: self.calls.trace(append, self._event))

    def learn(self, call: Signature) -> None:
        """From now on calls as `call` begin here with their arguments alone.

        `call` is one of LEARNT. Without effect if it is not of one array; for a reduction that has no kernel; for
        long arrays, which would block their callers' loops; if the core has not the ways of Python; and if many kinds
        are known.
        """
        kind = call.operation, call.dtype, call.elements, call.detail
        if kind in self._learnt or len(self._learnt) == _KINDS_MAX:
            return
        self._learnt.add(kind)
        if call.operation == "barrier":
            if not call.detail:  # otherwise it tells ways of the program
                self._teach((None,), call, None, 0, 0)
            return
        op, dtype = ReduceOp.__members__.get(call.detail), call.dtype
        if op is None:
            return  # of several arrays, or followed by something
        nbytes, kernel, sizes = call.nbytes, kernel_number(op, dtype, self._core), self._area.sizes
        if kernel and 0 < nbytes <= sizes.long:
            tensor, array = sys.intern(dtype), np.dtype(dtype) if dtype != BFLOAT16 else None
            keys = (tensor,) if array is None else (tensor, array)
            self._teach(keys, call, op, kernel, compiled_ways(sizes, Shape(nbytes, dtype)))

    def _teach(self, keys: tuple[object, ...], call: Signature, op: ReduceOp | None, kernel: int, ways: int) -> None:
        """Teach the core calls whose array has one of `keys`: its dtype, as numpy or as the package names it."""
        size, nbytes, reducing, receiving = self._area.size, call.nbytes, Traffic(), Traffic()
        if nbytes:
            for traffic, received in ((reducing, nbytes * (size - 1)), (receiving, nbytes)):
                traffic.sent(nbytes)
                traffic.received(received)
        kind, reduce = call[:1] + call[2:5], reducer(op, call.dtype, self._core) if op else None
        fingerprint, divisor, done = signed(call.fingerprint()), size if op is ReduceOp.AVG else 1, nbytes or 1
        is_long = ways & ~BY_MEETING != 0
        plan = Plan(kind, fingerprint, reduce, kernel, divisor, is_long, done, reducing, receiving, call.epoch)
        for key in keys:
            self.calls.learn(key, op, nbytes, plan, fingerprint, divisor, done, kernel, ways)

    # -- a call that has begun in the core ------------------------------------------------------------

    def general(self, begun: ShortCall, error: BaseException | None) -> Driven[Any]:
        """The rest of a call, with a record for deadlines. Raises `error`, unless it is one of the package.

        One of the package is raised by the rest.
        """
        if error is not None and not isinstance(error, AsyncollError):
            raise error
        call, plan, result = signature_of(begun.entry), begun.entry[0], begun.result
        x = None if begun.array is None else begun.array.reshape(-1)
        block = begun.block
        shown = x if block is None or x is None else block.memory[: x.nbytes].view(x.dtype)
        collectives = self._collectives(call)
        collectives.rejoin(shown, plan)

        async def body(_: Collectives) -> Any:
            if error is not None:
                raise error
            await collectives.finish_shortly(shown, plan)
            if block is not None and x is not None and shown is not None:
                x[...] = shown
                self._area.give_back(block)
            return result

        work = self._general.resume(call, collectives, body, begun.since_s, begun.expires_s)
        return SharedWork(self._area.arena, work, self._member.check, call.__str__)

    def interrupted(self, begun: ShortCall) -> None:
        """End the communicator: an exception has come between the beginning of the call and its rest."""
        call, trace = signature_of(begun.entry), self._member.trace
        if trace.sink is not None:
            trace.tell(What.FAIL, call, call.number, call.number)
        self._member.abort(f"{call} was interrupted")

    def _event(self, what: int, at_s: float, entry: Entry) -> Event:
        """The event of a call that the core has told."""
        call, trace = signature_of(entry), self._member.trace
        ranks = trace.everyone if what == What.REDUCE else (trace.rank,)
        nbytes = entry[0].done if what == What.BEGIN and call.dtype else 0
        return Event(What(what), at_s, trace.rank, call, call.number, call.number, ranks, nbytes)
