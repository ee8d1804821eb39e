"""The ways into a world: `run` and `connect`, in the one that the environment describes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from asyncoll import forks
from asyncoll.algorithms.seam.arrival import to_its_end
from asyncoll.communicator import Communicator
from asyncoll.errors import AsyncollError, UsageError
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.membership import Membership
from asyncoll.runtime.progress import ProgressThread, Runner, SharedLoop, new_loop
from asyncoll.runtime.threads import program_loop
from asyncoll.transport import START_TIMEOUT_S, Transport, standard_streams
from asyncoll.transport.joining import Joining, in_daemon_thread
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import inproc
from asyncoll.transport.messages.shared_payloads import SlottedTransport
from asyncoll.world import error_file
from asyncoll.world.environment import Environment
from asyncoll.world.meeting import PeerLinks, meet
from asyncoll.world.world import World
from asyncoll.world.write_once import Decisions, MemoryStore

_member = threading.Lock()  # held while this process is in a world
T = TypeVar("T")
_CLAIM = "ASYNCOLL_RANK_OF"  # set in the environment of a rank: its process id, and which rank of which world it is


def run(main: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Join the world that the environment describes, run `await main(comm, *args)` on a new event loop, and leave.

    The environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); `asyncoll launch` sets it, too. Without
    it the world has one rank. Every rank of the world calls `run`. It joins, and leaves, as `connect` does.

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
            the environment describes no possible world. Leaving raises it, and aborts the world, if a training has
            ended without `finish()` or `discard()`.
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
    with _claimed(environment):
        joining = _joining(environment)
        links = await _meet(environment, joining)
        world = World(
            _endpoint(links, environment),
            runner,
            links.hosts,
            joining,
            departs=departs,
            decisions=links.decisions,
            freeze_s=environment.freeze_s,
        )
        async with contextlib.AsyncExitStack() as inside:
            try:
                comm = await inside.enter_async_context(world)
            except BaseException as error:
                # The others are in the world if this rank was cancelled as it had joined: they read nothing more.
                await _end_joining(links, None if world.has_joined else error)
                raise
            links.until_joined.close()
            yield comm


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
    left_s = remaining_s()
    longest_s = START_TIMEOUT_S if environment.store is None or left_s is None else math.inf  # the program has chosen
    limit_s = min(longest_s, environment.deadline_s, math.inf if left_s is None else left_s)
    return Joining(environment.rank, environment.size, limit_s)


async def _meet(environment: Environment, joining: Joining) -> PeerLinks:
    """Meet the other ranks, in a thread.

    When this is cancelled, it waits for the thread to end: nothing else would close what the thread has opened.
    """
    meeting = asyncio.wrap_future(in_daemon_thread(lambda: meet(environment, joining)))
    try:
        return await asyncio.shield(meeting)
    except asyncio.CancelledError as error:
        joining.cancel()
        await to_its_end(_give_up(meeting, joining, error))
        raise


async def _give_up(meeting: asyncio.Future[PeerLinks], joining: Joining, error: BaseException) -> None:
    """End joining with `error`, if the meeting has not done so.

    The connections end once the others can read why, and before this rank waits for them to read it: as long as it
    listens, they wait for its answer.
    """
    with contextlib.suppress(AsyncollError):
        links = await meeting
        await joining.fail(error)
        if links.arena is not None:
            links.arena.close()
        await links.transport.close()
        await _end_joining(links, error)


async def _end_joining(links: PeerLinks, error: BaseException | None) -> None:
    """Release what this rank has held until all had joined. `error` is what has prevented that.

    In a thread, because rank 0 may wait for ten seconds until the others have read it; and to its end, also if this is
    cancelled meanwhile. Raises what another rank has told before, if `error` may be a consequence of that.
    """
    kind = None if error is None else type(error)
    ending = in_daemon_thread(lambda: links.until_joined.__exit__(kind, error, None))
    await to_its_end(asyncio.wrap_future(ending))


def _endpoint(links: PeerLinks, environment: Environment) -> Endpoint:
    transport: Transport = links.transport
    if links.arena is not None:
        transport = SlottedTransport(transport, links.arena)
    return Endpoint(
        transport,
        links.arena,
        environment.deadline_s,
        links.machines,
        all_have_arenas=links.all_have_arenas,
        shares_memory=environment.shares_memory,
        membership=Membership(transport.size, links.hosts),
    )
