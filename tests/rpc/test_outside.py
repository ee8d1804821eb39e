"""Services outside of a world, over real sockets: access control, hostile peers, and the loss of either end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import gc
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import uvloop
import zmq

import asyncoll
from asyncoll import (
    ClosedError,
    DeadlineError,
    MismatchError,
    ProtocolError,
    RemoteError,
    ServiceLostError,
    UsageError,
    deadline,
)
from asyncoll.rpc import connect, outside, protocol, segments, serve
from asyncoll.rpc.by_socket import dial, listen
from asyncoll.rpc.service import FunctionRegistry
from asyncoll.transport import addresses
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import segment_stream, service_protocol, service_sockets, service_streams
from asyncoll.transport.messages.segment_stream import HEADER, Lookout, SegmentStream
from asyncoll.transport.messages.service_protocol import BYE, HELLO, VERSION
from asyncoll.transport.wire import SEGMENT_BYTES
from tests.support.processes import PATIENCE_S

pytestmark = pytest.mark.slow


@dataclasses.dataclass
class Answer:
    text: str


class Service:
    def __init__(self) -> None:
        self.begun = 0
        self.ended = asyncio.Event()

    async def echo(self, x: Any) -> Any:
        return x

    def plain(self, a: int) -> int:
        return a + 1

    async def answer(self, text: str) -> Answer:
        return Answer(text)

    async def fail(self) -> None:
        raise LookupError("no")

    async def hang(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def count(self, n: int) -> AsyncIterator[np.ndarray]:
        try:
            for i in range(n):
                self.begun = i
                yield np.full(1000, i)
        finally:
            self.ended.set()


class RemoteService:
    async def answer(self, text: str) -> Answer: ...

    async def plain(self, a: int) -> int: ...

    def count(self, n: int) -> AsyncIterator[np.ndarray]: ...


class WrongService:
    async def plain(self, a: str) -> int: ...


@pytest.fixture(params=["ipc", "tcp", "curve", "ipc, curve"])
def place(request, tmp_path):
    """An address, and the arguments with its key."""
    key = {"key_file": a_key(tmp_path / "key")} if "curve" in request.param else {}
    return f"ipc://{tmp_path}/s" if "ipc" in request.param else "tcp://127.0.0.1:0", key


@pytest.fixture
def ipc(tmp_path):
    return f"ipc://{tmp_path}/s"


def a_key(path: Path, mode: int = 0o600, nbytes: int = 32) -> Path:
    path.write_bytes(os.urandom(nbytes))
    path.chmod(mode)
    return path


@contextlib.contextmanager
def a_socket(context, kind=zmq.DEALER):
    with context.socket(kind) as socket:
        socket.linger = 0
        yield socket


def run(main, loop_factory=uvloop.new_event_loop):
    async def in_time():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(in_time())


def in_a_thread(act: Callable[[], None], release: Callable[[], None]) -> str:
    """The text of the UsageError that `act` raises in a thread.

    If `act` blocks, `release` ends it, and the test fails.
    """
    refusals = []

    def keep():
        try:
            act()
        except UsageError as error:
            refusals.append(str(error))

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join(PATIENCE_S / 4)
    blocks = thread.is_alive()
    if blocks:
        release()
        thread.join()
    assert not blocks, "it blocks"
    return "".join(refusals)


@contextlib.asynccontextmanager
async def both(url, **key):
    service = Service()
    async with serve(service, url, **key) as address, connect(address, **key) as client:
        yield service, client, address


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls(place, loop_factory):
    url, key = place

    async def main():
        async with both(url, **key) as (_, client, _):
            for n in (0, 1, 10_000, 200_000, 5 << 20):
                x = np.arange(n, dtype=np.uint8)
                assert np.array_equal(await client.call("echo", x), x)
            assert await client.call("plain", 1) == 2
            await client.notify("plain", 1)
            assert [item[0] async for item in client.stream("count", 100)] == list(range(100))
            with pytest.raises(RemoteError, match="LookupError at the service: no"):
                await client.call("fail")
            with pytest.raises(UsageError, match="the service: no function 'ech': there is echo"):
                await client.call("ech")
            with pytest.raises(UsageError, match="a must be int, got str"):
                await client.call("plain", "x")
            with pytest.raises(DeadlineError), deadline(0.01):
                await client.call("hang")
            assert {method.name for method in await client.methods()} >= {"echo", "plain", "count"}

    run(main(), loop_factory)


def test_proxies(ipc):
    async def main():
        async with both(ipc) as (_, client, _):
            proxy = client.proxy(RemoteService)
            assert await proxy.answer("x") == Answer("x")
            assert await proxy.plain(1) == 2
            assert [int(item[0]) async for item in proxy.count(3)] == [0, 1, 2]
            with pytest.raises(MismatchError, match="the stub WrongService says"):
                await client.proxy(WrongService).plain("x")

    run(main())


class AwaitedStream(Protocol):
    async def count(self, n: int) -> AsyncIterator[np.ndarray]: ...


class NoStream(Protocol):
    async def count(self, n: int) -> np.ndarray: ...


class DeclaredStream(Protocol):
    def count(self, n: int) -> AsyncGenerator[np.ndarray, None]: ...


def test_a_protocol_declares_a_stream_without_async(ipc):
    declared = r"declare it `def count\(...\) -> AsyncIterator\[ndarray\]`, without `async`"

    async def main():
        async with both(ipc) as (_, client, _):
            with pytest.raises(UsageError, match=declared):
                client.proxy(AwaitedStream)
            with pytest.raises(MismatchError, match=declared):
                await client.proxy(NoStream).count(3)
            async with contextlib.aclosing(client.proxy(DeclaredStream).count(1000)) as items:
                assert [item[0] async for item in items][:3] == [0, 1, 2]

    run(main())


def test_a_call_of_the_other_kind_says_what_to_use(ipc):
    async def main():
        async with both(ipc) as (_, client, _):
            with pytest.raises(UsageError, match="count streams: use `stream`"):
                await client.call("count", 3)
            with pytest.raises(UsageError, match="plain does not stream: use `call`"):
                await anext(client.stream("plain", 3))

    run(main())


class Told:
    """Tells where its streams end."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def count(self, pause_s: float) -> AsyncGenerator[int, None]:
        try:
            for number in range(1000):
                yield number
                await asyncio.sleep(pause_s if number else 0)
        except BaseException as error:
            self.ends.put_nowait(type(error).__name__)
            raise


@pytest.mark.parametrize(("pause_s", "end"), [(0.0, "GeneratorExit"), (1000.0, "CancelledError")])
def test_a_stream_that_is_closed_ends_where_it_waits(pause_s, end, ipc):
    async def main():
        service = Told()
        async with asyncoll.rpc.serve(service, ipc), asyncoll.rpc.connect(ipc) as client:
            async with contextlib.aclosing(client.proxy(Told).count(pause_s)) as numbers:
                async for number in numbers:
                    if number == 1:
                        await asyncio.sleep(0.05)  # the generator has come as far as it may
                        break
            assert await asyncio.wait_for(service.ends.get(), PATIENCE_S) == end

    run(main())


def test_a_function_is_a_service_too(ipc):
    async def double(x: int) -> int:
        return 2 * x

    async def main():
        async with asyncoll.rpc.serve(double, ipc), asyncoll.rpc.connect(ipc) as client:
            assert await client.call("double", 4) == 8

    run(main())


