"""Rank 1 goes in the way that is asked for, and the others say what they hear of it, and when."""

import asyncio
import ctypes
import os
import signal
import sys

import numpy as np

import asyncoll
from asyncoll import _core
from asyncoll.runtime import pending
from asyncoll.testing.faults.lingering import linger
from asyncoll.transport.memory import mutex
from asyncoll.transport.processes import is_gone


def exit_with_a_lock() -> None:
    """The next one of shared memory, when this rank has not signed yet that it has it."""
    if _core.native is not None:
        _core.native.watch(lambda point: os._exit(0) if point == "lock-taken" else None)
    take = mutex._try_lock

    def take_and_exit(lock: ctypes.Array) -> int:
        if failure := take(lock):
            return failure
        os._exit(0)

    mutex._try_lock = take_and_exit


FAULTS = {
    "exits with a lock": exit_with_a_lock,
    "exits": lambda: os._exit(0),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the GIL": lambda: ctypes.PyDLL(None).usleep(4_000_000),
}


async def ends(pids: list[int]) -> None:
    """Of processes that the launcher waits for."""
    while not all(map(is_gone, pids)):
        await asyncio.sleep(0.01)


async def main(comm: asyncoll.Communicator) -> None:
    fault, elements = sys.argv[1], int(sys.argv[2])
    if len(sys.argv) > 3:
        linger(float(sys.argv[3]))
    pids = (await comm.allgather(np.array([os.getpid()]))).ravel()
    try:
        await comm.barrier()
        if comm.rank == 1:  # the others may not have left the barrier yet
            FAULTS[fault]()
        for _ in range(3):  # one that holds a lock may have given all that the others need for the first
            x = await comm.allreduce(np.ones(elements))
    except asyncoll.PeerLostError as error:
        whole = any(call in error.doing for call in ("barrier", "allreduce", "allgather", "joining"))
        known = (error.host, error.pid) == (comm.hosts[1], pids[1])
        fate = "frozen" if error.last_seen_s > 0 else "dead"
        print(f"rank {error.rank} is {fate}" if whole and known else repr(error), flush=True)
        if comm.rank == 0 and fault == "stopped":
            await ends([pid for rank, pid in enumerate(pids) if rank not in (0, 1)])  # or they might yet hear from it
            os.kill(error.pid, signal.SIGCONT)
        return
    print(f"all {x[0]:g} are there")


async def late(comm: asyncoll.Communicator) -> None:
    """Rank 2 computes, in pure Python, until the others have lost their patience, which its runtime hears of."""
    pending._ANSWER_S = 60.0  # who has little time to say where it is has some all the same
    failed, world = comm._core.member.endpoint.failures.has_failed, comm._core.member.group.communicator
    while comm.rank == 2 and not failed(world):
        pass
    try:
        await comm.allreduce(np.ones(3))
    except asyncoll.DeadlineError as error:
        where = "in its own code" if "in its own code for" in str(error) else str(error)
        print(f"arrived {error.arrived}, missing {error.missing} {where}")
        return
    print("it was in time")


asyncoll.run(late if sys.argv[1] == "is late" else main)
