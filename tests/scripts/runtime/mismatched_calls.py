"""Mismatches without a loop, of calls learned or not, within `reported_at` or not: they name the right line."""

import contextlib
import itertools
import sys

import numpy as np

import asyncoll
from asyncoll.runtime.signature import Site, reported_at


def users_place():
    return sys._getframe().f_code, sys._getframe().f_lasti


PLACE = users_place()
CALLS = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "barrier": lambda comm, x: comm.barrier(),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "quorum": lambda comm, x: comm.quorum_allreduce(x, quorum=comm.size),
}


def other(comm, call, x):
    if call == "quorum":
        return comm.quorum_allreduce(x, quorum=1)
    return comm.allreduce(x) if call == "barrier" else comm.barrier()


def told(comm, call, x, calls_before):
    try:
        for _ in range(calls_before):
            CALLS[call](comm, x).wait()
        while True:  # a rank may complete rounds before it learns of the mismatch
            (CALLS[call](comm, x) if comm.rank == 0 else other(comm, call, x)).wait()
    except asyncoll.MismatchError as error:
        return str(error)


comm = asyncoll.init()
for call, calls_before, is_reported in itertools.product(CALLS, (0, 4), (False, True)):
    x = np.ones(4)
    part = comm.split(0).wait()
    with reported_at(PLACE) if is_reported else contextlib.nullcontext():
        text = told(part, call, x, calls_before)
    reported, own = (f"mismatched_calls.py:{line}" for line in (Site(*PLACE).line, CALLS[call].__code__.co_firstlineno))
    assert text.count(reported) == (2 if is_reported else 0), (call, calls_before, is_reported, text)
    assert (own in text) == (not is_reported), (call, calls_before, is_reported, text)
comm.close()
print("all right")
