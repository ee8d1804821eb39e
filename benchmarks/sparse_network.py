"""Sparse allreduces between hosts with limited links. The hosts are network namespaces of this machine.

The algorithms are those of Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022.

    sudo python benchmarks/sparse_network.py [--shapes 4x1,4x2] [--rate 1gbit] [--elements 25000000] [--rounds 16]

Shape 4x2 is four hosts of two ranks each, consecutive ones, which share memory. A host is a Linux network namespace
with one interface, a veth pair to a bridge in a namespace of its own; `tc tbf` limits it in both directions. What a
link really carries is measured first, by one plain TCP connection. The ranks are real processes in real time, with one
thread each; they share this machine's cores, which 8 hosts would not: `busy` is the share of the cores' time that was
used, by whatever.

All systems in turn, `rounds` times, in the same processes: fresh accumulators (normal, each rank's own, by seed), a
barrier, the timed call. Ok-Topk's thresholds are exact in the first of the rounds and reused in the others, so these
are one whole period tau', and its regions are cut in the first one; beside it, thresholds that are exact in every
round. A round takes as long as its slowest rank.
`selection` is the part of it in which the ranks choose, in their mean; the rest is the exchange, additions included.
Two lower bounds: `wire`, of the link, the most bytes that a rank has received in the mean round, at the rate that one
connection reached; and `processors`, of this machine, the processor time of all ranks' processes in the median round,
shared by all cores.
Bytes are those counted by the interface, headers of all layers and acknowledgements included, beside the words that
asyncoll has counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import RANK, Record, parser, program

import asyncoll
from asyncoll.algorithms.sparse.sparse_operations import ALGORITHMS
from asyncoll.launch.rank_environment import THREADS
from asyncoll.statistics import WORD_BYTES
from asyncoll.transport.keys import write_key

GLOO, ALLREDUCE = "Gloo", "allreduce"
EXACT = "oktopk, tau' = 1"
SYSTEMS = ("oktopk", EXACT, *ALGORITHMS[1:], ALLREDUCE, GLOO)
RIVALS = ("topka", "topkdsa", "gtopk", "gaussiank")
TARGET = 10  # times faster than Gloo
INTERFACE, BRIDGE = "eth0", "br0"
PORT, GLOO_PORT, PROBE_PORT = 29500, 29501, 29502
PROBE_BYTES = 1 << 26
BURST, QUEUE = "256kb", "50ms"  # a GSO packet, up to 64 KiB, must fit into the burst, or it is dropped
PATIENCE_S = 10
SEED = 5
TOLERANCE = 0.5  # of a sum of values: far less than any element that is selected, far more than rounding
Row = dict[str, Any]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shapes", default="4x1,4x2", help="hosts x ranks of each")
    options.add_argument("--systems", default="", help="some, separated by semicolons, Gloo and oktopk among them")
    options.add_argument("--rate", default="1gbit", help="of every link, each way, as tc writes it")
    options.add_argument("--elements", type=int, default=25_000_000)
    options.add_argument("--density", type=float, default=0.01)
    options.add_argument("--rounds", type=int, default=16, help="of each system, and Ok-Topk's tau'")
    options.add_argument(
        "--overlap", type=float, default=0.0, help="share of the variance that all ranks have in common"
    )
    record = Record(options, "sparse_network")
    refuse_without_means()
    chosen = record.arguments
    systems = chosen.systems.split(";") if chosen.systems else list(SYSTEMS)
    question = {
        "elements": chosen.elements,
        "density": chosen.density,
        "rounds": chosen.rounds,
        "overlap": chosen.overlap,
        "systems": systems,
    }
    found = {}
    for shape in chosen.shapes.split(","):
        count, local = map(int, shape.split("x"))
        load = os.getloadavg()[0]
        with hosts(count, chosen.rate) as names:
            answer = ask_hosts(names, {**question, "local": local}, local=local)
        rows = [summary(name, rounds, answer) for name, rounds in answer["systems"].items()]
        found[shape] = {**answer, "load average before": load, "summary": rows}
        record.table(title(shape, chosen, answer["link_gbit_per_s"], load), table(rows))
        print(verdict(rows))
    plot(record, {shape: of_shape["summary"] for shape, of_shape in found.items()})
    record.write(found, {shape_name(shape): cells(of_shape["summary"]) for shape, of_shape in found.items()})


def refuse_without_means() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(f"this needs {' and '.join(missing)} (Linux, package iproute2)")
    if os.geteuid() != 0:
        sys.exit("network namespaces are made by root: run this with sudo")


# -- hosts ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """The names of `count` namespaces, connected by links of `rate`, without a limit if that is empty.

    Nothing is left of them at the end.
    """
    prefix = f"asyncoll-{os.getpid()}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{place}" for place in range(count)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with contextlib.ExitStack() as undo:
        for name in (switch, *names):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("-n", switch, "link", "add", BRIDGE, "type", "bridge")
        ip("-n", switch, "link", "set", BRIDGE, "up")
        for place, name in enumerate(names):
            connect_host(name, address(place), switch, f"port{place}", rate)
        yield names


def connect_host(name: str, own: str, switch: str, port: str, rate: str) -> None:
    ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", switch, "link", "set", port, "master", BRIDGE, "up")
    ip("-n", name, "addr", "add", f"{own}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        ip("-n", name, "link", "set", interface, "up")
    for namespace, interface in ((name, INTERFACE), (switch, port)) if rate else ():
        limit = ["root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE]
        subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", interface, *limit], check=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def address(place: int) -> str:
    return f"10.77.0.{place + 1}"


def ask_hosts(names: list[str], question: Row, script: str = __file__, local: int = 1) -> Any:
    """`local` ranks of `script` in each namespace; rank 0's answer."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        answer = Path(folder) / "answer"
        write_key(Path(folder) / "key")
        with contextlib.ExitStack() as running:
            processes = []
            for rank in range(len(names) * local):
                host = rank // local
                command = [sys.executable, script, RANK, json.dumps(question), str(answer)]
                environ = os.environ | rank_environment(rank, len(names) * local, local, Path(folder) / f"host{host}")
                processes.append(subprocess.Popen(["ip", "netns", "exec", names[host], *command], env=environ))
                running.callback(end, processes[-1])
            await_all(processes)
        return json.loads(answer.read_text())


