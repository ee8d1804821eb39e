"""Many ranks in one process: real transports on one loop, or a simulated network in virtual time.

`run_ranks` and `simulate` run `main(comm)` at every rank. Plain code and code inside a running loop can call both;
inside a running loop they use a thread of their own, and block the caller until the world has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import math
import os
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from asyncoll import _core
from asyncoll._core import NativeCore
from asyncoll.communicator import Communicator
from asyncoll.errors import AbortedError, DeadlockError, UsageError
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import Closed
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.progress import SharedLoop
from asyncoll.testing.records import Record
from asyncoll.transport import Arena, Transport, settings
from asyncoll.transport.keys import Key
from asyncoll.transport.memory import arena
from asyncoll.transport.memory import inproc as inproc_memory
from asyncoll.transport.messages import inproc, zeromq
from asyncoll.transport.messages.shared_payloads import SlottedTransport
from asyncoll.transport.messages.simulated import (
    Crash,
    Network,
    Silence,
    SimulatedTransport,
    SimulatedWorld,
    uniform,
)
from asyncoll.transport.virtual_time import VirtualTimeLoop
from asyncoll.world.environment import deadline_s
from asyncoll.world.world import World
from asyncoll.world.write_once import Decisions, MemoryStore

T = TypeVar("T")
_HEARD_S = 0.05  # a failed rank stays this long, so that the others fail with its cause before they are cancelled
_CAUSE_S = 1.0  # one that has heard of an abort waits so long for the end of the rank that has aborted
_STOPPED_S = 1.0  # in virtual time a cancelled program has ended by then, unless it waits for a call
Main = Callable[[Communicator], Coroutine[Any, Any, T]]
Carriers = tuple[Sequence[Transport], Sequence[Arena | None]]  # the transport and the arena of each rank


def _inproc(hosts: Sequence[object]) -> contextlib.AbstractContextManager[Carriers]:
    return contextlib.nullcontext((inproc.world(len(hosts)), [None] * len(hosts)))


@contextlib.contextmanager
def _zmq(hosts: Sequence[object]) -> Iterator[Carriers]:
    with zeromq.local_world(len(hosts)) as transports:
        yield transports, [None] * len(hosts)


@contextlib.contextmanager
def _shm(hosts: Sequence[object], natives: Sequence[NativeCore | None] = (_core.native,)) -> Iterator[Carriers]:
    with zeromq.local_world(len(hosts)) as transports, contextlib.ExitStack() as opened:
        arenas = _by_rank(hosts, lambda ranks: opened.enter_context(arena.local_world(len(ranks), natives, ranks)))
        for each in arenas:
            each.never_poll()
        yield list(map(SlottedTransport, transports, arenas)), arenas


def _by_rank(hosts: Sequence[object], open_arenas: Callable[[Sequence[int]], Sequence[T]]) -> list[T]:
    """The arena of each rank. `open_arenas` makes those of the ranks of one host."""
    arenas: dict[int, T] = {}
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, its in enumerate(hosts) if its == host]
        arenas |= zip(ranks, open_arenas(ranks), strict=True)
    return [arenas[rank] for rank in range(len(hosts))]


ON_ONE_LOOP: dict[str, Callable[[Sequence[object]], contextlib.AbstractContextManager[Carriers]]] = {
    "inproc": _inproc,
    "zmq": _zmq,
    "shm": _shm,
    "shm-mixed": partial(_shm, natives=(_core.native, None)),
}


def run_ranks(size: int, main: Main[T], transport: str = "inproc", *, hosts: Sequence[object] | None = None) -> list[T]:
    """Run `main(comm)` at `size` ranks on one loop. Returns the results of the ranks, in the order of ranks.

    `transport` is "inproc" (messages are passed as objects), "zmq" (real sockets) or "shm" (real sockets and real
    shared memory); "shm-mixed" is the same with ranks that use the compiled core and ranks that do without it, in turn.
    `hosts` has the name of each rank's host: ranks share memory if the names are equal. By default all are on one.
    ASYNCOLL_DEADLINE_S bounds calls as in a world of processes.

    When a rank raises, the others are cancelled and its error is raised here; a CancelledError of its own, too. A
    UsageError is raised for a size below 1, an unknown transport, a `main` that is not callable, a wrong number of
    hosts, or an ASYNCOLL_DEADLINE_S that is no number of seconds.
    """
    hosts, patience_s = _check(size, main, hosts), deadline_s(os.environ)
    if transport not in ON_ONE_LOOP:
        raise UsageError(f"unknown transport {transport!r}: use one of {', '.join(ON_ONE_LOOP)}")

    async def everything() -> list[T]:
        with ON_ONE_LOOP[transport](hosts) as carriers:
            return await _run_all(carriers, hosts, main, {}, patience_s=patience_s)

    return _outside_of_any_loop(lambda: _run(uvloop.new_event_loop(), everything()))


@dataclass(frozen=True, slots=True)
class SimReport:
    """The record of a simulated world. Times are virtual seconds. A word is 4 bytes of payload."""

    results: list[Any]  # by rank; None for a rank that crashed
    virtual_s: float
    messages: int  # those that have arrived; a record has those under way at the end, too
    words: int
    trace: list[tuple[float, int, int, int]]  # (arrival, source, dest, payload bytes) of every message, in order


def simulate(
    size: int,
    main: Main[Any],
    network: Network | None = None,
    seed: int = 0,
    *,
    shared_memory: bool | Container[object] = False,
    hosts: Sequence[object] | None = None,
    departs: bool = False,
    record: str | os.PathLike[str] | None = None,
) -> SimReport:
    """Run `main(comm)` at `size` ranks on a simulated network, in virtual time. The same seed gives the same trace.

    With `shared_memory` the ranks of a host share memory, and collectives among them go through it. Each piece of work
    takes the network's `memory_s` and a random time up to its jitter, and pieces of work of different ranks interleave.
    `hosts` has the name of each rank's host; by default all are on one. `shared_memory` may also be the set of the
    names of those hosts whose ranks share memory. With `departs`, each rank leaves on its own when its `main` ends, as
    programs of torch.distributed do, and no rank is cancelled; otherwise all ranks leave together.

    Virtual time advances only when all ranks wait. A rank that never waits (a root that only broadcasts) stops the
    clock. `main` must not use real time or real I/O; a rank computes by `asyncio.sleep`.

    `record` is a file to write, of JSON lines. The first line has `ranks`, `seed` and `format`, which is 1. Each other
    line is a message, in the order of departure: `kind` ("data" of a tensor, "signal" of a round, "announce" of an
    operation, ...), `call` (its text, with the line of the program; of a round: its kind and the name of the operation;
    empty if it is of none), `round` (0 if it is of none), the ranks `from` and `to`, `bytes` of payload, and the
    virtual seconds `departs_s` and `arrives_s`, which is null if the message never arrives. Each is written as it
    departs, so the record of a world that fails ends there. Unlike `SimReport.messages`, it has messages that had not
    arrived at the end. Messages in shared memory are none. The player on the page Simulation of the documentation
    replays the file.

    Raises the first error of a rank, as `run_ranks`. Raises DeadlockError, with a list of the pending calls, when all
    ranks wait and no timer is set. Raises UsageError before the run if `record` cannot be written.
    """
    hosts = _check(size, main, hosts)
    world = SimulatedWorld(size, network or Network(), seed)
    endpoints: dict[int, Endpoint] = {}
    written = None if record is None else Record(Path(record), size, seed, endpoints)
    world.on_departure = None if written is None else written.departs
    arenas: Sequence[Arena | None] = [None] * size
    loop = VirtualTimeLoop()
    if shared_memory:
        memory_s, jitter_s, draws = world.network.memory_s, world.network.jitter_s, uniform([seed, size])

        def pause() -> Awaitable[None]:
            return loop.sleep(memory_s + jitter_s * next(draws)) if memory_s or jitter_s else asyncio.sleep(0)

        arenas = _by_rank(hosts, lambda ranks: inproc_memory.arenas(len(ranks), pause, ranks))
        if not isinstance(shared_memory, bool):
            arenas = [each if host in shared_memory else None for each, host in zip(arenas, hosts, strict=True)]
    loop.set_deadlock_reporter(lambda: _deadlock(endpoints))

    async def everything() -> list[Any]:
        for fault in world.network.faults:
            if isinstance(fault, Crash):
                loop.call_at(fault.at_s, world.transports[fault.rank].crash)
            elif isinstance(fault, Silence):
                loop.call_at(fault.at_s, world.suspect, fault.rank)
        return await _run_all((world.transports, arenas), hosts, main, endpoints, departs=departs)

    thresholds = gc.get_threshold()
    # With the objects of a thousand ranks each collection is long and frees nothing.
    gc.set_threshold(100_000, 50, 100)
    try:
        results = _outside_of_any_loop(lambda: _run(loop, everything()))
    finally:
        gc.set_threshold(*thresholds)
        if written is not None:
            written.close()
    return SimReport(results, loop.time(), len(world.trace), world.words, world.trace)


async def _run_all(
    carriers: Carriers,
    hosts: Sequence[object],
    main: Main[T],
    endpoints: dict[int, Endpoint],
    patience_s: float = math.inf,
    departs: bool = False,
) -> list[T]:
    """Run `main` of every rank in a task of its own.

    The first failure cancels the other tasks and is raised; with `departs`, it is raised once all ranks have left.
    """
    transports, arenas = carriers
    names = [str(host) for host in hosts] if len(set(hosts)) > 1 else ()
    tasks: list[asyncio.Task[T]] = []
    errors: list[BaseException] = []  # in the order in which they came up
    failed = errors if departs else []
    store = MemoryStore()
    try:
        async with asyncio.TaskGroup() as ranks:
            for transport, arena_ in zip(transports, arenas, strict=True):
                membership = Membership(transport.size, names)
                endpoint = Endpoint(
                    transport, arena_, patience_s, hosts, all_have_arenas=None not in arenas, membership=membership
                )
                endpoints[transport.rank] = endpoint
                world = World(endpoint, SharedLoop(), departs=departs, decisions=Decisions(store, Key(b"one process")))
                run = _run_alone(world, main, errors) if departs else _run_rank(world, main, errors, tasks)
                tasks.append(ranks.create_task(run))
                if isinstance(transport, SimulatedTransport):
                    transport.on_crash(partial(_stop, world, tasks[-1]))
    except BaseExceptionGroup as group:
        failed = errors or list(group.exceptions)  # errors of the library itself
    if failed:  # raised outside of the `except`, so that the errors of other ranks are not its context
        # An AbortedError reports an error of another rank. It may be recorded before that rank's own exception.
        raise next((error for error in failed if not isinstance(error, AbortedError)), failed[0])
    return [
        None if task.cancelled() and _has_crashed(transport) else task.result()  # type: ignore[misc]
        for transport, task in zip(transports, tasks, strict=True)
    ]


def _stop(world: World, task: asyncio.Task[Any]) -> None:
    """A rank has crashed: its program stops. Then nothing of it waits any more: no message would end a call of it."""
    task.cancel()
    asyncio.get_running_loop().call_later(_STOPPED_S, lambda: world.endpoint.failures.fail(Closed()))


async def _run_alone(world: World, main: Main[T], errors: list[BaseException]) -> T:
    try:
        async with world as comm:
            return await main(comm)
    except Exception as error:
        errors.append(error)
        return None  # type: ignore[return-value]  # `_run_all` raises


async def _run_rank(world: World, main: Main[T], errors: list[BaseException], tasks: Sequence[asyncio.Task[T]]) -> T:
    try:
        async with world as comm:
            try:
                return await main(comm)
            except Exception as error:
                errors.append(error)
                raise
    except Exception as error:
        errors.append(error)  # of leaving the world, unless `main` has raised it
        await _until_heard(error, tasks)
        raise


async def _until_heard(error: Exception, tasks: Sequence[asyncio.Task[T]]) -> None:
    """Wait until the others, which the end of this task cancels, have failed with its cause, and the cause has come.

    The rank that has aborted raises the cause itself, unless its program goes on.
    """
    if isinstance(error, AbortedError) and (aborting := tasks[error.rank]) is not asyncio.current_task():
        await asyncio.wait([aborting], timeout=_CAUSE_S)
    else:
        await asyncio.sleep(_HEARD_S)


def _has_crashed(transport: Any) -> bool:
    return isinstance(transport, SimulatedTransport) and transport.has_crashed


def _deadlock(endpoints: dict[int, Endpoint]) -> DeadlockError:
    lines = [f"  rank {rank}: {line}" for rank, endpoint in endpoints.items() for line in endpoint.waiting()]
    return DeadlockError(
        "all ranks wait and no timer is set:\n" + "\n".join(lines or ["  no rank waits for a message"])
    )


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on `loop`.

    The result is not that of the runner's task: as the runner restores the handler of SIGINT, `signal` formats the
    handler and the task in it, which takes long if its result holds arrays.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await work)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(keep_result())
    return results[0]


def _outside_of_any_loop(work: Callable[[], T]) -> T:
    """Run `work`, which runs a loop of its own. It runs in a new thread if a loop runs in this one already."""
    threads = None
    with contextlib.suppress(RuntimeError):  # if no loop runs
        asyncio.get_running_loop()
        threads = ThreadPoolExecutor(1, "asyncoll-ranks")
    if threads is None:
        return work()  # outside of any `except`, so that an error of `work` has no false context
    world = threads.submit(contextvars.copy_context().run, work)
    try:
        return world.result()
    finally:
        threads.shutdown(wait=world.done())  # Ctrl-C interrupts `result` even if the world hangs


def _check(size: int, main: object, hosts: Sequence[object] | None) -> Sequence[object]:
    """The name of each rank's host."""
    settings.check(os.environ)
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"a world has at least one rank, got {size!r}")
    if not callable(main):
        raise UsageError(f"main must be an `async def main(comm)`, got {main!r}")
    if hosts is not None and len(hosts) != size:
        raise UsageError(f"hosts has one name for each of the {size} ranks, got {len(hosts)}")
    return [0] * size if hosts is None else hosts
