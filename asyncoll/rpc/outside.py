"""Services outside of a world: `serve` one at an address, `connect` to it from anywhere that it lets in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncoll.errors import ProtocolError, ServiceLostError
from asyncoll.rpc import stub
from asyncoll.rpc.by_socket import SocketCarrier
from asyncoll.rpc.codec import NO_TYPES
from asyncoll.rpc.exchange import Exchange
from asyncoll.rpc.service import FunctionRegistry, Method
from asyncoll.rpc.stub import Peer, Proxy
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.transport.keys import Key, read_key
from asyncoll.transport.messages.service_sockets import VERSION, ClientSocket, ServerSocket

S = TypeVar("S")
KeyFile = str | os.PathLike[str]
_PATIENCE_S = 10.0  # for the other end to answer at all
logger = logging.getLogger("asyncoll")


@contextlib.asynccontextmanager
async def serve(service: object, url: str, *, key_file: KeyFile | None = None) -> AsyncIterator[str]:
    """Let others call `service`, a function or an object with public methods, while the context lasts.

    Yields the address: that of `url`, with the port if it leaves that open (`tcp://127.0.0.1:0`). `ipc://path` is for
    this user's processes on this host alone. tcp goes without a key on loopback only, and then every user of this host
    can call every method: prefer ipc. With `key_file`, a file of mode 0600 with 32 random bytes, everything is
    encrypted, and who has not the key is refused. Coroutines run on this loop, plain functions in threads. When the
    context ends, what runs is cancelled.
    """
    registry = FunctionRegistry()
    registry.add(service)
    server = _Server(registry, url, None if key_file is None else read_key(Path(key_file)))
    try:
        yield server.url
    finally:
        await server.close()


class _Server:
    def __init__(self, registry: FunctionRegistry, url: str, key: Key | None) -> None:
        self._carrier = carrier = SocketCarrier(self._listen, self._broken, self._lost)
        self._address = url, key
        self._exchange = Exchange(carrier, registry, lambda client: -1, self._broken, "this service")

    def _listen(self, owner: SocketCarrier) -> ServerSocket:
        self._socket = ServerSocket(owner, *self._address)
        self.url = self._socket.url
        return self._socket

    async def close(self) -> None:
        await self._exchange.close()

    def _broken(self, client: int, error: ProtocolError) -> None:
        logger.warning("%s dropped client %d, which broke the protocol: %s", self.url, client, error)
        self._socket.drop(client, f"it dropped this client, which broke the protocol: {error}")
        self._carrier.forget(client)
        self._exchange.forget(client)

    def _lost(self, client: int, cause: str) -> None:
        self._exchange.forget(client)


@contextlib.asynccontextmanager
async def connect(url: str, *, key_file: KeyFile | None = None) -> AsyncIterator[Connection]:
    """A connection to the service at `url`, while the context lasts; `key_file` holds the key that it was given.

    Raises ServiceLostError if nobody answers there, and UsageError if an `ipc://` socket is another user's.
    """
    connection = Connection(url, None if key_file is None else read_key(Path(key_file)))
    try:
        await connection.meet()
        yield connection
        await connection.flush()
    finally:
        await connection.close()


class Connection:
    """Calls a service. Get one from `asyncoll.rpc.connect`.

    Calls are as those between ranks (`Rpc`): the same values, deadlines, streams and errors, with rank -1 in
    RemoteError. Dataclasses are returned through a `proxy` only, whose annotations name them. When the service is gone,
    everything that waits for it raises ServiceLostError, and so does every later call: connect again.
    """

    def __init__(self, url: str, key: Key | None) -> None:
        self._url = url
        self._key = key
        self._version: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        carrier = SocketCarrier(self._dial, self._broken, self._lost)
        self._exchange = Exchange(carrier, FunctionRegistry(), lambda service: -1, self._broken, "this connection")
        self._peer = Peer(self._exchange.client, 0, url)

    async def meet(self) -> None:
        """Wait until the service has answered."""
        remaining = remaining_s()
        try:
            async with asyncio.timeout(min(_PATIENCE_S, math.inf if remaining is None else remaining)) as late:
                version = await self._version
        except TimeoutError:
            if not late.expired():
                raise
            raise ServiceLostError(f"nobody answers at {self._url}") from None
        if version != VERSION:
            raise ProtocolError(
                f"{self._url} speaks version {version}, expected {VERSION}: run the same asyncoll there"
            )

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the function `name` returns."""
        return await self._exchange.client.call(0, name, args, kwargs, NO_TYPES)

    async def notify(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Have `name` called, and wait neither for its end nor for its result.

        It has begun when the connection ends without an error, and goes on when the connection is gone.
        """
        await self._exchange.client.notify(0, name, args, kwargs)

    def stream(self, name: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items that the async generator `name` yields."""
        return self._exchange.client.stream(0, name, args, kwargs, NO_TYPES)

    async def methods(self) -> list[Method]:
        """Everything that can be called."""
        return await stub.methods(self._peer)

    def proxy(self, service: Callable[..., S]) -> Proxy[S]:
        """What looks like a `service`, a description of this one: see `Rpc.proxy`."""
        return stub.stub(self._peer, service, None)

    async def flush(self) -> None:
        """Wait until everything that has been notified has begun; not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._exchange.flush()

    async def close(self) -> None:
        """End all calls. Idempotent."""
        await self._exchange.close()

    def _dial(self, owner: SocketCarrier) -> ClientSocket:
        return ClientSocket(owner, self._url, self._key, self._answered)

    def _answered(self, version: int) -> None:
        if not self._version.done():
            self._version.set_result(version)

    def _lost(self, service: int, cause: str) -> None:
        make = partial(ServiceLostError, f"the service at {self._url} is gone: {cause}")
        self._exchange.fail(make)
        if not self._version.done():
            self._version.set_exception(ServiceLostError(f"no service at {self._url}: {cause}"))
            self._version.exception()  # mark it as seen: its waiter may be gone

    def _broken(self, service: int, error: ProtocolError) -> None:
        self._exchange.fail(partial(ProtocolError, f"{self._url} broke the protocol: {error}"))
