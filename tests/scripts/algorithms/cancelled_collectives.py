"""Collectives that are cancelled at random points, each at one rank: the next is right."""

import asyncio
import sys

import numpy as np
import uvloop

import asyncoll
from tests.support.cancelling import cancelled_in_turn, interrupt

kind, times = sys.argv[1], int(sys.argv[2])


async def main() -> None:
    async with asyncoll.connect() as comm:
        random = np.random.default_rng(comm.rank)
        count = await interrupt(comm, 1, times, lambda call: cancelled_in_turn(call, int(random.integers(1, 20))))
        assert count > 0, "nothing was cancelled in time"
        assert asyncio.all_tasks() == {asyncio.current_task()}
        print("all right,", count, "cancelled")


with asyncio.Runner(loop_factory={"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[kind]) as runner:
    runner.run(main())