def test_inline_functions_of_a_service_run_on_its_loop(ipc):
    def here() -> bool:
        return threading.get_ident() == threading.main_thread().ident

    async def main():
        async with asyncoll.rpc.serve(here, ipc, inline=True), asyncoll.rpc.connect(ipc) as client:
            assert await client.call("here")
        with pytest.raises(UsageError, match="`inline` is for plain functions"):
            async with asyncoll.rpc.serve(Service(), ipc, inline=True):
                pass

    run(main())


def test_many_clients_at_once(ipc):
    async def use(number):
        async with connect(ipc) as client:
            x = np.full(100_000, number)
            for _ in range(5):
                assert np.array_equal(await client.call("echo", x), x)

    async def main():
        async with serve(Service(), ipc):
            await asyncio.gather(*map(use, range(20)))

    run(main())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_call_after_a_cancelled_call_is_right(ipc, loop_factory):
    draw = random.Random(1)

    async def main():
        async with both(ipc) as (_, client, _):
            for number in range(300):
                x = np.full(draw.choice([1, 200_000]), number)
                kind = draw.choice(["echo", "hang", "count"])
                call = (
                    read_on(client.stream("count", 100))
                    if kind == "count"
                    else client.call(kind, *[x][kind == "hang" :])
                )
                victim = asyncio.ensure_future(call)
                for _ in range(draw.randrange(100)):
                    await asyncio.sleep(0)
                victim.cancel()
                await asyncio.wait([victim])
                if not victim.cancelled():
                    victim.result()
                assert np.array_equal(await client.call("echo", x), x)
            while client._exchange.client._pending:
                await asyncio.sleep(0)

    run(main(), loop_factory)


# -- loss of either end --------------------------------------------------------------------------


def test_calls_to_a_service_that_ends_raise(place):
    url, key = place

    async def main():
        service = Service()
        async with contextlib.AsyncExitStack() as stack:
            ending = contextlib.AsyncExitStack()
            address = await ending.enter_async_context(serve(service, url, **key))
            client = await stack.enter_async_context(connect(address, **key))
            call = asyncio.ensure_future(client.call("hang"))
            items = client.stream("count", 10**9)
            await anext(items)
            while not service.begun:
                await asyncio.sleep(0)
            await ending.aclose()
            for waiting in (call, read_on(items), client.call("echo", 1)):
                with pytest.raises(ServiceLostError, match=r"the service at .* is gone: its connection closed"):
                    await waiting
            # A new service at the same address does not revive the connection.
            async with serve(Service(), address, **key):
                with pytest.raises(ServiceLostError):
                    await client.call("echo", 1)
                async with connect(address, **key) as again:
                    assert await again.call("echo", 1) == 1

    run(main())


async def read_on(items):
    async for _ in items:
        pass


FREEZING = """
import asyncio, os, signal, sys
from asyncoll.rpc import serve

class Service:
    async def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

async def main():
    async with serve(Service(), sys.argv[1]) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("url", ["ipc", "tcp://127.0.0.1:0"])
def test_a_service_that_freezes_is_lost(url, tmp_path, monkeypatch):
    monkeypatch.setattr(service_protocol, "FREEZE_S", 0.5)
    url = f"ipc://{tmp_path}/s" if url == "ipc" else url

    async def main(address):
        async with connect(address) as client:
            with pytest.raises(ServiceLostError, match="it has shown no sign of life"):
                await client.call("freeze")

    with subprocess.Popen([sys.executable, "-c", FREEZING, url], stdout=subprocess.PIPE, text=True) as service:
        try:
            run(main(service.stdout.readline().strip()))
        finally:
            service.kill()


FORKED = """
import asyncio, ctypes, os, signal, sys
from asyncoll.rpc import serve

class Service:
    async def fork(self) -> int:
        child = ctypes.PyDLL(None).fork()  # without Python's hooks: the child keeps the connections
        if not child:
            signal.pause()
        return child
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with serve(Service(), sys.argv[1]):
        print(flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_service_that_dies_is_lost_although_a_child_keeps_its_connections(ipc, monkeypatch):
    monkeypatch.setattr(service_protocol, "FREEZE_S", 0.5)

    async def main():
        async with connect(ipc) as client:
            child = await client.call("fork")
            try:
                with pytest.raises(ServiceLostError, match="its process has ended"):
                    await client.call("die")
            finally:
                os.kill(child, signal.SIGKILL)

    with subprocess.Popen([sys.executable, "-c", FORKED, ipc], stdout=subprocess.PIPE, text=True) as service:
        try:
            service.stdout.readline()
            run(main())
        finally:
            service.kill()


@pytest.mark.parametrize("what", ["call", "stream"])
def test_calls_of_a_lost_client_are_cancelled(place, what):
    url, key = place

    async def main():
        service = Service()
        async with serve(service, url, **key) as address:
            async with connect(address, **key) as client:
                if what == "call":
                    call = asyncio.create_task(client.call("hang"))
                    while not service.begun:
                        await asyncio.sleep(0)
                else:
                    items = client.stream("count", 10**9)
                    await anext(items)
            if what == "call":
                with pytest.raises(ClosedError):
                    await call
            await service.ended.wait()
            gc.collect()

    run(main())


class Ending:
    """A service that its clients end."""

    def __init__(self) -> None:
        self.ended, self.loop = asyncio.Event(), asyncio.get_running_loop()

    async def stop(self) -> None:
        self.ended.set()

    async def stop_and_go_on(self) -> None:
        self.ended.set()
        await asyncio.Event().wait()

    def stop_in_thread(self) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)


@pytest.mark.parametrize("how", ["notify stop", "notify stop_and_go_on", "notify stop_in_thread", "call stop"])
def test_a_call_may_end_the_service(place, how):
    """A notification has begun, so the connection ends without an error; a call that was answered returns.

    The end of the connection must not overtake the answers.
    """
    url, key = place
    kind, name = how.split()

    async def end():
        service, listens = Ending(), asyncio.get_running_loop().create_future()

        async def live():
            async with serve(service, url, **key) as address:
                listens.set_result(address)
                await service.ended.wait()

        life = asyncio.create_task(live())
        async with connect(await listens, **key) as client:
            await getattr(client, kind)(name)
        await life

    async def main():
        for _ in range(10):
            await end()

    asyncio.run(main())


