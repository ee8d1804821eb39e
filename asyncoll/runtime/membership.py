"""The processes of the world's ranks, and the description of a lost rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncoll.transport import Loss
from asyncoll.transport.processes import is_gone
from asyncoll.transport.wire import Hello, Lost

JOINING = "joining the world"  # in place of a call


class Membership:
    """The ranks of the world as this rank knows them: epoch and members, their processes, and which of them are lost.

    An epoch is one membership of the world; epochs are numbered from 1. Groups and messages have the number from here.
    Ranks are those of the epoch. A member number, the rank in the first epoch, is the same in all epochs of a process,
    and of no other process. Errors have member numbers.

    In: `introduced`, for each Hello message. Out: `news_of`, the message that reports a lost
    rank. The endpoint calls `news_of` in any thread and everything else on the runtime's loop.
    """

    def __init__(
        self, size: int, hosts: Sequence[str] = (), epoch: int = 1, numbers: Sequence[int] | None = None
    ) -> None:
        """`hosts` has the name of each rank's host, as far as it is known before the Hello messages.

        `numbers` are the member numbers by rank: the ranks of the first epoch, unless they are given.
        """
        self.epoch = epoch
        self.members = tuple(range(size))  # world ranks
        self.numbers = self.members if numbers is None else tuple(numbers)
        self._hosts = hosts
        self.lost: set[int] = set()  # world ranks
        self.ended: set[int] = set()  # world ranks that have left while others stay
        self._processes: dict[int, Hello] = {}
        # Each returns the last known call of a rank as text, or an empty string. Later ones are asked first.
        self.last_calls: list[Callable[[int], str]] = []
        # The same of rounds: the number, 0 for none, and the operation.
        self.last_rounds: list[Callable[[int], tuple[int, str]]] = []

    def next(self, epoch: int, numbers: Sequence[int]) -> Membership:
        """The membership of a later epoch, whose members are these of this one."""
        ranks = [self.numbers.index(number) for number in numbers]
        later = Membership(len(ranks), [self._hosts[rank] for rank in ranks] if self._hosts else (), epoch, numbers)
        later._processes = {new: self._processes[old] for new, old in enumerate(ranks) if old in self._processes}
        return later

    def rank_of(self, number: int, otherwise: int) -> int:
        """The rank of the member `number`; `otherwise` if it is none."""
        return self.numbers.index(number) if number in self.numbers else otherwise

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
        number = self.numbers[rank]
        return f"rank {number} (host {process.host}, pid {process.pid})" if process else f"rank {number}"

    def is_gone(self, rank: int) -> bool:
        """Whether the process of `rank`, which is on this host, is known to have ended."""
        return rank in self._processes and is_gone(self._processes[rank].pid)

    def process(self, rank: int) -> Hello:
        """The host and the process id of world rank `rank`; empty and 0 if they are not known."""
        return self._processes.get(rank) or Hello(self._hosts[rank] if self._hosts else "", 0)

    def news_of(self, loss: Loss, ranks: Sequence[int] = ()) -> Lost:
        """The message that reports `loss` by member numbers, with the process of the lost rank and its last known call.

        `ranks` are all ranks that are lost with it; by default that rank alone.
        """
        host, pid = self.process(loss.rank)
        listed = ",".join(str(self.numbers[rank]) for rank in ranks or (loss.rank,))
        return Lost(
            self.numbers[loss.rank],
            loss.cause,
            host,
            pid,
            round(1000 * loss.last_seen_s),
            self._doing(loss.rank),
            listed,
        )

    def _doing(self, rank: int) -> str:
        """The last known call of `rank`, and its last known round: no order of the two is known."""
        call = next((text for last_call in tuple(reversed(self.last_calls)) if (text := last_call(rank))), "")
        rounds = (last_round(rank) for last_round in tuple(reversed(self.last_rounds)))
        number, operation = next(((number, operation) for number, operation in rounds if number), (0, ""))
        if not number or operation in call:  # messages of a later round of it have come
            return call
        told = f"round {number} of {operation}"
        return f"{call} and {told}" if call and call != JOINING else told
