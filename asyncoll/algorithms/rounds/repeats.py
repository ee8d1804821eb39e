"""Calls whose arguments have been checked before.

A training loop repeats the same few calls. Such a call needs no check of its arguments. If it is over at once, it needs
no description of its contribution and no work for a runner either: it is one step, in which no other rank takes part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from operator import is_
from types import CodeType
from typing import Any, cast

import numpy as np

from asyncoll.algorithms.rounds.directory import AtOnce
from asyncoll.algorithms.rounds.operation import Operation, RoundCall
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.runtime import deadlines
from asyncoll.runtime.member import Member
from asyncoll.runtime.pending import PendingCalls
from asyncoll.runtime.signature import Site, place_outside
from asyncoll.tensors.operands import Bundle, Single, bundle


class NoRepeat:
    """Where there are no such calls, it leaves all alone."""

    def start(self, x: object, arguments: tuple[object, ...]) -> None:
        return None


NO_REPEAT = NoRepeat()


@dataclass(slots=True, eq=False)
class Repeat:
    """The calls of one operation with the same arguments, but for the array."""

    _operation: Operation
    _arguments: tuple[object, ...]  # these and `_dtype` stand for the operation
    _dtype: np.dtype[Any]
    _at_once: AtOnce  # makes a whole call of an array
    _member: Member
    _pending: PendingCalls
    # Starts a call of a contribution that is not over at once.
    _begin: Callable[[RoundCall, Bundle | Single], Coroutine[Any, Any, Reduction]]
    _failed: Callable[[RoundCall, BaseException], None]
    _code: CodeType | None = None
    _instruction: int = 0
    _call: RoundCall | None = None  # at that place of the program

    def start(self, x: object, arguments: tuple[object, ...]) -> Coroutine[Any, Any, Reduction] | None:
        """Carry out the call now, or begin it. None if it differs from the calls before: nothing was done.

        Arguments are compared by identity: an equal value of another type may mean something else.
        """
        if (
            type(x) is not np.ndarray
            or x.dtype is not self._dtype
            or self._member.has_failed
            or not all(map(is_, arguments, self._arguments))
        ):
            return None
        code, instruction = place_outside(sys._getframe(1))
        call = self._call
        if call is None or code is not self._code or instruction != self._instruction:
            self._code, self._instruction = code, instruction
            call = self._call = RoundCall(self._operation, Site(code, instruction))
        self._member.check_caller()
        is_traced = self._member.trace.sink is not None
        came_s = deadlines.now_s() if is_traced else 0.0
        answer = self._at_once(x)  # may raise the exception of a signal handler, which breaks nothing here
        if isinstance(answer, Exception):
            return self._fail(call, answer)
        if answer is not None:
            self._pending.note(call)
            if is_traced:
                self._tell(call, came_s, cast(Any, answer).result)
            return answer
        given = bundle(x, self._operation.op)
        return self._begin(call, given) if given.layout == self._operation.layout else None

    def _tell(self, call: RoundCall, came_s: float, reduction: Reduction) -> None:
        """The events of a call that is over: no bytecode may run within it."""
        trace = self._member.trace
        trace.reduced(self._operation, reduction.round, reduction.ranks)
        trace.over(call, self._operation.nbytes, came_s, reduction.round, included=reduction.included)

    async def _fail(self, call: RoundCall, error: Exception) -> Reduction:
        self._failed(call, error)
        raise error