class Ledger(Ending):
    """A service that its clients end, and which notes what has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, int]] = []

    async def note(self, client: int, number: int, _: bytes) -> int:
        self.begun.append((client, number))
        await asyncio.sleep(0)
        return number


def drawn_life(draw: random.Random) -> list[list[tuple[str, int]]]:
    """The messages of each client, with their bytes. After its messages the first client ends the service."""
    return [
        [(draw.choice(["call", "notify", "notify"]), draw.choice([0, 10, 100_000])) for _ in range(draw.randrange(8))]
        for _ in range(draw.randrange(1, 4))
    ]


@pytest.mark.parametrize("seed", range(6))
def test_each_message_before_the_end_of_a_service_counts(place, seed):
    """What the ending client has sent before has begun, and no error tells it otherwise. Others lose calls at most."""
    url, key = place
    draw = random.Random(seed)

    async def send(client, mine, messages, answered):
        for number, (kind, nbytes) in enumerate(messages):
            answer = await getattr(client, kind)("note", mine, number, bytes(nbytes))
            if kind == "call":
                assert answer == number
                answered.append((mine, number))

    async def other(address, mine, messages, answered):
        with contextlib.suppress(ServiceLostError):
            async with connect(address, **key) as client:
                await send(client, mine, messages, answered)

    async def live_once(clients, how):
        service, listens = Ledger(), asyncio.get_running_loop().create_future()
        answered: list[tuple[int, int]] = []

        async def live():
            async with serve(service, url, **key) as address:
                listens.set_result(address)
                await service.ended.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(live())
            address = await listens
            for mine, messages in enumerate(clients[1:], 1):
                group.create_task(other(address, mine, messages, answered))
            async with connect(address, **key) as client:
                await send(client, 0, clients[0], answered)
                await client.notify(how)
        own = [number for client, number in service.begun if client == 0]
        assert own == list(range(len(clients[0])))
        assert set(answered) <= set(service.begun)
        assert len(service.begun) == len(set(service.begun))

    async def main():
        for _ in range(10):
            await live_once(drawn_life(draw), draw.choice(["stop", "stop_and_go_on", "stop_in_thread"]))

    run(main())


def test_notifications_begin_before_their_client_has_left_and_continue(ipc):
    begun, ended = [], []

    class Notes:
        def __init__(self) -> None:
            self.go_on = asyncio.Event()
            self.all_ended = asyncio.Event()

        async def note(self, number: int) -> None:
            begun.append(number)
            await self.go_on.wait()
            ended.append(number)
            if len(ended) == 100:
                self.all_ended.set()

    async def main():
        notes = Notes()
        async with serve(notes, ipc):
            for number in range(100):
                async with connect(ipc) as client:
                    await client.notify("note", number)
            assert begun == [*range(100)]
            notes.go_on.set()
            await notes.all_ended.wait()

    run(main())


@pytest.mark.parametrize("url", ["ipc", "tcp://127.0.0.1:0"])
def test_lost_clients_leave_no_state(url, ipc):
    url = ipc if url == "ipc" else url

    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._ServiceExchange(registry, url, None)
        runs = server._exchange.server
        for _ in range(5):
            async with connect(server.url) as client:
                hanging = [asyncio.ensure_future(client.call("hang")) for _ in range(3)]
                await asyncio.sleep(0)
                for call in hanging:
                    call.cancel()
                await asyncio.wait(hanging)
                # Like a CANCEL that crosses the answer to its call.
                client._exchange.client._tell(protocol.CANCEL, 0, 0)
                await client.notify("echo", 1)
                assert await client.call("echo", 1) == 1
        socket = server._socket
        while socket._clients or runs._calls or server._carrier._peers:
            await asyncio.sleep(0)
        assert not (
            socket._strangers or socket._dropped if url.startswith("ipc") else socket._names or socket._descriptors
        )
        assert not [*runs._streams, *runs._counts, *runs._answers, *runs._answering]
        await server.close()

    run(main())


def test_a_service_that_is_cancelled_twice_is_closed(ipc):
    """The second cancellation arrives while it waits for a function to end."""
    is_there, serves, stops = Path(ipc.removeprefix("ipc://")).exists, asyncio.Event(), asyncio.Event()

    class Stubborn:
        async def stay(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stops.set()
                await asyncio.Event().wait()

    async def serve_on():
        async with serve(Stubborn(), ipc):
            serves.set()
            await asyncio.Event().wait()

    async def main():
        serving = asyncio.ensure_future(serve_on())
        await serves.wait()
        async with connect(ipc) as client:
            call = asyncio.ensure_future(client.call("stay"))
            assert await client.methods()  # it has begun
            serving.cancel()
            await stops.wait()
            serving.cancel()
            await asyncio.wait([serving])
            assert serving.cancelled()
            assert not is_there()
            with pytest.raises(ServiceLostError, match="its connection closed"):
                await call

    run(main())


CROWDED = """
import asyncio, socket, sys
from asyncoll.rpc import serve

def come_and_go(count):
    for _ in range(count):
        with socket.socket() as hostile:
            hostile.connect(where)

async def meet(count: int) -> None:
    come_and_go(count)

async def main():
    global where
    async with serve(meet, "tcp://127.0.0.1:0") as url:
        where = "127.0.0.1", int(url.rpartition(":")[2])
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        come_and_go(3000)

