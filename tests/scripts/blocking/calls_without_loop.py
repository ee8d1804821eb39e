"""A rank without an event loop: runs the case of its first argument, and prints a line once it has passed."""

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import torch

import asyncoll
from asyncoll.testing import fake_device
from tests.support.raising import caught

FILE = Path(__file__).name
SECONDS = 60.0  # for a wait that must end


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
    gossip = comm.gossip(np.full(4, float(rank))).wait(SECONDS)
    assert isinstance(gossip, asyncoll.Gossip)
    for _ in range(3):
        partner = gossip.exchange().wait(SECONDS)
        assert partner is None or partner % 2
    gossip.update(np.ones(4)).wait(SECONDS)
    total_of_models = comm.allreduce(gossip.close().wait(SECONDS)).wait(SECONDS)
    np.testing.assert_allclose(total_of_models, size * (size + 1) / 2)
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
    """A handle that nothing waits for does not end its call, and nothing of 10,000 calls stays."""
    x, y = np.ones(1), np.ones(40_000)

    def drop(count):
        for number in range(count):
            comm.allreduce(x)
            if number % 50 == 0:
                comm.allgather(x)
                comm.allreduce(y)
            if number % 100 == 0:
                comm.barrier().wait(SECONDS)  # so that the ranks need no memory for calls that are far ahead
        last = comm.barrier()
        while not last.done():
            threading.Event().wait(0.001)
        runner = comm._core.member.runner
        while runner._left or runner.held or runner._finishing:
            threading.Event().wait(0.001)
        turned = threading.Event()
        runner.home.call_soon_threadsafe(turned.set)  # after the callback that has the last handle
        turned.wait(SECONDS)
        comm.statistics()  # adds up what calls have left to be counted
        gc.collect()
        return sys.getallocatedblocks()

    drop(1000)
    before = drop(500)
    assert drop(10_000) - before < 1000
    assert not [each for each in gc.get_objects() if isinstance(each, asyncoll.Handle)]


def given_up(comm):
    """A wait-avoiding call whose handle is dropped has no receiver: the next call, or `join`, tells of its round."""

    def call():
        return comm.quorum_allreduce(np.ones(3), quorum=comm.size, history=2)

    if comm.rank == 0:
        call()  # nobody comes to its round before the next call is made
        second = call()
        comm.barrier().wait(SECONDS)
        told = second.wait(SECONDS)  # at once, as nobody comes to another round
        assert (told.round, told.missed, told.skipped, told.included) == (1, (), 0, False)
        call()
    else:
        comm.barrier().wait(SECONDS)
        assert call().wait(SECONDS).round == 1
    x = np.zeros(3)
    last = comm.join("quorum", x).wait(SECONDS)
    assert (last.round, last.skipped, set(x)) == (2, 0, {2.0})


def drawn(comm):
    """Whatever programs do with their handles: each round is told to each rank once, or counts as skipped there."""
    for seed in range(24):
        shared, draw = random.Random(seed), random.Random(f"{seed}, {comm.rank}")
        kind, history = shared.choice(("solo", "majority", "quorum")), shared.choice((0, 2, 64))
        count, told, skipped = shared.choice((3, 5000)), [], 0
        for _ in range(draw.randrange(1, 12)):
            call = getattr(comm, f"{kind}_allreduce")(np.ones(count), history=history, name=str(seed))
            patience_s = draw.choice((SECONDS, SECONDS, None, 0, 0.0002))  # None: the handle is dropped at once
            if patience_s is not None:
                with contextlib.suppress(TimeoutError):
                    answer = call.wait(patience_s)
                    told += rounds_of(answer)
                    skipped += answer.skipped
            del call
        end = comm.join(str(seed), np.zeros(count)).wait(SECONDS)
        if end is not None:
            told += () if end.round in told else rounds_of(end)
            skipped += end.skipped
        newest = max(told, default=0) if end is None else end.round
        assert told == sorted(set(told)), (seed, kind, history, told)
        assert len(told) + skipped == newest, (seed, kind, history, told, skipped, newest)


