"""Wait-avoiding rounds of a world of one rank: each call is a round of its own, and completes at once.

There is nothing to share: no lock, no message and no block. The accounting of calls is that of every other carrier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncoll.algorithms.rounds.engine import Accounted, Delivery, Engine, Parts, Result, result_of
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.reduction import Reduction, reduction_of
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Contribution
from asyncoll.runtime import deadlines
from asyncoll.runtime.progress import Runner
from asyncoll.runtime.trace import Trace
from asyncoll.tensors.reductions import Array, storage

_ALONE = (0,)  # the contributors and the members of every round


class _KeptRound(NamedTuple):
    """A round that a later call may be told of."""

    number: int
    parts: Parts  # copies
    weight: float


class LoneRounds(Accounted):
    """A persistent operation in a world of one rank. Implements `directory.Rounds`."""

    arena = None

    def __init__(self, operation: Operation, describe: Callable[[], str], runner: Runner, trace: Trace) -> None:
        self.operation = operation
        self._runner = runner
        self._trace = trace
        self.describe = describe
        self._now_s = deadlines.clock()
        self._engine = Engine(operation)
        self._lock = threading.Lock()  # calls may come from several threads
        self._latest = 0
        self._kept: deque[_KeptRound] = deque(maxlen=operation.history + 1)  # as many as `history`, and the newest one
        (_, self._count), *more = operation.layout
        self.at_once = None if more or operation.history or operation.weighted else self._at_once

    def last_round(self, rank: int) -> int:
        del rank  # its own
        return self._latest

    @property
    def newest(self) -> int:
        return self._latest

    def taken(self, number: int) -> Sequence[int]:
        return [number]

    def kept(self, first: int, last: int) -> Sequence[Result]:
        return [self._result(kept) for kept in self._kept if first <= kept.number <= last]

    def begin(self, contribution: Contribution) -> Delivery:
        """Carry out the round of this call. The result is in the caller's own memory where that needs no packing."""
        parts = contribution.lend()
        if parts is None:
            parts = [np.empty(count, storage(dtype)) for dtype, count in self.operation.layout]
            contribution.read(parts)
        elif contribution.weight != 1:
            contribution.scale_lent()
        with self._lock:
            self._engine.step_back()
            missed = self._missed(self._latest)
            number = self._latest = self._latest + 1
            self._trace.opened(self.operation, number)
            result = self._result(_KeptRound(number, parts, contribution.weight))
            # Copied now: after the call the caller's memory is divided, and the caller's own.
            self._kept.append(_KeptRound(number, [part.copy() for part in parts], contribution.weight))
            return self._engine.deliver(number, (*missed, result))

    def _at_once(self, array: Array) -> Coroutine[Any, Any, Reduction] | None:
        """A whole call of one array, or None. The array is the result as it is, also of an average of one rank."""
        # With answers that were not received (`owed`), the call has results to tell, and goes the general way.
        flags, engine = array.flags, self._engine
        if array.size != self._count or not flags.c_contiguous or not flags.writeable or engine.owed:
            return None
        if self._trace.sink is not None:  # `begin` tells of the round
            return None
        came_s = self._now_s()
        with self._lock:
            number = self._latest = self._latest + 1
            # A copy, as in `begin`. Made in half the time of `_KeptRound(...)`.
            self._kept.append(tuple.__new__(_KeptRound, (number, [array.flatten()], 1.0)))
            engine.deliver_own(number)
        synchronous = self.operation.is_synchronous(number)
        reduction = _own_round(number, synchronous, self._now_s() - came_s, array)
        return self._runner.done(reduction, partial(engine.owed.append, (1, number)))

    async def call(self, contribution: Contribution) -> Delivery:
        return self.begin(contribution)

    async def join(self) -> Delivery | None:
        """Contribute no more. No contribution is staged, because each call is a round, so there is no last round."""
        if self.operation.group_size or not self._engine.has_news(self._latest):
            return None
        result = self._result(self._kept[-1])
        return self._engine.tell(result.number, (*self._missed(self._latest - 1), result))

    def release(self, delivery: Delivery) -> None:
        """Without effect: the results that are kept are copies."""

    def _missed(self, latest: int) -> list[Result]:
        """The results up to round `latest` that this rank's callers were not told of, as far as history has them."""
        first = self._engine.first_missed(latest)
        return [self._result(kept) for kept in self._kept if first <= kept.number <= latest]

    def statistics(self) -> OperationStatistics:
        rounds = self._latest
        return self._engine.statistics(rounds, {1: rounds} if rounds else {}, (0.0,), (0.0,))

    def _result(self, kept: _KeptRound) -> Result:
        # In their order and not by name: that takes a third of the time. The round is the ticket of its contribution.
        number, parts, weight = kept
        taken, synchronous = number, self.operation.is_synchronous(number)
        deserted, lent, averaged, block = False, False, False, 0
        return result_of((number, parts, _ALONE, _ALONE, taken, synchronous, weight, deserted, lent, averaged, block))


def _own_round(number: int, synchronous: bool, waited_s: float, x: Array) -> Reduction:
    """The answer to a call in time: its own contribution, alone. By position: keywords take twice as long."""
    active, included, skipped, missed, lag = 1, True, 0, (), 0
    return reduction_of(number, active, included, skipped, synchronous, missed, _ALONE, _ALONE, lag, waited_s, x)