asyncio.run(main())
"""


def test_a_service_that_computes_survives_many_unauthenticated_peers():
    """The loop of the service is blocked, so it does not read the events of ZeroMQ."""

    async def main(url):
        async with connect(url) as client:
            await client.call("meet", 3000)
            assert await client.methods()

    command = [sys.executable, "-c", CROWDED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        try:
            run(main(service.stdout.readline().strip()))
            service.stdin.close()
            assert service.wait(PATIENCE_S) == 0
        finally:
            service.kill()


def test_a_service_that_computes_finds_the_connections_that_came_meanwhile(ipc, caplog):
    """A backlog full of connections, half of them closed and half silent, delays nobody else."""
    path = ipc.removeprefix("ipc://")

    async def main():
        with contextlib.ExitStack() as crowd:
            async with both(ipc) as (_, client, _):
                for number in range(service_protocol.BACKLOG):  # the loop, which is blocked here, accepts none
                    stranger = crowd.enter_context(socket.socket(socket.AF_UNIX))
                    stranger.connect(path)
                    if number % 2:
                        stranger.close()
                assert await client.call("echo", 1) == 1
                async with connect(ipc) as another:
                    assert await another.call("echo", 2) == 2

    run(main())


def test_messages_to_a_lost_client_are_dropped(ipc):
    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._ServiceExchange(registry, ipc, None)
        async with connect(ipc) as client:
            calls = [asyncio.ensure_future(client.call("echo", np.ones(40 << 20, np.uint8))) for _ in range(3)]
            while not server._exchange.server._tasks:
                await asyncio.sleep(0)
        assert all(isinstance(end, ClosedError) for end in await asyncio.gather(*calls, return_exceptions=True))
        while server._exchange.server._tasks or server._carrier._peers:
            await asyncio.sleep(0.001)
        await server.close()

    run(main())


def test_a_client_that_is_killed(ipc):
    script = (
        "import asyncio, sys\nfrom asyncoll.rpc import connect\n"
        "async def main():\n async with connect(sys.argv[1]) as client: await client.call('hang')\n"
        "asyncio.run(main())"
    )

    async def main():
        service = Service()
        async with serve(service, ipc), connect(ipc) as client:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, ipc)
            while not service.begun:
                await asyncio.sleep(0.01)
            process.kill()
            await process.wait()
            await service.ended.wait()
            assert await client.call("echo", 1) == 1

    run(main(), asyncio.new_event_loop)


def test_no_service_at_the_address(tmp_path):
    async def main():
        for url in (f"ipc://{tmp_path}/none", "tcp://127.0.0.1:1"):
            with pytest.raises(ServiceLostError, match="no service at"):
                async with connect(url):
                    raise AssertionError

    run(main())


def test_a_silent_peer_at_the_address(ipc):
    async def main():
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as silent, socket.socket(socket.AF_UNIX) as other:
            silent.bind("tcp://127.0.0.1:*")
            other.bind(ipc.removeprefix("ipc://"))
            other.listen()
            for url in (silent.last_endpoint.decode(), ipc):
                with deadline(0.05), pytest.raises(ServiceLostError, match="no answer from"):
                    async with connect(url):
                        raise AssertionError

    run(main())


def test_a_client_and_a_service_of_which_one_has_a_key(ipc, tmp_path):
    key = {"key_file": a_key(tmp_path / "key")}

    async def main():
        for own, other in ((key, {}), ({}, key)):
            async with both(ipc, **own) as (_, client, _):
                with pytest.raises(ServiceLostError, match="no service at"):
                    async with connect(ipc, **other):
                        raise AssertionError
                assert await client.call("echo", 1) == 1

    run(main())


STOPPED = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print(flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_error_says_that_a_stopped_service_does_not_answer(ipc, monkeypatch):
    """The kernel accepts connections for a stopped process."""
    monkeypatch.setattr(service_protocol, "FREEZE_S", 0.05)

    async def main():
        with pytest.raises(ServiceLostError, match=r"no service at .*: it has shown no sign of life"):
            async with connect(ipc):
                raise AssertionError

    command = [sys.executable, "-c", STOPPED, ipc.removeprefix("ipc://")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stopped:
        stopped.stdout.readline()
        run(main())
        stopped.kill()


def test_a_hello_that_comes_while_the_service_computes_is_in_time(ipc, monkeypatch):
    """The time limit is over when the service reads it."""
    monkeypatch.setattr(service_protocol, "HANDSHAKE_S", 0.0)

    async def main():
        async with both(ipc) as (_, client, _):
            assert await client.call("echo", 1) == 1

    run(main())


def test_connect_refuses_a_service_without_a_heartbeat(monkeypatch):
    """Without a heartbeat, a service that freezes right after its answer would never be missed."""
    monkeypatch.setattr(service_sockets.Heartbeat, "_handle_event", lambda *_: None)

    async def main():
        async with serve(Service(), "tcp://127.0.0.1:0") as url:
            with deadline(0.05), pytest.raises(ServiceLostError, match="no answer from"):
                async with connect(url):
                    raise AssertionError

    run(main())


# -- access control ------------------------------------------------------------------------------


BAD_ADDRESSES = {
    "tcp://10.1.2.3:5": "can be reached from other hosts: pass `key_file`",
    "tcp://[2001:db8::1]:5": "can be reached from other hosts",
    "tcp://0.0.0.0" + ":5": "means every interface",
    "tcp://[::]:5": "means every interface",
    "tcp://*" + ":5": "give the host as localhost, or as the IP address",
    "tcp://example.org:5": "give the host as localhost, or as the IP address",
    "tcp://127.0.0.1": "is no address of a service",
    "ipc://@abstract": "is no address of a service",
    "ipc://": "is no address of a service",
    "inproc://x": "is no address of a service",
    "": "is no address of a service",
    f"ipc:///tmp/{'x' * 200}": "cannot",
}


@pytest.mark.parametrize(("url", "message"), BAD_ADDRESSES.items())
def test_addresses_that_are_refused(url, message):
    async def main():
        with pytest.raises(UsageError, match=message):
            async with serve(Service(), url):
                raise AssertionError
        with pytest.raises(UsageError, match=message):
            async with connect(url):
                raise AssertionError

    run(main())


def test_localhost_is_an_address():
    async def main():
        async with (
            serve(Service(), "tcp://localhost:0") as url,
            connect(url.replace("127.0.0.1", "localhost")) as client,
        ):
            assert url.startswith("tcp://127.0.0.1:")
            assert await client.methods()

    run(main())


def test_every_interface_is_refused_with_a_key_too(tmp_path):
    async def main():
        with pytest.raises(UsageError, match="means every interface"):
            async with serve(Service(), "tcp://0.0.0.0" + ":0", key_file=a_key(tmp_path / "key")):
                raise AssertionError

    run(main())


@pytest.mark.parametrize(
    ("mode", "nbytes", "message"),
    [(0o640, 32, "others than its owner"), (0o600, 31, "must have 32 bytes"), (None, 0, "cannot read the key")],
)
def test_keys_that_are_refused(tmp_path, mode, nbytes, message):
    if mode is not None:
        a_key(tmp_path / "key", mode, nbytes)

    async def main():
        with pytest.raises(UsageError, match=message):
            async with serve(Service(), "tcp://127.0.0.1:0", key_file=tmp_path / "key"):
                raise AssertionError

    run(main())


def test_a_pipe_as_key_file_is_refused_at_once(tmp_path):
    path = tmp_path / "key"
    os.mkfifo(path, 0o600)

    async def main():
        async with serve(Service(), "tcp://127.0.0.1:0", key_file=path):
            raise AssertionError

    assert "must have 32 bytes" in in_a_thread(
        lambda: run(main(), asyncio.new_event_loop), lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    )


def test_a_client_without_the_key_is_refused(tmp_path, caplog):
    right, wrong = a_key(tmp_path / "right"), a_key(tmp_path / "wrong")

    async def main():
        async with both("tcp://127.0.0.1:0", key_file=right) as (_, client, url):
            for key in ({}, {"key_file": wrong}):
                with pytest.raises(ServiceLostError, match="no service at"):
                    async with connect(url, **key):
                        raise AssertionError
            assert await client.call("echo", 1) == 1

    run(main())


def test_a_client_with_the_servers_public_key_only_is_refused(tmp_path, caplog):
    key = a_key(tmp_path / "key")

    async def main():
        async with both("tcp://127.0.0.1:0", key_file=key) as (_, client, url):
            with zmq.Context() as context, a_socket(context) as hostile:
                hostile.curve_publickey, hostile.curve_secretkey = zmq.curve_keypair()
                hostile.curve_serverkey = service_sockets._pair(Key(key.read_bytes()), "server")[0]
                hostile.connect(url)
                while "refused a client" not in caplog.text:
                    await asyncio.sleep(0.01)
            assert await client.call("echo", 1) == 1

    run(main())


def test_a_socket_is_accessible_to_its_user_only(ipc):
    async def main():
        async with serve(Service(), ipc):
            mode = os.stat(ipc.removeprefix("ipc://")).st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600

    run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused(tmp_path):
    url = f"ipc://{tmp_path}/s"
    script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\nprint(len(s.recv(100)))"

    async def main():
        async with both(url) as (_, client, _):
            path = url.removeprefix("ipc://")
            os.chmod(path, 0o666)
            for folder in (tmp_path, *tmp_path.parents[:3]):
                os.chmod(folder, stat.S_IMODE(folder.stat().st_mode) | 0o011)
            done = await asyncio.to_thread(
                subprocess.run,
                ["/usr/bin/env", "python3", "-c", script, path],
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.strip() in ("0", ""), "it was greeted"
            assert await client.call("echo", 1) == 1

    run(main())


def test_connect_refuses_a_socket_of_another_user(ipc):
    path = Path(ipc.removeprefix("ipc://"))
    path.write_text("a file")

    async def refused(message):
        with pytest.raises(UsageError, match=message):
            async with connect(ipc):
                raise AssertionError

    async def main():
        async with serve(Service(), ipc):
            os.chown(path, 65534, -1)
            await refused("it belongs to another user, 65534")

    run(refused("it is not a socket"))
    path.unlink()
    if os.geteuid() == 0:
        run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_connect_notices_a_listening_process_of_another_user(tmp_path):
    path = tmp_path / "s"
    script = (
        "import os, socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\nos.setuid(65534)\n"
        "s.listen()\nprint(flush=True)\nsys.stdin.read()"
    )

    async def main():
        with pytest.raises(ServiceLostError, match=r"no service at .*: it is another user's"):
            async with connect(f"ipc://{path}"):
                raise AssertionError

    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        run(main())


def test_an_address_in_use_is_refused_and_a_stale_one_is_reused(ipc):
    path = Path(ipc.removeprefix("ipc://"))
    left = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"

    async def main():
        async with serve(Service(), ipc):
            with pytest.raises(UsageError, match="it is there already, and in use"):
                async with serve(Service(), ipc):
                    raise AssertionError
            async with connect(ipc) as client:
                assert await client.call("echo", 1) == 1

    async def refused():
        with pytest.raises(UsageError, match="it is there already"):
            async with serve(Service(), ipc):
                raise AssertionError

    async def welcome():
        async with both(ipc) as (_, client, _):
            assert await client.call("echo", 1) == 1

    run(main())
    assert not path.exists()
    path.write_text("a file of somebody's")
    run(refused())
    path.unlink()
    subprocess.run([sys.executable, "-c", left, path], check=True, timeout=PATIENCE_S)
    assert path.is_socket()
    run(welcome())


def test_an_address_of_a_stopped_process_is_in_use(ipc):
    """Its backlog is full, so a connection attempt blocks."""
    path = ipc.removeprefix("ipc://")

    def listen():
        with addresses.prepare(ipc, has_key=False):
            raise AssertionError

    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(socket.socket(socket.AF_UNIX))
        stopped.bind(path)
        stopped.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        assert "it is there already, and in use" in in_a_thread(listen, stopped.close)


def test_of_two_services_that_bind_one_address_one_fails(ipc, monkeypatch):
    """The second service waits until the first, which has begun to bind, listens."""
    has_come, lock, outcomes = threading.Event(), fcntl.flock, []

    def waits(*arguments):
        has_come.set()
        lock(*arguments)

    def listen_too():
        try:
            with addresses.prepare(ipc, has_key=False):
                outcomes.append("it listens too")
        except UsageError as error:
            outcomes.append(str(error))
        has_come.set()

    other = threading.Thread(target=listen_too)
    with socket.socket(socket.AF_UNIX) as listener:
        with addresses.prepare(ipc, has_key=False):
            monkeypatch.setattr(fcntl, "flock", waits)
            other.start()
            has_come.wait()
            listener.bind(ipc.removeprefix("ipc://"))
            listener.listen()
        other.join()
    assert outcomes == [f"cannot listen on {ipc}: it is there already, and in use"]


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_service_removes_its_file_before_others_may_listen_there(is_relative, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, unlink, was_served = tmp_path / "s", Path.unlink, []

    def watched(file, *arguments, **options):
        was_served.append(not addresses.refuses_connections(f"ipc://{file}"))
        unlink(file, *arguments, **options)

    async def main():
        async with serve(Service(), "ipc://s" if is_relative else f"ipc://{path}"):
            assert path.is_socket()
            os.chdir("/")
            monkeypatch.setattr(Path, "unlink", watched)

    run(main())
    assert was_served == [True]
    assert not path.exists()


def test_a_service_leaves_the_file_of_the_next_one(ipc):
    remove = Path(ipc.removeprefix("ipc://")).unlink

    async def main():
        async with contextlib.AsyncExitStack() as new:
            async with serve(Service(), ipc):
                remove()
                await new.enter_async_context(serve(Service(), ipc))
            async with connect(ipc) as client:
                assert await client.call("echo", 1) == 1

    run(main())


@pytest.mark.parametrize("url", ["ipc://\0name", "ipc:///tmp/na\0me", "tcp://127.0.0.1\0:0"])
def test_an_address_with_a_nul_is_refused(url):
    async def main():
        with pytest.raises(UsageError, match="contains a NUL"):
            async with serve(Service(), url):
                raise AssertionError
        with pytest.raises(UsageError, match="contains a NUL"):
            async with connect(url):
                raise AssertionError

    run(main())


def test_a_folder_that_others_keep_locked_is_refused(ipc, tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "_LOCK_ATTEMPTS", 3)

    def listen():
        with addresses.prepare(ipc, has_key=False):
            raise AssertionError

    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert "another process keeps a lock on the folder" in in_a_thread(
            listen, lambda: fcntl.flock(folder, fcntl.LOCK_UN)
        )
    finally:
        os.close(folder)


# -- hostile peers -------------------------------------------------------------------------------


def segment(kind: int, number: int, payload: bytes = b"") -> bytes:
    """A segment over a unix socket."""
    return HEADER.pack(len(payload), kind, number) + payload


def whole(head: bytes) -> tuple[int, int, bytes]:
    return segments._WHOLE, 0, segments._TABLE.pack(0, len(head)) + head


def a_call(number: int, body: bytes, name: str) -> tuple[int, int, bytes]:
    return whole(protocol.encode(protocol.CALL, number, body, name=name)[0])


@contextlib.contextmanager
def a_connection(url: str):
    """A raw connection to the unix socket of a service."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(url.removeprefix("ipc://"))
        peer.setblocking(False)
        yield peer


