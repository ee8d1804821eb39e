"""Ranks of which one has a callback of its runtime interrupted as it is entered: `interrupted_callback.py NAME ERROR`.

All ranks wait for messages that do not come. The name is qualified by its class.
"""

import asyncio
import sys
import threading

import numpy as np

import asyncoll

ERRORS = {"exit": SystemExit(3), "error": TimeoutError()}  # the first one ends the loop, the second one does not


def interrupt(comm: asyncoll.Communicator, callback: str, error: BaseException) -> None:
    """Let the thread of the runtime raise `error` as it next enters `callback`."""
    ready = threading.Event()

    def trace(frame, event, argument):
        if frame.f_code.co_qualname == callback:
            sys.settrace(None)
            raise error

    def begin() -> None:
        sys.settrace(trace)
        ready.set()

    comm._core.member.runner._loop.call_soon_threadsafe(begin)
    ready.wait()


async def on_a_loop(comm: asyncoll.Communicator, callback: str, error: BaseException) -> None:
    await comm.barrier()
    x = np.zeros(3)
    if comm.rank == 1:
        interrupt(comm, callback, error)
        if callback == "_Crossing._done":
            await comm.recv(x, 0)
            assert x[0] == 1
        elif callback == "_Crossing._discard":
            call = asyncio.ensure_future(comm.quorum_allreduce(x, quorum=3))  # may be cancelled
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
    elif comm.rank == 0 and callback == "_Crossing._done":
        await comm.send(np.ones(3), 1)
    await comm.recv(x, (comm.rank + 1) % 3)


def with_handles(callback: str, error: BaseException) -> None:
    with asyncoll.init() as comm:
        x = np.zeros(3)
        for _ in range(3):  # so that the compiled core has learned the call
            comm.allreduce(x).wait()
        if comm.rank == 1:
            interrupt(comm, callback, error)
            if callback == "HandleRunner._adopt":
                comm.allreduce(x).wait()
            elif callback == "HandleRunner._settle":
                comm.recv(x, 0).wait()
                assert x[0] == 1
        elif comm.rank == 0 and callback == "HandleRunner._settle":
            comm.send(np.ones(3), 1).wait()
        comm.recv(x, (comm.rank + 1) % 3).wait()


def main(callback: str, error: str) -> None:
    if callback.startswith("_Crossing"):
        asyncoll.run(on_a_loop, callback, ERRORS[error])
    else:
        with_handles(callback, ERRORS[error])


try:
    main(*sys.argv[1:])
except asyncoll.AbortedError as aborted:
    print(aborted)
