"""Calls that are carried out as a whole, from the arguments of the caller to the end of its `await`."""

from __future__ import annotations

from collections.abc import Coroutine, Sized
from types import CodeType
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncoll.algorithms.seam.collectives import Body, Collectives
from asyncoll.runtime.signature import Signature, Site
from asyncoll.statistics import Ledger, Traffic
from asyncoll.tensors.reductions import Array, Reduce

T = TypeVar("T")


class Plan(NamedTuple):
    """What all short calls of one operation, dtype, length and reduction have in common."""

    kind: tuple[str, str, int, str]  # operation, dtype, elements and detail of `Signature`
    fingerprint: int  # signed
    reduce: Reduce | None  # None for a barrier
    kernel: int  # of the compiled core, 0 for none: `tensors.reductions.kernel_number`
    divisor: int
    is_long: bool  # the ranks reduce what all show, in chunks; otherwise the last one to come reduces copies for all
    done: int  # the bytes of the result; 1 for a barrier
    reducing: Traffic  # of the rank that reduces
    receiving: Traffic  # of each other rank
    epoch: int  # of `Signature`


# A call of `ShortCalls`: its plan and number; the code and the instruction of its `Site`.
Entry = tuple[Plan, int, CodeType, int]


def signature_of(entry: Entry) -> Signature:
    """The call that is described there."""
    plan, number, code, instruction = entry
    operation, dtype, elements, detail = plan.kind
    return Signature(operation, number, dtype, elements, detail, Site(code, instruction), plan.epoch)


class GeneralCalls(Protocol):
    """What the short calls of a communicator need of it."""

    unstarted: Signature | None  # a call that is numbered and not yet started: no other call may begin
    unused: Sized  # registered memory to give back before the next call, unless it is empty
    ledger: Ledger

    def resume(
        self, call: Signature, collectives: Collectives, body: Body[T], since_s: float, expires_s: float | None
    ) -> Coroutine[Any, Any, T]:
        """The rest of `call`, which has begun: `body` with its `collectives`. It has a record for deadlines.

        It began at `since_s`, and is overdue at `expires_s`. It has failed at once if `since_s` is 0.
        """

    def collect(self) -> None:
        """Enter the calls that `ShortCalls.counts` tells."""


class Block(NamedTuple):
    """Shared memory for a long array of one call."""

    address: int
    memory: Array  # bytes


class ShortCalls(Protocol):
    """Starts calls of usual arguments and in usual circumstances, at the least cost. It leaves all others alone.

    A call is left alone if it returns None: it has no number then, nothing has changed, and it is to be started in the
    general way, which raises all errors. The other calls keep what that promises: see `Communicator`. Each method must
    be called by a public method of the communicator, directly.
    """

    last: int  # the number of the last call that was numbered, here or in the general way
    libraries: tuple[str, ...]  # what the names of files begin with whose lines no report names; empty at first

    def counts(self) -> list[tuple[Plan, int, int]]:
        """The calls that have ended here since the last time: how many this rank, and another one, has reduced."""

    def latest(self) -> tuple[Entry, float] | None:
        """The newest call that was numbered here, and when one last ended. None before the first call."""

    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None:
        """Start an allreduce of `x`, if it is a numpy array. The coroutine returns `x`, which has the result."""

    def allreduce_view(self, x: Any, op: object, array: Array, key: str, /) -> Coroutine[Any, Any, Any] | None:
        """The same for a tensor `x` of dtype `key`, whose elements `array` shows; `key` is interned."""

    def barrier(self) -> Coroutine[Any, Any, None] | None:
        """Start a barrier."""


class NoShortCalls:
    """Implements `ShortCalls`: it leaves all calls alone, so that all go the general way."""

    last = 0
    libraries: tuple[str, ...] = ()

    def counts(self) -> list[tuple[Plan, int, int]]:
        return []

    def latest(self) -> tuple[Entry, float] | None:
        return None

    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None:
        return None

    def allreduce_view(self, x: Any, op: object, array: Array, key: str, /) -> Coroutine[Any, Any, Any] | None:
        return None

    def barrier(self) -> Coroutine[Any, Any, None] | None:
        return None


class BegunCall(Collectives, Protocol):
    """The collectives of an allreduce, or of a barrier, that this rank has begun already."""

    def rejoin(self, x: Array | None, plan: Plan) -> None:
        """First of all: this rank has begun with `x`."""

    async def finish_shortly(self, x: Array | None, plan: Plan) -> None:
        """The rest of the call."""