def rank_environment(rank: int, size: int, local: int, folder: Path) -> dict[str, str]:
    """With a folder for temporary files of its own a host is another machine to asyncoll, as containers are."""
    folder.mkdir(exist_ok=True)
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    own = {"ASYNCOLL_KEY_FILE": str(folder.parent / "key"), "TMPDIR": str(folder)}
    return {**meeting, **{name: str(value) for name, value in places.items()}, **dict.fromkeys(THREADS, "1"), **own}


def await_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have succeeded. The first that fails ends the program."""
    codes: list[int | None] = [None]
    while None in codes:
        time.sleep(0.2)
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            sys.exit(f"a rank failed with exit code {failed[0]}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -- a rank ---------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The cost of one call at one rank."""

    total_s: float
    selection_s: float
    bytes_received: int  # by the interface
    words_received: float  # as counted by the system; 0 for systems that do not count
    selected: int
    processor_s: float  # of this process, all its threads
    busy_s: float  # of all cores of the machine


Array = np.ndarray[Any, Any]
Call = Callable[[Array], Coroutine[Any, Any, tuple[float, asyncoll.SparseReduction | None]]]


def rank(question: Row) -> Row:
    import torch

    torch.set_num_threads(1)
    found: Row = asyncoll.run(measure, question)
    return found


async def measure(comm: asyncoll.Communicator, question: Row) -> Row:
    """The `Cost` of each system in each round, at every rank."""
    import torch.distributed as dist

    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{GLOO_PORT}"
    dist.init_process_group("gloo", init_method=meeting, rank=comm.rank, world_size=comm.size)
    speed = await link_speed(comm)
    draw = np.random.default_rng([comm.rank, SEED])
    accumulators = [draw.standard_normal(question["elements"], np.float32) for _ in range(2)]
    if question["overlap"]:
        common = np.random.default_rng(SEED).standard_normal(question["elements"], np.float32)
        for each in accumulators:
            each *= (1 - question["overlap"]) ** 0.5
            each += np.float32(question["overlap"] ** 0.5) * common
    x = np.empty_like(accumulators[0])
    for system in question["systems"]:  # opens the connections and touches the memory before anything is timed
        x[...] = accumulators[0]
        await check(comm, system, caller(comm, system, question, "check"), x)
    calls = {system: caller(comm, system, question, "timed") for system in question["systems"]}
    costs: dict[str, list[Cost]] = {system: [] for system in question["systems"]}
    for turn in range(question["rounds"]):
        for system, call in calls.items():
            x[...] = accumulators[turn % 2]
            await comm.barrier()
            costs[system].append(await one(call, x))
    everyones = {system: (await comm.allgather(np.array(mine))).tolist() for system, mine in costs.items()}
    await comm.barrier()
    dist.destroy_process_group()
    return {"link_gbit_per_s": speed, "systems": everyones}


