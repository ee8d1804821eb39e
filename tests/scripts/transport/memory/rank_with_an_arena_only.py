"""One rank of a host that has nothing but an arena: `rank_with_an_arena_only.py FOLDER RANK SIZE WHAT`."""

import asyncio
import math
import os
import signal
import sys
from pathlib import Path

from asyncoll.errors import PeerLostError
from asyncoll.transport.control_block import Wait
from asyncoll.transport.memory import fd_passing


def wait(arena, control_block, ready):
    return arena.wait(Wait(control_block, ready), lambda: None, str)


async def count(arena):
    """Everybody adds one, 2000 times, and waits for the sum; then a token goes round."""
    control_block = arena.control_block(1, 2)
    for _ in range(2000):
        with control_block:
            control_block.cells[0] += 1
            control_block.wake()
    await wait(arena, control_block, lambda: control_block.cells[0] == 2000 * len(arena.ranks))
    for turn in range(50):
        mine = turn * len(arena.ranks) + arena.local_rank
        await wait(arena, control_block, lambda mine=mine: control_block.cells[1] >= mine)
        with control_block:
            control_block.cells[1] += 1
            control_block.wake()
    await wait(arena, control_block, lambda: control_block.cells[1] == 50 * len(arena.ranks))
    print(*control_block.cells)


async def die(arena):
    """The last rank is killed while it holds the lock; what it had written before is still there."""
    control_block = arena.control_block(1, 2)
    if arena.local_rank == len(arena.ranks) - 1:
        address = arena.allocate(8)
        arena.view(address, 8)[:] = 7
        await wait(arena, control_block, lambda: control_block.cells[0] == arena.local_rank)
        with control_block:
            control_block.cells[1] = address
            os.kill(os.getpid(), signal.SIGKILL)
    with control_block:
        control_block.cells[0] += 1
        control_block.wake()
    print(find_out(control_block))
    print(find_out(control_block))
    print(arena.view(control_block.cells[1], 8).sum())


def find_out(control_block):
    while True:
        try:
            with control_block:
                pass
        except PeerLostError as error:
            return error


folder, rank, size, what = sys.argv[1:]
ranks = tuple(range(10, 10 + int(size)))  # ranks of the world are not local ranks
arena = fd_passing.join(Path(folder), ranks[int(rank)], ranks)
with asyncio.Runner() as runner:
    runner.get_loop().slow_callback_duration = math.inf  # in debug mode, a busy machine would have it print
    runner.run({"count": count, "die": die}[what](arena))
arena.close()
