"""How the ranks of a communicator lie on hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)  # without slots: `cached_property` needs a dictionary
class Hosts:
    """The hosts of a group, as one of its ranks sees them. Equal at all ranks, but for `mine` and `place`.

    Ranks are group ranks. A host's ranks need not follow each other, and hosts may have different numbers of them.
    """

    ranks: tuple[tuple[int, ...], ...]  # of each host, ascending; hosts are in the order of their first ranks
    mine: int  # the host of this rank
    place: int  # of this rank among the ranks of its host

    @classmethod
    def of(cls, host_of: Sequence[object], rank: int) -> Hosts:
        """`host_of` names the host of each rank."""
        by_host: dict[object, list[int]] = {}
        for each, host in enumerate(host_of):
            by_host.setdefault(host, []).append(each)
        mine = list(by_host).index(host_of[rank])
        return cls(tuple(map(tuple, by_host.values())), mine, by_host[host_of[rank]].index(rank))

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.ranks[self.mine]

    @cached_property
    def leaders(self) -> int:
        """The leaders of each host: its first ranks. Leaders of the same place exchange arrays between hosts."""
        return min(map(len, self.ranks))

    @property
    def is_leader(self) -> bool:
        """Whether this rank is a leader."""
        return self.place < self.leaders

    @cached_property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The leaders of each place, by host."""
        return tuple(tuple(ranks[place] for ranks in self.ranks) for place in range(self.leaders))

    @cached_property
    def team(self) -> tuple[int, ...]:
        """The leaders of this rank's place, by host. Only for a leader."""
        return self.teams[self.place]

    def first_ranks(self, host: int, at_most: int) -> tuple[int, ...]:
        """The first ranks of `host`, at most so many."""
        return self.ranks[host][:at_most]

    # Computed once: calls ask for these again and again, and with 1,024 ranks that took 24 ms of each.

    @cached_property
    def host(self) -> dict[int, int]:
        """The host of each rank."""
        return {rank: host for host, ranks in enumerate(self.ranks) for rank in ranks}

    @cached_property
    def carried(self) -> Sequence[Sequence[Sequence[int]]]:
        """By leader: for each host, the ranks whose blocks the leader of that place sends and receives."""
        return [[ranks[leader :: self.leaders] for ranks in self.ranks] for leader in range(self.leaders)]
