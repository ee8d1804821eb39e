"""The world that a process joins with its first process group, and leaves with its last one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from asyncoll.arguments import digest
from asyncoll.blocking import BlockingCommunicator, join
from asyncoll.errors import UsageError
from asyncoll.runtime.deadlines import deadline
from asyncoll.runtime.group import Group
from asyncoll.world.environment import Environment

_lock = threading.Lock()
_worlds: list[BlockingCommunicator] = []  # at most one


def enter(store: Any, rank: int, size: int, timeout: timedelta) -> BlockingCommunicator:
    """Join the world of all ranks that share `store`."""
    with _lock:
        if _worlds:
            raise UsageError("this process is in a world already: destroy its default process group first")
        with deadline(timeout.total_seconds()):
            comm = join(Environment.of_store(store, rank, size))
        _worlds.append(comm)
        return comm


def subgroup(name: str, ranks: Sequence[int]) -> BlockingCommunicator:
    """The communicator of these ranks of the world, this one among them. Local: nothing is sent."""
    if not _worlds:
        raise UsageError(
            "a process group of the backend asyncoll is one of a world: initialize the default process group with it, "
            'as in init_process_group("asyncoll") or init_process_group("cpu:asyncoll,cuda:nccl")'
        )
    world = _worlds[0]
    context = digest(world._core.member.communicator, "torch", name, *ranks)
    group = Group(tuple(ranks), list(ranks).index(world.rank), context)
    return BlockingCommunicator(world._core.split(group), tuple(world.hosts[rank] for rank in ranks))


def leave(comm: BlockingCommunicator) -> None:
    """Leave the world, if `comm` is its communicator; without effect if this process has left it."""
    with _lock:
        if comm in _worlds:
            _worlds.remove(comm)
            comm.close()
