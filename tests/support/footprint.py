"""What the communicators of a rank take: boards, blocks, tables."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import numpy as np

from asyncoll.transport.wire import Unused

PATIENCE_S = 60.0  # for a wait that must end


def footprint(comm) -> dict[str, int]:
    """The entries of all tables of this rank, and its memory and boards in the arena."""
    endpoint = comm._core.member.endpoint
    world, departures = comm._core.member.communicator, endpoint.departures
    router, executions, failures, arena = endpoint.router, endpoint.executions, endpoint.failures, endpoint.arena
    found = {
        "listeners": len(router._listeners),
        "early": router._early_count,
        "handlers": len(router._handlers),
        # Others may be ahead on that of the world.
        "current": sum(context != world for context, _ in (*executions._open, *executions._early)),
        "abandoned": len(executions._abandoned),
        "described": len(executions.described),
        "early executions": len(executions.on_early),
        "failures": len(failures._first) + len(failures._told),
        "failure listeners": len(failures._listeners),
        "departures": len(endpoint.at_depart),
        "last_calls": len(endpoint.membership.last_calls),
        "ledgers": len(endpoint.in_memory.sources),
        "services": len(endpoint._services),
        "members": len(departures.open),
    }
    if arena is not None:
        found["boards here"] = len(arena._control_blocks)
        if hasattr(arena, "_memory") and hasattr(arena._memory, "control_blocks"):  # in this process
            found["boards"] = len(arena._memory.control_blocks)
            found["blocks"] = len(arena._memory.blocks)
        else:
            with arena._directory() as entries:
                found["boards"] = int(np.count_nonzero(entries[:, 2]))
            found["bytes"] = sum(arena._heap._used.values())
    return found


# Objects of calls: of those under way, and of the last ones and their totals, which tables of a fixed size have.
_OF_CALLS = {"Execution", "Identity", "Lane", "Mailbox", "MessageCall", "PendingCall", "Receive", "Signature", "Site"}
_OF_CALLS |= {"CallStatistics", "EarlyExecution", "Traffic", "Waiter"}


def objects() -> dict[str, int]:
    """The other objects of the package in this process, by class."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    names = [kind.__name__ for kind in kinds if str(kind.__module__).startswith("asyncoll")]
    return dict(Counter(name for name in names if name not in _OF_CALLS and not name.startswith("_")))


def left(comm) -> int:
    """The communicators, but for that of the world, which this rank has not forgotten."""
    listeners = list(comm._core.member.endpoint.router._listeners)  # at once: the runtime's thread changes them
    return sum(kind is Unused for kind, _ in listeners)


async def settled(comm, still_open: int = 0) -> None:
    """Wait until all ranks have forgotten what they have closed or dropped."""
    async with asyncio.timeout(PATIENCE_S):
        while left(comm) > still_open:
            await asyncio.sleep(0.001)
    await comm.barrier()


async def warmed(comm) -> None:
    """Make the calls of the other functions often enough that the world allocates all memory that it keeps for them."""
    for _ in range(40):
        await comm.allgather(np.ones((1, 3)))
    for _ in range(40):
        await comm.allreduce(np.ones(3))


async def measured(comm, still_open: int = 0) -> dict[str, int]:
    """The footprint of this rank, while no rank makes or forgets a communicator."""
    await settled(comm, still_open)
    found = footprint(comm)
    await comm.barrier()  # a rank that leaves the world makes boards for its calls of functions
    return found


def different(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The entries that have changed, for the report of a failure."""
    both = {what: (before.get(what, 0), after.get(what, 0)) for what in {*before, *after}}
    return {what: pair for what, pair in both.items() if pair[0] != pair[1]}
