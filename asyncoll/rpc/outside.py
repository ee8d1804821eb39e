"""Services outside of a world: `serve` listens at an address, `connect` calls the service there."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncoll.arguments import flag
from asyncoll.errors import DeviceError, ProtocolError, ServiceLostError
from asyncoll.rpc import stub
from asyncoll.rpc.by_socket import SocketCarrier, dial, listen
from asyncoll.rpc.client import Request
from asyncoll.rpc.device_place import DevicePlace
from asyncoll.rpc.exchange import RpcExchange
from asyncoll.rpc.failure import Limit
from asyncoll.rpc.service import FunctionRegistry, Method
from asyncoll.rpc.stub import Peer, Proxy
from asyncoll.runtime.deadlines import remaining_s
from asyncoll.runtime.threads import program_loop
from asyncoll.runtime.uncopied import Uncopied
from asyncoll.tensors import registered
from asyncoll.transport.keys import Key, read_key
from asyncoll.transport.messages.peer_reports import DroppedClients
from asyncoll.transport.messages.service_protocol import VERSION, ClientEnd, ServiceEnd
from asyncoll.transport.staging.opening import open_stager

S = TypeVar("S")
KeyFile = str | os.PathLike[str]
_PATIENCE_S = 10.0  # time limit for the first answer of a service, and for the flush at the end of a connection


@contextlib.asynccontextmanager
async def serve(
    service: object, url: str, *, key_file: KeyFile | None = None, inline: bool = False
) -> AsyncIterator[str]:
    """Serve the methods of an object, or a function, at `url`. An async context manager; yields the address.

    ```python
    class Adder:
        async def add(self, a: int, b: int) -> int:
            return a + b

    async with asyncoll.rpc.serve(Adder(), "ipc:///run/user/1000/adder.socket") as url:
        await asyncio.Event().wait()  # serve until this task is cancelled
    ```

    `service` is an object, whose public methods are called by their names, or a function, which is called by its name.
    The process needs no world. Several clients may be connected; they do not see each other. Values, and where
    functions run: see `Rpc`. Functions run on the loop of the `async with`, or in threads.

    `url` is one of:

    - `ipc://path`: a unix socket. Only processes of this user on this host can connect. The socket of a service that
      was killed is replaced.
    - `tcp://address:port`: an IP address of this host, or `localhost`. Port 0 means a free port; the yielded address
      names it. Without a key only a loopback address is allowed, and every user of this host can call every
      method: prefer ipc.

    `key_file` is a file of mode 0600 with 32 random bytes (`asyncoll key FILE` makes one). With it, connections are
    encrypted, and clients without the same key are refused.

    `inline` says that all functions of `service` are plain and short, and may run on the loop instead of in threads:
    see `Rpc.register`.

    Raises UsageError if the address or the key file cannot be used, or if a function is not plain and `inline` is set.
    A client that violates the protocol is disconnected, with a warning in the log. The calls and streams of a client
    that has ended are cancelled. An exception in a function is raised
    at its client as RemoteError, SystemExit too; the service continues. At the end of the context, calls that still run
    are cancelled, and clients get ServiceLostError.
    """
    program_loop()
    registry = FunctionRegistry()
    registry.add(service, inline=flag(inline, "inline"))
    async with registered.of_context(open_stager):
        server = _ServiceExchange(registry, url, None if key_file is None else read_key(Path(key_file)))
        try:
            yield server.url
        finally:
            await server.close()


class _ServiceExchange:
    """The exchange of a service, and its socket. Clients are numbered in the order in which they connect."""

    def __init__(self, registry: FunctionRegistry, url: str, key: Key | None) -> None:
        self._carrier = carrier = SocketCarrier(self._listen, self._broken, self._lost)
        self._address = url, key
        self._dropped_clients = DroppedClients(f"the service at {url}")
        self._exchange = RpcExchange(carrier, registry, lambda client: -1, self._broken, "this service")

    def _listen(self, owner: SocketCarrier) -> ServiceEnd:
        self._socket = listen(owner, *self._address)
        self.url = self._socket.url
        return self._socket

    async def close(self) -> None:
        self._exchange.server.answer_notifications()
        await self._exchange.close()

    def _broken(self, client: int, error: ProtocolError) -> None:
        self._dropped_clients.log(f"dropped client {client}, which broke the protocol: {error}")
        self._socket.drop(client, f"it dropped this client, which broke the protocol: {error}")
        self._carrier.forget(client)
        self._exchange.server.forget(client)

    def _lost(self, client: int, cause: str) -> None:
        self._exchange.server.forget(client)


@contextlib.asynccontextmanager
async def connect(url: str, *, key_file: KeyFile | None = None) -> AsyncIterator[Connection]:
    """Connect to the service that `serve` provides at `url`. An async context manager; yields a `Connection`.

    ```python
    async with asyncoll.rpc.connect("ipc:///run/user/1000/adder.socket") as client:
        assert await client.call("add", 1, 2) == 3
    ```

    `url` is the address that `serve` has yielded. `key_file` is a file with the key of the service, required if and
    only if the service has one. The process needs no world, but may be a rank of one. The connection belongs to the
    loop of the `async with`: make all calls there.

    Raises ServiceLostError if there is no answer within 10 s or by the end of `asyncoll.deadline`, at once if the
    socket of an `ipc://` address is missing, and if the key is refused; UsageError if the address or the key file
    cannot be used, or if an `ipc://` socket belongs to another user; ProtocolError if the service runs another version.
    At the end of the context without an exception, waits up to 10 s until all notifications have begun. Calls that
    still wait raise ClosedError.
    """
    program_loop()
    async with registered.of_context(open_stager):
        connection = Connection(url, None if key_file is None else read_key(Path(key_file)))
        try:
            await connection.meet()
            yield connection
            await connection.flush()
        finally:
            await connection.close()


class Connection(Uncopied):
    """A connection to a service, from `asyncoll.rpc.connect`. Use it on the loop on which it was made.

    Calls behave like those between ranks: see `Rpc` for values, limits, deadlines and cancellation. The differences:
    `rank` in RemoteError is -1. ASYNCOLL_DEADLINE_S does not apply. A dataclass in a result arrives only through a
    `proxy`, whose annotations name it. If the service is lost, all waiting and all later calls raise ServiceLostError,
    and the functions may or may not have run. There is no reconnection; call `connect` again.
    """

    def __init__(self, url: str, key: Key | None) -> None:
        self._url = url
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._place: DevicePlace | None = None
        self._version: asyncio.Future[int] = self._loop.create_future()
        carrier = SocketCarrier(self._dial, self._broken, self._lost)
        self._exchange = RpcExchange(carrier, FunctionRegistry(), lambda service: -1, self._broken, "this connection")

    async def meet(self) -> None:
        """Wait until the service has answered, and check its version. Called by `connect`."""
        remaining = remaining_s()
        seconds = _PATIENCE_S if remaining is None else min(remaining, _PATIENCE_S)
        silent = partial(
            ServiceLostError, f"no answer from {self._url}: does a service run there, and has it the same key?"
        )
        async with Limit(seconds, silent):
            version = await self._version
        if version != VERSION:
            raise ProtocolError(
                f"{self._url} speaks version {version}, expected {VERSION}: run the same asyncoll there"
            )

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function `name` of the service and return its result."""
        return await self._exchange.client.call(Request(0, name, args, kwargs, place=self._place))

    async def notify(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call the function `name` of the service without waiting for its end. There is no result.

        Returns once the arguments may be changed. The function has begun before a connection ends without an error, and
        it continues after the end of the connection. An exception of the function is logged at the service.
        """
        await self._exchange.client.notify(Request(0, name, args, kwargs))

    def stream(self, name: str, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items that the async generator `name` of the service yields: see `Rpc.stream`."""
        return self._exchange.client.stream(Request(0, name, args, kwargs, place=self._place))

    def to(self, device: object) -> Connection:
        """These calls, with torch tensors of `device` in results: see `Rpc.to`. A copy that fails ends all calls."""
        on_device = self._alias()
        stager = registered.current().devices.stager_named(device)
        on_device._place = DevicePlace(stager, _ServiceCopiesBack(self._exchange, self._loop))
        return on_device

    async def methods(self) -> list[Method]:
        """The functions of the service, with their parameters, annotations and docstrings."""
        return await stub.methods(self._peer())

    def proxy(self, service: Callable[..., S]) -> Proxy[S]:
        """An object with the methods of the class `service`, which run at the service: see `Rpc.proxy`."""
        return stub.stub(self._peer(), service, None)

    async def flush(self) -> None:
        """Wait until all notifications have begun, at most 10 s. Called by `connect` at the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self._exchange.client.flush()

    async def close(self) -> None:
        """End all calls with ClosedError. Idempotent. Called by `connect` at the end."""
        await self._exchange.close()

    def _peer(self) -> Peer:
        return Peer(self._exchange.client, 0, self._url, self._place)

    def _dial(self, owner: SocketCarrier) -> ClientEnd:
        return dial(owner, self._url, self._key, self._answered)

    def _answered(self, version: int) -> None:
        if not self._version.done():
            self._version.set_result(version)

    def _lost(self, service: int, cause: str) -> None:
        self._exchange.fail(partial(ServiceLostError, f"the service at {self._url} is gone: {cause}"))
        if not self._version.done():
            self._version.set_exception(ServiceLostError(f"no service at {self._url}: {cause}"))
            self._version.exception()  # mark it as retrieved, because `meet` may have been cancelled

    def _broken(self, service: int, error: ProtocolError) -> None:
        self._exchange.fail(partial(ProtocolError, f"{self._url} broke the protocol: {error}"))


class _ServiceCopiesBack:
    """Results that are copied to devices. Implements `tensors.staged.CopiesBack`: one that fails ends all calls."""

    def __init__(self, exchange: RpcExchange, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange = exchange
        self._loop = loop

    def begun(self) -> None: ...

    def ended(self, error: DeviceError | None) -> None:
        if error is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there are no calls any more
                self._loop.call_soon_threadsafe(self._exchange.fail, partial(DeviceError, str(error)))