def rounds_of(answer):
    return [*(answer.round - len(answer.missed) + each for each in range(len(answer.missed))), answer.round]


def unfetched(comm):
    """Results that this rank alone would lack must be fetched."""
    for _ in range(2):
        comm.push_sum(np.ones(3), np.ones(1), graph="ring").wait(SECONDS)
    handle = comm.push_sum(np.ones(3), np.ones(1), graph="ring")
    if comm.rank:
        handle.wait(SECONDS)
    else:
        while not handle.done():
            threading.Event().wait(0.001)
        del handle
    with contextlib.suppress(asyncoll.AbortedError):  # of a call that is over before the others know
        while True:
            comm.barrier().wait(SECONDS)
    assert "mass" in str(caught(asyncoll.AbortedError, comm.barrier().wait, SECONDS))


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


def watched(comm):
    """A program that does nothing but look at a call sees that it has failed."""
    for call in (lambda part: part.barrier(), lambda part: part.allreduce(np.ones(1))):
        part = comm.split(0).wait(SECONDS)
        for _ in range(3):
            call(part).wait(SECONDS)
        if comm.rank:
            with asyncoll.deadline(0.05):
                handle = call(part)
            until = time.monotonic() + SECONDS
            while not handle.done() and time.monotonic() < until:
                pass
            assert handle.done()
            caught(asyncoll.DeadlineError, handle.wait)
        comm.barrier().wait(SECONDS)


def aborts(comm):
    """After its own `abort` a rank makes no call any more."""
    for _ in range(20):
        part = comm.split(0).wait(SECONDS)
        for _ in range(2):
            part.allreduce(np.ones(1)).wait(SECONDS)
        comm.barrier().wait(SECONDS)
        if not comm.rank:
            part.abort("enough")
        error = caught(asyncoll.AbortedError, lambda part=part: part.allreduce(np.ones(1)).wait(SECONDS))
        assert (error.rank, error.reason) == (0, "enough")


def looked_at(comm):
    """A program that looks now and then sees the end of a call that the runtime has taken over."""
    for _ in range(3):
        comm.allreduce(np.ones(1)).wait(SECONDS)
    if comm.rank:
        handle, runner = comm.allreduce(np.ones(1)), comm._core.member.runner
        while handle._call is not None and not runner.has_taken(handle._call):
            threading.Event().wait(0.001)
        comm.send(np.ones(1), dest=0)
        until = time.monotonic() + SECONDS
        while not handle.done() and time.monotonic() < until:
            threading.Event().wait(0.001)
        assert handle.done()
        assert handle.wait(SECONDS) == [comm.size]
    else:
        for source in range(1, comm.size):
            comm.recv(np.ones(1), source).wait(SECONDS)
        comm.allreduce(np.ones(1)).wait(SECONDS)


def differs(comm):
    """The error names both calls, with the lines of this file, also for calls like earlier ones."""
    for _ in range(3):
        comm.barrier().wait(SECONDS)
        comm.allreduce(np.ones(3)).wait(SECONDS)
    handle = comm.barrier() if comm.rank else comm.allreduce(np.ones(3))
    assert str(caught(asyncoll.MismatchError, handle.wait, SECONDS)).count(f"{FILE}:") == 2


def overdue(comm):
    """The deadline is that of the thread that makes the call. The error says after which call a rank is missing."""
    for _ in range(3):
        comm.solo_allreduce(np.ones(3)).wait(SECONDS)
    if comm.rank:
        with asyncoll.deadline(0.05):
            handle = comm.barrier()
        error = caught(asyncoll.DeadlineError, handle.wait, SECONDS)
        assert error.missing == (0,)
        assert re.search(f"after .*solo.* at {FILE}:", str(error))
        lengths = set()
        for _ in range(5):
            again = caught(asyncoll.DeadlineError, handle.wait)
            assert again is error
            lengths.add(len(traceback.extract_tb(again.__traceback__)))
        assert len(lengths) == 1
    else:
        caught(asyncoll.DeadlineError, comm._core.member.runner.start(failed(comm)).wait, SECONDS)


