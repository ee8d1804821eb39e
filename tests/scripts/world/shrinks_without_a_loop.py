"""Rank 1 is killed, and the others go on, without an event loop. They leave by communicators of either epoch."""

import os
import signal

import numpy as np

import asyncoll

first = comm = asyncoll.init()
number = comm.rank
half = comm.split(number % 2).wait()
comm.barrier().wait()
try:
    while True:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(np.ones(1000)).wait()
except asyncoll.PeerLostError:
    comm = comm.shrink().wait()
    half = half.shrink().wait()
x, y = np.ones(3), np.ones(3)
comm.allreduce(x).wait()
half.allreduce(y).wait()
assert (comm.epoch, comm.size, x[0], y[0]) == (2, 3, 3, 1 + (number != 3))
print("went on")
(first if number == 0 else comm).close()
