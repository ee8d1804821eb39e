"""Calls without an event loop: `init`, and the communicator whose calls return handles."""

from __future__ import annotations

# mypy: disable-error-code=assignment
# The calls below return handles, which are awaitable as the coroutines of the base classes, but are no coroutines.
import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from asyncoll.algorithms.core import Core
from asyncoll.algorithms.gossip.pairwise import Gossip
from asyncoll.communicator import Communicator
from asyncoll.errors import ClosedError, Reason, UsageError, describe
from asyncoll.runtime.deadlines import lift
from asyncoll.runtime.handles import Gate, Handle, HandleRunner
from asyncoll.runtime.signature import place_of_end, reported_at
from asyncoll.runtime.threads import check_threads
from asyncoll.runtime.unfinished import program_error
from asyncoll.world.environment import Environment
from asyncoll.world.join import joined, sole_membership

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", Communicator, Gossip)
_STARTING_S = 1.0  # the thread of the membership has started by then, or never will: a signal handler has raised


def init() -> BlockingCommunicator:
    """Join the world that the environment describes, in a program without an event loop.

    The environment is as for `run`. Every rank of the world calls this, and leaves by `close`, or as a context manager.
    A process is in one world at a time, and may join another one afterwards. Blocks until all ranks have
    joined: for 300 s, ASYNCOLL_DEADLINE_S or the deadline that holds here, whichever is least.

    Leaving is collective: this rank goes on serving the rounds of others until every rank leaves. A `with` block that
    raises an exception aborts the world: the pending and later calls of the other ranks raise AbortedError with its
    text as the reason. A program that ends without `close` aborts the world, too. The reason is then the exception that
    has ended it, or a ClosedError after a normal end and after `sys.exit`.

    If an exception of a signal handler (Ctrl-C) interrupts it, this process is in no world afterwards. The others raise
    a PeerLostError that names this rank: in `init`, or in their calls if they have joined already. After it all ranks,
    this one included, may call `init` again.

    Returns:
        The communicator of all ranks. Its calls may be made in any thread.

    Raises:
        UsageError: this process is in a world already; it inherits the environment of a rank that has started it; or
            the environment describes no possible world.
        PeerLostError: a rank has died, or is frozen, before all ranks had joined.
        DeadlineError: a rank has not joined in time.
        ServiceLostError: the store at MASTER_ADDR has ended before all ranks had joined.

    Example:

        with asyncoll.init() as comm:
            x = np.full(4, float(comm.rank))
            handle = comm.allreduce(x)  # has begun
            handle.wait(timeout=5.0)
    """
    return join(None)


def join(environment: Environment | None, *, departs: bool = False, leaves_by: str = "`close`") -> BlockingCommunicator:
    """Join the world of `environment`, or of the environment variables if it is None. Blocks until all have joined.

    With `departs`, leaving is not collective: this rank leaves once its calls are over. `leaves_by` is the call of the
    program by which it leaves, for errors.
    """
    return _Session(departs, leaves_by).enter(environment)