async def failed(comm):
    while True:
        comm._core.member.check()
        await asyncio.sleep(0.001)


def dies(comm):
    """All survivors learn which rank is gone, in all handles."""
    handles = [comm.allreduce(np.ones(1)) for _ in range(3)] if comm.rank else []
    comm.barrier()
    if not comm.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    for handle in handles:
        assert caught(asyncoll.PeerLostError, handle.wait, SECONDS).rank == 0


def forks(comm):
    """In a forked child neither a new call nor an old handle works, and nothing hangs or disturbs the rank."""
    part = comm.split(0).wait(SECONDS)
    held = comm.allreduce(np.ones(1 << 20)) if comm.rank else None
    started = comm.recv(np.empty(1), (comm.rank - 1) % comm.size)
    begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=in_a_call, args=(part, begun, over))
    thread.start()
    begun.wait()
    for child in (lambda: refused(comm, started, held), comm.close, part.close, lambda: inside_of(comm), sys.exit):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            child()
            sys.stdout.close()
            sys.exit(0)  # with all that is called at exit
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    over.set()
    thread.join()
    if not held:
        held = comm.allreduce(np.ones(1 << 20))
    assert held.wait(SECONDS)[0] == comm.size
    comm.send(np.full(1, float(comm.rank)), (comm.rank + 1) % comm.size).wait(SECONDS)
    assert started.wait(SECONDS)[0] == (comm.rank - 1) % comm.size


def in_a_call(comm, begun, over):
    """As a call that begins: hold the lock of `comm` until `over`."""
    with comm._order:
        begun.set()
        over.wait()


def refused(comm, *handles):
    for handle in handles:
        if handle is not None:
            assert handle.done()
            assert "forked child" in str(caught(asyncoll.UsageError, handle.wait))
    assert "forked child" in str(caught(asyncoll.UsageError, comm.barrier))


def inside_of(comm):
    with comm:
        pass


def interrupted(comm):
    """Ctrl-C during a wait raises KeyboardInterrupt, and the call goes on."""
    if not comm.rank:
        for source in range(1, comm.size):
            comm.recv(np.ones(1), source).wait(SECONDS)
        comm.allreduce(np.ones(1)).wait(SECONDS)
        return
    handle = comm.allreduce(np.ones(1))
    interrupt_at(lambda: handle._gate._waiting)
    caught(KeyboardInterrupt, handle.wait, SECONDS)
    comm.send(np.ones(1), 0)
    assert handle.wait(SECONDS) == [comm.size]


def interrupt_at(is_time):
    """Send SIGINT to the main thread once `is_time()`."""

    def interrupt():
        while not is_time():
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()


class Interruption(BaseException):
    """As KeyboardInterrupt, at any point where Python may run a signal handler."""


def interruptions(comm):
    """An exception of a signal handler at any point of a wait loses nothing, and the other ranks notice nothing.

    Python runs handlers at the beginning of a function and after a call. A profiler is called there, too.
    """
    x, weight = np.ones(4), np.ones(1)
    calls = {
        "short": lambda: comm.allreduce(x),
        "gather": lambda: comm.allgather(x),
        "push": lambda: comm.push_sum(x, weight),
        "solo": lambda: comm.solo_allreduce(x),
    }
    for name, call in calls.items():
        for _ in range(3):
            call().wait(SECONDS)  # the next ones are usual calls
        # The other ranks make the call before or after the interruption, and another thread waits before or after it.
        for is_late, is_first in ((False, True), (True, True), (True, False)):
            at, is_reached = 0, True
            while is_reached:
                at += 1
                if comm.rank:
                    is_reached = follow(comm, call, is_late)
                else:
                    is_reached = interrupt(comm, f"{name} {is_late} {is_first} {at}", call, at, is_late, is_first)
    comm.barrier().wait(SECONDS)


