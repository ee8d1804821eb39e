"""One end of RPC over a carrier: the client for calls from here, and the server for calls to here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.rpc import protocol
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.client import Client
from asyncoll.rpc.device_route import DeviceRoute
from asyncoll.rpc.protocol import CALL, CANCEL, CREDIT, NOTIFY, SHOW_ARGUMENT, SHOW_RESULT, STREAM
from asyncoll.rpc.server import Server
from asyncoll.rpc.service import FunctionRegistry
from asyncoll.rpc.shown import Reader, Sender
from asyncoll.tensors.reductions import Array


class RpcExchange:
    """One end of RPC. All of it runs on the loop on which it was made.

    In: messages of peers (`_deliver`, called by the carrier), the calls of `client`, and what `server` is told of peers
    that are gone. Out: `Carrier.send`.
    """

    def __init__(
        self,
        carrier: Carrier,
        registry: FunctionRegistry,
        rank_of: Callable[[int], int],
        broken: Callable[[int, ProtocolError], None],
        name: str,
        patience_s: float = math.inf,
        route: DeviceRoute | None = None,
    ) -> None:
        """`rank_of` returns the rank of a peer for errors, -1 for a service; `broken` handles protocol errors.

        `name` is the subject of the ClosedError after the end; `patience_s` is the longest time that a caller waits.
        Tensors on devices may take `route`.
        """
        self._carrier = carrier
        self._sender, self._reader = Sender(carrier, route), Reader(route)
        self.client = Client(carrier, self._sender, rank_of, name, patience_s)
        self.server = Server(carrier, self._sender, registry, broken)
        carrier.open(self._deliver)

    def fail(self, make: Callable[[], AsyncollError]) -> None:
        """End all calls from here, and every later one, with the exception `make()`. Cancel all calls to here."""
        self.client.fail(make)
        self.server.stop()

    async def close(self) -> None:
        """End all calls, and wait until those that run here have ended. Idempotent."""
        try:
            await self.client.close()
            await self.server.close()
            await self._sender.close()
            await self._reader.close()
        finally:
            await self._carrier.close()

    def _deliver(self, peer: int, head: bytes, arrays: Sequence[Array]) -> None:
        """Dispatch one message. Raises ProtocolError if it violates the protocol."""
        message, arrays = protocol.decode(head, arrays)
        if message.kind in (CALL, NOTIFY, STREAM):
            self.server.on_call(peer, message, arrays)
        elif message.kind == CANCEL:
            self.server.on_cancel(peer, message.call)
        elif message.kind == CREDIT:
            self.server.on_credit(peer, message.call, message.number)
        elif message.kind == SHOW_RESULT:
            self._reader.read(peer, message.body, self.client.arrivals(peer, message.call))
        elif message.kind == SHOW_ARGUMENT:
            self._reader.read(peer, message.body, self.server.arrivals(peer, message))
        else:
            self.client.on_answer(peer, message, arrays)
