"""The world that a process joins with its default process group, and the groups in it.

torch.distributed does not require that all ranks destroy a process group, or that they do it in an order. So leaving is
not collective here: a rank tells the others, and only groups that contain it fail, at the first call that needs it.

*Security.* The ranks meet in the store that torch hands over. Any process that reaches that store may write to it. With
ASYNCOLL_KEY_FILE every entry of asyncoll is sealed with the key, except the number of the world and the marks of ranks
that have read a failure: a stranger can prevent a world from forming, but not join it. Without a key file the seals
prove nothing: a process that reaches the store can join, as with Gloo. Ranks of several hosts need a key file in any
case, and what torch itself writes to the store is never sealed.

*The store* of MASTER_ADDR is at rank 0, and torch ends it with the default group. So a rank that is faster than rank 0
would enter its next group in a store that ends. Rank 0 keeps it, and the worlds of all its groups meet in that one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from asyncoll.arguments import digest
from asyncoll.blocking import BlockingCommunicator, join
from asyncoll.errors import AsyncollError, ClosedError, UsageError, reason_to_leave
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.group import Group
from asyncoll.world.environment import Environment, place_of
from asyncoll.world.store import is_of_agent, keep

_lock = threading.Lock()
_WORLDS = "asyncoll worlds"  # in the store: how many worlds rank 0 has begun to join
_OPENED = "asyncoll opened"  # in the store: an entry by which rank 0 finds that torch has opened it


@dataclass(slots=True)
class _JoinedWorld:
    """A membership of this process."""

    comm: BlockingCommunicator
    process: int
    number: int  # of the worlds that have shared a store; the same at all ranks
    store: Any  # the store, if it would end with the default group of this process; otherwise None
    made: Counter[int] = field(default_factory=Counter)  # groups of each name and ranks, by their digest
    served: dict[BlockingCommunicator, float] = field(default_factory=dict)  # of `serve_until_all_leave`: the limits


_world: _JoinedWorld | None = None


def enter(store: Any, rank: int, size: int, timeout: timedelta) -> BlockingCommunicator:
    """Join the world of all ranks that share `store`. Blocks until all have joined, for `timeout` at most.

    A process has one world at a time. It may join another one after `leave`, and so may a forked child.
    """
    global _world
    with _lock:
        if _world is not None and _world.process == os.getpid():
            _leave_forgotten(_world)
        if _world is not None and _world.process == os.getpid():
            raise UsageError("this process is in a world already: destroy its default process group first")
        comm = served = None
        try:
            number = _number(store, 1) if rank == 0 else 0
            served = store if rank == 0 and not is_of_agent() and _is_opened_by_torch(store) else None
            with deadline(timeout.total_seconds()):
                place = Environment.of_store(store, rank, size)
                comm = join(place, departs=True, leaves_by="destroy_process_group")
            _world = _JoinedWorld(comm, os.getpid(), number or _number(store, 0), served)
        except BaseException:
            # The names of groups are counts, and parts of the names in the store. destroy_process_group resets the
            # count; after an error nothing else does, and this rank would not meet those that have had no error.
            distributed_c10d._world.group_count = 0
            _world = None
            _keep(served)
            if comm is not None:
                comm._leave(ClosedError("init_process_group was interrupted"))
            raise
        return comm


def number_of_world() -> int:
    """The number of this process's world among those that have shared its store; 0 in none."""
    world = _world
    return 0 if world is None else world.number


def _leave_forgotten(world: _JoinedWorld) -> None:
    """Leave the world that torch has never got: an exception has interrupted init_process_group after joining."""
    global _world
    if not distributed_c10d.is_initialized():
        _world = None
        _keep(world.store)
        world.comm._leave(ClosedError("init_process_group was interrupted"))


def subgroup(name: str, ranks: Sequence[int]) -> BlockingCommunicator:
    """The communicator of these ranks of the world, this one among them. Local: nothing is sent.

    Each rank of the group makes its groups of one name and the same ranks in the same order.
    """
    world = _world
    if world is None:
        raise UsageError(
            "a process group of the backend asyncoll is one of a world: initialize the default process group with it, "
            'as in init_process_group("asyncoll") or init_process_group("cpu:asyncoll,cuda:nccl")'
        )
    comm = world.comm
    kind = digest(comm._core.member.communicator, "torch", name, *ranks)
    with _lock:
        world.made[kind] += 1
        context = digest(kind, world.made[kind])
    group = Group(tuple(ranks), list(ranks).index(comm.rank), context, epoch=comm._epoch)
    core = comm._core.split(group, keeps_messages=False)
    return BlockingCommunicator(core, tuple(comm.hosts[rank] for rank in ranks))


def leave(comm: BlockingCommunicator) -> None:
    """Leave the group of `comm`, and the world if it is that of all ranks. Not collective but after a `discard()`.

    Leaving the world waits until the collectives under way are over, and ends sends and receives. Leaving a group waits
    for nothing: its collectives go on, and its sends and receives do until all ranks have left it. While an exception
    is handled, as in a `finally` block, this ends all calls at once, and tells the others of the exception. So
    left, the world is aborted. Without effect in a forked child.
    """
    _leave(comm, sys.exc_info()[1])


def serve_until_all_leave(comm: BlockingCommunicator, timeout_s: float) -> None:
    """Rounds of `comm` may need this rank: as it leaves the world in order, it waits for the others, for this time."""
    if _world is not None:
        _world.served[comm] = timeout_s


def abort(comm: BlockingCommunicator) -> None:
    """End all calls of the group of `comm`, at all its ranks, with an AbortedError; and leave it. From any thread."""
    comm.abort("the process group was aborted")
    _leave(comm, ClosedError("the process group was aborted"))


def _number(store: Any, more: int) -> int:
    # The store ends with rank 0, which may have left already.
    with contextlib.suppress(RuntimeError):
        return int(store.add(_WORLDS, more))
    return 0


def _is_opened_by_torch(store: Any) -> bool:
    """Whether torch has opened this store, a TCPStore, for its default group; the program owns those that it opens.

    In those that it opens, torch gives the names of all entries of the group a beginning.
    """
    outer, inner = None, store
    while isinstance(inner, distributed_c10d.PrefixStore):
        outer, inner = inner, inner.underlying_store
    if outer is None or not place_of(inner)[1]:
        return False
    outer.set(_OPENED, "")
    return bool(inner.check([f"default_pg/{_OPENED}"]))


def _keep(served: Any) -> None:
    """Let a store that this process serves outlive its default group."""
    if served is not None:
        keep(distributed_c10d, served)


def _leave(comm: BlockingCommunicator, error: BaseException | None) -> None:
    global _world
    world = _world
    if world is None or world.process != os.getpid():
        return
    if comm is not world.comm:
        if comm._core.member.endpoint is world.comm._core.member.endpoint:  # not of an earlier world
            comm._end(reason_to_leave(error))
        return
    _keep(world.store)
    while error is None and world.served:
        served, timeout_s = world.served.popitem()
        with contextlib.suppress(AsyncollError), deadline(timeout_s):  # a rank that is gone needs nothing
            served.barrier().wait()
    # First: if a signal handler raises in it, the next call waits for the end.
    comm._leave(error)
    with _lock:
        if _world is world:
            _world = None


def _forget() -> None:
    """Forget the world in a forked child: it is that of the parent."""
    global _lock, _world
    _lock, _world = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
