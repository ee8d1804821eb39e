"""The one place that chooses the backend of a communicator, and puts the tables of ways together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncoll.algorithms.alone_backend import AloneBackend
from asyncoll.algorithms.calls import SEND_WAYS
from asyncoll.algorithms.dense import by_size
from asyncoll.algorithms.dense.pair_memory import least_in_blocks
from asyncoll.algorithms.dense.shared_call import allreduce_ways
from asyncoll.algorithms.dense.tuning import choose
from asyncoll.algorithms.hosts_backend import HostsBackend
from asyncoll.algorithms.memory_backend import MemoryBackend, device_ways, pair_ways
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.rounds import announced, compiled_rounds
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

    Calls that are not here have one way only. Raises UsageError for sizes in `environ` that are none.
    """
    if ranks == 1:
        return {"of one rank": own()}
    sizes = choose(ranks, environ)
    others: tuple[Way[Any], ...] = (*by_size.REDUCE_WAYS, *by_size.broadcast_ways(ranks), *by_size.ALLGATHER_WAYS)
    of_devices: tuple[Way[Any], ...] = (*device_ways(sizes), *pair_ways(least_in_blocks(sizes)))
    rounds_in_memory, rounds_by_message = compiled_rounds.rounds_ways(sizes.long), announced.rounds_ways(ranks)
    between_hosts: tuple[Way[Any], ...] = (*by_size.allreduce_ways(ranks, beside=True), *others)
    return {
        "anywhere": (*own(), *SEND_WAYS),
        "on one host": (*allreduce_ways(sizes), *of_devices, *rounds_in_memory),
        "by message": (*by_size.allreduce_ways(ranks, beside=False), *others, *rounds_by_message),
        "between so many hosts, beside steps in the memory of each": between_hosts,
    }