@contextlib.contextmanager
def hostile_at(url: str):
    """Yields a function that sends segments (kind, number and perhaps payload) to the service at `url`."""
    if url.startswith("ipc"):
        with a_connection(url) as peer:
            yield lambda *messages: peer.sendall(b"".join(segment(*message) for message in messages))
    else:
        with zmq.Context() as context, a_socket(context) as hostile:
            hostile.connect(url)

            def send(*messages):
                for kind, number, *payload in messages:
                    hostile.send(service_sockets._FORM.pack(kind, number) + b"".join(payload))

            yield send


async def heard(peer: socket.socket, client: Any, nbytes: int = 1 << 16) -> bytes:
    """What comes over a raw connection next, and nothing at its end; the client of the service is served meanwhile."""
    while True:
        with contextlib.suppress(BlockingIOError):
            try:
                return peer.recv(nbytes)
            except ConnectionResetError:
                return b""
        assert await client.call("echo", 1) == 1


URLS = ["ipc", "tcp://127.0.0.1:0"]


@pytest.fixture(params=URLS)
def keyless(request, ipc):
    return ipc if request.param == "ipc" else request.param


HOSTILE = {
    "no hello": [(0, 0, b"hi")],
    "random bytes": [(HELLO, VERSION), (255, 1, b"\xff" * 100), (0xFF, 1 << 60, b"\xff" * 100), (9, 9, b"\xff")],
    "a segment of nothing": [(HELLO, VERSION), (segments._PART, 3, b"x")],
    "credit for nothing": [(HELLO, VERSION), (segments._CREDIT, 1 << 40)],
    "a lot of memory": [(HELLO, VERSION), (segments._FIRST, 0, b"\1\0\0\0\0\0\0\0" + b"\xff" * 8)],
    "no message": [(HELLO, VERSION), whole(b"\0" * 100)],
    "a bad call": [(HELLO, VERSION), a_call(1, b"\xc1", "echo")],
    "two of one number": [(HELLO, VERSION), *[a_call(1, b"\x92\x90\x80", "hang")] * 2],
    "too many calls": [
        (HELLO, VERSION),
        *[a_call(number, b"\x92\x90\x80", "hang") for number in range(2 * protocol.CALLS_MAX + 1)],
    ],
}


