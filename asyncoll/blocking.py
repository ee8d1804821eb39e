"""Calls without an event loop: `init`, and the communicator whose calls return handles."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from asyncoll.algorithms.core import Core
from asyncoll.algorithms.gossip.pairwise import Gossip
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.algorithms.sparse.operations import SparseReduction
from asyncoll.algorithms.sparse.selection import Feedback
from asyncoll.communicator import Communicator
from asyncoll.errors import ClosedError, UsageError, describe
from asyncoll.rpc.ranks import Rpc
from asyncoll.runtime.deadlines import lift
from asyncoll.runtime.handles import Handle, HandleRunner, as_handle
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.world.environment import Environment
from asyncoll.world.join import joined, sole_membership

T = TypeVar("T")


def init() -> BlockingCommunicator:
    """Join the world that the environment describes, in a program without an event loop.

    The environment is as for `run`. Every rank of the world calls this, and leaves by `close`, or as a context manager.
    A process is in one world at a time, and may join another one afterwards. Blocks until all ranks have
    joined: for 300 s, ASYNCOLL_DEADLINE_S or the deadline that holds here, whichever is least.

    Leaving is collective: this rank goes on serving the rounds of others until every rank leaves. A `with` block that
    raises an exception aborts the world: the pending and later calls of the other ranks raise AbortedError with its
    text as the reason. So does a program that ends without `close`.

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


def join(environment: Environment | None, *, departs: bool = False) -> BlockingCommunicator:
    """As `init`, for the world of `environment`; None: that of the environment variables.

    With `departs`, leaving is not collective: this rank leaves once its calls are over, or at once with an exception,
    and communicators without it go on.
    """
    return _Session(departs).enter(environment)


class _Session:
    """The membership of this process in a world, from `init` to `close`: a task on the runtime's loop."""

    def __init__(self, departs: bool) -> None:
        self._departs = departs
        self._undo = contextlib.ExitStack()
        self._closing = threading.Lock()

    def enter(self, environment: Environment | None) -> BlockingCommunicator:
        process = os.getpid()
        with contextlib.ExitStack() as undo:
            undo.enter_context(sole_membership())
            environment = environment or Environment.read()
            runner = HandleRunner()
            undo.callback(_stop, runner, process)
            entered = concurrent.futures.Future[Communicator]()
            self._left = runner.home.create_future()
            self._task = asyncio.run_coroutine_threadsafe(self._stay(runner, environment, entered), runner.home)
            self._task.add_done_callback(lambda task: _fail(entered, task))
            try:
                comm = entered.result()
            except BaseException:
                self._task.cancel()
                concurrent.futures.wait([self._task])
                raise
            undo.enter_context(comm._core.memory.of_process())
            atexit.register(self._leave_at_exit)
            undo.callback(atexit.unregister, self._leave_at_exit)
            self._undo = undo.pop_all()
        return BlockingCommunicator(comm._core, comm.hosts, self)

    async def _stay(
        self, runner: HandleRunner, environment: Environment | None, entered: concurrent.futures.Future[Communicator]
    ) -> None:
        async with joined(runner, environment, departs=self._departs) as comm:
            lift()  # the deadline of joining is none of leaving
            entered.set_result(comm)
            await self._left

    def leave(self, error: BaseException | None) -> None:
        """End the membership, with `error` for the other ranks. Without effect if it has ended."""
        with self._closing, self._undo:
            if self._task.done():
                return
            self._left.get_loop().call_soon_threadsafe(_end, self._left, error)
            outcome = concurrent.futures.wait([self._task]).done.pop().exception()
            if outcome is not None and outcome is not error:
                raise outcome

    def _leave_at_exit(self) -> None:
        with contextlib.suppress(Exception):
            self.leave(ClosedError("its program has ended without `close`"))


def _end(left: asyncio.Future[None], error: BaseException | None) -> None:
    if left.done():
        return
    if error is None:
        left.set_result(None)
    else:
        left.set_exception(error)


def _fail(entered: concurrent.futures.Future[Communicator], task: concurrent.futures.Future[None]) -> None:
    """The end of the membership before it has begun."""
    if not entered.done():
        error = None if task.cancelled() else task.exception()
        entered.set_exception(error or concurrent.futures.CancelledError())


