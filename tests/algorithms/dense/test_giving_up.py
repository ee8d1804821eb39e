"""In memory: a rank that comes after another one has given up completes no call alone; one that is over stays so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from asyncoll import Communicator
from asyncoll.algorithms.dense.shared_call import SharedCall
from asyncoll.tensors.reductions import Array, ReduceOp
from asyncoll.testing import run_ranks, simulate
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


@pytest.mark.parametrize("is_simulated", [False, True])
def test_a_call_whose_result_is_there_is_over_although_a_rank_gives_up_then(is_simulated):
    """As the first rank whose program ends, while others have not seen yet that the last call is over."""
    calls: list[Callable[[Communicator], Coroutine[Any, Any, Any]]] = [
        lambda comm: comm.barrier(),
        lambda comm: comm.allreduce(np.ones(3)),
        lambda comm: comm.allreduce(np.ones(1 << 18)),
        lambda comm: comm.broadcast(np.ones(3), root=comm.size - 1),
        lambda comm: comm.allgather(np.ones(3)),
        lambda comm: comm.quorum_allreduce(np.ones(3), quorum=comm.size),
    ]

    async def main(world: Communicator) -> None:
        for call in calls:
            comm = await world.split(0)
            assert comm is not None
            if comm.rank == comm.size - 1:
                await asyncio.sleep(0.01)  # the others wait for this one
            await call(comm)
            comm.abort("over")

    for size in (2, 3, 5):
        if is_simulated:
            simulate(size, main, shared_memory=True)
        else:
            run_ranks(size, main, "shm")