async def with_hostile_client(url, messages, caplog):
    """A service and a client continue while a hostile client sends invalid messages."""
    async with both(url) as (_, client, address):
        with hostile_at(address) as send:
            send(*messages)
            while "dropped" not in caplog.text:
                assert await client.call("echo", 1) == 1
        assert await client.call("echo", 1) == 1


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_clients_are_dropped_and_logged(keyless, messages, caplog):
    run(with_hostile_client(keyless, messages, caplog))


def test_dropped_clients_cannot_fill_the_log(keyless, caplog):
    async def main():
        async with both(keyless) as (_, client, address):
            with contextlib.ExitStack() as crowd:
                for _ in range(8):
                    crowd.enter_context(hostile_at(address))(*HOSTILE["a segment of nothing"])
                while "(dropped client number 8)" not in caplog.text:
                    assert await client.call("echo", 1) == 1

    run(main())
    assert len(caplog.records) == 4  # the 1st, 2nd, 4th and 8th


def test_a_message_of_too_many_frames_is_ignored():
    async def main():
        async with both("tcp://127.0.0.1:0") as (_, client, url):
            with zmq.Context() as context, a_socket(context) as hostile:
                hostile.connect(url)
                form = service_sockets._FORM
                for message in ([form.pack(HELLO, VERSION)], [b"x"], [b"x", b"y", b"z"], [form.pack(77, 0)]):
                    hostile.send_multipart(message)
                while not hostile.poll(0):
                    assert await client.call("echo", 1) == 1
                assert hostile.recv()[0] == HELLO
                while not hostile.poll(0):
                    assert await client.call("echo", 1) == 1
                assert b"kind 77" in hostile.recv()

    run(main())


def test_a_peer_of_an_old_zeromq_is_ignored(caplog):
    """ZMTP 1.0 tells no descriptor. Its messages of two frames once left the second ones for the next reads."""

    async def main():
        async with both("tcp://127.0.0.1:0") as (_, client, url):
            host, port = url.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(b"\x01\x00" + b"\x02\x01A\x02\x00B" * 20)
                while "unauthenticated peer number 16" not in caplog.text:
                    assert await client.call("echo", 1) == 1
            for number in range(100):
                assert await client.call("echo", number) == number

    run(main())


def test_frames_that_are_too_long_end_the_connection():
    async def main():
        async with both("tcp://127.0.0.1:0") as (_, client, url):
            with zmq.Context() as context, a_socket(context) as hostile:
                monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                hostile.connect(url)
                hostile.send(service_sockets._FORM.pack(HELLO, VERSION) + bytes(2 * SEGMENT_BYTES))
                while not monitor.poll(0):
                    assert await client.call("echo", 1) == 1
                hostile.disable_monitor()
                monitor.close(linger=0)

    run(main())


def test_a_segment_that_is_announced_too_long_ends_the_connection(ipc, monkeypatch, caplog):
    """Its header is enough. The client is told, and is disconnected even if it stays."""
    monkeypatch.setattr(service_protocol, "HANDSHAKE_S", 0.05)

    async def main():
        async with both(ipc) as (_, client, _):
            with a_connection(ipc) as hostile:
                hostile.sendall(segment(HELLO, VERSION) + HEADER.pack(segment_stream.PAYLOAD_MAX + 1, 0, 0))
                told = await heard(hostile, client)
                while len(told) <= 2 * HEADER.size:
                    told += await heard(hostile, client)
                hostile.sendall(segment(0, 0, b"more"))  # which is ignored
                while rest := await heard(hostile, client):
                    told += rest
        assert told.startswith(segment(HELLO, VERSION))
        nbytes, kind, _ = HEADER.unpack_from(told, HEADER.size)
        assert (nbytes, kind) == (len(told) - 2 * HEADER.size, BYE)
        assert b"it dropped this client, which broke the protocol: a segment of" in told

    run(main())
    assert caplog.text.count("dropped client 1, which broke the protocol") == 1


BEGINNINGS = {
    "zeromq": b"\xff" + bytes(8) + b"\x7f",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(5),
    "a hello with too much behind it": HEADER.pack(1 << 20, HELLO, VERSION),
    "a hello with a payload": segment(HELLO, VERSION, b"x"),
    "a farewell": segment(BYE, 0, b"x"),
}


@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_strangers_are_disconnected_at_their_first_bytes(ipc, beginning, caplog):
    async def main():
        async with both(ipc) as (_, client, _):
            with a_connection(ipc) as stranger:
                stranger.sendall(beginning)
                assert await heard(stranger, client) == b""

    run(main())
    assert "dropped an unauthenticated peer: it does not begin with a hello" in caplog.text


@pytest.mark.parametrize("beginning", [b"", segment(HELLO, VERSION)[:4], segment(HELLO, VERSION)[:-1]])
def test_slow_strangers_are_disconnected_after_a_time(ipc, beginning, monkeypatch):
    async def main():
        async with serve(Service(), ipc), connect(ipc) as client:
            monkeypatch.setattr(service_protocol, "HANDSHAKE_S", 0.05)
            with a_connection(ipc) as stranger:
                stranger.sendall(beginning)
                assert await heard(stranger, client) == b""

    run(main())


def test_a_crowd_of_silent_strangers_keeps_no_client_out(ipc, monkeypatch, caplog):
    monkeypatch.setattr(service_streams, "_UNGREETED_MAX", 2)
    monkeypatch.setattr(service_streams, "_PAUSE_S", 0.01)
    monkeypatch.setattr(service_protocol, "HANDSHAKE_S", 1000 * PATIENCE_S)

    async def main():
        async with serve(Service(), ipc):
            with contextlib.ExitStack() as crowd:
                for _ in range(5):
                    crowd.enter_context(a_connection(ipc))
                async with connect(ipc) as client:
                    assert await client.call("echo", 1) == 1
                    for _ in range(5):
                        crowd.enter_context(a_connection(ipc))
                    assert await client.call("echo", 2) == 2

    run(main())
    assert "closed a connection without a hello, to accept another one" in caplog.text


def test_silent_strangers_take_no_descriptor_that_a_client_needs(ipc, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(service_streams, "_PAUSE_S", 0.01)
    monkeypatch.setattr(service_protocol, "HANDSHAKE_S", 1000 * PATIENCE_S)

    async def main():
        async with both(ipc) as (_, client, _):
            with contextlib.ExitStack() as crowd:
                for _ in range(100):
                    crowd.enter_context(a_connection(ipc))
                late = crowd.enter_context(a_connection(ipc))
                late.sendall(segment(HELLO, VERSION))
                crowd.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, limits[1]))
                assert await heard(late, client) == segment(HELLO, VERSION)

    run(main())


