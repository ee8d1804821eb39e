"""Who belongs to the world, in which process, and what is known of those who are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from asyncoll.transport.processes import is_gone, is_stopped
from asyncoll.transport.wire import Hello, Lost

_UNKNOWN = Hello("", 0)
_ENDING_S = 0.05  # for a process to end


class Membership:
    """The ranks of the world, as one of them knows them."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self._processes: dict[int, Hello] = {}
        self._traces: list[Callable[[int], str]] = []

    def introduced(self, rank: int, process: Hello) -> None:
        """This is the process of `rank`."""
        self._processes[rank] = process

    def knows(self, rank: int) -> bool:
        """Whether `rank` has introduced itself."""
        return rank in self._processes

    def name(self, rank: int) -> str:
        """`rank` and, as far as it is known, its process."""
        process = self._processes.get(rank)
        return f"rank {rank} (host {process.host}, pid {process.pid})" if process else f"rank {rank}"

    def culprit(self, suspect: int, neighbours: Iterable[int]) -> int:
        """`suspect`, unless it lives and one of its neighbours, which are of this host as it is, does not.

        Blocks for some ms while nobody is out yet: the kernel opens the locks of a process before it has ended.
        """
        known = {rank: self._processes[rank].pid for rank in neighbours if rank in self._processes}
        until_s = time.monotonic() + _ENDING_S  # noqa: TID251 (there are no processes in virtual time)
        while suspect in known:
            out = [rank for rank, pid in known.items() if is_gone(pid) or is_stopped(pid)]
            if out or time.monotonic() > until_s:  # noqa: TID251
                return out[0] if out and suspect not in out else suspect
            time.sleep(0.001)  # noqa: TID251
        return suspect

    def on_trace(self, trace: Callable[[int], str]) -> None:
        """`trace(rank)` describes the last call that it knows of that rank; empty if it knows none."""
        self._traces.append(trace)

    def news_of(self, rank: int, cause: str, last_seen_s: float) -> Lost:
        """What to tell of a rank that is gone."""
        process = self._processes.get(rank, _UNKNOWN)
        doing = next((text for trace in reversed(self._traces) if (text := trace(rank))), "")
        return Lost(rank, cause, process.host, process.pid, round(1000 * last_seen_s), doing)
