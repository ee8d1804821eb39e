"""Join the world that the environment describes: `run` and `connect`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from asyncoll import forks
from asyncoll.algorithms.arrival import to_its_end
from asyncoll.algorithms.choice import choose_backend
from asyncoll.algorithms.core import ChooseBackend, Core
from asyncoll.algorithms.dense import on_lane
from asyncoll.arguments import digest
from asyncoll.communicator import Communicator
from asyncoll.errors import AsyncollError, DeadlineError, DeviceError, PeerLostError, UsageError, describe, text_of
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.failures import WORLD
from asyncoll.runtime.group import Group, Lane
from asyncoll.runtime.member import Member
from asyncoll.runtime.progress import TAKEOVER_S, ProgressThread, Runner, SharedLoop
from asyncoll.runtime.signature import site_outside
from asyncoll.transport import START_TIMEOUT_S, Loss, Transport
from asyncoll.transport.joining import Joining, in_daemon_thread
from asyncoll.transport.messages import inproc
from asyncoll.transport.messages.shared_payloads import SlottedTransport
from asyncoll.transport.wire import Overdue
from asyncoll.world import error_file
from asyncoll.world.environment import Environment
from asyncoll.world.rendezvous import PeerLinks, meet

_member = threading.Lock()  # held while this process is in a world
T = TypeVar("T")
_SETTLE_S = 60.0  # for collectives that all ranks have made and that the program has not awaited
_RETURN_S = 60.0  # for copies of results to devices, which may have seconds of work before them
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
        UsageError: `main` is no `async def`; an event loop runs in this thread; this process is in a world already; or
            the environment describes no possible world.
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

    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
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
            the environment describes no possible world.
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


@contextlib.asynccontextmanager
async def connected(read: Callable[[], Environment | None]) -> AsyncIterator[Communicator]:
    """As `connect`, in the world that `read` describes; None: one of one rank."""
    with sole_membership():
        environment = read()
        if environment is None or environment.size == 1:
            async with World(Endpoint(inproc.world(1)[0]), SharedLoop()) as comm:
                yield comm
            return
        process = os.getpid()
        thread = ProgressThread(asyncio.get_running_loop())
        try:
            async with joined(thread, environment) as comm:
                yield comm
        finally:
            if os.getpid() == process:  # a forked child has no such thread
                thread.stop()


@contextlib.contextmanager
def _claimed(environment: Environment) -> Iterator[None]:
    """Mark the environment of this rank's process, and refuse a second process of the same rank.

    Processes that this one starts inherit RANK and WORLD_SIZE. Their messages would come between those of the ranks.
    """
    if environment.store is not None and not environment.master_port:  # a file, which the program has chosen
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
    """As `connect`, with this runner and environment; None: a world of one rank. `departs` is that of `World`."""
    if environment is None or environment.size == 1:
        async with World(Endpoint(inproc.world(1)[0]), runner, departs=departs) as comm:
            yield comm
        return
    with _claimed(environment):
        joining = _joining(environment)
        links = await _meet(environment, joining)
        with links.until_joined:
            endpoint = _endpoint(links, environment)
            async with World(endpoint, runner, links.hosts, joining, departs=departs) as comm:
                links.until_joined.close()
                yield comm


@contextlib.contextmanager
def sole_membership() -> Iterator[None]:
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
    links = asyncio.wrap_future(in_daemon_thread(lambda: meet(environment, joining)))
    try:
        return await asyncio.shield(links)
    except asyncio.CancelledError as error:
        joining.cancel()
        with contextlib.suppress(AsyncollError):
            met = await links
            met.until_joined.__exit__(type(error), error, None)
            if met.arena is not None:
                met.arena.close()
            await met.transport.close()
        raise


def _endpoint(links: PeerLinks, environment: Environment) -> Endpoint:
    transport: Transport = links.transport
    if links.arena is not None:
        transport = SlottedTransport(transport, links.arena)
    return Endpoint(
        transport,
        links.arena,
        environment.deadline_s,
        links.machines,
        shares_memory=environment.shares_memory,
        all_have_arenas=links.all_have_arenas,
    )


class World:
    """All ranks, from joining to leaving: an async context manager, whose value is the communicator of all ranks."""

    def __init__(
        self,
        endpoint: Endpoint,
        runner: Runner,
        hosts: tuple[str, ...] | None = None,
        joining: Joining | None = None,
        choose: ChooseBackend = choose_backend,
        *,
        departs: bool = False,
    ) -> None:
        """`hosts` has the name of each rank's host; None if all ranks are in this process.

        `joining` bounds how long the other ranks may take to join; None if they are in this process. `choose` makes the
        backend of each communicator. With `departs`, leaving is not collective: this rank leaves once its calls are
        over, or at once with an exception, and the communicators without it go on (see `runtime.departures`).
        """
        self._endpoint = endpoint
        self._runner = runner
        self._has_processes = hosts is not None
        self._joining = joining
        self._choose = choose
        self._departs = departs
        self._inside = contextlib.ExitStack()  # contexts of the task that is in the world
        self._hosts = hosts or (socket.gethostname(),) * endpoint.size
        self._group = Group(tuple(range(endpoint.size)), endpoint.rank, communicator=digest("world"))

    async def __aenter__(self) -> Communicator:
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()
        forks.register(self)
        comm = await self._runner.within(self._join())
        self._inside.enter_context(self._core.memory.as_current())
        return comm

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process:  # a forked child leaves the block; the rank stays in the world
            return
        forks.unregister(self)
        self._inside.close()
        # A rank that has never used RPC must still answer calls of others, with the error that it has no functions.
        with contextlib.suppress(UsageError):  # shared memory has no room for it: then no rank can call this one
            _ = self._departs or self._core.rpc
        try:
            if error is None:
                await self._flush()
        except BaseException as cancelled:
            error = cancelled
            raise
        finally:
            await self._end(error)

    def abandon(self, parent: int) -> None:
        """In a forked child, where the caller's loop goes on: make it independent of the parent's loop."""
        forks.silence_signals()
        forks.isolate(self._loop)

    async def _flush(self) -> None:
        """Wait for what the program may not have awaited. Raises DeviceError if a result has not reached its device."""
        if self._runner.held or not self._is_settled():
            await self._runner.within(self._settle())
        if not self._departs:
            with contextlib.suppress(AsyncollError):  # the world has failed, which `_leave` deals with
                for rpc in self._core.rpcs:
                    await rpc.flush()
        if self._endpoint.returns.any:
            await self._runner.within(self._return())

    def _is_settled(self) -> bool:
        """Whether no call is pending whose end the end of this rank would overtake. In any thread.

        Calls of the other communicators are waited for in `_part`, where no rank makes another call. Before it a rank
        would wait for those of ranks that are leaving, and that wait for this rank.
        """
        return self._endpoint.departures.is_settled() if self._departs else self._core.lifetime.is_settled()

    async def _settle(self) -> None:
        """On the runtime's loop: wait until then.

        Raises the error of a call that fails meanwhile: perhaps no handle of it is left.
        """
        has_failed = self._failed()
        await self._take_over()
        while not self._is_settled():
            await asyncio.sleep(TAKEOVER_S)
        if not (has_failed or self._departs):
            self._core.member.check()

    async def _take_over(self) -> None:
        """Wait until all calls that have begun count as pending: the runtime takes them over soon."""
        while self._runner.held:
            await asyncio.sleep(TAKEOVER_S)

    async def _return(self) -> None:
        """On the runtime's loop: wait for the copies of results to devices. A failure of the world ends the wait."""
        failures, returns = self._endpoint.failures, self._endpoint.returns
        over, is_late = returns.over(), False
        with contextlib.suppress(AsyncollError):  # `_leave` deals with it
            with failures.watch(self._group.communicator, "results to reach a device") as failed:
                ends = [over, failed]
                is_late = not (await asyncio.wait(ends, timeout=_RETURN_S, return_when=asyncio.FIRST_COMPLETED))[0]
        if is_late:
            names = self._core.memory.devices.names or "a device"
            raise DeviceError(
                f"rank {self._endpoint.rank}: {names} has not taken all results {_RETURN_S:g} s after the last call"
            )
        returns.check()

    async def _end(self, error: BaseException | None) -> None:
        try:
            await self._runner.within(self._leave(error))
        finally:
            for rpc in self._core.rpcs:
                await rpc.close()
            try:
                # Before their memory is unmapped, also if this rank is cancelled: a driver goes on with pinned pages.
                await to_its_end(self._runner.within(self._close_devices()))
            finally:
                await self._runner.within(self._let_go())

    async def _close_devices(self) -> None:
        """First the memory that ranks share, and then the devices that copy it."""
        try:
            await self._endpoint.end()
        finally:
            await self._core.memory.devices.close()

    async def _join(self) -> Communicator:
        try:
            await self._start()
            if self._endpoint.arena is not None:
                self._endpoint.arena.runtime_loop = asyncio.get_running_loop()
            if self._has_processes:
                self._endpoint.introduce(self._hosts[self._endpoint.rank], os.getpid())
            await self._meet()  # after it all ranks are connected to each other
        except BaseException as error:
            try:
                self._tell_of(error)
            finally:
                await self._endpoint.close(flush=self._failed())
                await self._let_go()
            raise
        self._core = Core(Member(self._endpoint, self._group, self._runner), self._choose)
        return Communicator(self._core, self._hosts)

    async def _meet(self) -> None:
        barrier = self._barrier("joining")
        if self._joining is None:
            await barrier
        else:
            # A rank that cannot connect knows why, and tells the others.
            await self._joining.over(barrier, self._unheard, "not connected to all others yet", is_told=True)

    async def _start(self) -> None:
        """Start the endpoint. Ends early if another rank reports that joining has failed, or is lost."""
        if self._joining is None:
            return await self._endpoint.start()
        starting = asyncio.ensure_future(self._endpoint.start())
        try:
            with self._endpoint.failures.watch(WORLD, "all ranks to be connected") as failed:
                await asyncio.wait([starting, failed], return_when=asyncio.FIRST_COMPLETED)
                await (starting if starting.done() else failed)
        finally:
            starting.cancel()
            await asyncio.wait([starting])

    def _unheard(self) -> list[int]:
        return [rank for rank in range(self._endpoint.size) if not self._endpoint.membership.knows(rank)]

    def _tell_of(self, error: BaseException) -> None:
        """Tell the other ranks why joining has failed, so that they do not report this rank, which leaves now."""
        if isinstance(error, PeerLostError):
            self._endpoint.lost(Loss(error.rank, error.cause, error.last_seen_s))
        elif isinstance(error, DeadlineError):
            lists = (",".join(map(str, ranks)) for ranks in (error.arrived, error.missing))
            self._endpoint.failures.give_up(Overdue(WORLD, str(error), *lists), WORLD, self._group.ranks)

    async def _leave(self, error: BaseException | None) -> None:
        try:
            if self._departs:
                await self._depart(error)
            elif not self._failed():
                await self._part(error)
        finally:
            await self._endpoint.close(flush=self._departs or self._failed())

    async def _let_go(self) -> None:
        """Release the memory that the ranks of the host share."""
        if self._endpoint.arena is not None:
            self._endpoint.arena.close()

    def _failed(self) -> bool:
        """Whether this rank has heard of a failure: then the ranks do not leave in good order."""
        return self._endpoint.failures.has_failed(self._group.communicator)

    async def _part(self, error: BaseException | None) -> None:
        """Leave in good order, by two barriers; or tell the others of `error`.

        After the first barrier no rank makes another call. It is numbered like a call, so a rank that makes calls while
        others leave gets a MismatchError. After the second no message that matters is under way, so sockets may close
        at once; a rank that ends during the second is not lost, only faster.
        """
        if error is not None:
            self._endpoint.failures.abort(WORLD, self._group.ranks, describe(error))
            return
        self._endpoint.depart()
        await self._core.leave(site_outside(os.path.dirname(__file__)))
        await self._settle_others()
        if self._endpoint.returns.any:
            await self._return()
        self._endpoint.part()
        with contextlib.suppress(PeerLostError):
            await self._barrier("leaving")

    async def _settle_others(self) -> None:
        """Wait for the calls of communicators made by `split`. Those that all their ranks have made are over soon.

        Unless a device has much to do before: a minute bounds that, too.
        """
        try:
            async with asyncio.timeout(_SETTLE_S):
                await self._endpoint.departures.settle()
        except TimeoutError:
            raise DeadlineError(
                f"rank {self._endpoint.rank} has left a collective of a communicator made by `split` without an await, "
                f"and {_SETTLE_S:g} s after the last call of all ranks it is not over: another rank has not made it, "
                "or a device has not come to it"
            ) from None

    async def _depart(self, error: BaseException | None) -> None:
        """Leave while the other ranks go on."""
        await self._take_over()
        if self._endpoint.failures.of(WORLD) is None:
            self._endpoint.depart()
            await self._endpoint.departures.leave_world("" if error is None else text_of(error))

    async def _barrier(self, why: str) -> None:
        context = digest(self._group.communicator, why)
        with Lane(self._endpoint.executions, self._group, context, 1, 1, lambda: f"{why} the world") as lane:
            await on_lane.barrier(lane)
