"""An exception strikes rank 0 at each line of the library in turn, as a signal handler's does in the main thread."""

import asyncio
import contextlib
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

import asyncoll
from asyncoll.algorithms.rounds.repeats import Repeat

LIBRARY = str(Path(asyncoll.__file__).parent)


class AlarmError(Exception):
    pass


class Strike:
    """As a context manager: raise AlarmError at the so many-th line of the library in this thread."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(LIBRARY) or frame.f_code.co_name in ("__del__", "_settle"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise AlarmError
        return self.trace


async def rounds(comm):
    """Rank 0 is struck at a later line in each call, until a call has no more lines."""
    line, seen, was_struck = 0, 0, True
    while was_struck if comm.rank == 0 else seen < 1000:
        line += 1
        strike = Strike(line)
        with strike if comm.rank == 0 else contextlib.nullcontext(), contextlib.suppress(AlarmError):
            history = line % 2 * 2
            seen = (await comm.solo_allreduce(np.ones(3), name=f"solo {history}", history=history)).round
        was_struck = strike.left <= 0
        await asyncio.sleep(0)
    return line


async def whole_calls(comm):
    """Calls in one step of the compiled core: a round is told by the call that is struck, or by the one after it."""
    line, told, was_struck = 0, 0, True
    while was_struck:
        line += 1
        for strike in (Strike(0), Strike(line)):
            with strike, contextlib.suppress(AlarmError):
                reduction = await comm.solo_allreduce(np.ones(3), name=f"whole {comm.rank}")
                told += 1 + reduction.skipped
        was_struck = strike.left <= 0
    assert told == reduction.round
    return line


async def collectives(comm):
    """Each ends the communicator that it was struck in, and none but that."""
    struck = 0
    for line in range(1, 100):
        part = await comm.split(0, key=comm.rank)
        with Strike(line) if comm.rank == 0 else contextlib.nullcontext():
            try:
                assert (await part.allreduce(np.ones(3)) == comm.size).all()
            except (AlarmError, asyncoll.AbortedError):
                struck += 1
                part.abort("it was struck before it had made its call")
        assert (await comm.allreduce(np.ones(3)) == comm.size).all()
    return struck


async def main(comm):
    signal.signal(signal.SIGUSR1, lambda *_: None)  # a handler of the program's own
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    lines = await rounds(comm)
    repeats = comm._core.operations.repeats
    if any(isinstance(each, Repeat) for each in repeats.values()):
        assert await whole_calls(comm) > 10
        assert f"whole {comm.rank}" in repeats
    struck = await collectives(comm)
    if comm.rank == 0:
        assert lines > 50, "the path of a call is longer"
        assert struck > 30
    assert (await comm.allreduce(np.ones(3)) == comm.size).all()
    print("held")


warnings.simplefilter("ignore", RuntimeWarning)
asyncoll.run(main)
