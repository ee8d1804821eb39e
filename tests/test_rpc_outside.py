"""Services outside of a world, over real sockets: access control, hostile peers, and the loss of either end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import os
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq
from conftest import PATIENCE_S

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
from asyncoll.rpc.service import FunctionRegistry
from asyncoll.transport import addresses
from asyncoll.transport.keys import Key
from asyncoll.transport.messages import service_sockets
from asyncoll.transport.wire import SEGMENT_BYTES

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


@pytest.fixture(params=["ipc", "tcp", "curve"])
def place(request, tmp_path):
    """An address, and the arguments with its key."""
    if request.param == "ipc":
        return f"ipc://{tmp_path}/s", {}
    return "tcp://127.0.0.1:0", {"key_file": a_key(tmp_path / "key")} if request.param == "curve" else {}


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
    monkeypatch.setattr(service_sockets, "FREEZE_S", 0.5)
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


def test_lost_clients_leave_no_state(ipc):
    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._Server(registry, ipc, None)
        runs = server._exchange._server
        for _ in range(5):
            async with connect(ipc) as client:
                hanging = [asyncio.ensure_future(client.call("hang")) for _ in range(3)]
                await asyncio.sleep(0)
                for call in hanging:
                    call.cancel()
                await asyncio.wait(hanging)
                # Like a CANCEL that crosses the answer to its call.
                client._exchange.client._tell(protocol.CANCEL, 0, 0)
                await client.notify("echo", 1)
                assert await client.call("echo", 1) == 1
        while server._socket._clients or runs._calls or server._carrier._segments._peers:
            await asyncio.sleep(0)
        assert not server._socket._names
        assert not server._socket._descriptors
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
        with socket.socket(socket.AF_UNIX) as hostile:
            hostile.connect(sys.argv[1].removeprefix("ipc://"))

async def meet(count: int) -> None:
    come_and_go(count)

async def main():
    async with serve(meet, sys.argv[1]):
        print(flush=True)
        await asyncio.to_thread(sys.stdin.read)
        come_and_go(3000)

asyncio.run(main())
"""


def test_a_service_that_computes_survives_many_unauthenticated_peers(ipc):
    """The loop of the service is blocked, so it does not read the events of ZeroMQ."""

    async def main():
        async with connect(ipc) as client:
            await client.call("meet", 3000)
            assert await client.methods()

    command = [sys.executable, "-c", CROWDED, ipc]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as service:
        try:
            service.stdout.readline()
            run(main())
            service.stdin.close()
            assert service.wait(PATIENCE_S) == 0
        finally:
            service.kill()


def test_messages_to_a_lost_client_are_dropped(ipc):
    async def main():
        registry = FunctionRegistry()
        registry.add(Service())
        server = outside._Server(registry, ipc, None)
        async with connect(ipc) as client:
            calls = [asyncio.ensure_future(client.call("echo", np.ones(40 << 20, np.uint8))) for _ in range(3)]
            while not server._exchange._server._tasks:
                await asyncio.sleep(0)
        assert all(isinstance(end, ClosedError) for end in await asyncio.gather(*calls, return_exceptions=True))
        while server._exchange._server._tasks or server._carrier._segments._peers:
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


def test_a_silent_peer_at_the_address(tmp_path):
    async def main():
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as silent:
            silent.bind(f"ipc://{tmp_path}/s")
            with deadline(0.05), pytest.raises(ServiceLostError, match="no answer from"):
                async with connect(f"ipc://{tmp_path}/s"):
                    raise AssertionError

    run(main())


def test_the_error_says_that_a_stopped_service_does_not_answer(ipc, monkeypatch):
    """The kernel accepts connections for a stopped process."""
    monkeypatch.setattr(service_sockets, "_HANDSHAKE_MS", 50)

    async def main():
        with socket.socket(socket.AF_UNIX) as stopped:
            stopped.bind(ipc.removeprefix("ipc://"))
            stopped.listen()
            with pytest.raises(ServiceLostError, match="it does not answer as it should: is it stopped"):
                async with connect(ipc):
                    raise AssertionError

    run(main())


def test_connect_refuses_a_service_without_a_heartbeat(ipc, monkeypatch):
    """Without a heartbeat, a service that freezes right after its answer would never be missed."""
    monkeypatch.setattr(service_sockets.Heartbeat, "_handle_event", lambda *_: None)

    async def main():
        async with serve(Service(), ipc):
            with deadline(0.05), pytest.raises(ServiceLostError, match="no answer from"):
                async with connect(ipc):
                    raise AssertionError

    run(main())


# -- access control ------------------------------------------------------------------------------


