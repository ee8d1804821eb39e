"""Which ranks are on which host. Ranks are numbered host by host, in the order of the hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncoll.errors import UsageError

HERE = ""  # the name of this host in a job that has no other
_ENTRY = re.compile(r"(?P<host>\[[^\[\]\s]+\]|[^-:\[\]\s][^:\[\]\s]*):(?P<ranks>[0-9]+)")
_RANKS_MAX = 999_999  # on one host


def parse_hosts(text: str) -> dict[str, int]:
    """The number of ranks on each host, from a text such as "a:4,user@b:2,[fe80::1]:2". Raises UsageError if it is not.

    The brackets around an address of IPv6 are not part of the name.
    """
    hosts: dict[str, int] = {}
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise UsageError(
                f"--hosts {text}: {entry!r} is not HOST:RANKS; give a host and its number of ranks, as in a:4,b:4 "
                "(an address of IPv6 in brackets)"
            )
        name = found["host"].strip("[]")
        if name in hosts:
            raise UsageError(f"--hosts {text}: {name} is given twice; give each host once, with all of its ranks")
        if len(found["ranks"]) > len(str(_RANKS_MAX)):
            raise UsageError(f"--hosts {text:.100}: a host has at most {_RANKS_MAX} ranks, not {found['ranks']:.100}")
        hosts[name] = int(found["ranks"])
    return hosts


@dataclass(frozen=True)
class Placement:
    """The hosts of a job by name, with the number of ranks on each. In a job of this host alone its name is `HERE`."""

    hosts: Mapping[str, int]

    def __post_init__(self) -> None:
        """Raise UsageError if there is no rank, or none on one of several hosts."""
        if not self.hosts:
            raise UsageError("a job has at least one host")
        for host, ranks in self.hosts.items():
            if ranks < 1:
                where = f" on host {host}" if host else ""
                raise UsageError(f"a job has at least one rank{where}, not {ranks}")

    @property
    def size(self) -> int:
        return sum(self.hosts.values())

    @property
    def is_here(self) -> bool:
        return HERE in self.hosts

    def ranks_of(self, host: str) -> range:
        first = 0
        for name, ranks in self.hosts.items():
            if name == host:
                return range(first, first + ranks)
            first += ranks
        raise KeyError(host)

    def host_of(self, rank: int) -> str:
        return next(host for host in self.hosts if rank in self.ranks_of(host))
