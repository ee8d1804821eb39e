"""The ways into a world: `run` and `connect`, in the one that the environment describes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from asyncoll import forks
from asyncoll.communicator import Communicator
from asyncoll.errors import AsyncollError, ClosedError, UsageError
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.linking import GrowthAttempt
from asyncoll.runtime.progress import ProgressThread, Runner, SharedLoop, new_loop
from asyncoll.runtime.threads import program_loop
from asyncoll.transport import START_TIMEOUT_S, standard_streams
from asyncoll.transport.joining import Joining, in_daemon_thread
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import inproc
from asyncoll.world import error_file
from asyncoll.world.environment import Environment
from asyncoll.world.meeting import PeerLinks
from asyncoll.world.newcomers import Newcomer, Newcomers, WorldOverError
from asyncoll.world.rank_links import end_joining, endpoint_of, meeting
from asyncoll.world.world import World
from asyncoll.world.write_once import Decisions, MemoryStore

logger = logging.getLogger("asyncoll")
_member = threading.Lock()  # held while this process is in a world
T = TypeVar("T")
_CLAIM = "ASYNCOLL_RANK_OF"  # set in the environment of a rank: its process id, and which rank of which world it is


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Join the world that the environment describes, run `await main(comm, *args)` on a new event loop, and leave.

    The environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); `asyncoll launch` sets it, too. Without
    it the world has one rank. Every rank of the world calls `run`. It joins, and leaves, as `connect` does.

    With ASYNCOLL_JOIN=1, and ASYNCOLL_FOLDER as the ranks of a running job have it (`asyncoll launch -n`, two ranks or
    more), this process joins their world as all of them call `grow`. If the world ends first, the process does, too,
    with exit code 0.

    If `main` raises, the exception leaves `run`, and the pending and later calls of the other ranks raise AbortedError
    with its text as the reason. Ctrl-C cancels `main`, and `run` raises KeyboardInterrupt. Under torchrun it is also
    written to the error file of this rank, as with `torch.distributed.elastic.multiprocessing.errors.record`.

    Args:
        main: an `async def`; its first argument is the `Communicator` of all ranks.
        args: its other arguments.

    Returns:
        The result of `main`.

    Raises:
        UsageError: `main` is no `async def`; an event loop runs in this thread; this process is in a world already;
            the environment describes no possible world; or a training has ended without `finish()` or `discard()`.
        PeerLostError: a rank has died, or is frozen, before all ranks had joined, or while this rank waited for the
            others to leave.
        DeviceError: a result has not reached its tensor on a device.
        DeadlineError: a rank has not joined in time.
        ServiceLostError: the store at MASTER_ADDR has ended before all ranks had joined.

    Example:

        async def main(comm):
            x = torch.full((3,), float(comm.rank))
            await comm.allreduce(x)
            return x

        total = asyncoll.run(main)
    """
    if not inspect.iscoroutinefunction(main):
        raise UsageError(f"asyncoll.run needs an `async def main(comm, ...)`, got {main!r}")
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError("a loop is running here already: use `async with asyncoll.connect() as comm`")

    async def joined() -> T:
        async with connect() as comm:
            return await main(comm, *args)

    standard_streams.fill_gaps()
    runner = asyncio.Runner(loop_factory=new_loop)
    process = os.getpid()
    try:
        return runner.run(joined())
    except WorldOverError as over:
        print(f"asyncoll: {over}: this process has nothing to join", file=sys.stderr)
        sys.exit(0)
    except Exception as error:
        if os.getpid() == process:
            error_file.write(error)
        raise
    finally:
        if os.getpid() == process:
            runner.close()
        else:  # in a forked child, closing would wait for threads that only the parent has
            forks.keep(runner)


@contextlib.asynccontextmanager
async def connect() -> AsyncIterator[Communicator]:
    """Join the world that the environment describes, on the event loop that runs here: an async context manager.

    Its value is the `Communicator` of all ranks. The environment is as for `run`. Every rank of the world enters it,
    and leaves it. A process is in one world at a time, and may join another one afterwards.

    Entering waits for all ranks: for 300 s, ASYNCOLL_DEADLINE_S or the deadline that holds here, whichever is least.

    Leaving is collective: this rank goes on serving the rounds and the calls of others until every rank leaves. It
    waits for the collectives that it has made, awaited or not, and raises the error of one of `comm` that fails
    meanwhile. Leaving with an exception, CancelledError included, aborts the world: the pending and later calls of the
    other ranks raise AbortedError with its text as the reason.

    Raises:
        UsageError: this process is in a world already; it inherits the environment of a rank that has started it; or
            the environment describes no possible world, or one that is over, for a newcomer. Leaving raises it, and
            aborts the world, if a training has ended without `finish()` or `discard()`.
        PeerLostError: a rank has died, or is frozen, before all ranks had joined, or before all had left.
        DeviceError: a result has not reached its tensor on a device. Leaving raises it.
        DeadlineError: a rank has not joined in time; or, on leaving, a collective of a communicator made by `split`,
            which was not awaited, is not over a minute after the last call of all ranks.
        ServiceLostError: the store at MASTER_ADDR has ended before all ranks had joined.

    Example:

        async with asyncoll.connect() as comm:
            await comm.barrier()
    """
    async with connected(Environment.read) as comm:
        yield comm


def alone(runner: Runner, *, departs: bool = False) -> World:
    """A world of one rank, which needs no store that outlives it."""
    decisions = Decisions(MemoryStore(), Key(secrets.token_bytes(32)))
    return World(Endpoint(inproc.world(1)[0]), runner, departs=departs, decisions=decisions)


