"""Rank 1 forks, in the way that is asked for, and all ranks say what follows from it."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import asyncoll
from asyncoll.transport.processes import is_gone

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # of Python 3.12
libc = ctypes.PyDLL(None)


def by_python() -> int:
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid


def by_c() -> int:
    """Python does not know of it."""
    pid = libc.fork()
    if not pid:
        libc.pause()
    return pid


def loader() -> Iterator[Any]:
    import torch  # takes long

    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    return iter(torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork"))


def by_a_loader() -> int:
    from torch.utils.data._utils import worker

    worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # a worker looks so rarely whether its parent lives
    batches = loader()
    next(batches)
    kept.append(batches)
    return batches._workers[0].pid


kept: list[object] = []  # or the workers of a loader end
FORKS: dict[str, Callable[[], int]] = {"python": by_python, "c": by_c, "loader": by_a_loader}


async def dies(comm: asyncoll.Communicator, how: str) -> None:
    """And leaves a child."""
    await comm.barrier()
    child = FORKS[how]() if comm.rank == 1 else 0
    children = await comm.allgather(np.array([child]))
    try:
        if comm.rank == 1:
            for source in (0, 2):
                await comm.recv(np.ones(1), source)  # they have heard of the child
            os._exit(0)  # or the launcher would stop the others before they have said what they heard
        await comm.send(np.ones(1), 1)
        while True:
            await comm.allreduce(np.ones(3))
    except asyncoll.PeerLostError as error:
        print(f"rank {error.rank} is {'frozen' if error.last_seen_s else 'dead'}", flush=True)
    if comm.rank == 0:
        print("its child lives" if not is_gone(children[1, 0]) else "its child was gone before", flush=True)
        os.kill(children[1, 0], signal.SIGKILL)


async def leaves(comm: asyncoll.Communicator) -> None:
    """The child does, in the middle of a call and of whatever the loop does; and it takes nothing from its parent."""
    await comm.barrier()
    if comm.rank == 1:
        call = asyncio.create_task(comm.allreduce(np.ones(4)))
        await asyncio.sleep(0)
        child = os.fork()
        if not child:
            sys.exit(7)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        print(f"the child left with code {os.waitstatus_to_exitcode(status)}", flush=True)
        for dest in (0, 2):
            await comm.send(np.ones(1), dest)
        await call
    else:
        await comm.recv(np.ones(1), 1)
        await comm.allreduce(np.ones(4))
    await comm.barrier()
    print(f"rank {comm.rank} left", flush=True)


async def trains(comm: asyncoll.Communicator) -> None:
    """With the workers of a loader at every rank."""
    import torch

    flat = asyncoll.flatten(torch.nn.Linear(2, 1))
    for (batch,) in loader():
        flat.gradients[:] = batch.sum()
        await comm.allreduce(flat.gradients)
    print(f"gradients {flat.gradients[0]:g}", flush=True)


async def sums(comm: asyncoll.Communicator) -> None:
    print(f"the sum is {(await comm.allreduce(np.ones(1)))[0]:g}", flush=True)


async def starts_a_program(comm: asyncoll.Communicator) -> None:
    """This one, as if it were the rank itself; and a job of its own, which is fine."""
    await comm.barrier()
    if comm.rank == 1:
        again = await run([sys.executable, __file__, "sums"])
        print("refused" if "RANK=1 of this world is process" in again.stderr else again.stderr, flush=True)
        job = [sys.executable, "-m", "asyncoll", "launch", "-n", "2", __file__, "sums"]
        print(*sorted((await run(job)).stdout.splitlines()), flush=True)
    await comm.barrier()
    print(f"rank {comm.rank} left", flush=True)


async def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


async def joined() -> None:
    async with asyncoll.connect() as comm:
        await leaves(comm)


match sys.argv[1:]:
    case ["dies", how]:
        asyncoll.run(dies, how)
    case ["leaves", "connect"]:
        asyncio.run(joined())
    case [act]:
        asyncoll.run({"leaves": leaves, "trains": trains, "sums": sums, "starts": starts_a_program}[act])
