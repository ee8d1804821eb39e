"""The carrier of RPC between any ranks: segments as signals of the router.

The router runs on the runtime's loop, this carrier on the caller's loop. In a world of processes these are two threads.
So each segment changes threads at its receiver; those that have arrived are handed over together, with one wake-up of
the caller's loop. At its sender the caller's thread sends a short segment itself, if the transport can do that and the
runtime's loop has sent all segments before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial

from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Deliver
from asyncoll.rpc.segments import SegmentCarrier
from asyncoll.runtime.group import Group
from asyncoll.runtime.interruption import may_interrupt
from asyncoll.runtime.router import Router
from asyncoll.transport import Buffer, settle, wire

_DIRECT_BYTES = 1 << 13  # payloads that the caller's thread sends; ZeroMQ copies as many into one frame


class MessageCarrier(SegmentCarrier):
    """The carrier between the ranks of a group. Peers are world ranks."""

    def __init__(
        self,
        router: Router,
        group: Group,
        post: Callable[[Callable[[], None]], None],
        broken: Callable[[int, ProtocolError], None],
    ) -> None:
        """`post` schedules a callback on the runtime's loop. `broken` handles a rank that violates the protocol."""
        super().__init__()
        self._router = router
        self._ranks = frozenset(group.ranks)
        self._epoch = group.epoch
        self._context = digest(group.communicator, "rpc")
        self._post_to_runtime = post
        self._broken = broken
        self._arrived: deque[tuple[int, int, int, Buffer]] = deque()
        self._is_handing_over = False
        self._posted = 0  # segments that were given to the runtime's loop; and those that it has sent
        self._sent = 0
        self._is_closed = False

    def open(self, deliver: Deliver) -> None:
        super().open(deliver)
        self._loop = asyncio.get_running_loop()
        self._post_to_runtime(partial(self._router.on_signal, self._context, self._on_signal))

    async def close(self) -> None:
        self._is_closed = True

    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        if self._is_closed:
            return
        frames: list[Buffer] = [wire.encode(wire.SIGNAL, self._epoch, self._context, number, kind), payload]
        if (
            self._posted == self._sent  # else it would overtake them
            and len(payload) <= _DIRECT_BYTES
            and not may_interrupt()  # a message must not be sent in part
            and self._router.send_directly(dest, frames)
        ):
            return
        self._posted += 1
        self._post_to_runtime(partial(self._send_posted, dest, frames))

    def _send_posted(self, dest: int, frames: list[Buffer]) -> None:
        """Send a segment on the runtime's loop."""
        try:
            self._router.send(dest, frames)
        finally:
            self._sent += 1

    async def flush(self, dest: int) -> None:
        """Wait until all payloads that were posted may change: the router copies each when it sends it, in order."""
        if self._is_closed:
            return
        passed = self._loop.create_future()
        self._post_to_runtime(lambda: self._post_to_caller(settle, passed))
        await passed

    def _on_signal(self, source: int, number: int, step: int, fingerprint: int, payload: Buffer) -> None:
        """A segment has arrived. On the runtime's loop."""
        self._arrived.append((source, step, number, payload))
        if not self._is_handing_over:
            self._is_handing_over = True
            self._post_to_caller(self._hand_over)

    def _post_to_caller(self, callback: Callable[..., None], *args: object) -> None:
        """Schedule `callback` on the caller's loop. On the runtime's loop."""
        if asyncio.get_running_loop() is self._loop:
            self._loop.call_soon(callback, *args)
        else:
            # The caller's loop is closed: there is no receiver.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *args)

    def _hand_over(self) -> None:
        """Process the segments that have arrived. On the caller's loop."""
        # Before `_arrived` is read: a segment that comes meanwhile schedules another run.
        self._is_handing_over = False
        while self._arrived:
            source, kind, number, payload = self._arrived.popleft()
            if self._is_closed:
                continue
            try:
                if source not in self._ranks:
                    raise ProtocolError("a message on a communicator that it does not belong to")
                self.received(source, kind, number, payload)
            except ProtocolError as error:
                self._broken(source, error)
