"""Dense calls of ranks on several hosts that share memory within each, against Gloo. The hosts are namespaces.

    sudo python benchmarks/two_levels.py [--calls allreduce] [--shapes 2x4,4x2] [--megabytes 25,100] [--rate 1gbit]
                                         [--rounds 5]

`--calls allreduce,allgather,reduce_scatter` measures all three; megabytes are those of the whole array, of all blocks.

Shape 2x4 is two hosts of four ranks. `block` places consecutive ranks on a host, `cyclic` deals the ranks to the hosts
in turn: a ring of Gloo crosses the network once for each host, or with each of its steps. The links are those of
`sparse_network.py`. Both systems in turn, in the same processes, one round more than counted; a round takes as long as
its slowest rank. `received` is counted by the interface of host 0, headers included, beside the two-level formula,
2 n (H - 1) / H bytes for an allreduce, and half for the others. All ranks share the cores of this machine, which hosts
would not.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RANK, Record, numbers, parser, program
from sparse_network import (
    GLOO,
    GLOO_PORT,
    INTERFACE,
    PORT,
    address,
    await_all,
    end,
    hosts,
    refuse_without_means,
)

import asyncoll
from asyncoll.bench.claims import Cells
from asyncoll.launch.rank_environment import THREADS
from asyncoll.transport.keys import write_key

ASYNCOLL = "asyncoll"
SYSTEMS = (GLOO, ASYNCOLL)
PLACEMENTS = ("block", "cyclic")
MB = 1_000_000
CROSSINGS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}  # of a link by each byte, times (H - 1) / H
Row = dict[str, Any]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--calls", default="allreduce", help=f"of {', '.join(CROSSINGS)}")
    options.add_argument("--shapes", default="2x4,4x2", help="hosts x ranks of each")
    options.add_argument("--megabytes", type=numbers, default=[25, 100])
    options.add_argument("--rate", default="1gbit", help="of every link, each way, as tc writes it")
    options.add_argument("--rounds", type=int, default=5)
    record = Record(options, "two_levels")
    refuse_without_means()
    chosen = record.arguments
    found = []
    for shape in chosen.shapes.split(","):
        count, local = map(int, shape.split("x"))
        question = {"calls": chosen.calls.split(","), "megabytes": chosen.megabytes, "rounds": chosen.rounds}
        for placement in PLACEMENTS:
            with hosts(count, chosen.rate) as names:
                rows = ask_hosts(names, local, placement, question)
            found += [{"shape": shape, "placement": placement, "hosts": count, **row} for row in rows]
    record.table(f"calls between hosts, links of {chosen.rate}", table(found))
    record.write(found, cells(found))


def ask_hosts(names: list[str], local: int, placement: str, question: Row) -> Any:
    """`local` ranks in each namespace; rank 0's answer."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder, contextlib.ExitStack() as running:
        answer = Path(folder) / "answer"
        write_key(Path(folder) / "key")
        processes = []
        for host, name in enumerate(names):
            (Path(folder) / f"host{host}").mkdir()
            for place in range(local):
                rank = host * local + place if placement == "block" else place * len(names) + host
                command = [sys.executable, __file__, RANK, json.dumps(question), str(answer)]
                environ = os.environ | environment(rank, len(names) * local, place, local, Path(folder) / f"host{host}")
                processes.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=environ))
                running.callback(end, processes[-1])
        await_all(processes)
        return json.loads(answer.read_text())


def environment(rank: int, size: int, place: int, local: int, folder: Path) -> dict[str, str]:
    """With a folder for temporary files of its own a host is another machine to asyncoll, as containers are."""
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": local}
    own = {"ASYNCOLL_KEY_FILE": str(folder.parent / "key"), "TMPDIR": str(folder)}
    return {**meeting, **{name: str(value) for name, value in places.items()}, **dict.fromkeys(THREADS, "1"), **own}


