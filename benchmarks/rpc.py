"""Calls of a function at another process of this host, against grpc.aio, aiozmq.rpc, torch RPC and iceoryx2.

    python benchmarks/rpc.py [--repeats 3] [--calls 300]

Two ranks; rank 0 calls a function of rank 1 that returns its argument: 64 bytes, as bytes and as a float32 tensor, one
call after another and 100 at a time, and longer tensors. A time is the median of a run, and of several runs, in which
all systems take turns, the median. "64 B" and "pipelined" call a coroutine function; "plain" a plain function, which
runs in a thread, and "inline" one that is registered as inline. `service` is `asyncoll.rpc.serve`, over a unix socket
as gRPC and aiozmq are. gRPC sends bytes without a schema: long messages are bytes there, and no tensors. aiozmq answers
from a method on its loop, torch RPC from a thread; torch RPC and iceoryx2 send 64 bytes as a tensor. iceoryx2 has no
coroutines in Python: client and server poll, each on a core of its own, and copy a tensor into and out of its memory.

A peer that is not installed is left out; all are in the extra `peers`, but for torch.

*Slow reader*: rank 0 sends 300 tensors of 4 MB, as notifications, to a function that takes 5 ms for each; what the
peak memory of either rank grows by is bounded by what may be under way, however many are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from common import Record, ask, parser, program

import asyncoll
from asyncoll.bench.claims import Cells

WARMUP = 5
SMALL = 64  # bytes
TENSORS = {"4 MB": (1_000_000, 20), "100 MB": (25_000_000, 5)}  # elements, calls
AT_A_TIME = 100
SLOW_MESSAGES, SLOW_ELEMENTS, SLOW_S = 300, 1_000_000, 0.005
# What is compared: the measurement of a system of ours, that of a peer, and how many times as fast ours is to be.
TARGETS = [
    ("ranks", "64 B", "aiozmq.rpc", "64 B", 3.0),
    ("ranks", "64 B", "torch RPC", "64 B", 7.0),
    ("ranks", "64 B tensor", "torch RPC", "64 B", 7.0),
    ("ranks", "plain", "torch RPC", "64 B", 5.0),
    ("ranks", "pipelined", "aiozmq.rpc", "pipelined", 2.0),
    ("ranks", "4 MB", "torch RPC", "4 MB", 2.5),
    ("ranks", "100 MB", "torch RPC", "100 MB", 3.0),
    ("service", "64 B", "aiozmq.rpc", "64 B", 2.0),
]
PIPELINED_PER_S = 60_000  # calls
Echo = Callable[[str, Any], Awaitable[Any]]  # takes the name of the function, and its argument


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--calls", type=int, default=300, help="counted calls of 64 bytes in a repeat")
    record = Record(options, "rpc")
    chosen = record.arguments
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in installed()}
    for _ in range(chosen.repeats):
        for system, found in runs.items():
            found.append(one_run(system, chosen.calls))
    medians = {
        system: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for system, found in runs.items()
    }
    record.table("seconds of a call, in microseconds; pipelined: of each", times(medians))
    record.table("times as fast as the peer, median of the repeats", ratios(runs))
    rate = 1 / medians["ranks"]["pipelined"]
    record.table("pipelined calls between ranks", [["per second", "target"], [f"{rate:.0f}", f"{PIPELINED_PER_S}"]])
    grown = ask(2, __file__, {"system": "slow reader"})
    total = SLOW_MESSAGES * SLOW_ELEMENTS * 4 / 2**20
    record.table(
        "slow reader: MiB",
        [["sent", "growth of the sender", "of the reader"], [f"{total:.0f}", *map("{:.0f}".format, grown)]],
    )
    record.write({"runs": runs, "slow reader, MiB": grown}, cells(medians))


def installed() -> list[str]:
    return [system for system in SYSTEMS if importlib.util.find_spec(MODULES.get(system, "torch"))]


def one_run(system: str, calls: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        found: dict[str, float] = ask(2, __file__, {"system": system, "calls": calls, "folder": folder, "port": port})
        return found


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    if question["system"] == "slow reader":
        return asyncoll.run(slow_reader)
    return SYSTEMS[question["system"]](question)


async def measure(
    call: Echo, calls: int, *, ours: bool, long: Callable[[int], Any] | None = torch.ones
) -> dict[str, float]:
    """`ours`: the peer has a function `plain`, too, and takes tensors. `long` makes a message of so many float32."""
    small, tensor = b"x" * SMALL, torch.ones(SMALL // 4)
    found = {"64 B": await one_after_another(call, "echo", small, calls)}
    if ours:
        found["64 B tensor"] = await one_after_another(call, "echo", tensor, calls)
        found["plain"] = await one_after_another(call, "plain", small, calls)
        found["plain tensor"] = await one_after_another(call, "plain", tensor, calls)
    rounds = max(1, 10 * calls // AT_A_TIME)
    await asyncio.gather(*(call("echo", small) for _ in range(AT_A_TIME)))
    start = time.perf_counter()
    for _ in range(rounds):
        await asyncio.gather(*(call("echo", small) for _ in range(AT_A_TIME)))
    found["pipelined"] = (time.perf_counter() - start) / rounds / AT_A_TIME
    if long:
        for name, (elements, count) in TENSORS.items():
            found[name] = await one_after_another(call, "echo", long(elements), count)
    return found


async def one_after_another(call: Echo, name: str, payload: Any, calls: int) -> float:
    seconds = []
    for _ in range(WARMUP + calls):
        start = time.perf_counter()
        answer = await call(name, payload)
        seconds.append(time.perf_counter() - start)
    assert len(answer) == len(payload)
    return statistics.median(seconds[WARMUP:])


def between_ranks(question: dict[str, Any]) -> Any:
    async def main(comm: asyncoll.Communicator) -> Any:
        comm.rpc.register(Echoes())
        comm.rpc.register(same, name="inline", inline=True)
        await comm.barrier()
        found = None
        if comm.rank == 0:
            call = partial(comm.rpc.call, 1)
            found = await measure(call, question["calls"], ours=True)
            found["inline"] = await one_after_another(call, "inline", b"x" * SMALL, question["calls"])
        await comm.barrier()
        return found

    return asyncoll.run(main)


class Echoes:
    async def echo(self, x: Any) -> Any:
        return x

    def plain(self, x: Any) -> Any:
        return x


def service(question: dict[str, Any]) -> Any:
    url = f"ipc://{question['folder']}/service"

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[Echo]:
        async with asyncoll.rpc.connect(url) as connection:
            yield connection.call

    return served(question, asyncoll.rpc.serve(Echoes(), url), client, ours=True)


def aiozmq(question: dict[str, Any]) -> Any:
    import aiozmq.rpc

    url = f"ipc://{question['folder']}/aiozmq"

    class Handler(aiozmq.rpc.AttrHandler):  # type: ignore[misc]
        @aiozmq.rpc.method  # type: ignore[misc]
        def echo(self, x: bytes) -> bytes:
            return x

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[None]:
        serving = await aiozmq.rpc.serve_rpc(Handler(), bind=url)
        yield
        serving.close()

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[Echo]:
        connection = await aiozmq.rpc.connect_rpc(connect=url)
        yield lambda name, x: connection.call.echo(x)
        connection.close()

    # The transport of aiozmq needs a loop with a selector, which uvloop has not.
    return served(question, server(), client, ours=False, long=None, loop_factory=asyncio.new_event_loop)


def grpc_aio(question: dict[str, Any]) -> Any:
    import grpc

    url = f"unix:{question['folder']}/grpc"
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

    async def echo(x: bytes, _: Any) -> bytes:
        return x

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[None]:
        serving = grpc.aio.server(options=unlimited)
        echoes = {"echo": grpc.unary_unary_rpc_method_handler(echo)}
        serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", echoes),))
        serving.add_insecure_port(url)
        await serving.start()
        yield
        await serving.stop(None)

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[Echo]:
        async with grpc.aio.insecure_channel(url, options=unlimited) as channel:
            method = channel.unary_unary("/bench/echo")
            yield lambda name, x: method(x)

    return served(
        question, server(), client, ours=False, long=lambda n: bytes(4 * n), loop_factory=asyncio.new_event_loop
    )


def served(
    question: dict[str, Any],
    server: contextlib.AbstractAsyncContextManager[Any],
    client: Callable[[], contextlib.AbstractAsyncContextManager[Echo]],
    *,
    ours: bool,
    long: Callable[[int], Any] | None = torch.ones,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Any:
    """Rank 1 serves until rank 0 has measured. They synchronise by files."""
    ready, done = Path(question["folder"]) / "ready", Path(question["folder"]) / "done"

    async def main() -> Any:
        if os.environ["RANK"] == "1":
            async with server:
                ready.touch()
                await asyncio.to_thread(wait_for, done)
            return None
        await asyncio.to_thread(wait_for, ready)
        async with client() as call:
            found = await measure(call, question["calls"], ours=ours, long=long)
        done.touch()
        return found

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.1)


def torch_rpc(question: dict[str, Any]) -> Any:
    import torch.distributed.rpc as rpc

    place = int(os.environ["RANK"])
    how = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{question['port']}")
    rpc.init_rpc(f"rank{place}", rank=place, world_size=2, rpc_backend_options=how)
    found = None
    if place == 0:
        found = in_turn(lambda x: rpc.rpc_sync("rank1", same, (x,)), question["calls"])
        found["pipelined"] = pipelined_in_threads(rpc, question["calls"])
    rpc.shutdown()
    return found


def same(x: Any) -> Any:
    return x


def in_turn(call: Callable[[torch.Tensor], torch.Tensor], calls: int) -> dict[str, float]:
    """The measurements of `measure`, one call after another, of a function that blocks."""
    found = {}
    for name, elements, count in [("64 B", SMALL // 4, calls), *((name, *of) for name, of in TENSORS.items())]:
        payload, seconds = torch.ones(elements), []
        for _ in range(WARMUP + count):
            start = time.perf_counter()
            answer = call(payload)
            seconds.append(time.perf_counter() - start)
        assert len(answer) == elements
        found[name] = statistics.median(seconds[WARMUP:])
    return found


def pipelined_in_threads(rpc: Any, calls: int) -> float:
    small = torch.ones(SMALL // 4)
    rounds = max(1, 10 * calls // AT_A_TIME)
    start = time.perf_counter()
    for _ in range(rounds):
        for future in [rpc.rpc_async("rank1", same, (small,)) for _ in range(AT_A_TIME)]:
            future.wait()
    return (time.perf_counter() - start) / rounds / AT_A_TIME


def iceoryx2(question: dict[str, Any]) -> Any:
    import ctypes

    import iceoryx2 as iox

    ready, done = Path(question["folder"]) / "ready", Path(question["folder"]) / "done"
    slices, longest = iox.Slice[ctypes.c_uint8], 4 * max(elements for elements, _ in TENSORS.values())
    node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
    name = iox.ServiceName.new(f"asyncoll-{question['port']}")
    service = node.service_builder(name).request_response(slices, slices).open_or_create()
    if os.environ["RANK"] == "1":
        server = service.server_builder().initial_max_slice_len(longest).create()
        ready.touch()
        while not done.exists():
            for _ in range(1000):
                if request := server.receive():
                    x = request.payload()
                    response = request.loan_slice_uninit(x.len())
                    ctypes.memmove(response.payload().as_ptr(), x.as_ptr(), x.len())
                    response.assume_init().send()
        return None
    wait_for(ready)
    client = service.client_builder().initial_max_slice_len(longest).create()

    def call(x: torch.Tensor) -> torch.Tensor:
        answer = torch.empty_like(x)
        request = client.loan_slice_uninit(x.nbytes)
        ctypes.memmove(request.payload().as_ptr(), x.data_ptr(), x.nbytes)
        pending = request.assume_init().send()
        while (response := pending.receive()) is None:
            pass
        ctypes.memmove(answer.data_ptr(), response.payload().as_ptr(), x.nbytes)
        return answer

    found = in_turn(call, question["calls"])
    done.touch()
    return found


async def slow_reader(comm: asyncoll.Communicator) -> list[float]:
    """The growth of the peak memory of each rank, in MiB."""

    @comm.rpc.register
    async def read(x: np.ndarray) -> None:
        await asyncio.sleep(SLOW_S)

    x = np.ones(SLOW_ELEMENTS, np.float32)
    await comm.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if comm.rank == 0:
        for _ in range(SLOW_MESSAGES):
            await comm.rpc.notify(1, "read", x)
    await comm.barrier()
    grown = np.array([(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024])
    return [float(each) for each in (await comm.allgather(grown)).ravel()]


SYSTEMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ranks": between_ranks,
    "service": service,
    "grpc.aio": grpc_aio,
    "aiozmq.rpc": aiozmq,
    "torch RPC": torch_rpc,
    "iceoryx2": iceoryx2,
}
MODULES = {"grpc.aio": "grpc", "aiozmq.rpc": "aiozmq", "iceoryx2": "iceoryx2"}  # that a peer needs


# -- showing --------------------------------------------------------------------------------------


def cells(medians: dict[str, dict[str, float]]) -> Cells:
    """What the page of benchmarks shows, in seconds."""
    columns = {"64 B": "64 B", "pipelined": "64 B, pipelined", "4 MB": "4 MB", "100 MB": "100 MB"}
    return {
        system: {columns[key]: value for key, value in found.items() if key in columns}
        for system, found in medians.items()
    }


def times(medians: dict[str, dict[str, float]]) -> list[list[str]]:
    columns = list(medians["ranks"])
    lines = [["", *columns]]
    for system, found in medians.items():
        lines.append([system, *(f"{1e6 * found[key]:.0f}" if key in found else "-" for key in columns)])
    return lines


def ratios(runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    lines = [["", "", "peer", "times", "target"]]
    for ours, what, peer, theirs, target in TARGETS:
        if peer not in runs:
            continue
        found = [peer_run[theirs] / run[what] for run, peer_run in zip(runs[ours], runs[peer], strict=True)]
        lines.append([ours, what, peer, f"{statistics.median(found):.2f}", f"{target:g}"])
    return lines


if __name__ == "__main__":
    program(main, rank)
