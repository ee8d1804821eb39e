"""The processes of the world's ranks, and the description of a lost rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncoll.transport import Loss
from asyncoll.transport.processes import is_gone
from asyncoll.transport.wire import Hello, Lost


class Membership:
    """The ranks of the world as this rank knows them: epoch and members, their processes, and which of them are lost.

    An epoch is one membership of the world; epochs are numbered from 1. Groups and messages have the number from here.

    In: `introduced`, for each Hello message; `enter`. Out: `news_of`, the message that reports a lost
    rank. The endpoint calls `news_of` in any thread and everything else on the runtime's loop.
    """

    def __init__(self, size: int, hosts: Sequence[str] = ()) -> None:
        """`hosts` has the name of each rank's host, as far as it is known before the Hello messages."""
        self.epoch = 1
        self.members = tuple(range(size))  # world ranks
        self._hosts = hosts
        self.lost: set[int] = set()  # world ranks
        self.ended: set[int] = set()  # world ranks that have left while others stay
        self._processes: dict[int, Hello] = {}
        # Each returns the last known call of a rank as text, or an empty string. Later ones are asked first.
        self.last_calls: list[Callable[[int], str]] = []

    def enter(self, epoch: int, members: tuple[int, ...]) -> None:
        """This rank goes on in a later epoch."""
        self.epoch, self.members = epoch, members

    def gone(self) -> frozenset[int]:
        """The world ranks that are lost or have left."""
        return frozenset(self.lost | self.ended)

    def introduced(self, rank: int, process: Hello) -> None:
        """Record the host and the process id of world rank `rank`."""
        self._processes[rank] = process

    def knows(self, rank: int) -> bool:
        """Whether the Hello message of `rank` has arrived."""
        return rank in self._processes

    def name(self, rank: int) -> str:
        """The rank, with its host and process id if they are known; for error messages."""
        process = self._processes.get(rank)
        return f"rank {rank} (host {process.host}, pid {process.pid})" if process else f"rank {rank}"

    def is_gone(self, rank: int) -> bool:
        """Whether the process of `rank`, which is on this host, is known to have ended."""
        return rank in self._processes and is_gone(self._processes[rank].pid)

    def process(self, rank: int) -> Hello:
        """The host and the process id of world rank `rank`; empty and 0 if they are not known."""
        return self._processes.get(rank) or Hello(self._hosts[rank] if self._hosts else "", 0)

    def news_of(self, loss: Loss, ranks: Sequence[int] = ()) -> Lost:
        """The message that reports `loss`, with the process of the lost rank and its last known call.

        `ranks` are all ranks that are lost with it; by default that rank alone.
        """
        host, pid = self.process(loss.rank)
        doing = next((text for last_call in tuple(reversed(self.last_calls)) if (text := last_call(loss.rank))), "")
        listed = ",".join(map(str, ranks or (loss.rank,)))
        return Lost(loss.rank, loss.cause, host, pid, round(1000 * loss.last_seen_s), doing, listed)
