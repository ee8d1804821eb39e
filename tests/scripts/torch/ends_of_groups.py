"""A rank of torch.distributed whose groups and children end: runs the case of its argument, and prints a line then."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

import asyncoll
from tests.support.raising import caught

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AFTER, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
SECONDS = timedelta(seconds=60)  # for a wait that must end
PATIENCE_S = 120  # of a child that must end
STRIDE = 3  # events between two interruptions of a call: calls of one kind have events in common
LONG = 1 << 19  # elements of an array that waits at its sender until it is received

kept = []


def total(group=None):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return int(x[0])


MESSAGES = {
    "irecv": lambda x, group: dist.irecv(x, BEFORE, group=group),
    "any source": lambda x, group: group.recv_anysource([x], 0),
    "isend": lambda x, group: dist.isend(x, AFTER, group=group),
}


def unmatched():
    """Sends and receives that no rank has matched end, and free their memory, once all have destroyed the group."""
    for begin in MESSAGES.values():
        group, x, reduced = dist.new_group(), torch.ones(LONG), torch.ones(LONG)
        dropped = weakref.ref(x)
        begin(x, group)
        kept = begin(torch.ones(LONG), group)
        reduction = dist.all_reduce(reduced, group=group, async_op=True)
        dist.destroy_process_group(group)
        assert reduction.wait(SECONDS)  # a collective goes on
        assert (reduced == SIZE).all()
        caught(asyncoll.ClosedError, kept.wait, SECONDS)
        del x, kept
        while dropped() is not None:
            gc.collect()
            threading.Event().wait(0.001)


def matched():
    """A message of a rank that has destroyed the group reaches one that has not."""
    group = dist.new_group()
    if RANK == 0:
        x = torch.full((LONG,), 7.0)
        sending = [dist.isend(x, rank, group=group) for rank in range(1, SIZE)]
        dist.destroy_process_group(group)
    dist.barrier()
    if RANK:
        x = torch.zeros(LONG)
        dist.recv(x, 0, group=group)
        assert (x == 7).all()
    else:
        assert all(send.wait(SECONDS) for send in sending)


def children():
    """Forked children end as any program does. They do not hang, and the world goes on."""
    group = dist.new_group()
    receiving = dist.irecv(torch.zeros(1), BEFORE, group=group)  # a call is under way
    assert total(group) == SIZE
    if RANK == 0:  # which serves the store
        for child in [forked(end) for end in (sys.exit, leave_and_exit)]:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if RANK == 1:
        child = multiprocessing.get_context("fork").Process(target=dist.get_rank)
        child.start()
        child.join()
        assert child.exitcode == 0
        rows = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2, persistent_workers=True)
        assert [torch.cat(list(rows)).tolist() for _ in range(2)] == [list(range(8))] * 2
        kept.append(rows)  # its workers live until this rank ends
    dist.send(torch.ones(1), AFTER, group=group)
    assert receiving.wait(SECONDS)


def forked(end):
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)
        end()
    return child


def leave_and_exit():
    dist.destroy_process_group()
    sys.exit()


class Interruption(BaseException):
    """What a signal handler raises."""


# One that a handler raises within a finalizer is lost.
sys.unraisablehook = lambda lost: None if lost.exc_type is Interruption else sys.__unraisablehook__(lost)

BEGUN = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True),
    "broadcast": lambda group: dist.broadcast(torch.ones(LONG), 0, group=group, async_op=True),
    "short send": lambda group: pair(torch.ones(1), group),
    "send": lambda group: pair(torch.ones(LONG), group),
    "receive": lambda group: pair(torch.ones(1), group, receiver=0),
    "any source": lambda group: pair(torch.ones(1), group, receiver=0, receive=group.recv_anysource),
}


def pair(x, group, receiver=1, receive=None):
    """A message between ranks 0 and 1."""
    if receiver == RANK:
        return receive([x], 0) if receive else dist.irecv(x, 1 - receiver, group=group)
    return dist.isend(x, receiver, group=group) if RANK + receiver == 1 else None


def interruptions():
    """An exception of a handler at any point of the beginning of a call: the other ranks go on, or hear of rank 0.

    Python runs handlers at the beginning of a function and after a call. A profiler is called there, too. Coroutines
    that were made and never started are destroyed then, and Python warns of each.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a handler of the program: calls begin as they do then
    for first, (name, begin) in enumerate(BEGUN.items()):
        at, is_reached = 1 + first % STRIDE, torch.ones(1)
        while is_reached:
            at += STRIDE
            group = dist.new_group()
            if RANK == 0:
                is_reached.fill_(interrupt(at, begin, group))
            elif (work := begin(group)) is not None:
                said = outcome(work)
                assert said is None or "rank 0" in said, (name, at, said)
            dist.destroy_process_group(group)
            dist.broadcast(is_reached, 0)
        assert at > 5, name


def outcome(work):
    """None if `work` succeeds; otherwise its error."""
    try:
        work.wait(SECONDS)
    except dist.DistBackendError as error:
        return str(error)
    return None


def interrupt(at, begin, group):
    """Interrupt `begin` at its event `at`. Returns whether it had that many."""
    left = at

    def count(frame, event, argument):
        nonlocal left
        if event != "c_exception":  # no handler runs before the exception is caught
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise Interruption

    try:
        sys.setprofile(count)
        begin(group)
        sys.setprofile(None)
    except Interruption:
        pass
    return left <= 0


CASES = {case.__name__: case for case in (unmatched, matched, children, interruptions)}
dist.init_process_group("asyncoll", timeout=timedelta(hours=1))
for name in sys.argv[1:]:
    CASES[name]()
    assert total() == SIZE
dist.destroy_process_group()
print("passed", flush=True)