def test_silent_strangers_take_at_most_a_share_of_the_descriptors(ipc):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        try:
            server = outside._ServiceExchange(registry, ipc, None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        service, most = server._socket, 0
        with contextlib.ExitStack() as crowd:
            async with connect(ipc) as client:
                for _ in range(40):
                    crowd.enter_context(a_connection(ipc))
                for _ in range(100):
                    assert await client.call("echo", 1) == 1
                    most = max(most, len(service._strangers))
        assert most == 16
        await server.close()

    run(main())


def test_the_call_of_a_lost_client_is_over_with_its_function(ipc):
    """Its answer, which has no receiver, is not delayed as one that the end of a program has cancelled."""

    async def main():
        registry, functions = FunctionRegistry(), Service()
        registry.add(functions)
        server = outside._ServiceExchange(registry, ipc, None)
        with a_connection(ipc) as peer:
            peer.sendall(segment(HELLO, VERSION) + segment(*a_call(0, b"\x92\x90\x80", "hang")))
            while not functions.begun:
                await asyncio.sleep(0)
        await functions.ended.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not server._exchange.server._calls
        await server.close()

    run(main())


@pytest.mark.parametrize("nbytes", [100, 3 * segments.WINDOW_BYTES])
def test_answers_that_wait_for_a_client_that_is_gone_end(ipc, nbytes, monkeypatch):
    """Also those to its notifications, which nobody cancels, and answers of several segments."""

    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._ServiceExchange(registry, ipc, None)
        runs, carrier = server._exchange.server, server._carrier
        with a_connection(ipc) as hostile:
            hostile.sendall(segment(HELLO, VERSION) + segment(*a_call(0, b"\x92\x91\x01\x80", "echo")))
            while 0 not in carrier._peers:
                await asyncio.sleep(0)
            peer = carrier._peers[0]
            peer.outstanding = segments.WINDOW_BYTES - 10
            for number in range(1, 4):
                head = protocol.encode(protocol.NOTIFY, number, b"\x92\x91\x01\x80", name="echo")[0]
                hostile.sendall(segment(*whole(head)))
            arrays = [np.zeros(nbytes, np.uint8)]
            sends = [asyncio.ensure_future(carrier.send(0, b"", arrays)) for _ in range(6)]
            while len(peer.waiters) < 3 + (6 if nbytes == 100 else segments._LONG_MAX):
                await asyncio.sleep(0)
        await asyncio.gather(*sends)
        while runs._tasks or runs._calls or carrier._peers:
            await asyncio.sleep(0)
        await server.close()

    run(main())


def test_strangers_and_dropped_clients_are_counted_apart(ipc, monkeypatch):
    monkeypatch.setattr(service_streams, "_UNGREETED_MAX", 2)
    monkeypatch.setattr(service_streams, "_PAUSE_S", 0.01)

    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._ServiceExchange(registry, ipc, None)
        service, most = server._socket, 0
        with contextlib.ExitStack() as crowd:
            for _ in range(3):
                hostile = crowd.enter_context(a_connection(ipc))
                hostile.sendall(segment(HELLO, VERSION) + HEADER.pack(segment_stream.PAYLOAD_MAX + 1, 0, 0))
            while len(service._dropped) < 3:
                await asyncio.sleep(0)
            async with connect(ipc) as client:
                for _ in range(5):
                    crowd.enter_context(a_connection(ipc))
                for _ in range(100):
                    assert await client.call("echo", 1) == 1
                    most = max(most, len(service._strangers))
        assert most == 2
        await server.close()

    run(main())


def test_a_service_whose_process_ends_while_a_client_connects_is_lost(ipc, monkeypatch):
    """The process has ended after the connection, and a child keeps the socket."""
    states = iter([False])
    monkeypatch.setattr(service_streams, "is_gone", lambda process: next(states, True))
    monkeypatch.setattr(service_streams, "process_of", lambda connection: 1)

    async def main():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(ipc.removeprefix("ipc://"))
            listener.listen()
            with pytest.raises(ServiceLostError, match="its process has ended"):
                async with connect(ipc):
                    raise AssertionError

    run(main())


def test_a_service_without_free_descriptors_continues(ipc, caplog):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main():
        async with both(ipc) as (_, client, _):
            with a_connection(ipc) as late:
                next_one = os.dup(0)
                os.close(next_one)
                resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, limits[1]))
                try:
                    while "could not accept a connection: Too many open files" not in caplog.text:
                        assert await client.call("echo", 1) == 1
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                late.sendall(segment(HELLO, VERSION))
                assert await heard(late, client) == segment(HELLO, VERSION)

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_segments(keyless, seed, caplog):
    draw = random.Random(seed)
    kinds = [segments._WHOLE, segments._FIRST, segments._PART, segments._DROP, draw.randrange(254)]
    drawn = [(draw.choice(kinds), draw.randrange(3), draw.randbytes(draw.randrange(60))) for _ in range(200)]
    run(with_hostile_client(keyless, [(HELLO, VERSION), *drawn], caplog))


def test_segments_that_come_in_pieces_are_joined(ipc):
    async def main():
        async with both(ipc) as (_, client, _):
            with a_connection(ipc) as slow:
                for byte in segment(HELLO, VERSION) + segment(*a_call(5, b"\x92\x91\x01\x80", "echo")):
                    slow.sendall(bytes([byte]))
                    assert await client.call("echo", 1) == 1
                answer = b""
                while len(answer) <= 2 * HEADER.size:
                    answer += await heard(slow, client)
                message = segment(*whole(protocol.encode(protocol.RESULT, 5, b"\x01")[0]))
                assert answer == segment(HELLO, VERSION) + message

    run(main())


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("seed", range(3))
def test_streams_carry_segments_of_all_lengths_in_order(seed, loop_factory):
    draw = random.Random(seed)
    lengths = [0, 1, 100, (1 << 14) - HEADER.size, (1 << 14) - HEADER.size + 1, 1 << 16, segment_stream.PAYLOAD_MAX]
    sent = [(draw.randrange(256), number, draw.randbytes(draw.choice(lengths))) for number in range(100)]

    async def main():
        ends, came, done = socket.socketpair(), [], asyncio.Event()
        streams = []
        for end in ends:
            end.setblocking(False)
            streams.append(SegmentStream(end, Lookout()))

        def received(kind, number, payload):
            came.append((kind, number, bytes(payload)))

        streams[0].use(None, lambda cause: None, lambda error: None)
        streams[1].use(received, lambda cause: done.set(), pytest.fail)
        streams[0].send(HELLO, 0, b"")
        for kind, number, payload in sent:
            streams[0].send(kind, number, np.frombuffer(payload, np.uint8) if number % 2 else payload)
            if draw.random() < 0.5:
                await asyncio.sleep(0)
        while len(came) <= len(sent):
            await asyncio.sleep(0)
        streams[0].close()
        await done.wait()
        streams[1].close()
        assert came == [(HELLO, 0, b""), *sent]

    run(main(), loop_factory)


@pytest.mark.parametrize("reads", [True, False])
def test_payloads_may_change_after_a_flush(reads):
    """Also if the peer does not read for longer than a flush takes."""

    async def main():
        ends, came = socket.socketpair(), []
        for end in ends:
            end.setblocking(False)
        sender, payload = SegmentStream(ends[0], Lookout()), np.full(SEGMENT_BYTES, 1, np.uint8)
        sender.use(None, lambda cause: None, lambda error: None)
        sender.send(HELLO, 0, b"")
        if reads:
            receiver = SegmentStream(ends[1], Lookout())
            receiver.use(lambda kind, number, data: came.append(bytes(data)), lambda cause: None, pytest.fail)
        for _ in range(3):
            sender.send(0, 0, payload)
        await sender.flush()
        payload[:] = 2
        if not reads:
            receiver = SegmentStream(ends[1], Lookout())
            receiver.use(lambda kind, number, data: came.append(bytes(data)), lambda cause: None, pytest.fail)
        while len(came) < 4:
            await asyncio.sleep(0)
        assert came == [b"", *[b"\1" * SEGMENT_BYTES] * 3]
        sender.close()
        receiver.close()
        await sender.flush()

    run(main())


