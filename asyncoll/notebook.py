"""Ranks as processes, from a cell of a notebook: `run`."""

from __future__ import annotations

import inspect
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np

from asyncoll.arguments import whole
from asyncoll.errors import PeerLostError, RemoteError, UsageError
from asyncoll.launch.function import check_function, launch_function
from asyncoll.launch.supervisor import Outcome
from asyncoll.launch.verdict import signal_name
from asyncoll.rpc import codec
from asyncoll.rpc.packing import Packing, unpack
from asyncoll.runtime.threads import check_threads
from asyncoll.transport.system_calls import anonymous_file
from asyncoll.world import join

__all__ = ["run"]

T = TypeVar("T")
_COUNT = struct.Struct("<Q")  # of the pieces of a result
_BLOCK = 64  # the byte at which the block of them begins: its arrays are aligned to as many


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any, ranks: int) -> list[T]:
    """Run `await main(comm, *args)` at `ranks` ranks, each a process of its own, and return their results by rank.

    For a notebook, or an interactive interpreter: `main` may be defined in a cell, and may use everything that the
    notebook has defined. The ranks are forks of this process. They share memory with each other, and what they change
    changes nothing here. Their output appears in the cell, with the rank in front of each line.

    Blocks until all ranks, and all processes that they have started, are gone. An interrupt (SIGINT) ends the ranks,
    and then raises KeyboardInterrupt here; a rank has 10 s to end, and a second interrupt kills it. If one rank fails,
    the others are stopped. If this process ends, the ranks end, too.

    Each rank has one thread of torch and, in what it imports itself, of OpenMP and OpenBLAS.

    Args:
        main: an `async def`; its first argument is the `Communicator` of all ranks.
        args: its other arguments.
        ranks: the number of ranks, at least 1.

    Returns:
        The results of the ranks. They come back by the codec of RPC, without pickle: None, numbers, strings, bytes,
        lists, tuples, sets, dicts, numpy arrays and torch tensors of the CPU.

    Raises:
        UsageError: `main` is no `async def`; this is not the main thread; gevent or eventlet has replaced threads; or
            this process uses CUDA, which a fork cannot use.
        RemoteError: a rank has raised. This is the root cause, with its traceback as text. A result of another type,
            and sys.exit(), are a UsageError at their rank.
        PeerLostError: a rank has ended without raising, for example by a signal.
        KeyboardInterrupt: the cell was interrupted.

    Example:

        async def main(comm):
            x = torch.full((3,), float(comm.rank))
            await comm.allreduce(x)
            return x

        first, *others = asyncoll.notebook.run(main, ranks=4)
    """
    size = whole(ranks, "ranks")
    if size < 1:
        raise UsageError(f"a job has at least one rank, not {size}")
    if not inspect.iscoroutinefunction(main):
        raise UsageError(f"asyncoll.notebook.run needs an `async def main(comm, ...)`, got {main!r}")
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise UsageError("this process uses CUDA, which its forks cannot use: restart it, and use CUDA in ranks alone")
    check_threads()
    check_function(size)
    with ExitStack() as opened:
        memory = [anonymous_file("asyncoll-result") for _ in range(size)]
        for descriptor in memory:
            opened.callback(os.close, descriptor)

        def act() -> None:
            _write(_result(main, args), memory[int(os.environ["RANK"])])

        outcome = launch_function(size, act)
        if outcome.stopped_by is not None:
            signal.raise_signal(outcome.stopped_by)
            raise KeyboardInterrupt
        _raise_failure(outcome)
        return [_read(rank, descriptor) for rank, descriptor in enumerate(memory)]


def _result(main: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any]) -> T:
    """The result of this rank. Raises UsageError if `main` ends the process instead: code 0 would look like success."""
    try:
        return join.run(main, *args)
    except SystemExit as error:
        raise UsageError(f"main has raised {error!r}, and so has no result: return one, or raise an error") from error


def _raise_failure(outcome: Outcome) -> None:
    if outcome.root is None:
        return
    rank, summary, code, lost = outcome.root.rank, outcome.root.summary, outcome.root.code, outcome.root.blames
    kind, _, text = summary.partition(": ")
    if lost is not None and kind == f"{PeerLostError.__module__}.{PeerLostError.__name__}":
        # The lost rank has reported nothing: it was stopped, or has ended with exit code 0.
        rank, cause = lost, f"as rank {rank} reports: {text}"
    elif outcome.root.traceback:
        raise RemoteError(rank, kind, text, outcome.root.traceback)
    else:
        cause = summary or (f"it was killed by {signal_name(-code)}" if code < 0 else f"it ended with exit code {code}")
    raise PeerLostError(rank, cause, socket.gethostname(), outcome.pids.get(rank, 0))


def _write(result: object, descriptor: int) -> None:
    """Write `result`: its pieces in one block, behind their number, which is written last."""
    body, arrays, staged = codec.encode(result, "the result of main")
    if staged:
        raise UsageError("the result of main has a tensor of a device: return `x.cpu()`")
    packing = Packing([np.frombuffer(body, np.uint8), *arrays])
    os.ftruncate(descriptor, _BLOCK + packing.nbytes)
    memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    for _ in packing.fill(memory[_BLOCK:]):
        pass
    os.pwrite(descriptor, _COUNT.pack(packing.count), 0)


def _read(rank: int, descriptor: int) -> Any:
    """The result that `rank` has written. Its arrays lie in a private copy of that memory, made as they change."""
    if not any(os.pread(descriptor, _COUNT.size, 0)):
        raise PeerLostError(rank, "it ended with exit code 0, and without a result", socket.gethostname())
    memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    body, *arrays = unpack(memory[_BLOCK:], *_COUNT.unpack_from(memory))
    try:
        return codec.decode(body.tobytes(), arrays)
    except UsageError as error:
        raise UsageError(f"the result of rank {rank}: {error}; return a dict of its fields") from None
