"""A rank that comes to a collective in memory after another one has given up does not complete it alone."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncoll.algorithms.dense.shared_call import SharedCall
from asyncoll.tensors.reductions import Array, ReduceOp
from tests.algorithms.dense.test_meetings import SIZES, Rank, cores, ranks

SHORT, LONG = 100, 1 << 14  # elements of float32: copied as a whole, and passed in windows or pieces

Make = Callable[[SharedCall, list[Array]], Coroutine[Any, Any, None]]
COLLECTIVES: dict[str, Make] = {
    "barrier": lambda call, blocks: call.barrier(),
    "allreduce": lambda call, blocks: call.allreduce(blocks[0], ReduceOp.SUM, "float32"),
    "reduce": lambda call, blocks: call.reduce(blocks[0], ReduceOp.SUM, "float32", 0),
    "reduce_scatter": lambda call, blocks: call.reduce_scatter(blocks, blocks[0].copy(), ReduceOp.SUM, "float32"),
    "broadcast": lambda call, blocks: call.broadcast(blocks[0], 0),
    "gather": lambda call, blocks: call.gather(blocks[0], blocks, 0),
    "scatter": lambda call, blocks: call.scatter(blocks, blocks[0], 0),
    "allgather": lambda call, blocks: call.allgather(blocks),
}


class Caller:
    """One rank of one collective, which this test drives."""

    def __init__(self, rank: Rank, make: Make, size: int, count: int, is_registered: bool) -> None:
        self.call = SharedCall(rank.area, 1, 5)
        blocks = [rank.array(np.ones(count, np.float32), is_registered) for _ in range(size)]
        self.work = make(self.call, blocks)
        self.wait: Any = None
        self.is_over = False

    def advance(self) -> None:
        """Go on until the call is over or has to wait."""
        while not self.is_over and (self.wait is None or self.wait.ready()):
            try:
                self.wait = self.work.send(None)
            except StopIteration:
                self.is_over = True

    def give_up(self) -> None:
        self.work.close()
        with pytest.raises(StopIteration):
            self.call.retreat(lambda rank: False).send(None)


@cores
@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_last_rank_waits_for_the_failure(natives, name, count, is_registered):
    for gives_up in (False, True):
        with ranks(3, natives) as world:
            callers = [Caller(rank, COLLECTIVES[name], 3, count, is_registered) for rank in world]
            for caller in callers[:2]:
                caller.advance()
                assert not caller.is_over
            if gives_up:
                callers[0].give_up()
                callers[2].advance()
                assert not callers[2].is_over
                callers[1].give_up()
                callers[2].give_up()
            else:
                for _ in range(16 * LONG // SIZES.window):  # more turns than a call has rendezvous
                    for caller in callers:
                        caller.advance()
                assert all(caller.is_over for caller in callers)
