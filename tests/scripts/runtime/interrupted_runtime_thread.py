"""Ranks of which one has its runtime's thread interrupted, in the way that the argument names, while all wait."""

import asyncio
import contextlib
import ctypes
import sys
import threading

import numpy as np

import asyncoll


def strike(comm: asyncoll.Communicator, way: str) -> None:
    (thread,) = (each for each in threading.enumerate() if each.name == "asyncoll-progress")
    loop = comm._core.member.runner._loop
    if way == "sent":
        assert thread.ident is not None
        for _ in range(3):  # turns of that loop, so that it has begun the call
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            turned.wait()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        loop.call_soon_threadsafe(lambda: None)  # the thread must run for it
    elif way == "stop":
        loop.call_soon_threadsafe(loop.stop)
    else:
        loop.call_soon_threadsafe(raising({"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[way]))


def raising(error: BaseException):
    def act() -> None:
        raise error

    return act


async def main(comm: asyncoll.Communicator, way: str) -> None:
    try:
        await comm.barrier()  # a rank may still be in it when the thread is struck
        if comm.rank != 1:
            await comm.recv(np.ones(3), 1)
        else:
            waiting = asyncio.ensure_future(comm.recv(np.ones(3), 0))
            await asyncio.sleep(0)
            strike(comm, way)
            await waiting
    except asyncoll.AbortedError as error:
        print(error)


with contextlib.suppress(asyncoll.AsyncollError):
    asyncoll.run(main, sys.argv[1])
