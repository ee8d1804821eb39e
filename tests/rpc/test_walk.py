"""How many functions a call of a function enters, at both ranks."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncoll.testing import run_ranks
from tests.support.walking import Walk

# By the elements of a float32 tensor: the functions and the files, also where a rank sleeps meanwhile. A long tensor is
# lent, or sent in pieces.
LIMITS = {64: (88, 22), 100_000: (120, 25)}


@pytest.mark.parametrize("elements", LIMITS)
@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize("kind", ["coroutine", "inline", "thread"])
def test_a_call_with_a_tensor_enters_few_functions(transport, kind, elements):
    async def coroutine(x):
        return x

    def plain(x):
        return x

    async def main(comm):
        comm.rpc.register(coroutine if kind == "coroutine" else plain, name="f", inline=kind == "inline")
        await comm.barrier()
        if comm.rank == 0:
            x, rpc = torch.ones(elements), comm.rpc
            for _ in range(3):  # what is made at the first calls is there
                await rpc.call(1, "f", x)
            with Walk() as walk:
                await rpc.call(1, "f", x)
            over.set()
        await over.wait()  # rank 1 enters nothing meanwhile but for the call
        return walk if comm.rank == 0 else None

    over = asyncio.Event()
    walk = run_ranks(2, main, transport)[0]
    functions, files = LIMITS[elements]
    assert len(walk.functions) <= functions, sorted(walk.functions)
    assert len(walk.files) <= files, sorted(walk.files)