def caller(comm: asyncoll.Communicator, system: str, question: Row, name: str) -> Call:
    """A call of `system`; it returns how long the selection took, and what asyncoll reports of a sparse allreduce."""
    import torch
    import torch.distributed as dist

    async def gloo(x: Array) -> tuple[float, None]:
        dist.all_reduce(torch.from_numpy(x))
        return 0.0, None

    async def allreduce(x: Array) -> tuple[float, None]:
        await comm.allreduce(x)
        return 0.0, None

    async def sparse(x: Array) -> tuple[float, asyncoll.SparseReduction]:
        start = time.perf_counter()
        work = comm.sparse_allreduce(
            x,
            density=question["density"],
            algorithm="oktopk" if system == EXACT else system,
            name=f"{system}, {name}",
            thresholds_every=1 if system == EXACT else question["rounds"],
            regions_every=question["rounds"],
        )
        selection_s = time.perf_counter() - start
        return selection_s, await work

    dense: dict[str, Call] = {GLOO: gloo, ALLREDUCE: allreduce}
    return dense.get(system, sparse)


async def check(comm: asyncoll.Communicator, system: str, call: Call, x: Array) -> None:
    """Nothing is lost: the ranks' vectors add up to the result and what is left of them."""
    before = x.sum(dtype=np.float64)
    _, reduction = await call(x)
    if reduction is None:
        result, left = x.sum(dtype=np.float64), 0.0
    else:
        result = reduction.values.sum(dtype=np.float64)
        left = x.sum(dtype=np.float64) + reduction.lost_values.sum(dtype=np.float64)
    befores, results, lefts = (await comm.allgather(np.array([before, result, left]))).T
    if np.ptp(results) or abs(befores.sum() - results[0] - lefts.sum()) > TOLERANCE:
        raise RuntimeError(f"{system}: {befores} became {results} and {lefts}")


async def one(call: Call, x: Array) -> Cost:
    received, processor_s, busy_s, start = bytes_received(), time.process_time(), machine_busy_s(), time.perf_counter()
    selection_s, reduction = await call(x)
    total_s = time.perf_counter() - start
    used = time.process_time() - processor_s, machine_busy_s() - busy_s
    received = bytes_received() - received
    if reduction is None:
        return Cost(total_s, selection_s, received, 0.0, x.size, *used)
    return Cost(total_s, selection_s, received, reduction.words_received, reduction.selected, *used)


def bytes_received() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


