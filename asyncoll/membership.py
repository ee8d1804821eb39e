"""Who belongs to the world, in which process, and what is known of those who are gone."""

from __future__ import annotations

from collections.abc import Callable

from asyncoll.wire import Hello, Lost

_UNKNOWN = Hello("", 0)


class Membership:
    """The ranks of the world, as one of them knows them."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self._processes: dict[int, Hello] = {}
        self._traces: list[Callable[[int], str]] = []

    def introduced(self, rank: int, process: Hello) -> None:
        """This is the process of `rank`."""
        self._processes[rank] = process

    def name(self, rank: int) -> str:
        """`rank` and, as far as it is known, its process."""
        process = self._processes.get(rank)
        return f"rank {rank} (host {process.host}, pid {process.pid})" if process else f"rank {rank}"

    def on_trace(self, trace: Callable[[int], str]) -> None:
        """`trace(rank)` describes the last call that it knows of that rank; empty if it knows none."""
        self._traces.append(trace)

    def news_of(self, rank: int, cause: str, last_seen_s: float) -> Lost:
        """What to tell of a rank that is gone."""
        process = self._processes.get(rank, _UNKNOWN)
        doing = next((text for trace in reversed(self._traces) if (text := trace(rank))), "")
        return Lost(rank, cause, process.host, process.pid, round(1000 * last_seen_s), doing)
