"""How many functions of the package one call enters, and how many files, at rank 0 of two ranks of one loop.

It prints one line for each call: its name, functions and files before the algorithm, and of the whole call. The record
is that of the profiler. It depends on public calls and on two class names, so it also runs on older versions.
"""

import os
import sys

import numpy as np

import asyncoll
from asyncoll.testing import run_ranks

ROOT = os.path.dirname(asyncoll.__file__)
ALGORITHMS = ("SharedCall.", "MessageCall.")  # the classes whose methods begin an algorithm
TENSOR = np.ones(128)


async def rpc(comm):
    await comm.rpc.call(1, "echo", TENSOR)


CALLS = {
    "broadcast, shm": lambda comm: comm.broadcast(TENSOR),
    "allreduce, shm": lambda comm: comm.allreduce(TENSOR),
    "solo, shm": lambda comm: comm.solo_allreduce(TENSOR),
    "allreduce, zmq": lambda comm: comm.allreduce(TENSOR),
    "solo, zmq": lambda comm: comm.solo_allreduce(TENSOR),
    "rpc, shm": rpc,
}


class Record:
    """The functions that are entered, in a set; a copy of it when an algorithm begins."""

    def __init__(self):
        self.entered = set()
        self.before = None

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT) or f"{os.sep}testing{os.sep}" in code.co_filename:
            return
        name = code.co_qualname
        is_algorithm = name.startswith(ALGORITHMS) and name.partition(".")[2] in ("broadcast", "allreduce")
        if is_algorithm and self.before is None:
            self.before = counted(self.entered)
        self.entered.add((code.co_filename, name))


def counted(entered):
    return len(entered), len({file for file, _ in entered})


def walk(name, call):
    async def main(comm):
        async def echo(x):
            return x

        comm.rpc.register(echo)
        await comm.barrier()
        is_caller = comm.rank == 0
        for _ in range(3):  # the first call of a kind prepares the next ones
            if is_caller or call is not rpc:
                await call(comm)
        await comm.barrier()
        record = Record()
        if is_caller:
            sys.setprofile(record)
        try:
            if is_caller or call is not rpc:
                await call(comm)
        finally:
            if is_caller:
                sys.setprofile(None)
        await comm.barrier()
        return record.before or counted(record.entered), counted(record.entered)

    before, whole = run_ranks(2, main, name.partition(", ")[2])[0]
    print(name, *before, *whole, sep=";")


for each in CALLS.items():
    walk(*each)
