"""Wait-avoiding rounds of a world of one rank: each call is a round of its own, and completes at once.

There is nothing to share: no lock, no message and no block. The accounting of calls is that of every other carrier.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from asyncoll.algorithms.rounds.engine import Engine
from asyncoll.algorithms.rounds.operation import Operation
from asyncoll.algorithms.rounds.tally import OperationStatistics
from asyncoll.algorithms.rounds.wait_avoiding import Contribution, Delivery, Result, delivery_of, result_of
from asyncoll.tensors.reductions import storage

_ALONE = (0,)  # the contributors and the members of every round


class LoneRounds:
    """A persistent operation in a world of one rank. Implements `directory.Rounds`."""

    is_prompt = True
    at_once = None
    arena = None

    def __init__(self, operation: Operation, describe: Callable[[], str]) -> None:
        self.operation = operation
        self.describe = describe
        self._engine: Engine[Result] = Engine(operation)
        self._lock = threading.Lock()  # calls may come from several threads
        self._latest = 0
        # Copies of the results that a later call may be told of: as many as `history`, and the newest one.
        self._kept: deque[Result] = deque(maxlen=operation.history + 1)

    def begin(self, contribution: Contribution) -> Delivery:
        """Carry out the round of this call. The result is in the caller's own memory where that needs no packing."""
        parts = contribution.lend()
        if parts is None:
            parts = [np.empty(count, storage(dtype)) for dtype, count in self.operation.layout]
            contribution.read(parts)
        elif contribution.weight != 1:
            contribution.scale_lent()
        operation = self.operation
        with self._lock:
            number = self._latest = self._latest + 1
            synchronous = operation.sync_every > 0 and operation.is_synchronous(number)
            # The round is the ticket of its one contribution.
            result = result_of(
                (number, parts, _ALONE, _ALONE, number, synchronous, contribution.weight, False, False, 0)
            )
            self._kept.append(
                _copy(result)
            )  # now: the caller's memory is divided, and the caller's own, after the call
            told = self._engine.deliver(number, result, ())
        return delivery_of(((*told.missed, result), told.included, told.skipped, told.lag))

    async def call(self, contribution: Contribution) -> Delivery:
        return self.begin(contribution)

    async def join(self) -> Delivery | None:
        """As `Rounds.join`. No contribution is staged, so there is no last round."""
        if self.operation.group_size or not self._engine.has_news(self._latest):
            return None
        result = self._kept[-1]
        told = self._engine.conclude(result.number, result, ())
        return Delivery((*told.missed, result), told.included, told.skipped, told.lag)

    def release(self, delivery: Delivery) -> None:
        """Without effect: the results that are kept are copies."""

    def take_back(self, delivery: Delivery) -> None:
        newest = delivery.results[-1]
        numbers = {result.number for result in delivery.results}
        kept = [result for result in tuple(self._kept) if result.number in numbers] if self.operation.history else []
        self._engine.take_back(kept, len(delivery.results) + delivery.skipped, newest.number)

    def statistics(self) -> OperationStatistics:
        rounds = self._latest
        return self._engine.statistics(rounds, {1: rounds} if rounds else {}, (0.0,), (0.0,))


def _copy(result: Result) -> Result:
    return result._replace(parts=[part.copy() for part in result.parts])
