"""RPC between any ranks, as signals of the router, which lives on the runtime's loop; everything else is here.

In a process world that is another thread. So each segment crosses over twice, at its sender and at its receiver; what
has come is handed over together, with one wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from asyncoll.arguments import digest
from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Deliver
from asyncoll.rpc.segments import Segments
from asyncoll.runtime.group import Group
from asyncoll.runtime.router import Router
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer


class MessageCarrier:
    """A `Carrier` between the ranks of a group, by their ranks in the world."""

    def __init__(
        self,
        router: Router,
        group: Group,
        post: Callable[[Callable[[], None]], None],
        broken: Callable[[int, ProtocolError], None],
    ) -> None:
        """`post` calls on the runtime's loop, soon. `broken` is told of a rank that broke the protocol."""
        self._router = router
        self._ranks = frozenset(group.ranks)
        self._context = digest(group.communicator, "rpc")
        self._run_there = post
        self._broken = broken
        self._arrived: deque[tuple[int, int, int, Buffer]] = deque()
        self._is_handing_over = False
        self._is_closed = False

    def open(self, deliver: Deliver) -> None:
        self._loop = asyncio.get_running_loop()
        self._segments = Segments(self, deliver)
        self._run_there(partial(self._router.on_signal, self._context, self._heard))

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        await self._segments.send(dest, head, arrays)

    async def close(self) -> None:
        self._is_closed = True

    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        if not self._is_closed:
            signal = self._router.signal
            self._run_there(lambda: signal(dest, self._context, number, kind, 0, payload))

    async def flush(self) -> None:
        if self._is_closed:
            return
        passed = self._loop.create_future()
        self._run_there(lambda: self._here(_settle, passed))
        await passed

    def _heard(self, source: int, number: int, step: int, fingerprint: int, payload: Buffer) -> None:
        """On the runtime's loop."""
        self._arrived.append((source, step, number, payload))
        if not self._is_handing_over:
            self._is_handing_over = True
            self._here(self._hand_over)

    def _here(self, what: Callable[..., None], *args: object) -> None:
        """Call on the caller's loop, soon, from the runtime's."""
        if asyncio.get_running_loop() is self._loop:
            self._loop.call_soon(what, *args)
        else:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody is left to be told
                self._loop.call_soon_threadsafe(what, *args)

    def _hand_over(self) -> None:
        self._is_handing_over = False  # before looking: what comes from now on is handed over once more
        while self._arrived:
            source, kind, number, payload = self._arrived.popleft()
            if self._is_closed:
                continue
            try:
                if source not in self._ranks:
                    raise ProtocolError("a call on a communicator that it is not part of")
                self._segments.received(source, kind, number, payload)
            except ProtocolError as error:
                self._broken(source, error)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
