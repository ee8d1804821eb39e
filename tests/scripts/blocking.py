"""A rank without an event loop: runs the case of its first argument, and prints a line once it has passed."""

import asyncio
import contextlib
import os
import signal
import sys
import threading

import numpy as np
import torch

import asyncoll

SECONDS = 60.0  # for a wait that must end


def caught(kind, act, *arguments):
    """The exception of this kind that `act` raises."""
    try:
        act(*arguments)
    except kind as error:
        return error
    raise AssertionError(f"{act} has raised no {kind}")


def collectives(comm):
    """Every call gives a handle with the result of its coroutine."""
    rank, size = comm.rank, comm.size
    total = size * (size - 1) / 2
    for count in (0, 1, 7, 1000, 1 << 18):
        for x in (np.full(count, float(rank), np.float32), torch.full((count,), rank, dtype=torch.int16)):
            handle = comm.allreduce(x)
            assert handle.wait(SECONDS) is x
            assert handle.done()
            assert handle.wait() is x  # again
            assert (np.asarray(x) == total).all()
    assert comm.broadcast(np.full(3, rank), root=size - 1).wait(SECONDS).tolist() == [size - 1] * 3
    assert comm.allgather(np.full(1, rank)).wait(SECONDS).ravel().tolist() == list(range(size))
    assert [len(x) for x in comm.allgatherv(np.zeros(rank)).wait(SECONDS)] == list(range(size))
    reduced = comm.reduce(np.ones(2), root=0).wait(SECONDS)
    assert rank or reduced.tolist() == [size] * 2
    registered = comm.empty(1 << 16, torch.bfloat16).fill_(1)
    assert (comm.allreduce(registered, asyncoll.AVG).wait(SECONDS) == 1).all()
    rounds = [comm.solo_allreduce(np.ones(5)).wait(SECONDS).round for _ in range(80)]
    assert rounds == sorted(rounds)
    if size > 1:
        comm.send(np.full(2, rank), dest=(rank + 1) % size).wait(SECONDS)
        assert comm.recv(np.empty(2, int), source=(rank - 1) % size).wait(SECONDS)[0] == (rank - 1) % size
    half = comm.split(rank % 2).wait(SECONDS)
    assert type(half) is asyncoll.BlockingCommunicator
    assert half.allreduce(np.ones(1)).wait(SECONDS) == [half.size]
    assert comm.split(None).wait(SECONDS) is None
    flat = asyncoll.flatten(torch.nn.Linear(3, 3))  # in the registered memory of the world, in any thread
    parameters = flat.parameters
    assert comm.allreduce(parameters).wait(SECONDS) is parameters


def threads(comm):
    """Handles belong to no thread: one begins the calls, another one waits for them."""
    handles = [comm.allreduce(np.full(n, float(comm.rank))) for n in (1, 1000, 1 << 20) for _ in range(20)]
    ended = []
    waiting = [threading.Thread(target=lambda h=h: ended.append(h.wait(SECONDS)[0])) for h in handles]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert ended == [comm.size * (comm.size - 1) / 2] * len(handles)
    # Calls of one thread each are in order on a communicator of their own.
    own = [comm.split(0).wait(SECONDS) for _ in range(4)]
    sums = []

    def call(mine):
        for _ in range(50):
            sums.append(mine.allreduce(np.ones(10)).wait(SECONDS)[0])

    calling = [threading.Thread(target=call, args=(mine,)) for mine in own]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join()
    assert sums == [comm.size] * 200


def dropped(comm):
    """A handle that nobody waits for does not end its call."""
    for _ in range(300):
        comm.allreduce(np.ones(100))
        comm.allreduce(np.ones(1 << 16))
    del _
    last = comm.allreduce(np.ones(1))
    while not last.done():
        threading.Event().wait(0.001)
    assert last.wait() == [comm.size]


def awaited(comm):
    """Handles may be awaited, and gathered, on any loop."""

    async def main():
        assert (await comm.allreduce(np.ones(3)))[0] == comm.size
        both = await asyncio.gather(comm.allreduce(np.ones(1 << 20)), comm.allreduce(np.ones(2)))
        assert [x[0] for x in both] == [comm.size] * 2
        if comm.rank:
            with contextlib.suppress(TimeoutError):  # the call goes on
                await asyncio.wait_for(comm.barrier(), 0.01)

    asyncio.run(main())
    if not comm.rank:
        comm.barrier().wait(SECONDS)
    assert comm.allreduce(np.ones(1)).wait(SECONDS) == [comm.size]


