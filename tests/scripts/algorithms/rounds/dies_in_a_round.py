"""Call until a rank has died in a round, and judge the record: `dies_in_a_round.py KIND LENGTH VICTIM POINT PASSING`.

The victim is killed as it passes POINT for the PASSING-th time: a point of the core; "opcode", of the record in Python;
or "instruction", which is after so many tenths of a millisecond.
"""

import os
import signal
import sys

import numpy as np

import asyncoll
from asyncoll import _core
from asyncoll.algorithms.rounds import round_record
from asyncoll.testing.faults.left_record import left_records

CALLS = 40  # of each rank: later contributions are 0
CALLS_MAX = 5000  # of each rank, if the victim does not die
KIND, LENGTH, VICTIM, POINT, PASSING = sys.argv[1:]
passed = 0


def die_at(name: str) -> None:
    global passed
    passed += name == POINT
    if passed == int(PASSING):
        os.kill(os.getpid(), signal.SIGKILL)


def trace(frame, event, _):
    if frame.f_code.co_filename != round_record.__file__:
        return None
    frame.f_trace_opcodes = True
    die_at(event)
    return trace


def arm() -> None:
    if POINT == "instruction":
        signal.setitimer(signal.ITIMER_REAL, int(PASSING) / 10_000)  # the action of SIGALRM is to end the process
    elif POINT == "opcode":
        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of opcodes only if a frame has asked before
        sys.settrace(trace)
    else:
        _core.native.watch(die_at)


async def main(comm: asyncoll.Communicator) -> None:
    calls, size = 0, comm.size
    elements = {"short": 0, "long": 20_000, "registered": 20_000}[LENGTH] + size * CALLS
    x = comm.empty(elements, np.dtype("f8")) if LENGTH == "registered" else np.zeros(elements)
    results = {}  # by round

    def contributions(values: np.ndarray) -> np.ndarray:
        return values[-size * CALLS :].reshape(size, CALLS).copy()

    await comm.barrier()
    if comm.rank == int(VICTIM):
        arm()
    try:
        while calls < CALLS_MAX:
            x[:] = 0
            if calls < CALLS:
                x[(comm.rank - size) * CALLS + calls] = 1
            calls += 1
            # No rank is later than the next synchronous round, so history has all results.
            options = {"name": KIND, "sync_every": 8, "history": 16}
            if KIND == "solo":
                reduction = await comm.solo_allreduce(x, **options)
            elif KIND == "majority":
                reduction = await comm.majority_allreduce(x, **options)
            else:
                reduction = await comm.quorum_allreduce(x, quorum=size - 1, **options)
            assert not reduction.skipped
            for number, values in enumerate([*reduction.missed, x], reduction.round - len(reduction.missed)):
                assert number not in results
                results[number] = contributions(values) * (number < reduction.round or reduction.active > 0)
    except asyncoll.PeerLostError:
        for left in left_records(comm):  # none before the first call
            for number, values in left.results.items():
                assert (results.setdefault(number, contributions(values)) == contributions(values)).all()
            assert sorted(results) == list(range(1, left.latest + 1))
            published = sum(results.values(), np.zeros((size, CALLS)))
            assert published.max() <= 1, "a contribution is in two rounds"
            assert left.ticket in (calls - 1, calls)
            own = (published + contributions(left.staged))[comm.rank]
            assert (own == (np.arange(CALLS) < left.ticket)).all(), (left, own)
        print("all right", flush=True)
        raise


asyncoll.run(main)
