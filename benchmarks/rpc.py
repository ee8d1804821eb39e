"""Calls of a function at another process of this host, against aiozmq.rpc and torch.distributed.rpc.

    python benchmarks/rpc.py [--repeats 3] [--calls 300]

Two ranks; rank 0 calls a function of rank 1 that returns its argument: 64 bytes, as bytes and as a float32 tensor, one
call after another and 100 at a time, and longer tensors. A time is the median of a run, and of several runs, in which
all systems take turns, the median. "64 B" and "pipelined" call a coroutine function; "plain" a plain function, which
runs in a thread, and "inline" one that is registered as inline. `service` is `asyncoll.rpc.serve`, over a unix socket
as aiozmq is. aiozmq answers from a method on its loop, torch RPC from a thread; torch RPC sends 64 bytes as a tensor.

aiozmq is in the extra `peers`.

*Slow reader*: rank 0 sends 300 tensors of 4 MB, as notifications, to a function that takes 5 ms for each; what the
peak memory of either rank grows by is bounded by what may be under way, however many are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
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

WARMUP = 5
SMALL = 64  # bytes
TENSORS = {"4 MB": (1_000_000, 20), "100 MB": (25_000_000, 5)}  # elements, calls
AT_A_TIME = 100
SLOW_MESSAGES, SLOW_ELEMENTS, SLOW_S = 300, 1_000_000, 0.005
# What is compared: the measurement of a system of ours, that of a peer, and how many times as fast ours is to be.
TARGETS = [
    ("ranks", "64 B", "aiozmq", "64 B", 3.0),
    ("ranks", "64 B", "torch", "64 B", 7.0),
    ("ranks", "64 B tensor", "torch", "64 B", 7.0),
    ("ranks", "plain", "torch", "64 B", 5.0),
    ("ranks", "pipelined", "aiozmq", "pipelined", 2.0),
    ("ranks", "4 MB", "torch", "4 MB", 2.5),
    ("ranks", "100 MB", "torch", "100 MB", 3.0),
    ("service", "64 B", "aiozmq", "64 B", 2.0),
]
PIPELINED_PER_S = 60_000  # calls
Echo = Callable[[str, Any], Awaitable[Any]]  # takes the name of the function, and its argument


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--calls", type=int, default=300, help="counted calls of 64 bytes in a repeat")
    record = Record(options, "rpc")
    chosen = record.arguments
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
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
    record.write({"runs": runs, "slow reader, MiB": grown})


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


async def measure(call: Echo, calls: int, *, ours: bool) -> dict[str, float]:
    """`ours`: the peer has a function `plain`, too, and takes tensors."""
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
    if ours:
        for name, (elements, count) in TENSORS.items():
            found[name] = await one_after_another(call, "echo", torch.ones(elements), count)
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
    return served(question, server(), client, ours=False, loop_factory=asyncio.new_event_loop)


def served(
    question: dict[str, Any],
    server: contextlib.AbstractAsyncContextManager[Any],
    client: Callable[[], contextlib.AbstractAsyncContextManager[Echo]],
    *,
    ours: bool,
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
            found = await measure(call, question["calls"], ours=ours)
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
    found = in_threads(rpc, question["calls"]) if place == 0 else None
    rpc.shutdown()
    return found


def same(x: Any) -> Any:
    return x


def in_threads(rpc: Any, calls: int) -> dict[str, float]:
    """The measurements of `measure`, with the API of torch RPC."""
    small = torch.ones(SMALL // 4)
    found = {}
    for name, elements, count in [("64 B", SMALL // 4, calls), *((name, *of) for name, of in TENSORS.items())]:
        payload, seconds = torch.ones(elements), []
        for _ in range(WARMUP + count):
            start = time.perf_counter()
            rpc.rpc_sync("rank1", same, (payload,))
            seconds.append(time.perf_counter() - start)
        found[name] = statistics.median(seconds[WARMUP:])
    rounds = max(1, 10 * calls // AT_A_TIME)
    start = time.perf_counter()
    for _ in range(rounds):
        for future in [rpc.rpc_async("rank1", same, (small,)) for _ in range(AT_A_TIME)]:
            future.wait()
    found["pipelined"] = (time.perf_counter() - start) / rounds / AT_A_TIME
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
    "aiozmq": aiozmq,
    "torch": torch_rpc,
}


# -- showing --------------------------------------------------------------------------------------


def times(medians: dict[str, dict[str, float]]) -> list[list[str]]:
    columns = list(medians["ranks"])
    lines = [["", *columns]]
    for system, found in medians.items():
        lines.append([system, *(f"{1e6 * found[key]:.0f}" if key in found else "-" for key in columns)])
    return lines


def ratios(runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    lines = [["", "", "peer", "times", "target"]]
    for ours, what, peer, theirs, target in TARGETS:
        found = [peer_run[theirs] / run[what] for run, peer_run in zip(runs[ours], runs[peer], strict=True)]
        lines.append([ours, what, peer, f"{statistics.median(found):.2f}", f"{target:g}"])
    return lines


if __name__ == "__main__":
    program(main, rank)