class _Session:
    """The membership of this process in a world, from `init` to `close`.

    A thread of its own enters the world and leaves it, because no signal handler runs there. The threads of the program
    only wait for it. So an exception of a handler (Ctrl-C) ends a wait, and leaves nothing half done.
    """

    def __init__(self, departs: bool, leaves_by: str) -> None:
        self._departs = departs
        self._leaves_by = leaves_by
        self._process = os.getpid()
        self._entered, self._over = Gate(), Gate()
        self._comm: Communicator | None = None
        self._outcome: BaseException | None = None  # the error of joining or leaving
        self._is_told = False  # a caller has the outcome
        self._runner: HandleRunner | None = None
        self._is_asked = False  # to leave, for this reason, which the other ranks are told:
        self._reason: BaseException | None = None
        self._inside: asyncio.Task[None] | None = None  # the task that is in the world

    def enter(self, environment: Environment | None) -> BlockingCommunicator:
        live = partial(contextvars.copy_context().run, self._live, environment)
        check_threads()
        thread = threading.Thread(target=live, name="asyncoll-membership", daemon=True)
        try:
            thread.start()
            self._entered.wait(threading.TIMEOUT_MAX)
            if self._comm is None:
                assert self._outcome is not None
                raise self._outcome
            comm = BlockingCommunicator(self._comm._core, self._comm.hosts, self)
            atexit.register(self._leave_at_exit)
        except BaseException as error:
            self._ask_to_leave(error)
            self._over.wait(threading.TIMEOUT_MAX if thread.is_alive() else _STARTING_S)
            raise
        return comm

    def leave(self, error: BaseException | None) -> None:
        """End the membership, with `error` for the other ranks. Without effect if it has ended."""
        # A forked child leaves; the rank stays in the world.
        if os.getpid() != self._process:
            return
        if self._runner is not None and self._runner.is_here():
            raise UsageError("this thread ends the calls of its rank: close the communicator in another one")
        self._place = place_of_end(sys._getframe())
        self._ask_to_leave(error)
        self._over.wait(threading.TIMEOUT_MAX)
        atexit.unregister(self._leave_at_exit)
        if not self._is_told:
            self._is_told = True
            if self._outcome is not None:
                raise self._outcome

    def _leave_at_exit(self) -> None:
        with contextlib.suppress(Exception):
            self.leave(program_error() or ClosedError(f"its program has ended without {self._leaves_by}"))

    def _ask_to_leave(self, reason: BaseException | None) -> None:
        if not self._is_asked:
            self._reason = reason
            self._is_asked = True
        if self._runner is not None:
            # The loop is closed: this rank has left.
            with contextlib.suppress(RuntimeError):
                self._runner.home.call_soon_threadsafe(self._check_asked)

    # -- in the thread of the membership, and on the runtime's loop -------------------------------

    def _live(self, environment: Environment | None) -> None:
        try:
            with sole_membership():
                environment = environment or Environment.read()
                runner = self._runner = HandleRunner()
                try:
                    asyncio.run_coroutine_threadsafe(self._stay(runner, environment), runner.home).result()
                finally:
                    runner.stop()
        except BaseException as error:
            self._outcome = error
        self._over.open()
        # Last: after an error in joining nothing of the world is left.
        self._entered.open()

    async def _stay(self, runner: HandleRunner, environment: Environment | None) -> None:
        self._asked = asyncio.Event()
        self._inside = inside = asyncio.create_task(self._be_inside(runner, environment))
        self._check_asked()
        await asyncio.wait([inside])
        inside.result()

    def _check_asked(self) -> None:
        if self._is_asked and self._inside is not None:
            self._asked.set()
            if not self._entered.is_open:
                self._inside.cancel()

    async def _be_inside(self, runner: HandleRunner, environment: Environment | None) -> None:
        world = joined(runner, environment, departs=self._departs)
        self._comm = await world.__aenter__()
        # The deadline of joining is none of leaving.
        lift()
        with self._comm._core.memory.of_process():
            self._entered.open()
            await self._asked.wait()
        reason = self._reason
        # Not raised here: KeyboardInterrupt in a task would end the loop.
        if reason is None:
            with reported_at(self._place):
                await world.__aexit__(None, None, None)
        else:
            await world.__aexit__(type(reason), reason, reason.__traceback__)


