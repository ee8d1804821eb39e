"""The carrier of RPC between a service and its clients: segments over a socket.

Unix sockets are plain ones, on the loop of the service or client. tcp, and connections that a key encrypts, go through
ZeroMQ, which brings encryption and heartbeats from threads of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncoll.errors import ProtocolError
from asyncoll.rpc.carrier import Deliver
from asyncoll.rpc.segments import SegmentCarrier
from asyncoll.tensors.reductions import Array
from asyncoll.transport.keys import Key
from asyncoll.transport.messages.service_protocol import ClientEnd, ServiceEnd, SocketOwner
from asyncoll.transport.messages.service_streams import StreamClient, StreamServer
from asyncoll.transport.wire import Buffer


def listen(owner: SocketOwner, url: str, key: Key | None) -> ServiceEnd:
    """The sockets of a service at `url`. Raises UsageError if it cannot listen there, or would admit strangers."""
    if _is_plain(url, key):
        return StreamServer(owner, url)
    from asyncoll.transport.messages.service_sockets import ServerSocket  # loads ZeroMQ, which others do without

    return ServerSocket(owner, url, key)


def dial(owner: SocketOwner, url: str, key: Key | None, connected: Callable[[int], None]) -> ClientEnd:
    """The socket of a client of the service at `url`.

    `connected` is called with the protocol version of the service, once the service has answered and is watched for
    signs of life. Raises UsageError if `url` is malformed, belongs to another user, or is not safe.
    """
    if _is_plain(url, key):
        return StreamClient(owner, url, connected)
    from asyncoll.transport.messages.service_sockets import ClientSocket  # as above

    return ClientSocket(owner, url, key, connected)


def _is_plain(url: str, key: Key | None) -> bool:
    return key is None and isinstance(url, str) and url.startswith("ipc://")


class SocketCarrier(SegmentCarrier):
    """The carrier over one socket, which it owns. The socket calls `room`, `received` and `lost`."""

    def __init__(
        self,
        make: Callable[[SocketCarrier], ServiceEnd | ClientEnd],
        broken: Callable[[int, ProtocolError], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """`make` opens the socket. `broken` handles peers that violate the protocol, `lost` peers that are gone."""
        super().__init__()
        self._make = make
        self._broken = broken
        self._lost = lost

    def open(self, deliver: Deliver) -> None:
        super().open(deliver)
        # Not in `__init__`: the socket delivers from now on.
        self.socket = self._make(self)

    def send_nowait(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> bool:
        # A message to a peer that is gone is dropped, so it counts as sent: its calls fail by the loss.
        return not self.socket.has(dest) or super().send_nowait(dest, head, arrays)

    async def send(self, dest: int, head: bytes, arrays: Sequence[Array] = ()) -> None:
        """Send a message in order, and return when `arrays` may change. One to a peer that is gone is dropped."""
        if self.socket.has(dest):
            await super().send(dest, head, arrays)

    async def close(self) -> None:
        self.socket.close()

    def post(self, dest: int, kind: int, number: int, payload: Buffer) -> None:
        self.socket.send(dest, kind, number, payload)

    async def flush(self, dest: int) -> None:
        await self.socket.flush(dest)

    def received(self, peer: int, kind: int, number: int, payload: Buffer) -> None:
        """The socket has received a segment."""
        try:
            super().received(peer, kind, number, payload)
        except ProtocolError as error:
            self._broken(peer, error)

    def lost(self, peer: int, cause: str) -> None:
        """The socket has lost a peer."""
        self.forget(peer)
        self._lost(peer, cause)