def interrupt(comm, name, call, at, is_late, is_first):
    """Interrupt a wait at its event `at`. Returns whether it had that many."""
    handle, ends = call(), []
    waiting = threading.Thread(target=lambda: ends.append(handle.wait(SECONDS)))
    if not is_first:
        waiting.start()
    is_reached = True
    try:
        profile(at, lambda: handle.wait(0.03))
    except Interruption:
        pass
    except TimeoutError:
        is_reached = False
    else:
        is_reached = False
    if is_first:
        waiting.start()
    if is_late:
        tell(comm, is_reached)
    result = handle.wait(SECONDS)
    waiting.join(SECONDS)
    assert len(ends) == 1, name
    assert ends[0] is result, name
    if not is_late:
        tell(comm, is_reached)
    return is_reached


def profile(at, act):
    """Run `act()`, and raise Interruption at event `at` of it."""
    left = at

    def count(frame, event, argument):
        nonlocal left
        if event != "c_exception":  # no handler runs before the exception is caught
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Interruption

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)


def tell(comm, is_reached):
    for dest in range(1, comm.size):
        comm.send(np.full(1, float(is_reached)), dest).wait(SECONDS)


def follow(comm, call, is_late):
    """The part of the other ranks: they make their call before, or after, the interruption."""
    handle = None if is_late else call()
    is_reached = comm.recv(np.empty(1), 0).wait(SECONDS)[0]
    (handle or call()).wait(SECONDS)
    return bool(is_reached)


def shared(comm):
    """Several tasks and threads wait for one handle, and each gets the result."""

    async def wait(handle):
        return await handle

    async def main():
        received = np.empty(1)
        for handle in (comm.barrier(), comm.allreduce(np.ones(4)), comm.allreduce(np.ones(1 << 20))):
            results = await asyncio.gather(wait(handle), wait(handle), asyncio.to_thread(handle.wait, SECONDS))
            assert all(result is results[0] for result in results)
        handle = comm.recv(received, (comm.rank - 1) % comm.size)
        for _ in range(3):
            caught(TimeoutError, handle.wait, 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handle, 0.01)
                raise AssertionError("the message has not been sent")
        first, second = asyncio.create_task(wait(handle)), asyncio.create_task(wait(handle))
        await asyncio.sleep(0)
        second.cancel()
        await comm.barrier()
        await comm.send(np.ones(1), (comm.rank + 1) % comm.size)
        assert await first is received
        assert second.cancelled()
        assert not handle._callbacks
        assert not asyncio.iscoroutine(handle)
        turned = []
        asyncio.get_running_loop().call_soon(turned.append, True)
        done = comm.barrier()
        done.wait(SECONDS)
        while not turned:  # tasks that await nothing but calls that are over let the loop turn
            await done

    asyncio.run(main())


