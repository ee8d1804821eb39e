"""Ranks that wait for each other in different calls: runs the case of its first argument, and prints what it raises."""

import asyncio
import logging
import signal
import sys
import threading
import time

import numpy as np

import asyncoll
from asyncoll.runtime import standstill

standstill.STILL_S, standstill._TICK_S = 0.5, 0.1
logging.basicConfig(format="%(message)s", stream=sys.stdout)


def other_calls(comm):
    """Calls that do not meet: rank 0 receives, and the others wait for all."""
    (comm.recv(np.empty(3), 1) if comm.rank == 0 else comm.barrier()).wait()


def rounds(comm):
    x = np.ones(4)
    for _ in range(3):
        comm.solo_allreduce(x, history=8).wait()
    (comm.join("solo", x) if comm.rank == 0 else comm.allreduce(np.ones(1))).wait()


def parts(comm):
    """Each rank is in a collective of another group, in a circle."""
    pairs = [comm.split(int(comm.rank in (each, (each + 1) % comm.size))).wait() for each in range(comm.size)]
    pairs[comm.rank].barrier().wait()


def leaving(comm):
    """Rank 0 has come to its end, and the others receive from each other."""
    if comm.rank:
        comm.recv(np.empty(3), 3 - comm.rank).wait()


def another_thread(comm):
    """A thread makes the missing calls, once the others have stood still for some time."""
    if comm.rank == 1:
        threading.Thread(target=send_after_the_warning, args=(comm,)).start()
    if comm.rank == 0:
        comm.recv(np.empty(3), 1).wait()
    comm.barrier().wait()


def send_after_the_warning(comm):
    while standstill_of(comm)._stamp == 0:
        time.sleep(0.01)
    time.sleep(0.5)
    comm.send(np.empty(3), 0).wait()


def standstill_of(comm):
    return comm._core.member.endpoint.standstill


def meet_and_send(comm):
    """The other ranks wait for rank 0 in the barrier. Then rank 1 sends to rank 0, which receives since before it."""
    comm.barrier().wait()
    if comm.rank == 1:
        comm.send(np.empty(3), 0).wait()


def a_limit(comm):
    """A wait that has a limit goes on."""
    if comm.rank == 0:
        call = comm.recv(np.empty(3), 1)
        try:
            call.wait(2.0)
        except TimeoutError:
            comm.barrier().wait()
        call.wait()
        return
    meet_and_send(comm)


def computing(comm):
    """A rank with a call under way is in its own code, and uses no core."""
    if comm.rank == 0:
        call = comm.recv(np.empty(3), 1)
        time.sleep(2.0)
        comm.barrier().wait()
        call.wait()
        return
    meet_and_send(comm)


def a_handler(comm):
    """The handler of a signal that comes later ends the wait of rank 0."""
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        try:
            comm.recv(np.empty(3), 1).wait()
        except InterruptedError:
            comm.barrier().wait()
        return
    meet_and_send(comm)


def interrupt(*_):
    raise InterruptedError


async def a_loop(comm):
    """A timer of an event loop makes the missing call."""
    if comm.rank == 1:
        asyncio.get_running_loop().call_later(2.0, comm.send, np.empty(3), 0)
    if comm.rank == 0:
        await comm.recv(np.empty(3), 1)
    await comm.barrier()


def hooks():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from asyncoll.torch import hooks as ddp_hooks

    dist.init_process_group("asyncoll")
    ddp = DistributedDataParallel(torch.nn.Linear(4, 1), forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state = ddp_hooks.EagerSGDState(ddp, optimizer, partial="solo", history=64)
    ddp.register_comm_hook(state, ddp_hooks.eager_sgd)
    while state.round < 6:
        loss = ddp(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        state.finish()
    else:
        dist.all_reduce(loss.detach())


def departed():
    """Rank 0, which the others tell that they stand still, leaves then. It has sent messages, and received none."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("asyncoll")
    x = torch.ones(3)
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        for rank in (1, 1, 2):
            dist.send(x, rank)
        while len(standstill_of(dist.group.WORLD._comm)._told) < 2:
            time.sleep(0.01)
        dist.destroy_process_group()
        return
    for _ in range(3 - dist.get_rank()):
        dist.recv(x, 0)
    if dist.get_rank() == 1:
        dist.barrier(group=group)
    else:
        dist.recv(x, 1)


mode = sys.argv[1]
try:
    if mode in ("hooks", "departed"):
        globals()[mode]()
    elif mode == "a_loop":
        asyncoll.run(a_loop)
    else:
        with asyncoll.init() as comm:
            globals()[mode](comm)
    print("passed")
except asyncoll.DeadlockError as error:
    print("DeadlockError:", error)
