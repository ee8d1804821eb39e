"""Messages among the members of one epoch, which have ranks from 0 in it, over a transport among all processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from asyncoll.transport import Buffer, Loss, Receiver, Transport, check_frames


class AmongMembers:
    """A `Transport` whose ranks are the places of `numbers`, the ranks of its members in the started transport `inner`.

    It is also the receiver of `inner`. Processes that are not among the members send nothing that is delivered.
    """

    def __init__(self, inner: Transport, numbers: Sequence[int], to_kill: Collection[int] = ()) -> None:
        """`to_kill` are the processes that `inner` has to end first."""
        self.size = len(numbers)
        self.rank = numbers.index(inner.rank)
        self._inner = inner
        self._numbers = numbers
        self._to_kill = to_kill
        self._ranks = {number: rank for rank, number in enumerate(numbers)}
        self._receiver: Receiver | None = None

    async def start(self, receiver: Receiver) -> None:
        """Begin to receive at once: the members are connected already."""
        self._receiver = receiver
        self._inner.enter(self, self._numbers, self._to_kill)

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        check_frames(dest, self.size, frames)
        self._inner.send(self._numbers[dest], frames)

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        check_frames(dest, self.size, frames)
        return self._inner.send_directly(self._numbers[dest], frames)

    async def drain(self, dest: int) -> None:
        await self._inner.drain(self._numbers[dest])

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        self._receiver = receiver
        among, killed = ([self._numbers[rank] for rank in ranks] for ranks in (members, to_kill))
        self._inner.enter(self, among, killed)

    async def close(self, *, flush: bool = False) -> None:
        await self._inner.close(flush=flush)

    def received(self, source: int, frames: list[Buffer]) -> None:
        rank = self._ranks.get(source)
        if rank is not None and self._receiver is not None:
            self._receiver.received(rank, frames)

    def lost(self, loss: Loss) -> None:
        rank = self._ranks.get(loss.rank)
        if rank is not None and self._receiver is not None:
            self._receiver.lost(replace(loss, rank=rank))