def machine_busy_s() -> float:
    """Since the start: of all cores together, neither idle nor waiting for a disk."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


async def link_speed(comm: asyncoll.Communicator) -> float:
    """Gbit/s of payload that one TCP connection carries from the second host to rank 0 while nothing else moves."""
    speed = np.zeros(1)
    listener = socket.create_server((address(0), PROBE_PORT)) if comm.rank == 0 else None
    await comm.barrier()
    if listener is not None:
        with listener, listener.accept()[0] as connection:
            speed[0] = received_gbit_per_s(connection)
    elif comm.rank == comm.local_size:  # the first rank of the second host
        with socket.create_connection((address(0), PROBE_PORT)) as connection:
            connection.sendall(bytes(PROBE_BYTES))
    await comm.broadcast(speed, root=0)
    return float(speed[0])


def received_gbit_per_s(connection: socket.socket) -> float:
    into, count = bytearray(1 << 20), 0
    start = time.perf_counter()
    while count < PROBE_BYTES:
        count += connection.recv_into(into)
    return 8e-9 * count / (time.perf_counter() - start)


# -- showing --------------------------------------------------------------------------------------


def summary(system: str, everyones: list[list[list[float]]], answer: Row) -> Row:
    """Of costs by rank and round; times in seconds."""
    total, selection, received, words, selected, processor, busy = np.moveaxis(np.array(everyones), 2, 0)
    rounds, cores = total.max(axis=0), len(os.sched_getaffinity(0))
    return {
        "system": system,
        "round_s": float(np.median(rounds)),
        "mean_s": float(rounds.mean()),
        "first_s": float(rounds[0]),
        "selection_s": float(np.median(selection.mean(axis=0))),
        "exchange_s": float(np.median(rounds - selection.mean(axis=0))),
        "wire_s": 8e-9 * float(received.mean(axis=1).max()) / answer["link_gbit_per_s"],
        "bytes": float(received.mean()),
        "words": float(words.mean()),
        "selected": float(selected.mean()),
        "processors_s": float(np.median(processor.sum(axis=0))) / cores,
        "busy": float(busy[0].sum() / rounds.sum() / cores),
    }


def title(shape: str, chosen: Any, speed: float, load: float) -> str:
    return (
        f"{shape}, links of {chosen.rate} ({speed:.3f} Gbit/s by one TCP connection), {chosen.elements} float32, "
        f"density {chosen.density:g}, {chosen.rounds} rounds (tau' = {chosen.rounds}), load before {load:.2f}; "
        "times in ms, bytes and words received by a rank in a round"
    )


def table(rows: list[Row]) -> list[list[str]]:
    gloo = next(row for row in rows if row["system"] == GLOO)
    times = ["round", "mean", "first", "selection", "exchange", "wire", "processors"]
    lines = [["system", f"{GLOO} / this", *times, "busy", "selected", "words", "bytes", "bytes / counted"]]
    for row in rows:
        counted = f"{row['bytes'] / WORD_BYTES / row['words']:.3f}" if row["words"] else "-"
        lines.append(
            [
                row["system"],
                f"{gloo['round_s'] / row['round_s']:.2f}",
                *(f"{1e3 * row[f'{name}_s']:.0f}" for name in times),
                f"{row['busy']:.0%}",
                f"{row['selected']:.0f}",
                f"{row['words']:.0f}",
                f"{row['bytes']:.0f}",
                counted,
            ]
        )
    return lines


def cells(rows: list[Row]) -> dict[str, float | str]:
    """What the page of benchmarks shows, in seconds."""
    round_s = {row["system"]: row["round_s"] for row in rows}
    names = {ALLREDUCE: ALLREDUCE, "Ok-Topk": EXACT, GLOO: GLOO}
    return {name: round_s[system] for name, system in names.items() if system in round_s}


def shape_name(shape: str) -> str:
    hosts, local = shape.split("x")
    return f"{hosts} hosts x {local} rank{'s' if local != '1' else ''}"


def verdict(rows: list[Row]) -> str:
    by_name = {row["system"]: row for row in rows}
    ours = by_name["oktopk"]
    over_gloo = {kind: by_name[GLOO][f"{kind}_s"] / ours[f"{kind}_s"] for kind in ("round", "mean")}
    slower = [rival for rival in RIVALS if rival in by_name and by_name[rival]["mean_s"] <= ours["mean_s"]]
    reached = "reached" if over_gloo["mean"] >= TARGET else "missed"
    return (
        f"Ok-Topk is {over_gloo['round']:.1f} times faster than Gloo's allreduce by medians, {over_gloo['mean']:.1f} "
        f"by means (the aim, {TARGET}: {reached}), and not faster than: {', '.join(slower) or 'none of its rivals'}"
    )


def plot(record: Record, found: dict[str, list[Row]]) -> None:
    """Mean rounds, selection below and exchange above, and the link's bound."""
    with record.figure(len(found)) as panels:
        for axes, (shape, rows) in zip(panels, found.items(), strict=True):
            names = [row["system"] for row in rows]
            selection = [row["selection_s"] for row in rows]
            axes.bar(names, selection, label="selection")
            axes.bar(names, [row["mean_s"] - row["selection_s"] for row in rows], bottom=selection, label="exchange")
            for bound, marker in (("wire", "k_"), ("processors", "r_")):
                axes.plot(names, [row[f"{bound}_s"] for row in rows], marker, markersize=20, label=f"bound: {bound}")
            axes.set(title=f"{shape} ranks", ylabel="seconds a round")
            axes.tick_params(axis="x", rotation=30)
            axes.legend()


if __name__ == "__main__":
    program(main, rank)
