"""The backend of a communicator of one rank: it has no rank to wait for, so every call is over when it returns."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from asyncoll.algorithms.dense.alone import Alone
from asyncoll.algorithms.message_backend import WithoutMemory
from asyncoll.algorithms.rounds.directory import Rounds
from asyncoll.algorithms.rounds.lone_rounds import LoneRounds
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.seam.call import Call
from asyncoll.algorithms.seam.short_calls import GeneralCalls, NoShortCalls
from asyncoll.algorithms.seam.ways import OWN
from asyncoll.errors import DeviceError, UsageError
from asyncoll.runtime.member import Member
from asyncoll.runtime.progress import ignore
from asyncoll.runtime.shared_work import Immediate
from asyncoll.runtime.signature import Site
from asyncoll.tensors.reductions import DTYPES, Array, ReduceOp, check_reduction

T = TypeVar("T")


class AloneCalls(NoShortCalls):
    """The reduction of one array is the array. Each call is counted at once, and no other rank asks for the latest."""

    def __init__(self, member: Member, general: GeneralCalls) -> None:
        self._member = member
        self._general = general
        self._reductions: set[tuple[object, object]] = set()  # that make sense: the dtype of numpy or its name, the op

    def allreduce(self, x: Any, op: object, /) -> Coroutine[Any, Any, Any] | None:
        if type(x) is not np.ndarray or not x.flags.writeable:
            return None
        return self._end("allreduce", x) if self._makes_sense(x.dtype, op) else None

    def allreduce_view(self, x: Any, op: object, array: Array, key: str, /) -> Coroutine[Any, Any, Any] | None:
        return self._end("allreduce", x) if self._makes_sense(key, op) else None

    def barrier(self) -> Coroutine[Any, Any, None] | None:
        return self._end("barrier", None)

    def _makes_sense(self, dtype: Any, op: object) -> bool:
        """Whether `op` is a reduction that is defined for `dtype`."""
        if type(op) is not ReduceOp:
            return False
        if (dtype, op) in self._reductions:
            return True
        name = dtype if isinstance(dtype, str) else dtype.name
        try:
            check_reduction(op, name)
        except UsageError:
            return False
        if name not in DTYPES:
            return False
        self._reductions.add((dtype, op))
        return True

    def _end(self, operation: str, result: T) -> Coroutine[Any, Any, T] | None:
        general, member = self._general, self._member
        if general.unstarted is not None or general.unused or member.has_failed or member.trace.sink is not None or OWN:
            return None
        member.check_caller()
        self.last += 1
        general.ledger.enter(operation, Alone.traffic)
        return member.runner.done(result)


class AloneBackend(WithoutMemory):
    """The `Backend` of one rank. What it sends to itself goes by message."""

    def short_calls(self, general: GeneralCalls) -> AloneCalls:
        return AloneCalls(self._member, general)

    def collectives(self, call: Call[Any]) -> Alone:
        return Alone()

    def start(
        self, work: Coroutine[Any, Any, T], describe: Callable[[], str], nbytes: int, discarded: Callable[[], None]
    ) -> Coroutine[Any, Any, T]:
        if discarded is ignore:
            return self._member.runner.drive(Immediate(work))
        # The next call must know that the result was lost. So nothing is over before its caller has awaited it.
        return self._member.runner.start(work, discarded)

    async def here(self, work: Coroutine[Any, Any, T], describe: Callable[[], str]) -> T:
        try:
            return await work
        # The next call tells a program that does not await this one.
        except DeviceError as error:
            self._member.failed(describe(), error)
            raise

    async def open(self, operation: Operation, site: Site) -> Rounds:
        rounds = LoneRounds(operation, lambda: f"{operation} at {site}", self._member.runner, self._member.trace)
        self.operations.add(rounds)
        return rounds

    def retire(self) -> None:
        """No other rank waits for this one."""
