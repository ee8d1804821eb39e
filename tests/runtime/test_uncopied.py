"""Objects of one rank in one process refuse to be copied and pickled, and say what to do."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import asyncoll
from asyncoll import UsageError, training


class Adder:
    async def add(self, x: int, y: int) -> int:
        return x + y


class Held(nn.Module):
    def __init__(self, thing: object) -> None:
        super().__init__()
        self.thing = thing


def check(thing: object, name: str | None = None) -> None:
    module = Held(thing)
    for make in (
        lambda: copy.deepcopy(thing),
        lambda: pickle.dumps(thing),
        lambda: copy.deepcopy(module),
        lambda: torch.save(module, io.BytesIO()),
    ):
        text = rf"^{name or type(thing).__name__} cannot be copied or pickled: .*Module.*state_dict"
        with pytest.raises(UsageError, match=text):
            make()
    assert isinstance(copy.copy(module).thing, type(thing))


def test_of_a_loop():
    async def main(comm):
        check(comm)
        check(await comm.split(0))
        check(comm.rpc)
        check(comm.rpc.proxy(0, Adder), "a proxy of Adder")
        gossip = await comm.gossip(np.ones(2))
        check(gossip)
        await gossip.close()
        model = nn.Linear(2, 2)
        check(training.AllreduceSGD(comm, model, torch.optim.SGD(model.parameters(), lr=0.1)), "Communicator")
        assert copy.copy(comm) is comm

    asyncoll.run(main)


def test_of_a_connection(tmp_path):
    async def main(comm):
        async with asyncoll.rpc.serve(Adder(), f"ipc://{tmp_path}/socket") as url, asyncoll.rpc.connect(url) as client:
            check(client)
            assert await copy.copy(client).call("add", 1, 2) == 3

    asyncoll.run(main)


def test_without_a_loop():
    with asyncoll.init() as comm:
        check(comm)
        check(handle := comm.allreduce(np.ones(2)))
        assert copy.copy(handle) is handle
        handle.wait()


def test_of_torch():
    dist.init_process_group("asyncoll", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check(dist.group.WORLD)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        check(work)
        work.wait()
    finally:
        dist.destroy_process_group()
