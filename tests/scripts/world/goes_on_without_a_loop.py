"""Rank 1 is killed, a process joins, and all go on, without an event loop. They leave by communicators of any epoch."""

import os
import signal
import subprocess
import sys

import numpy as np

import asyncoll


def start_newcomer():
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ASYNCOLL_RANK_OF")
    env = {name: value for name, value in os.environ.items() if name not in own}
    subprocess.Popen([sys.executable, __file__], env=env | {"ASYNCOLL_JOIN": "1"})


def lose_one(comm):
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
    return comm


first = comm = asyncoll.init()
if comm.epoch == 1:
    comm = lose_one(comm)
    if comm.rank == 0:
        start_newcomer()
    waiting = np.zeros(1)
    while not waiting[0]:
        waiting[0] = comm.waiting
        comm.allreduce(waiting, asyncoll.MIN).wait()
    comm = comm.grow().wait()
x = np.ones(3)
comm.allreduce(x).wait()
assert (comm.epoch, comm.size, x[0]) == (3, 4, 4)
print("went on")
(first if comm.rank == 0 else comm).close()
