"""The cost of a short message: wall and processor time of calls by message, and where the processor time goes.

    python benchmarks/message_cost.py [--ranks 2,4] [--calls 2000] [--repeats 5]

All ranks run on this host and exchange messages alone (ASYNCOLL_TRANSPORT=zmq): over unix sockets, and two of them over
tcp on the loopback. `ping-pong` is a `send` of 64 bytes to the other rank and the `recv` of its answer; its time is
that of one direction, and its processor time is that of one rank for one message sent and one received. The others are
one call each, with arrays of 64 bytes. Wall times are rank 0's medians, processor times its means.

Processor time is given for the whole rank and for its threads: `caller` runs the program, `runtime` runs asyncoll's
loop (two event loops), and `I/O` is ZeroMQ's. `sleeps` is how often these threads go to sleep in one call: each is a
wake-up, and wake-ups are most of the cost.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Record, ask, numbers, parser, program

import asyncoll
from asyncoll.runtime.endpoint import Endpoint
from asyncoll.runtime.progress import ProgressThread
from asyncoll.transport.messages.zeromq import ZeroMQTransport
from asyncoll.world.world import World

ELEMENTS = 16  # float32
WARMUP = 200
PARTS = ("us", "cpu_us", "caller_us", "runtime_us", "io_us", "sleeps")


class Usage(NamedTuple):
    """What the threads of this process have used so far, and how often they have gone to sleep."""

    cpu_s: float
    caller_s: float
    runtime_s: float
    io_s: float
    sleeps: int


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[2, 4])
    options.add_argument("--calls", type=int, default=2000, help="counted calls of each in a repeat")
    options.add_argument("--repeats", type=int, default=5)
    record = Record(options, "message_cost")
    chosen = record.arguments
    worlds = {f"{ranks} ranks over unix sockets": {"ranks": ranks, "tcp": False} for ranks in chosen.ranks}
    worlds["2 ranks over tcp"] = {"ranks": 2, "tcp": True}
    raw: dict[str, Any] = {}
    for title, world in worlds.items():
        question = {"calls": chosen.calls, "tcp": world["tcp"]}
        repeats = [ask(world["ranks"], __file__, question, transport="zmq") for _ in range(chosen.repeats)]
        rows = {call: summary([found[call] for found in repeats]) for call in repeats[0]}
        record.table(f"{title}, 64 bytes", table(rows))
        raw[title] = {"repeats": repeats, "summary": rows}
    record.write(raw)


def summary(repeats: list[dict[str, float]]) -> dict[str, float]:
    """The medians of the repeats."""
    return {part: statistics.median(found[part] for found in repeats) for part in PARTS}


def table(rows: dict[str, dict[str, float]]) -> list[list[str]]:
    lines = [["call", "wall (us)", "processor (us)", "caller", "runtime", "I/O", "sleeps"]]
    for call, row in rows.items():
        *times, sleeps = (row[part] for part in PARTS)
        lines.append([call, *(f"{each:.0f}" for each in times), f"{sleeps:.1f}"])
    return lines


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = asyncoll.run(over_tcp if question["tcp"] else measure, question["calls"])
    return found


async def over_tcp(comm: asyncoll.Communicator, calls: int) -> dict[str, dict[str, float]]:
    """The same measurements in a second world, whose ranks have addresses of the loopback."""
    transport = ZeroMQTransport(comm.rank, comm.size, b"benchmark")
    port = int(transport.bind("tcp://127.0.0.1:0").rpartition(":")[2])
    ports = await comm.allgather(np.array([port]))
    transport.peers = [f"tcp://127.0.0.1:{other}" for other in np.ravel(ports)]
    thread = ProgressThread()
    try:
        async with World(Endpoint(transport), thread, ("localhost",) * comm.size) as second:
            found = await measure(second, calls)
    finally:
        thread.stop()
    return found


async def measure(comm: asyncoll.Communicator, calls: int) -> dict[str, dict[str, float]]:
    x = np.zeros(ELEMENTS, np.float32)

    async def ping_pong() -> None:
        if comm.rank == 0:
            await comm.send(x, 1)
            await comm.recv(x, 1)
        elif comm.rank == 1:
            await comm.recv(x, 0)
            await comm.send(x, 0)

    async def solo() -> None:
        await comm.solo_allreduce(x, name="solo")

    found = {"ping-pong": await repeated(comm, ping_pong, calls)}
    found["ping-pong"]["us"] /= 2
    found["barrier"] = await repeated(comm, comm.barrier, calls)
    found["allreduce"] = await repeated(comm, lambda: comm.allreduce(x), calls)
    found["solo"] = await repeated(comm, solo, calls)
    return found


async def repeated(comm: asyncoll.Communicator, call: Callable[[], Awaitable[Any]], calls: int) -> dict[str, float]:
    for _ in range(WARMUP):
        await call()
    await comm.barrier()
    seconds = []
    before = usage()
    for _ in range(calls):
        start = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - start)
    used = [(after - earlier) / calls for after, earlier in zip(usage(), before, strict=True)]
    await comm.barrier()
    values = [statistics.median(seconds), *used]
    return dict(zip(PARTS, [*(1e6 * value for value in values[:-1]), values[-1]], strict=True))


def usage() -> Usage:
    caller_s = runtime_s = io_s = 0.0
    sleeps = 0
    for thread in Path("/proc/self/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
        ran_s = int((thread / "schedstat").read_text().split()[0]) / 1e9
        sleeps += int(status["voluntary_ctxt_switches"])
        if status["Name"].startswith("ZMQ"):
            io_s += ran_s
        elif int(thread.name) == os.getpid():
            caller_s += ran_s
        else:
            runtime_s += ran_s
    return Usage(time.process_time(), caller_s, runtime_s, io_s, sleeps)


if __name__ == "__main__":
    program(main, rank)
