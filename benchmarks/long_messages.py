"""The cost of long messages between hosts, beside Gloo and plain sockets. The hosts are two namespaces of this machine.

    sudo python benchmarks/long_messages.py [--rates ,10gbit,1gbit] [--megabytes 1,16,100] [--repeats 5]

One rank a host, one thread each; the hosts are those of `sparse_network.py`, and an empty rate has no limit. `send` is
an array of rank 0 that rank 1 receives, `allreduce` a sum of both. A repeat moves about 400 MB; all systems take turns.
`sockets` is one TCP connection, whose ends call `sendall` and `recv_into`: it moves bytes and nothing else. A call
takes as long as its slower rank. Processor times are those of a whole rank, in milliseconds for each megabyte of the
array; the two ranks share this machine's cores, which hosts do not. `sleeps` is how often a rank's threads went to
sleep for each megabyte. `ping-pong` is half the round trip of 64 bytes.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from common import Record, numbers, parser, program
from message_cost import usage
from sparse_network import GLOO_PORT, PROBE_PORT, address, ask_hosts, hosts, refuse_without_means

import asyncoll
from asyncoll.bench.claims import Cells

ASYNCOLL, GLOO, SOCKETS = "asyncoll", "Gloo", "sockets"
RATES = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
MB = 1_000_000
REPEAT_BYTES = 400 * MB
PING_PONGS = 1000
Row = dict[str, Any]
Call = Callable[[], Awaitable[None]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rates", default=",10gbit,1gbit", help="of the links, as tc writes them")
    options.add_argument("--megabytes", type=numbers, default=[1, 16, 100])
    options.add_argument("--repeats", type=int, default=5)
    record = Record(options, "long_messages")
    refuse_without_means()
    chosen = record.arguments
    raw: Row = {}
    for rate in chosen.rates.split(","):
        question = {"megabytes": chosen.megabytes, "repeats": chosen.repeats if rate != "1gbit" else 1}
        with hosts(2, rate) as names:
            raw[rate or "no limit"] = found = ask_hosts(names, question, __file__)
        record.table(f"links: {rate or 'no limit'}", table(found))
    record.write(raw, cells(raw))


def table(found: list[Row]) -> list[list[str]]:
    of_ranks = [f"{what} {rank}" for what in ("processor", "sleeps") for rank in range(2)]
    lines = [["call", "system", "MB", "ms", "GB/s", "Gloo / this", *of_ranks]]
    medians = {(row["call"], row["system"], row["mb"]): statistics.median(row["s"]) for row in found}
    for row in found:
        seconds = medians[row["call"], row["system"], row["mb"]]
        gloo = medians.get((row["call"], GLOO, row["mb"]))
        lines.append(
            [
                row["call"],
                row["system"],
                f"{row['mb']:g}",
                f"{1e3 * seconds:.3f}",
                f"{row['mb'] / 1e3 / seconds:.2f}",
                f"{gloo / seconds:.2f}" if gloo else "-",
                *(f"{1e3 * statistics.median(each):.3f}" for each in row["cpu_s"]),
                *(f"{statistics.median(each):.1f}" for each in row["sleeps"]),
            ]
        )
    return lines


def cells(raw: Row) -> Cells:
    """What the page of benchmarks shows, in seconds."""
    named: Cells = {}
    for rate, found in raw.items():
        for row in found:
            name = f"{row['call']} of {row['mb']:g} MB, 2 hosts, {RATES.get(rate, rate)}"
            system = {ASYNCOLL: row["call"], GLOO: GLOO}.get(row["system"])
            if system:
                named.setdefault(name, {})[system] = statistics.median(row["s"])
    return named


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: Row) -> list[Row]:
    import torch

    torch.set_num_threads(1)
    return asyncoll.run(measure, question)


async def measure(comm: asyncoll.Communicator, question: Row) -> list[Row]:
    import torch.distributed as dist

    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{GLOO_PORT}"
    dist.init_process_group("gloo", init_method=meeting, rank=comm.rank, world_size=comm.size)
    found: dict[tuple[str, str, float], Row] = {}
    with connection(comm.rank) as plain:
        arrays = {mb: np.ones(mb * MB // 4, np.float32) for mb in question["megabytes"]}
        for turn in range(question["repeats"] + 1):  # the first opens connections
            for call, system, mb, count, run in calls(comm, plain, arrays):
                one = await repeat(comm, run, count, mb)
                if turn:
                    row = found.setdefault((call, system, mb), {"s": [], "cpu_s": [[], []], "sleeps": [[], []]})
                    row["s"].append(one[:, 0].max())
                    for of in range(2):
                        row["cpu_s"][of].append(one[of, 1])
                        row["sleeps"][of].append(one[of, 2])
    await comm.barrier()
    dist.destroy_process_group()
    return [{"call": call, "system": system, "mb": mb, **row} for (call, system, mb), row in found.items()]


def calls(
    comm: asyncoll.Communicator, plain: socket.socket, arrays: dict[int, Any]
) -> Iterator[tuple[str, str, float, int, Call]]:
    import torch
    import torch.distributed as dist

    for mb, x in arrays.items():
        tensor, view = torch.from_numpy(x), memoryview(x).cast("B")
        count = max(1, REPEAT_BYTES // x.nbytes)

        async def send(x: Any = x) -> None:
            await (comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0))

        async def send_gloo(tensor: Any = tensor) -> None:
            if comm.rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)

        async def send_plain(view: memoryview = view) -> None:
            if comm.rank == 0:
                plain.sendall(view)
            else:
                receive(plain, view)

        async def allreduce(x: Any = x) -> None:
            await comm.allreduce(x)

        async def allreduce_gloo(tensor: Any = tensor) -> None:
            dist.all_reduce(tensor)

        yield "send", ASYNCOLL, mb, count, send
        yield "send", GLOO, mb, count, send_gloo
        yield "send", SOCKETS, mb, count, send_plain
        yield "allreduce", ASYNCOLL, mb, max(1, count // 2), allreduce
        yield "allreduce", GLOO, mb, max(1, count // 2), allreduce_gloo
    short = np.zeros(16, np.float32)

    async def ping_pong() -> None:
        if comm.rank == 0:
            await comm.send(short, 1)
            await comm.recv(short, 1)
        else:
            await comm.recv(short, 0)
            await comm.send(short, 0)

    yield "ping-pong", ASYNCOLL, 2 * 64 / MB, PING_PONGS, ping_pong


async def repeat(comm: asyncoll.Communicator, run: Call, count: int, mb: float) -> Any:
    """Of a call, by rank: seconds, and processor seconds and sleeps for each megabyte."""
    await comm.barrier()
    before, start = usage(), time.perf_counter()
    for _ in range(count):
        await run()
    seconds = (time.perf_counter() - start) / count
    after = usage()
    moved = count * mb
    mine = [seconds, (after.cpu_s - before.cpu_s) / moved, (after.sleeps - before.sleeps) / moved]
    return (await comm.allgather(np.array(mine))).reshape(2, 3)


def receive(plain: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        filled += plain.recv_into(view[filled:])


@contextmanager
def connection(rank: int) -> Iterator[socket.socket]:
    """A TCP connection between the two ranks."""
    if rank == 0:
        with socket.create_server((address(0), PROBE_PORT)) as listener, listener.accept()[0] as plain:
            yield plain
        return
    while True:
        try:
            plain = socket.create_connection((address(0), PROBE_PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with plain:
        yield plain


if __name__ == "__main__":
    program(main, rank)
