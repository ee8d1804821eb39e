"""Operations of the matrix in programs without an event loop: of `asyncoll.init`, of torch.distributed, and of DDP.

A program that an exception ends makes no call to leave its world, as programs of users do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from asyncoll.blocking import BlockingCommunicator, init
from asyncoll.testing.faults.checked_calls import all_are

Joined = tuple[
    BlockingCommunicator, Callable[[], None]
]  # the communicator, and a step: a call, and checks of its result
Joining = Callable[[int], AbstractContextManager[Joined]]  # its argument is the number of elements

# Steps of DDP that all ranks make: until it has made its final buckets, a solo hook waits for all ranks.
_STEPS_TOGETHER = 3


class EarlyReturn(Exception):  # noqa: N818
    """Raised in a program that is to end there as by `return`, without a call by which it leaves."""


@contextlib.contextmanager
def init_allreduce(elements: int) -> Iterator[Joined]:
    comm = init()
    yield comm, lambda: all_are(comm.allreduce(np.ones(elements)).wait(), comm.size)
    comm.close()


@contextlib.contextmanager
def init_solo(elements: int) -> Iterator[Joined]:
    comm = init()

    def step() -> None:
        x = np.ones(elements)
        comm.solo_allreduce(x).wait()
        assert np.ptp(x) == 0, "parts of different rounds"

    yield comm, step
    comm.close()


@contextlib.contextmanager
def torch_all_reduce(elements: int) -> Iterator[Joined]:
    import torch

    with _default_group() as (dist, comm):

        def step() -> None:
            x = torch.ones(elements)
            dist.all_reduce(x)
            all_are(x.numpy(), comm.size)

        yield comm, step


@contextlib.contextmanager
def ddp_solo(elements: int) -> Iterator[Joined]:
    """Training steps with the hook of eager-SGD, which wait for no other rank."""
    import torch

    from asyncoll.torch import hooks

    with _default_group() as (_, comm):
        module = torch.nn.Linear(elements, 1, bias=False)
        torch.nn.init.zeros_(module.weight)
        ddp = torch.nn.parallel.DistributedDataParallel(module, forward_sync_buffers=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = hooks.EagerSGDState(ddp, optimizer)
        ddp.register_comm_hook(state, hooks.eager_sgd)
        x = torch.ones(1, elements)

        def step() -> None:
            ddp(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert np.ptp(module.weight.detach().numpy()) == 0, "parts of different rounds"

        for _ in range(_STEPS_TOGETHER):
            step()
        yield comm, step
        state.discard()
        state.finish()


PROGRAMS: dict[str, Joining] = {each.__name__: each for each in (init_allreduce, init_solo, torch_all_reduce, ddp_solo)}


@contextlib.contextmanager
def _default_group() -> Iterator[tuple[Any, BlockingCommunicator]]:
    """torch.distributed, and the communicator of its default group."""
    import torch.distributed as dist

    # The ranks of one host have a folder, and no port for a store.
    folder, rank, size = (os.environ[name] for name in ("ASYNCOLL_FOLDER", "RANK", "WORLD_SIZE"))
    store = f"file://{folder}/store" if folder else "env://"
    dist.init_process_group("asyncoll", init_method=store, rank=int(rank), world_size=int(size))
    group: Any = dist.group.WORLD
    yield dist, group._comm
    dist.destroy_process_group()