def callbacks(comm):
    """Callbacks run once, in the runtime's thread; one that fails disturbs nothing, and none may block that thread."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.exc_info[0])
    logging.getLogger("asyncoll").addHandler(handler)
    logging.getLogger("asyncoll").propagate = False
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received, pending = comm.recv(np.empty(1), before), comm.recv(np.empty(1), before, tag=1)
    called, refusals, waited = [], [], []

    def fail():
        raise SystemExit

    def block():
        refusals.append(caught(asyncoll.UsageError, pending.wait, SECONDS))
        refusals.append(caught(asyncoll.UsageError, comm.close))

    received.when_done(fail)
    received.when_done(block)
    received.when_done(lambda: called.append((threading.current_thread().name, comm.barrier())))
    thread = threading.Thread(target=lambda: waited.append(received.wait(SECONDS)))
    thread.start()
    while not received._gate._waiting:
        threading.Event().wait(0.001)
    comm.barrier().wait(SECONDS)  # all have registered their callbacks
    comm.send(np.ones(1), after).wait(SECONDS)
    thread.join(SECONDS)
    assert len(waited) == 1
    while not called:
        threading.Event().wait(0.001)
    [(name, barrier)] = called
    assert name == "asyncoll-progress"
    barrier.wait(SECONDS)
    assert ["callback" in str(refusal) or "another" in str(refusal) for refusal in refusals] == [True] * 2
    received.when_done(lambda: called.append(1))  # it is over: now
    received.when_done(lambda: 1 / 0)
    assert called[1:] == [1]
    assert logged == [SystemExit, ZeroDivisionError]
    comm.send(np.ones(1), after, tag=1).wait(SECONDS)
    pending.wait(SECONDS)


def timeouts(comm):
    """A timeout is checked first, and a wait that is too short leaves nothing behind."""
    received = comm.recv(np.empty(1), (comm.rank - 1) % comm.size)
    held = comm.allreduce(np.ones(4)) if comm.rank else None
    for handle in filter(None, (received, held)):
        for wrong in (float("nan"), "1", True, 1j, []):
            caught(asyncoll.UsageError, handle.wait, wrong)
        for _ in range(1000):
            caught(TimeoutError, handle.wait, 0)
        for short in (-1, -float("inf"), 1e-9, np.float32(0.001)):
            caught(TimeoutError, handle.wait, short)
        assert not handle._callbacks
        assert not handle._gate._waiting
    assert len(comm._core.member.runner._left) <= 2
    waits = []
    for limit in (None, float("inf"), 1e300, 10**30, threading.TIMEOUT_MAX):
        waits.append(threading.Thread(target=received.wait, args=(limit,)))
        waits[-1].start()
    if comm.rank:
        comm.send(np.ones(1), 0, tag=1).wait(SECONDS)
    else:
        for source in range(1, comm.size):
            comm.recv(np.empty(1), source, tag=1).wait(SECONDS)
        comm.allreduce(np.ones(4)).wait(SECONDS)
    comm.barrier().wait(SECONDS)
    comm.send(np.ones(1), (comm.rank + 1) % comm.size).wait(1e300)
    for wait in waits:
        wait.join(SECONDS)
        assert not wait.is_alive()
    caught(asyncoll.UsageError, received.wait, float("nan"))


def documents(comm):
    """The calls are those of `Communicator`, with their arguments and documents. RPC is not there."""
    for kind, blocking in ((asyncoll.Communicator, type(comm)), (asyncoll.Gossip, asyncoll.blocking.BlockingGossip)):
        for name, method in vars(kind).items():
            if str(getattr(method, "__annotations__", {}).get("return", "")).startswith("Coroutine") and name[0] != "_":
                mine = getattr(blocking, name)
                assert mine is not method, name
                assert list(inspect.signature(mine).parameters) == list(inspect.signature(method).parameters)
                assert mine.__doc__
    assert not hasattr(comm, "rpc")
    assert "event loop" in str(caught(asyncoll.UsageError, lambda: comm.rpc))
    assert isinstance(comm, asyncoll.Communicator)


CASES = {
    case.__name__: case
    for case in (
        collectives,
        threads,
        dropped,
        given_up,
        drawn,
        unfetched,
        awaited,
        shared,
        callbacks,
        timeouts,
        documents,
        late,
        looked_at,
        watched,
        aborts,
        differs,
        overdue,
        dies,
        forks,
        interrupted,
        interruptions,
    )
}


def leaves():
    """A process may join one world after another."""
    for _ in range(3):
        comm = asyncoll.init()
        comm.barrier().wait()
        handles = [comm.recv(np.ones(1), (comm.rank + 1) % comm.size)] if comm.size > 1 else []
        ended = []
        for handle in handles:
            handle.when_done(partial(ended.append, 1))
        closing = threading.Thread(target=comm.close)  # in two threads at once
        closing.start()
        comm.close()
        closing.join()
        comm.close()
        comm.abort("too late")
        caught(asyncoll.ClosedError, comm.barrier)
        for handle in handles:
            caught(asyncoll.ClosedError, handle.wait, SECONDS)
        assert len(ended) == len(handles)


def unwaited():
    """`close` waits for collectives whose handles nothing waits for."""
    with fake_device() as device:
        comm = asyncoll.init()
        of_host, of_device = np.ones(100_000), device.tensor(torch.ones(1000))
        for x in (of_host, of_device):
            comm.allreduce(x)
        comm.close()
        assert (of_host == comm.size).all()
        assert (device.values(of_device) == comm.size).all()
        assert "asyncoll-progress" not in {thread.name for thread in threading.enumerate()}


def ends():
    """Rank 0 ends without `close`, in the middle of the calls of the others."""
    comm = asyncoll.init()
    if not comm.rank:
        comm.barrier().wait(SECONDS)
        return

    def meet():
        comm.barrier().wait(SECONDS)  # rank 0 may end before this rank has seen the end of this call
        comm.barrier().wait(SECONDS)

    assert "ended without" in str(caught(asyncoll.AbortedError, meet))


def flag(name):
    """A file that the ranks see, which one of them makes."""
    return Path(os.environ["FLAGS"]) / name


def await_flag(name):
    while not flag(name).exists():
        threading.Event().wait(0.001)


def closes():
    """An interrupted `close` goes on, and the next one waits for its end."""
    comm = asyncoll.init()
    comm.barrier().wait()
    if comm.rank:
        await_flag("interrupted")
    else:
        interrupt_at(lambda: comm._session._over._waiting)
        caught(KeyboardInterrupt, comm.close)
        assert "in a world" in str(caught(asyncoll.UsageError, asyncoll.init))
        flag("interrupted").touch()
    comm.close()
    again = asyncoll.init()
    assert again.allreduce(np.ones(1)).wait(SECONDS) == [again.size]
    again.close()


def begins():
    """After an interrupted `init` a rank joins the world with the others."""
    if int(os.environ["RANK"]):
        await_flag("interrupted")
    else:
        interrupt_at(lambda: "asyncoll-progress" in {thread.name for thread in threading.enumerate()})
        caught(KeyboardInterrupt, asyncoll.init)
        assert "asyncoll-progress" not in {thread.name for thread in threading.enumerate()}
        flag("interrupted").touch()
    with asyncoll.init() as comm:
        assert comm.allreduce(np.ones(1)).wait(SECONDS) == [comm.size]


def fails(comm):
    if comm.rank == 0:
        raise ValueError("enough")
    comm.barrier().wait(SECONDS)


def stops(comm):
    if comm.rank == 0:
        raise KeyboardInterrupt("enough")
    comm.barrier().wait(SECONDS)


def raises():
    """An exception that leaves the `with` block aborts the calls of the others, and keeps its traceback."""
    for case in (fails, stops):
        error = caught((ValueError, KeyboardInterrupt, asyncoll.AbortedError), inside, case)
        assert "enough" in str(error)
        assert case.__name__ in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def inside(case):
    with asyncoll.init() as comm:
        case(comm)


ALONE = {case.__name__: case for case in (leaves, unwaited, ends, raises, closes, begins)}
FAILING = (dies, differs, overdue, unfetched)  # a failed world is left with its error


def main(name):
    if name in ALONE:
        ALONE[name]()
        return
    with contextlib.suppress(*(asyncoll.AsyncollError,) if CASES[name] in FAILING else ()):
        inside(CASES[name])


signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
main(sys.argv[1])
print("passed", flush=True)