def late(comm):
    """A wait that is too short leaves the call under way."""
    if comm.rank:
        handle = comm.allreduce(np.ones(1))
        assert "goes on" in str(caught(TimeoutError, handle.wait, 0.01))
        assert not handle.done()
        comm.send(np.ones(1), dest=0)
        assert handle.wait(SECONDS) == [comm.size]
    else:
        for source in range(1, comm.size):
            comm.recv(np.ones(1), source).wait(SECONDS)
        comm.allreduce(np.ones(1)).wait(SECONDS)


def differs(comm):
    """The error names both calls, with the lines of this file."""
    handle = comm.barrier() if comm.rank else comm.allreduce(np.ones(3))
    assert str(caught(asyncoll.MismatchError, handle.wait, SECONDS)).count("blocking.py") == 2


def overdue(comm):
    """The deadline is that of the thread that makes the call."""
    if comm.rank:
        with asyncoll.deadline(0.05):
            handle = comm.barrier()
        assert caught(asyncoll.DeadlineError, handle.wait, SECONDS).missing
    else:
        caught(asyncoll.DeadlineError, comm.recv(np.ones(1), 1).wait, SECONDS)


def dies(comm):
    """All survivors learn which rank is gone, in all handles."""
    handles = [comm.allreduce(np.ones(1)) for _ in range(3)] if comm.rank else []
    comm.barrier()
    if not comm.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    for handle in handles:
        assert caught(asyncoll.PeerLostError, handle.wait, SECONDS).rank == 0


def forks(comm):
    """In a forked child neither a new call nor an old handle works, and neither hangs."""
    held = comm.allreduce(np.ones(1 << 20)) if comm.rank else None
    pid = os.fork()
    if pid == 0:
        acts = (comm.barrier, held.wait if held else comm.barrier)
        os._exit(sum("forked child" in str(caught(asyncoll.UsageError, act)) for act in acts))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    if not held:
        held = comm.allreduce(np.ones(1 << 20))
    assert held.wait(SECONDS)[0] == comm.size


def interrupted(comm):
    """Ctrl-C during a wait raises KeyboardInterrupt, and the call goes on."""
    if not comm.rank:
        comm.recv(np.ones(1), 1).wait(SECONDS)
        comm.allreduce(np.ones(1)).wait(SECONDS)
        return
    handle = comm.allreduce(np.ones(1))

    def interrupt():
        while not handle._gate._waiting:  # the main thread sleeps in `wait` then
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    caught(KeyboardInterrupt, handle.wait, SECONDS)
    if comm.rank == 1:
        comm.send(np.ones(1), 0)
    assert handle.wait(SECONDS) == [comm.size]


CASES = {
    case.__name__: case
    for case in (collectives, threads, dropped, awaited, late, differs, overdue, dies, forks, interrupted)
}


def leaves():
    """A process may join one world after another."""
    for _ in range(3):
        comm = asyncoll.init()
        comm.barrier().wait()
        comm.close()
        comm.close()
        caught(asyncoll.ClosedError, comm.barrier)


def ends():
    """Rank 0 ends without `close`, in the middle of the calls of the others."""
    comm = asyncoll.init()
    comm.barrier().wait()
    if comm.rank:
        assert "ended without" in str(caught(asyncoll.AbortedError, comm.barrier().wait, SECONDS))


def fails(comm):
    if comm.rank == 0:
        raise ValueError("enough")
    comm.barrier().wait(SECONDS)


def raises():
    """An exception that leaves the `with` block aborts the calls of the others."""
    assert "enough" in str(caught((ValueError, asyncoll.AbortedError), inside, fails))


def inside(case):
    with asyncoll.init() as comm:
        case(comm)


ALONE = {case.__name__: case for case in (leaves, ends, raises)}
FAILING = (dies, differs, overdue)  # a failed world is left with its error


def main(name):
    if name in ALONE:
        ALONE[name]()
        return
    with contextlib.suppress(*(asyncoll.AsyncollError,) if CASES[name] in FAILING else ()):
        inside(CASES[name])


main(sys.argv[1])
print("passed", flush=True)
