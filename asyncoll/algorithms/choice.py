"""The one place that chooses the backend of a communicator, and puts the tables of ways together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncoll.algorithms.alone_backend import AloneBackend
from asyncoll.algorithms.dense import by_size
from asyncoll.algorithms.dense.meeting_cells import BY_MEETING
from asyncoll.algorithms.dense.shared_call import allreduce_ways
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.hosts_backend import HostsBackend
from asyncoll.algorithms.memory_backend import MemoryBackend, device_ways
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.rounds.announced import rounds_ways
from asyncoll.algorithms.rounds.compiled_rounds import ROUNDS_WAYS
from asyncoll.algorithms.rounds.directory import RoundsBackend
from asyncoll.algorithms.seam.ways import Way, own
from asyncoll.runtime.hosts import Hosts
from asyncoll.runtime.member import Member


def choose_backend(member: Member) -> RoundsBackend:
    """Nothing if there is one rank, memory if all ranks share an arena, otherwise messages.

    All ranks make the same choice, because it depends only on the ranks of the communicator and of the host.
    """
    arena, ranks = member.endpoint.arena, member.group.ranks
    if len(ranks) == 1:
        return AloneBackend(member)
    if arena is not None and set(ranks) <= set(arena.ranks):
        return MemoryBackend(member, arena)
    host_of = [member.endpoint.host_of[rank] for rank in ranks]
    if member.endpoint.shares_memory and 1 < len(set(host_of)) < len(ranks):
        return HostsBackend(
            member, Hosts.of(host_of, member.group.rank), arena if member.endpoint.all_have_arenas else None
        )
    return MessageBackend(member)


def tables(ranks: int, environ: Mapping[str, str]) -> dict[str, tuple[Way[Any], ...]]:
    """All ways of calls among so many ranks, by where the ranks are, in the order in which they are tried.

    Raises UsageError for sizes in `environ` that are none.
    """
    if ranks == 1:
        return {"of one rank": (*own(), _only("all calls", "alone", "there is no rank to wait for"))}
    sizes = choose(ranks, environ)
    others: tuple[Way[Any], ...] = (*by_size.REDUCE_WAYS, *by_size.broadcast_ways(ranks), *by_size.ALLGATHER_WAYS)
    in_memory: tuple[Way[Any], ...] = (*allreduce_ways(sizes), *device_ways(sizes), *ROUNDS_WAYS)
    by_message: tuple[Way[Any], ...] = (*by_size.allreduce_ways(ranks, beside=False), *others, *rounds_ways(ranks))
    between_hosts: tuple[Way[Any], ...] = (*by_size.allreduce_ways(ranks, beside=True), *others)
    return {
        "anywhere": (*own(), _MESSAGES),
        "on one host": (*in_memory, *_IN_MEMORY_ONLY),
        "by message": (*by_message, *_BY_MESSAGE_ONLY),
        "between so many hosts, beside steps in the memory of each": between_hosts,
        "on several hosts": _ON_HOSTS_ONLY,
    }


def _only(calls: str, name: str, why: str, compiled: int = 0) -> Way[None]:
    """The one way of some calls, which nothing chooses: their rooms begin it."""
    return Way(calls, name, lambda *_: None, why, compiled=compiled)


_MESSAGES = _only("send, recv", "message", "long tensors of devices pass in device memory that both ranks read")
_IN_MEMORY_ONLY = (
    _only("barrier", "meeting", "one step for all", BY_MEETING),
    _only("reduce", "slots", "pieces stay in the cache"),
    _only("broadcast, gather, allgather", "windows", "long registered arrays are read where they are"),
    _only("scatter, alltoall, reduce_scatter", "windows", "each has a piece for every rank"),
)
_BY_MESSAGE_ONLY = (
    _only("barrier", "dissemination", "ceil(log2 P) steps"),
    _only("gather, scatter", "one message a rank", "each byte is sent once"),
    _only("alltoall, reduce_scatter", "pairwise", "each byte is sent once"),
)
_ON_HOSTS_ONLY = (
    _only("barrier", "two levels", "few messages between hosts"),
    _only("reduce_scatter, allgather", "two levels", "a host sends what one rank would"),
    _only("gather, scatter, alltoall", "by message", "each block goes from one rank to one other"),
    _only("rounds", "agents", "as in memory on each host; where one has none, as by message"),
)
