"""A rank of a world in which rank 1 ends its program: `program_ends.py FACADE END`. The others say what they raise.

All make the same calls, until one raises. Rank 1 makes no more after a few. Facades and ends have the names of the
table in docs/concepts/failures.md.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading

import numpy as np

import asyncoll

CALLS_BEFORE = 5
CALLS_MAX = 20_000  # of ranks that are told nothing
IN_ORDER = "leaves, as the others do"
EARLY = "returns early"
NOTHING = "nothing"
HANDLED_BY_RAY = ("Ctrl-C", "`sys.exit` in a signal handler", "SIGTERM")  # whose main thread is not that of `main`


def fail():
    raise ValueError("boom")


def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    signal.raise_signal(signal.SIGINT)


def exit_by_handler():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    signal.raise_signal(signal.SIGTERM)


def die_of(signum):
    os.kill(os.getpid(), signum)
    threading.Event().wait()


ENDS = {
    IN_ORDER: lambda: None,
    EARLY: lambda: None,
    "an exception": fail,
    "`sys.exit(0)`": lambda: sys.exit(0),
    "`sys.exit(1)`": lambda: sys.exit(1),
    "Ctrl-C": interrupt,
    "`sys.exit` in a signal handler": exit_by_handler,
    "SIGTERM": lambda: die_of(signal.SIGTERM),
    "SIGKILL": lambda: die_of(signal.SIGKILL),
    "`os._exit(0)`": lambda: os._exit(0),
    "a crash (SIGSEGV)": lambda: ctypes.string_at(0),
    "a fatal error of the interpreter (SIGABRT)": os.abort,
}


def turns(rank, end):
    """The turns of a loop that goes on until something raises. Rank 1, or all ranks, leave it sooner."""
    for turn in range(CALLS_MAX):
        if turn == CALLS_BEFORE and (rank == 1 or end == IN_ORDER):
            ENDS[end]()
            return
        yield


async def main(comm, end):
    for _ in turns(comm.rank, end):
        await comm.allreduce(np.ones(3))


def run(end):
    asyncoll.run(main, end)


def connect(end):
    async def connected():
        async with asyncoll.connect() as comm:
            await main(comm, end)

    asyncio.run(connected())


def loop(comm, end):
    for _ in turns(comm.rank, end):
        comm.allreduce(np.ones(3)).wait()


def init(end):
    comm = asyncoll.init()
    loop(comm, end)
    if end == IN_ORDER:
        comm.close()


def init_in_block(end):
    with asyncoll.init() as comm:
        loop(comm, end)


def group(end, partial=None):
    import torch
    import torch.distributed as dist

    dist.init_process_group("asyncoll")
    step, finish = (lambda: dist.all_reduce(torch.ones(3)), lambda: None) if partial is None else training(partial)
    for _ in turns(dist.get_rank(), end):
        step()
    if end == IN_ORDER:
        finish()
        dist.destroy_process_group()


def training(partial):
    """A step of DDP with a hook, and its end."""
    import torch
    import torch.distributed as dist

    from asyncoll.torch import hooks

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    quorum = {"quorum": dist.get_world_size()} if partial == "quorum" else {}
    state = hooks.EagerSGDState(ddp, optimizer, partial=partial, history=1 << 16, **quorum)
    ddp.register_comm_hook(state, hooks.eager_sgd)

    def step():
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, state.finish


FACADES = {
    "run": run,
    "connect": connect,
    "init": init,
    "with init": init_in_block,
    "group": group,
    "solo": lambda end: group(end, "solo"),
    "majority": lambda end: group(end, "majority"),
    "quorum": lambda end: group(end, "quorum"),
}

if __name__ == "__main__":
    try:
        FACADES[sys.argv[1]](sys.argv[2])
    except asyncoll.AsyncollError as error:
        if os.environ["RANK"] == "1":
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
    else:
        print(NOTHING, flush=True)