@contextlib.asynccontextmanager
async def connected(read: Callable[[], Environment | None]) -> AsyncIterator[Communicator]:
    """Join the world that `read` describes, a world of one rank if that is None, with a progress thread of its own."""
    loop = program_loop()
    with sole_membership():
        environment = read()
        if environment is None or environment.size == 1:
            async with alone(SharedLoop()) as comm:
                yield comm
            return
        process = os.getpid()
        thread = ProgressThread(loop)
        try:
            async with joined(thread, environment) as comm:
                yield comm
        finally:
            # A forked child has no such thread.
            if os.getpid() == process:
                thread.stop()


@contextlib.contextmanager
def _claimed(environment: Environment) -> Iterator[None]:
    """Mark the environment of this rank's process, and refuse a second process of the same rank.

    Processes that this one starts inherit RANK and WORLD_SIZE. Their messages would come between those of the ranks.
    """
    # It is a file, which the program has chosen.
    if environment.store is not None and not environment.master_port:
        yield
        return
    store = f"{environment.master_addr}:{environment.master_port}"
    world = f"{environment.rank} of {environment.size} at {environment.folder or store} {environment.run}"
    process = str(os.getpid())
    holder, _, claimed = os.environ.get(_CLAIM, "").partition(" ")
    if claimed == world and holder != process:
        raise UsageError(
            f"RANK={environment.rank} of this world is process {holder}, which has started this one, and a rank is one "
            "process: start this program without RANK and WORLD_SIZE in its environment to let it run alone, or with "
            "`asyncoll launch` to give it ranks of its own"
        )
    os.environ[_CLAIM] = f"{process} {world}"
    try:
        yield
    finally:
        os.environ.pop(_CLAIM, None)


@contextlib.asynccontextmanager
async def joined(
    runner: Runner, environment: Environment | None, *, departs: bool = False
) -> AsyncIterator[Communicator]:
    """Join the world of `environment`, or one of one rank if it is None, with this runner.

    With `departs`, leaving is not collective: this rank leaves once its calls are over, and the others go on.
    """
    if environment is None or environment.size == 1:
        async with alone(runner, departs=departs) as comm:
            yield comm
        return
    if environment.is_newcomer:
        async with contextlib.AsyncExitStack() as inside:
            yield await _admitted(runner, environment, inside, departs=departs)
        return
    with _claimed(environment):
        joining = _joining(environment)
        links = await meeting(environment, joining)
        endpoint = endpoint_of(links, environment)
        newcomers = None
        if environment.folder and links.decisions is not None:
            newcomers = Newcomers(environment, links.decisions.entries, environment.size)
        world = World(
            endpoint,
            runner,
            links.hosts,
            joining,
            departs=departs,
            decisions=links.decisions,
            newcomers=newcomers,
            freeze_s=environment.freeze_s,
        )
        async with contextlib.AsyncExitStack() as inside:
            yield await _entered(world, links, inside)


async def _entered(world: World, links: PeerLinks, inside: contextlib.AsyncExitStack) -> Communicator:
    try:
        comm = await inside.enter_async_context(world)
    except BaseException as error:
        # The others are in the world if this rank was cancelled as it had joined: they read nothing more.
        await end_joining(links, None if world.has_joined else error)
        raise
    links.until_joined.close()
    return comm


async def _admitted(
    runner: Runner, environment: Environment, inside: contextlib.AsyncExitStack, *, departs: bool
) -> Communicator:
    """Join a world that has begun. A newcomer tries again if an attempt fails."""
    limit_s = _limit_s(environment)
    newcomer = await _in_thread(lambda: Newcomer(environment, limit_s))
    inside.callback(newcomer.cancel)  # a thread may wait
    while True:
        seat = await _in_thread(newcomer.seat)
        attempt = seat.attempt
        try:
            links = await meeting(seat.environment, seat.joining)
            endpoint = endpoint_of(links, seat.environment, attempt.epoch, attempt.members)

            world = World(
                endpoint,
                runner,
                links.hosts,
                seat.joining,
                departs=departs,
                decisions=newcomer.decisions,
                newcomers=Newcomers(environment, newcomer.decisions.entries, newcomer.first_size),
                admitted=partial(_await_admission, newcomer, attempt, endpoint),
                freeze_s=environment.freeze_s,
            )
            return await _entered(world, links, inside)
        except UsageError:
            raise
        except AsyncollError as error:
            logger.info("an attempt to join the world has failed: %s", error)


async def _await_admission(newcomer: Newcomer, attempt: GrowthAttempt, endpoint: Endpoint) -> None:
    """Raises ClosedError if the ranks go on without this newcomer."""
    if not await _in_thread(lambda: newcomer.is_admitted(attempt, lambda: endpoint.failures.any)):
        raise ClosedError("the ranks have gone on without this newcomer")


async def _in_thread(operation: Callable[[], T]) -> T:
    return await asyncio.wrap_future(in_daemon_thread(operation))


@contextlib.contextmanager
def sole_membership() -> Iterator[None]:
    # Before anything is opened, so that no descriptor takes the place of a standard stream.
    standard_streams.fill_gaps()
    member = _member
    if not member.acquire(blocking=False):
        raise UsageError(
            "this process is in a world already: leave it before joining the next one, and use `split` for a "
            "communicator of some of its ranks"
        )
    try:
        yield
    finally:
        member.release()


def _forget_membership() -> None:
    """Let a child join a world of its own, if it was forked while this process was in one."""
    global _member
    _member = threading.Lock()


os.register_at_fork(after_in_child=_forget_membership)


def _joining(environment: Environment) -> Joining:
    return Joining(environment.rank, environment.size, _limit_s(environment))


def _limit_s(environment: Environment) -> float:
    left_s = remaining_s()
    longest_s = START_TIMEOUT_S if environment.store is None or left_s is None else math.inf  # the program has chosen
    return min(longest_s, environment.deadline_s, math.inf if left_s is None else left_s)
