"""The one place that chooses the backend of a communicator, and puts the tables of ways together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncoll.algorithms.alone_backend import AloneBackend
from asyncoll.algorithms.dense import by_size
from asyncoll.algorithms.dense.shared_call import allreduce_ways
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.hosts_backend import HostsBackend
from asyncoll.algorithms.memory_backend import MemoryBackend, device_ways
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.rounds.announced import rounds_ways
from asyncoll.algorithms.rounds.compiled_rounds import ROUNDS_WAYS
from asyncoll.algorithms.rounds.directory import RoundsBackend
from asyncoll.algorithms.seam.ways import OWN, Way
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
        return HostsBackend(member, Hosts.of(host_of, member.group.rank))
    return MessageBackend(member)


def tables(ranks: int, environ: Mapping[str, str]) -> dict[str, tuple[Way[Any], ...]]:
    """All ways of calls among so many ranks, by where the ranks are, in the order in which they are tried.

    Raises UsageError for sizes in `environ` that are none.
    """
    if ranks == 1:
        return {"of one rank": (Way("all calls", "alone", lambda: None, "there is no rank to wait for"),)}
    sizes = choose(ranks, environ)
    others: tuple[Way[Any], ...] = (*by_size.REDUCE_WAYS, *by_size.broadcast_ways(ranks), *by_size.ALLGATHER_WAYS)
    in_memory: tuple[Way[Any], ...] = (*allreduce_ways(sizes), *device_ways(sizes), *ROUNDS_WAYS)
    by_message: tuple[Way[Any], ...] = (*by_size.allreduce_ways(ranks, beside=False), *others, *rounds_ways(ranks))
    between_hosts: tuple[Way[Any], ...] = (*by_size.allreduce_ways(ranks, beside=True), *others)
    return {
        "anywhere": tuple(OWN),
        "on one host": in_memory,
        "by message": by_message,
        "between so many hosts, after a reduction in the memory of each": between_hosts,
    }
