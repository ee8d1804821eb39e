"""Both halves of RPC over one carrier: what is called here, and what is called from here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from asyncoll.errors import AsyncollError, ProtocolError
from asyncoll.rpc import protocol
from asyncoll.rpc.carrier import Carrier
from asyncoll.rpc.client import Client
from asyncoll.rpc.protocol import CALL, CANCEL, CREDIT, NOTIFY, STREAM
from asyncoll.rpc.server import Server
from asyncoll.rpc.service import FunctionRegistry
from asyncoll.tensors.reductions import Array


class Exchange:
    """One end of RPC, on the loop that it was made on."""

    def __init__(
        self,
        carrier: Carrier,
        registry: FunctionRegistry,
        rank_of: Callable[[int], int],
        broken: Callable[[int, ProtocolError], None],
        what: str,
        patience_s: float = math.inf,
    ) -> None:
        """`rank_of` says how a peer is called in errors; `broken` is told of one that is no honest peer.

        `what` is what is closed at the end; `patience_s` is how long a caller waits.
        """
        self._carrier = carrier
        self.client = Client(carrier, rank_of, what, patience_s)
        self._server = Server(registry, self._reply, broken)
        carrier.open(self._deliver)

    def fail(self, make: Callable[[], AsyncollError]) -> None:
        """End everything that waits or runs, and every later call with `make()`."""
        self.client.fail(make)
        self._server.stop()

    def forget(self, peer: int) -> None:
        """That peer, which only ever called, is gone."""
        self._server.forget(peer)

    async def flush(self) -> None:
        """Wait until everything that has been notified from here has begun."""
        await self.client.flush()

    async def close(self) -> None:
        """End everything, and wait for what runs here. Idempotent."""
        try:
            await self.client.close()
            await self._server.close()
        finally:
            await self._carrier.close()

    async def _reply(self, peer: int, kind: int, call: int, body: bytes = b"", arrays: Sequence[Array] = ()) -> None:
        await self._carrier.send(peer, *protocol.encode(kind, call, body, arrays))

    def _deliver(self, peer: int, head: bytes, arrays: Sequence[Array]) -> None:
        message, arrays = protocol.decode(head, arrays)
        if message.kind in (CALL, NOTIFY, STREAM):
            self._server.begin(peer, message, arrays)
        elif message.kind == CANCEL:
            self._server.cancel(peer, message.call)
        elif message.kind == CREDIT:
            self._server.taken(peer, message.call, message.number)
        else:
            self.client.received(peer, message, arrays)