BAD_ADDRESSES = {
    "tcp://10.1.2.3:5": "can be reached from other hosts: pass `key_file`",
    "tcp://[2001:db8::1]:5": "can be reached from other hosts",
    "tcp://0.0.0.0" + ":5": "means every interface",
    "tcp://[::]:5": "means every interface",
    "tcp://*" + ":5": "give the host as an IP address",
    "tcp://example.org:5": "give the host as an IP address",
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
    subprocess.run([sys.executable, "-c", left, path], check=True)
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


# -- hostile peers -------------------------------------------------------------------------------


def hello(version=service_sockets.VERSION):
    return service_sockets._FORM.pack(service_sockets._HELLO, version)


def whole(head: bytes) -> bytes:
    return service_sockets._FORM.pack(segments._WHOLE, 0) + segments._TABLE.pack(0, len(head)) + head


async def with_hostile_client(ipc, act, caplog, expected):
    """A service and a client continue while a hostile client sends invalid messages."""
    async with both(ipc) as (_, client, _):
        with zmq.Context() as context, a_socket(context) as hostile:
            hostile.connect(ipc)
            act(hostile)
            while expected not in caplog.text:
                assert await client.call("echo", 1) == 1
        assert await client.call("echo", 1) == 1


HOSTILE = {
    "no hello": [[b"hi"]],
    "random bytes": [[hello()], [b"\xff" * 100]],
    "too many frames": [[hello()], [b"x"], [b"x", b"y", b"z"], [service_sockets._FORM.pack(77, 0)]],
    "a segment of nothing": [[hello()], [service_sockets._FORM.pack(segments._PART, 3) + b"x"]],
    "credit for nothing": [[hello()], [service_sockets._FORM.pack(segments._CREDIT, 1 << 40)]],
    "a lot of memory": [
        [hello()],
        [service_sockets._FORM.pack(segments._FIRST, 0) + b"\1\0\0\0\0\0\0\0" + b"\xff" * 8],
    ],
    "no message": [[hello()], [whole(b"\0" * 100)]],
    "a bad call": [[hello()], [whole(protocol.encode(protocol.CALL, 1, b"\xc1", name="echo")[0])]],
    "two of one number": [
        [hello()],
        *[[whole(protocol.encode(protocol.CALL, 1, b"\x92\x90\x80", name="hang")[0])]] * 2,
    ],
    "too many calls": [
        [hello()],
        *[
            [whole(protocol.encode(protocol.CALL, n, b"\x92\x90\x80", name="hang")[0])]
            for n in range(2 * protocol.CALLS_MAX + 1)
        ],
    ],
}


@pytest.mark.parametrize("messages", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_clients_are_dropped_and_logged(ipc, messages, caplog):
    def act(hostile):
        for message in messages:
            hostile.send_multipart(message)

    run(with_hostile_client(ipc, act, caplog, "dropped"))


def test_frames_that_are_too_long_end_the_connection(ipc):
    async def main():
        async with both(ipc) as (_, client, _):
            with zmq.Context() as context, a_socket(context) as hostile:
                monitor = hostile.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                hostile.connect(ipc)
                hostile.send(hello() + bytes(2 * SEGMENT_BYTES))
                while not monitor.poll(0):
                    assert await client.call("echo", 1) == 1
                hostile.disable_monitor()
                monitor.close(linger=0)

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_segments(ipc, seed, caplog):
    draw = random.Random(seed)

    def act(hostile):
        hostile.send(hello())
        for _ in range(200):
            kind = draw.choice([segments._WHOLE, segments._FIRST, segments._PART, segments._DROP, draw.randrange(256)])
            hostile.send(service_sockets._FORM.pack(kind, draw.randrange(3)) + draw.randbytes(draw.randrange(60)))

    run(with_hostile_client(ipc, act, caplog, "dropped"))


def test_a_client_of_another_version(ipc):
    async def main():
        async with serve(Service(), ipc):
            with zmq.Context() as context, a_socket(context) as old:
                old.connect(ipc)
                old.send(hello(99))
                while not old.poll(0):
                    await asyncio.sleep(0)
                assert old.recv() == hello()
                for _ in range(5):
                    old.send(hello(99))
                async with connect(ipc) as client:
                    assert await client.call("echo", 1) == 1
                assert not old.poll(0), "it was answered again"

    run(main())


def test_a_service_of_another_version(ipc):
    async def answer(service):
        while not service.poll(0):
            await asyncio.sleep(0)
        client, _ = service.recv_multipart()
        service.send_multipart([client, hello(99)])

    async def main():
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as service:
            service.bind(ipc)
            answering = asyncio.create_task(answer(service))
            with pytest.raises(ProtocolError, match="speaks version 99, expected 1"):
                async with connect(ipc):
                    raise AssertionError
            await answering

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


def test_a_client_above_the_limit_is_told_so(ipc, monkeypatch):
    monkeypatch.setattr(service_sockets, "_CLIENTS_MAX", 1)

    async def main():
        async with both(ipc) as (_, client, _):
            with pytest.raises(ServiceLostError, match=r"no service at .*: it has 1 clients already"):
                async with connect(ipc):
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


def test_a_client_that_never_reads_is_dropped(ipc, monkeypatch, caplog):
    monkeypatch.setattr(service_sockets, "_UNSENT_MAX", 8)

    async def main():
        owner = Losses()
        server = service_sockets.ServerSocket(owner, ipc, None)
        with contextlib.closing(server), zmq.Context() as context, a_socket(context) as deaf:
            deaf.rcvhwm = 1
            deaf.connect(ipc)
            deaf.send(hello())
            deaf.send(hello())
            await owner.came.wait()
            await send_until_lost(server, owner)
        assert caplog.text.count("dropped client 0: it does not read what it is sent") == 1

    run(main())


def test_a_service_that_never_reads_is_lost(ipc, monkeypatch):
    monkeypatch.setattr(service_sockets, "_UNSENT_MAX", 8)

    async def main():
        owner = Losses()
        with zmq.Context() as context, a_socket(context, zmq.ROUTER) as deaf:
            deaf.rcvhwm = 1
            deaf.bind(ipc)
            with contextlib.closing(service_sockets.ClientSocket(owner, ipc, None, lambda version: None)) as client:
                await send_until_lost(client, owner)

    run(main())


def test_keepalive_probes_detect_dead_hosts(place):
    url, key = place

    async def main():
        async with both(url, **key) as (_, client, _):
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
