"""Messages between ranks on one loop: the loop delivers each message in its next iteration."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

from asyncoll.transport import Buffer, Loss, Receiver, check_frames

_HIGH_WATER_MARK = 64  # messages in the inbox of a rank above which `drain` makes their senders wait


def world(size: int) -> list[InprocTransport]:
    """One transport for each rank of a world inside this process."""
    transports: list[InprocTransport] = []
    transports.extend(InprocTransport(rank, size, transports) for rank in range(size))
    return transports


class InprocTransport:
    """A `Transport` whose peers live on the same loop."""

    def __init__(self, rank: int, size: int, peers: list[InprocTransport]) -> None:
        self.rank = rank
        self.size = size
        self._peers = peers
        self._inbox: deque[tuple[int, list[bytes] | None]] = deque()  # None: the source has closed
        self._receiver: Receiver | None = None
        self._scheduled = False
        self._closed = False
        self._members: Collection[int] = range(size)

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._schedule()

    def send(self, dest: int, frames: Sequence[Buffer]) -> None:
        check_frames(dest, self.size, frames)
        if not self._closed and dest in self._members:
            self._peers[dest]._put(self.rank, [bytes(frame) for frame in frames])

    def send_directly(self, dest: int, frames: Sequence[Buffer]) -> bool:
        # The ranks share a loop: no other thread would save a wake-up.
        del dest, frames
        return False

    async def drain(self, dest: int) -> None:
        while len(self._peers[dest]._inbox) > _HIGH_WATER_MARK and not self._peers[dest]._closed:
            await asyncio.sleep(0)

    def enter(self, receiver: Receiver, members: Collection[int], to_kill: Collection[int] = ()) -> None:
        del to_kill  # there are no processes
        self._receiver, self._members = receiver, frozenset(members)

    async def close(self, *, flush: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        for peer in self._peers:
            if peer is not self:
                peer._put(self.rank, None)

    def _put(self, source: int, frames: list[bytes] | None) -> None:
        if not self._closed:
            self._inbox.append((source, frames))
            self._schedule()

    def _schedule(self) -> None:
        if self._receiver is not None and self._inbox and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Deliver the messages that are in the inbox now.

        Messages that these cause wait for the next iteration of the loop, so that other ranks and tasks can run.
        """
        self._scheduled = False
        assert self._receiver is not None
        for _ in range(len(self._inbox)):
            if self._closed:
                return
            source, frames = self._inbox.popleft()
            if frames is None and source not in self._members:
                continue
            if frames is None:
                self._receiver.lost(Loss(source, "it closed its transport"))
            else:
                self._receiver.received(source, list(frames))
        self._schedule()
