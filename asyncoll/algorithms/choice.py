"""The one place that chooses the backend of a communicator."""

from __future__ import annotations

from asyncoll.algorithms.alone_backend import AloneBackend
from asyncoll.algorithms.hosts_backend import HostsBackend
from asyncoll.algorithms.memory_backend import MemoryBackend
from asyncoll.algorithms.message_backend import MessageBackend
from asyncoll.algorithms.rounds.directory import RoundsBackend
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
