"""RPC between a service and its clients: segments over sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Deliver
from asyncoll.rpc.segments import Segments
from asyncoll.tensors.reductions import Array
from asyncoll.transport.wire import Buffer


class Socket(Protocol):
    """A server's or a client's."""

    def has(self, peer: int) -> bool: ...

    def send(self, peer: int, kind: int, number: int, payload: Buffer) -> None: ...

    def close(self) -> None: ...


class SocketCarrier:
    """A `Carrier` over one socket, whose owner it is."""

    def __init__(
        self,
        make: Callable[[SocketCarrier], Socket],
        broken: Callable[[int, ProtocolError], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """`broken` and `lost` are told of peers that are no honest ones, or gone."""
        self._make = make
        self._broken = broken
        self._lost = lost

    def open(self, deliver: Deliver) -> None:
        self._segments = Segments(self, deliver)
        self.socket = self._make(self)

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        if self.socket.has(dest):
            await self._segments.send(dest, head, arrays)

    async def close(self) -> None:
        self.socket.close()

    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        self.socket.send(dest, kind, number, payload)

    async def flush(self) -> None:
        """What has been posted has been copied."""

    def received(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        try:
            self._segments.received(peer, kind, number, payload)
        except ProtocolError as error:
            self._broken(peer, error)

    def forget(self, peer: int) -> None:
        """Nothing more is sent to that peer."""
        self._segments.forget(peer)

    def lost(self, peer: int, cause: str) -> None:
        self._segments.forget(peer)
        self._lost(peer, cause)
