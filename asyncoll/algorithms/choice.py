"""The one place that chooses the backend of a communicator."""

from __future__ import annotations

from asyncoll.algorithms.alone import AloneBackend
from asyncoll.algorithms.backend import Backend
from asyncoll.algorithms.by_message import MessageBackend
from asyncoll.algorithms.in_memory import MemoryBackend
from asyncoll.runtime.member import Member


def choose_backend(member: Member) -> Backend:
    """Nothing if there is one rank, memory if all ranks share an arena, otherwise messages.

    All ranks make the same choice, because it depends only on the ranks of the communicator and of the host.
    """
    arena, ranks = member.endpoint.arena, member.group.ranks
    if len(ranks) == 1:
        return AloneBackend(member)
    if arena is not None and set(ranks) <= set(arena.ranks):
        return MemoryBackend(member, arena)
    return MessageBackend(member)