def table(found: list[Row]) -> list[list[str]]:
    figures = ["MB", "Gloo ms", "asyncoll ms", "ratio", "received: Gloo", "asyncoll", "formula"]
    lines = [["call", "hosts x ranks", "placement", *figures]]
    for row in found:
        gloo, ours = (row["systems"][name] for name in SYSTEMS)
        formula = CROSSINGS[row["call"]] * (row["hosts"] - 1) / row["hosts"] * row["mb"]
        figures = [f"{each['s'] * 1e3:.0f}" for each in (gloo, ours)]
        moved = [f"{each['bytes'] / MB:.1f}" for each in (gloo, ours)]
        lines.append(
            [
                row["call"],
                row["shape"],
                row["placement"],
                str(row["mb"]),
                *figures,
                f"{gloo['s'] / ours['s']:.2f}",
                *moved,
                f"{formula:.1f}",
            ]
        )
    return lines


def cells(found: list[Row]) -> Cells:
    """What the page of benchmarks shows, in seconds; the allreduces of 100 MB by the names of its rows."""
    named: Cells = {}
    for row in found:
        hosts, local = row["shape"].split("x")
        turn = ", dealt in turn" if row["placement"] == "cyclic" else ""
        name = f"{row['call']} of {row['mb']} MB, {hosts} hosts x {local} ranks{turn}"
        if (row["call"], row["mb"]) == ("allreduce", 100):
            name = f"{hosts} x {local}{turn}" if turn else f"{hosts} hosts x {local} ranks"
        gloo, ours = (row["systems"][system]["s"] for system in SYSTEMS)
        named[name] = {row["call"]: ours, GLOO: gloo}
    return named


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: Row) -> Any:
    torch.set_num_threads(1)
    return asyncoll.run(measure, question)


async def measure(comm: asyncoll.Communicator, question: Row) -> list[Row]:
    dist.init_process_group("gloo", f"tcp://{address(0)}:{GLOO_PORT}", rank=comm.rank, world_size=comm.size)
    rows = [
        await ask_systems(comm, call, mb, question["rounds"])
        for call in question["calls"]
        for mb in question["megabytes"]
    ]
    dist.destroy_process_group()
    return rows


async def ask_systems(comm: asyncoll.Communicator, call: str, mb: int, rounds: int) -> Row:
    found: dict[str, list[list[float]]] = {name: [] for name in SYSTEMS}
    x = torch.empty(mb * MB // 4 // comm.size * comm.size)
    for _ in range(rounds + 1):
        for name in SYSTEMS:
            found[name].append(await once(comm, name, call, x))
    medians = {name: [statistics.median(each) for each in zip(*found[name][1:], strict=True)] for name in SYSTEMS}
    return {"call": call, "mb": mb, "systems": {name: {"s": s, "bytes": b} for name, (s, b) in medians.items()}}


async def once(comm: asyncoll.Communicator, name: str, call: str, x: torch.Tensor) -> list[float]:
    """The seconds of the slowest rank, and the bytes that host 0 has received, in one call."""
    x.fill_(1.0)
    await comm.barrier()
    bytes_before, start = received(), time.perf_counter()
    result = with_gloo(call, x, comm.size) if name == GLOO else await with_asyncoll(comm, call, x)
    mine = torch.tensor([time.perf_counter() - start, received() - bytes_before], dtype=torch.float64)
    assert result[0] == result[-1] == (1 if call == "allgather" else comm.size)
    of_all = torch.stack(tuple(await comm.allgather(mine)))
    return [float(of_all[:, 0].max()), float(of_all[0, 1])]


def with_gloo(call: str, x: torch.Tensor, size: int) -> torch.Tensor:
    if call == "allreduce":
        dist.all_reduce(x)
        return x
    share = x.numel() // size
    result = torch.empty(x.numel() if call == "allgather" else share)
    if call == "allgather":
        dist.all_gather_into_tensor(result, x[:share])
    else:
        dist.reduce_scatter_tensor(result, x)
    return result


async def with_asyncoll(comm: asyncoll.Communicator, call: str, x: torch.Tensor) -> torch.Tensor:
    if call == "allreduce":
        return await comm.allreduce(x)
    if call == "allgather":
        return (await comm.allgather(x[: x.numel() // comm.size])).flatten()
    return (await comm.reduce_scatter(x)).flatten()


def received() -> int:
    """By the interface of this host."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))


if __name__ == "__main__":
    program(main, rank)