def _stop(runner: HandleRunner, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such thread
        runner.stop()


class BlockingCommunicator(Communicator):
    """A `Communicator` for programs without an event loop: its calls may be made in any thread, and return handles.

    `asyncoll.init` gives the communicator of all ranks, `split` one of some of them. All calls are those of
    `Communicator`, with its arguments, results and errors; what those raise "when awaited", these raise in
    `Handle.wait`. Differences:

    *Threads.* A call needs no event loop. Calls of several threads are numbered in the order in which they are made,
    which has to be the same at all ranks; so threads that do not wait for each other need communicators of their own.

    *Cancellation.* A call is not cancelled: neither by a wait that is too short, nor by an exception of a signal
    handler, nor if a task that awaits its handle is cancelled. It ends, or fails, with the communicator.

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
        self._order = threading.RLock()  # of calls in several threads

    def __enter__(self) -> BlockingCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def close(self) -> None:
        """Leave the world. Collective: every rank leaves it. Without effect if this rank has left already.

        For a communicator made by `split`, as `Communicator.close`: local.
        """
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._session is not None:
            self._session.leave(error)
            return
        if error is not None:
            self.abort(describe(error))
        with self._order:
            super().close()

    @property
    def rpc(self) -> Rpc:
        """Always a UsageError: calls of functions need an event loop."""
        raise UsageError("calls of functions need an event loop: join by `asyncoll.run` or `asyncoll.connect`")

    def allreduce(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Handle[T]:
        """As `Communicator.allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().allreduce(x, op))

    def broadcast(self, x: T, root: int = 0) -> Handle[T]:
        """As `Communicator.broadcast`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().broadcast(x, root))

    def reduce(self, x: T, root: int = 0, op: ReduceOp = ReduceOp.SUM) -> Handle[T]:
        """As `Communicator.reduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().reduce(x, root, op))

    def reduce_scatter(self, x: T, op: ReduceOp = ReduceOp.SUM) -> Handle[T]:
        """As `Communicator.reduce_scatter`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().reduce_scatter(x, op))

    def allgather(self, x: T) -> Handle[T]:
        """As `Communicator.allgather`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().allgather(x))

    def allgatherv(self, x: T) -> Handle[list[T]]:
        """As `Communicator.allgatherv`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().allgatherv(x))

    def gather(self, x: T, root: int = 0) -> Handle[T | None]:
        """As `Communicator.gather`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().gather(x, root))

    def scatter(self, xs: Sequence[T] | None = None, root: int = 0) -> Handle[T]:
        """As `Communicator.scatter`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().scatter(xs, root))

    def alltoall(self, x: T) -> Handle[T]:
        """As `Communicator.alltoall`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().alltoall(x))

    def alltoallv(self, xs: Sequence[T]) -> Handle[list[T]]:
        """As `Communicator.alltoallv`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().alltoallv(xs))

    def barrier(self) -> Handle[None]:
        """As `Communicator.barrier`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().barrier())

    def send(self, x: object, dest: int, tag: int = 0) -> Handle[None]:
        """As `Communicator.send`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().send(x, dest, tag))

    def recv(self, x: T, source: int, tag: int = 0) -> Handle[T]:
        """As `Communicator.recv`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().recv(x, source, tag))

    def recv_any(self, x: T, tag: int = 0) -> Handle[tuple[T, int]]:
        """As `Communicator.recv_any`, with a handle for the end of the call.

        The message is taken even if the handle is dropped.
        """
        with self._order:
            handle = as_handle(super().recv_any(x, tag))
        handle.claim()
        return handle

    def solo_allreduce(
        self,
        x: object,
        *,
        name: str = "solo",
        op: ReduceOp = ReduceOp.SUM,
        sync_every: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Handle[Reduction]:
        """As `Communicator.solo_allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(
                super().solo_allreduce(x, name=name, op=op, sync_every=sync_every, history=history, weight=weight)
            )

    def majority_allreduce(
        self,
        x: object,
        *,
        candidates: int = 1,
        name: str = "majority",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Handle[Reduction]:
        """As `Communicator.majority_allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(
                super().majority_allreduce(
                    x,
                    candidates=candidates,
                    name=name,
                    op=op,
                    seed=seed,
                    sync_every=sync_every,
                    history=history,
                    weight=weight,
                )
            )

    def quorum_allreduce(
        self,
        x: object,
        *,
        quorum: int | None = None,
        name: str = "quorum",
        op: ReduceOp = ReduceOp.SUM,
        seed: int = 0,
        sync_every: int = 0,
        history: int = 0,
        weight: float | None = None,
    ) -> Handle[Reduction]:
        """As `Communicator.quorum_allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(
                super().quorum_allreduce(
                    x, quorum=quorum, name=name, op=op, seed=seed, sync_every=sync_every, history=history, weight=weight
                )
            )

    def group_allreduce(
        self,
        x: object,
        *,
        group_size: int,
        name: str = "group",
        op: ReduceOp = ReduceOp.SUM,
        fixed: bool = False,
        sync_every: int = 0,
        weight: float | None = None,
    ) -> Handle[Reduction]:
        """As `Communicator.group_allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(
                super().group_allreduce(
                    x, group_size=group_size, name=name, op=op, fixed=fixed, sync_every=sync_every, weight=weight
                )
            )

    def join(self, name: str, x: object) -> Handle[Reduction | None]:
        """As `Communicator.join`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().join(name, x))

    def sparse_allreduce(
        self,
        x: object,
        *,
        density: float,
        algorithm: str = "oktopk",
        name: str = "sparse",
        thresholds_every: int = 1,
        regions_every: int = 64,
        feedback: Feedback | None = None,
        global_threshold: str = "auto",
        dense: bool = False,
    ) -> Handle[SparseReduction]:
        """As `Communicator.sparse_allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(
                super().sparse_allreduce(
                    x,
                    density=density,
                    algorithm=algorithm,
                    name=name,
                    thresholds_every=thresholds_every,
                    regions_every=regions_every,
                    feedback=feedback,
                    global_threshold=global_threshold,
                    dense=dense,
                )
            )

    def neighbor_average(self, x: T, *, graph: str = "ring", iteration: int = 0, peers: int = 1) -> Handle[T]:
        """As `Communicator.neighbor_average`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().neighbor_average(x, graph=graph, iteration=iteration, peers=peers))

    def push_sum(
        self, x: T, weight: object, *, graph: str = "exponential", iteration: int = 0, peers: int = 1
    ) -> Handle[tuple[T, float]]:
        """As `Communicator.push_sum`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().push_sum(x, weight, graph=graph, iteration=iteration, peers=peers))

    def gossip(self, x: object, *, graph: str = "ring", seed: int = 0) -> Handle[Gossip]:
        """As `Communicator.gossip`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().gossip(x, graph=graph, seed=seed))

    def split(self, color: int | None, key: int = 0) -> Handle[BlockingCommunicator | None]:
        """As `Communicator.allreduce`, with a handle for the end of the call."""
        with self._order:
            return as_handle(super().split(color, key))  # type: ignore[arg-type]  # of the class of this one