def _with_handle(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], Handle[T]]:
    """`method`, for calls of any thread, and with a handle as the result."""

    @functools.wraps(method)
    def call(caller: Any, /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        member = caller._member
        # In a forked child, another thread of its parent may hold the lock for ever.
        member.check_open()
        with caller._order:
            handle: Handle[T] = member.runner.handle(method(caller, *args, **kwargs))
            return handle

    return call


_gossip, _split = _with_handle(Communicator.gossip), _with_handle(Communicator.split)
_recv_any = _with_handle(Communicator.recv_any)
_shrink, _grow = _with_handle(Communicator.shrink), _with_handle(Communicator.grow)


class _NoRpcError(UsageError, AttributeError):
    """As an AttributeError it answers `hasattr`."""


class BlockingGossip(Gossip):
    """A `Gossip` whose calls may be made in any thread, and return handles."""

    def __init__(self, order: threading.RLock, *parts: Any) -> None:
        """`order` is held while a call begins."""
        super().__init__(*parts)
        self._order = order

    update = _with_handle(Gossip.update)
    exchange = _with_handle(Gossip.exchange)
    close = _with_handle(Gossip.close)


class BlockingCommunicator(Communicator):
    """A `Communicator` for programs without an event loop: its calls may be made in any thread, and return handles.

    `asyncoll.init` gives the communicator of all ranks, `split` one of a subset of ranks. It has all calls of a
    `Communicator`, with the same arguments, results and errors; what those raise "when awaited", these raise in
    `Handle.wait`. Differences:

    *Threads.* A call needs no event loop. Calls of several threads are numbered in the order in which they are made,
    which has to be the same at all ranks; so threads that do not wait for each other need communicators of their own.

    *Handles* are awaitable, but no coroutines: `asyncio.create_task` does not take one. Several threads and tasks may
    wait for one handle.

    *Cancellation.* A call that has returned its handle is not cancelled: neither by a wait that is too short, nor by an
    exception of a signal handler (Ctrl-C), nor if a task that awaits its handle is cancelled. It ends, or fails, with
    the communicator. An exception of a handler while a call begins may abort the communicator.

    *Forks.* In a forked child every call and every wait for a call that is not over is a UsageError, and `close` has no
    effect: the rank stays in the world.

    *RPC* is not there: its functions run on an event loop.

    Example:

        comm = asyncoll.init()
        comm.allreduce(np.ones(3)).wait()
        comm.close()
    """

    def __init__(self, core: Core, hosts: tuple[str, ...], session: _Session | None = None) -> None:
        """`session` is the membership that ends with this communicator; None for one made by `split`."""
        super().__init__(core, hosts)
        self._session = session
        self._member = core.member
        self._process = os.getpid()
        self._order = threading.RLock()  # of calls in several threads

    def __enter__(self) -> BlockingCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def close(self) -> None:
        """Leave the world. Collective: every rank leaves it. Without effect if this rank has left already.

        Blocks until every rank leaves. If an exception of a signal handler interrupts it, the rank goes on leaving, and
        another call waits for the end. Collectives are over before, whether or not a thread waits for them. Other calls
        that are not over then (rounds, `send`, `recv`) raise ClosedError in their handles.

        Raises:
            UsageError: this is a callback of `Handle.when_done`; or a training has ended without `finish()`.
            AsyncollError: a collective that this rank has made has failed meanwhile.
            PeerLostError: a rank has died while this one waited for the others to leave.

        For a communicator made by `split`, as `Communicator.close`: local.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._session is not None:
            self._session.leave(error)
            return
        # A forked child: another thread of its parent may hold the lock for ever.
        if os.getpid() != self._process:
            return
        if error is not None:
            self.abort(describe(error))
        self._end(None)

    def _end(self, error: Reason | None) -> None:
        with self._order:
            if not self._core.member.endpoint.closed:
                self._calls.check_started()  # under the lock: no thread is about to start a call
            super()._end(error)

    @property
    def rpc(self) -> NoReturn:
        """Not there: calls of functions need an event loop. The error is a UsageError, and an AttributeError."""
        raise _NoRpcError("calls of functions need an event loop: join by `asyncoll.run` or `asyncoll.connect`")

    def _make_gossip(self, *parts: Any) -> BlockingGossip:
        return BlockingGossip(self._order, *parts)

    def _renewed(self, core: Core, hosts: tuple[str, ...]) -> BlockingCommunicator:
        return BlockingCommunicator(core, hosts, self._session)

    allreduce = _with_handle(Communicator.allreduce)
    broadcast = _with_handle(Communicator.broadcast)
    reduce = _with_handle(Communicator.reduce)
    reduce_scatter = _with_handle(Communicator.reduce_scatter)
    allgather = _with_handle(Communicator.allgather)
    allgatherv = _with_handle(Communicator.allgatherv)
    gather = _with_handle(Communicator.gather)
    scatter = _with_handle(Communicator.scatter)
    alltoall = _with_handle(Communicator.alltoall)
    alltoallv = _with_handle(Communicator.alltoallv)
    barrier = _with_handle(Communicator.barrier)
    send = _with_handle(Communicator.send)
    recv = _with_handle(Communicator.recv)
    solo_allreduce = _with_handle(Communicator.solo_allreduce)
    majority_allreduce = _with_handle(Communicator.majority_allreduce)
    policy_allreduce = _with_handle(Communicator.policy_allreduce)
    quorum_allreduce = _with_handle(Communicator.quorum_allreduce)
    group_allreduce = _with_handle(Communicator.group_allreduce)
    join = _with_handle(Communicator.join)
    sparse_allreduce = _with_handle(Communicator.sparse_allreduce)
    neighbor_average = _with_handle(Communicator.neighbor_average)
    push_sum = _with_handle(Communicator.push_sum)

    def recv_any(self, x: T, tag: int = 0) -> Handle[tuple[T, int]]:  # type: ignore[override]
        """Receive a message of any other rank into `x`, in place. The handle's result is `x` and the sender's rank.

        Arguments and errors are the same as those of `Communicator.recv_any`. The message is taken even if the handle
        is dropped.
        """
        handle: Handle[tuple[T, int]] = _recv_any(self, x, tag)
        handle.claim()
        return handle

    def gossip(  # type: ignore[override]
        self, x: object, *, graph: str = "ring", seed: int = 0
    ) -> Handle[BlockingGossip]:
        """Make a gossip of `x`, whose calls return handles. All ranks call it, as they do `Communicator.gossip`."""
        return _gossip(self, x, graph=graph, seed=seed)  # type: ignore[return-value]

    def shrink(self) -> Handle[BlockingCommunicator]:  # type: ignore[override]
        """Go on without the ranks that are lost, as `Communicator.shrink`: a communicator whose calls return handles.

        Leaving the world by that of all ranks, or by one of an earlier epoch, is the same.
        """
        return _shrink(self)  # type: ignore[return-value]

    def grow(self) -> Handle[BlockingCommunicator]:  # type: ignore[override]
        """Go on with the processes that wait, as `Communicator.grow`: a communicator whose calls return handles."""
        return _grow(self)  # type: ignore[return-value]

    def split(  # type: ignore[override]
        self, color: int | None, key: int = 0
    ) -> Handle[BlockingCommunicator | None]:
        """Make communicators of the ranks that give the same `color`, whose calls return handles; None for color None.

        Collective: all ranks call it, in the order of their other calls. `key` orders the ranks of a group.
        """
        return _split(self, color, key)  # type: ignore[return-value]
