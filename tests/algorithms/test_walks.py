"""How many functions a call enters, in how many files: at two ranks of one loop, as the profiler tells it.

The numbers are a budget. A commit that raises one says why in the same line.
"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from asyncoll import _core
from asyncoll.testing import Network, run_ranks, simulate
from tests.support.walking import Walk

CALLS = {
    "broadcast": lambda comm, x: comm.broadcast(x),
    "allreduce": lambda comm, x: comm.allreduce(x),
    "solo": lambda comm, x: comm.solo_allreduce(x),
}
ALGORITHMS = ("SharedCall", "MessageCall")  # the classes of the algorithms of dense calls


def walk(call, transport, *, until=()):
    """The walk of the fourth call: what the first calls make is there."""

    async def main(comm):
        x = np.ones(128)
        for _ in range(3):
            await CALLS[call](comm, x)
        await ready.wait()  # not a barrier of `comm`: the other rank would still be in it
        with Walk(until) if comm.rank == 0 else contextlib.nullcontext() as recorded:
            await CALLS[call](comm, x)
        if comm.rank == 0:
            over.set()
        await over.wait()  # the other rank enters nothing but its part of the call
        return recorded

    ready, over = asyncio.Barrier(2), asyncio.Event()
    if transport == "messages":  # in virtual time, in which each run enters the same functions
        return simulate(2, main, Network()).results[0]
    return run_ranks(2, main, transport)[0]


@pytest.mark.parametrize(
    ("call", "transport", "functions", "files"),
    [("broadcast", "shm", 30, 12), ("broadcast", "messages", 35, 15), ("allreduce", "messages", 36, 16)],
)
def test_a_call_comes_to_its_algorithm_in_few_steps(call, transport, functions, files):
    recorded = walk(call, transport, until=tuple(f"{name}.{call}" for name in ALGORITHMS))
    assert len(recorded.functions) <= functions, sorted(recorded.functions)
    assert len(recorded.files) <= files, sorted(recorded.files)


@pytest.mark.parametrize(
    ("call", "transport", "functions", "files"),
    [
        ("allreduce", "messages", 84, 26),
        ("solo", "messages", 113, 29),
        pytest.param("solo", "shm", 8, 5, marks=pytest.mark.skipif(_core.native is None, reason="the compiled way")),
    ],
)
def test_a_whole_call_enters_few_functions(call, transport, functions, files):
    recorded = walk(call, transport)
    assert len(recorded.functions) <= functions, sorted(recorded.functions)
    assert len(recorded.files) <= files, sorted(recorded.files)
