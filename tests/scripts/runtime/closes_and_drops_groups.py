"""A rank that makes many groups, and closes half of them and drops the others. It counts what is left."""

import sys
import threading
import time

import numpy as np

import asyncoll
from tests.support.footprint import different, footprint, left, objects

SECONDS = 60.0  # for a wait that must end
GROUPS = int(sys.argv[1])


def settled(comm):
    """The footprint, once all ranks have forgotten what they have closed or dropped."""
    until_s = time.monotonic() + SECONDS
    while left(comm):
        assert time.monotonic() < until_s, f"{left(comm)} communicators are left"
        time.sleep(0.001)
    comm.barrier().wait(SECONDS)
    found = footprint(comm)
    comm.barrier().wait(SECONDS)
    # The runtime's thread wakes this one before it lets go of the handle: let it pass that step.
    passed = threading.Event()
    comm._core.member.post(passed.set)
    assert passed.wait(SECONDS)
    return found


comm = asyncoll.init()
before = counted = None
for _ in range(40):
    comm.allgather(np.ones((1, 3))).wait(SECONDS)
for _ in range(40):
    comm.allreduce(np.ones(3)).wait(SECONDS)
for number in range(GROUPS):
    part = comm.split(comm.rank % (1 + number % 4)).wait(SECONDS)
    for _ in range(3):
        assert (part.allreduce(np.ones(1 + number % 5)).wait(SECONDS) == part.size).all()
    if number % 10 == 0:
        assert (part.allreduce(np.ones(100_000)).wait(SECONDS) == part.size).all()
    handle = part.barrier()
    if number % 2:
        part.close()
    del part
    handle.wait(SECONDS)
    del handle
    if number == 100:
        before = settled(comm)
        counted = objects()
after = settled(comm)
assert before == after, (before, after)
assert objects() == counted, different(counted, objects())
comm.barrier().wait(SECONDS)  # a rank that ends tells the others, which note it
comm.close()
print("passed")