@pytest.mark.parametrize("nbytes", [1, 1 << 16])
def test_a_peer_that_is_gone_kills_no_program_that_has_restored_sigpipe(nbytes):
    async def main():
        ends, done = socket.socketpair(), asyncio.Event()
        ends[0].setblocking(False)
        stream = SegmentStream(ends[0], Lookout())
        stream.use(None, lambda cause: done.set(), pytest.fail)
        ends[1].close()
        for _ in range(3):
            stream.send(0, 0, bytes(nbytes))
        await done.wait()
        stream.close()

    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        run(main())
    finally:
        signal.signal(signal.SIGPIPE, before)


@pytest.mark.parametrize("queued", [False, True])
def test_a_stream_that_cannot_be_written_ends_with_the_cause(queued, monkeypatch):
    def fail(stream, parts):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    async def main():
        ends, ended = socket.socketpair(), asyncio.Queue()
        ends[0].setblocking(False)
        stream = SegmentStream(ends[0], Lookout())
        stream.use(None, ended.put_nowait, pytest.fail)
        if queued:
            stream.send(0, 0, b"")
        monkeypatch.setattr(SegmentStream, "_put", fail)
        stream.send(0, 0, b"")
        assert ended.empty()  # the owner is not called while it sends
        assert await ended.get() == "its connection failed: No buffer space available"
        stream.send(0, 0, b"")
        stream.close()
        ends[1].close()
        assert ended.empty()

    run(main())


def test_a_client_of_another_version(keyless):
    async def main():
        async with serve(Service(), keyless) as url:
            if url.startswith("ipc"):
                with a_connection(url) as old, contextlib.nullcontext():
                    old.sendall(segment(HELLO, 99))
                    async with connect(url) as client:
                        assert await heard(old, client) == segment(HELLO, VERSION)
                        old.sendall(segment(HELLO, 99) * 5)
                        assert await client.call("echo", 1) == 1
                    with pytest.raises(BlockingIOError):  # it was not answered again
                        old.recv(1)
                return
            with zmq.Context() as context, a_socket(context) as old:
                hello = service_sockets._FORM.pack
                old.connect(url)
                old.send(hello(HELLO, 99))
                while not old.poll(0):
                    await asyncio.sleep(0)
                assert old.recv() == hello(HELLO, VERSION)
                for _ in range(5):
                    old.send(hello(HELLO, 99))
                async with connect(url) as client:
                    assert await client.call("echo", 1) == 1
                assert not old.poll(0), "it was answered again"

    run(main())


def test_a_service_of_another_version(ipc):
    async def refused(url):
        with pytest.raises(ProtocolError, match="speaks version 99, expected 1"):
            async with connect(url):
                raise AssertionError

    async def answer(service):
        while not service.poll(0):
            await asyncio.sleep(0)
        client, _ = service.recv_multipart()
        service.send_multipart([client, service_sockets._FORM.pack(HELLO, 99)])

    async def main():
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as service:
            service.bind("tcp://127.0.0.1:*")
            answering = asyncio.create_task(answer(service))
            await refused(service.last_endpoint.decode())
            await answering
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(ipc.removeprefix("ipc://"))
            listener.listen()
            connecting = asyncio.create_task(refused(ipc))
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.sendall(segment(HELLO, 99))
                await connecting

    run(main())


def test_a_client_that_is_dropped_is_told_why(place):
    url, key = place

    async def main():
        async with both(url, **key) as (service, client, _):
            call = asyncio.ensure_future(client.call("hang"))
            while not service.begun:
                await asyncio.sleep(0)
            client._exchange._carrier.post(0, 77, 0, b"")
            for waiting in (call, client.call("echo", 1)):
                with pytest.raises(
                    ServiceLostError, match="gone: it dropped this client, which broke the protocol: a se"
                ):
                    await waiting
            await service.ended.wait()

    run(main())


def test_a_client_above_the_limit_is_told_so(keyless, monkeypatch):
    monkeypatch.setattr(service_protocol, "CLIENTS_MAX", 1)

    async def main():
        async with both(keyless) as (_, client, url):
            with pytest.raises(ServiceLostError, match=r"no service at .*: it has 1 clients already"):
                async with connect(url):
                    raise AssertionError
            assert await client.call("echo", 1) == 1

    run(main())


class Losses:
    """An owner of a socket that records lost peers."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.lost_ones: list[tuple[int, str]] = []

    def received(self, peer: int, kind: int, number: int, payload: Any) -> None:
        self.came.set()

    def room(self, peer: int, kind: int, number: int, nbytes: int) -> None:
        return None

    def lost(self, peer: int, cause: str) -> None:
        self.lost_ones.append((peer, cause))


async def send_until_lost(socket, owner):
    for _ in range(1000):
        socket.send(0, 0, 0, bytes(SEGMENT_BYTES))
    assert not owner.lost_ones, "it was told of while it was busy sending"
    while not owner.lost_ones:
        await asyncio.sleep(0)
    assert not socket.has(0)
    assert owner.lost_ones == [(0, "it does not read what it is sent")]


def test_a_client_that_never_reads_is_dropped(keyless, monkeypatch, caplog):
    monkeypatch.setattr(service_sockets, "_UNSENT_MAX", 8)
    monkeypatch.setattr(segment_stream, "UNSENT_MAX", 8 * SEGMENT_BYTES)

    async def main():
        owner = Losses()
        server = listen(owner, keyless, None)
        with contextlib.closing(server), hostile_at(server.url) as send:  # which never reads
            send((HELLO, VERSION), (0, 0))
            await owner.came.wait()
            await send_until_lost(server, owner)
        assert caplog.text.count("dropped client 0: it does not read what it is sent") == 1

    run(main())


def test_a_service_that_never_reads_is_lost(ipc, monkeypatch):
    monkeypatch.setattr(service_sockets, "_UNSENT_MAX", 8)
    monkeypatch.setattr(segment_stream, "UNSENT_MAX", 8 * SEGMENT_BYTES)

    async def is_noticed(url):
        owner = Losses()
        with contextlib.closing(dial(owner, url, None, lambda version: None)) as client:
            await send_until_lost(client, owner)

    async def main():
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as deaf:
            deaf.rcvhwm = 1
            deaf.bind("tcp://127.0.0.1:*")
            await is_noticed(deaf.last_endpoint.decode())
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(ipc.removeprefix("ipc://"))
            deaf.listen()
            await is_noticed(ipc)

    run(main())


def test_keepalive_probes_detect_dead_hosts():
    async def main():
        async with both("tcp://127.0.0.1:0") as (_, client, _):
            dealer = client._exchange._carrier.socket._socket
            assert [dealer.getsockopt(option) for option in service_sockets._KEEPALIVE] == list(
                service_sockets._KEEPALIVE.values()
            )

    run(main())


def test_a_stream_waits_for_a_client_that_does_not_read(ipc):
    async def main():
        async with both(ipc) as (service, client, _):
            items = client.stream("count", 10**9)
            await anext(items)
            for _ in range(50):
                assert await client.call("echo", 1) == 1
            assert service.begun <= protocol.ITEMS_MAX + 1
            await items.aclose()

    run(main())
