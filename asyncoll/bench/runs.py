"""Runs a benchmark: in real processes under the launcher, or in ranks that share one loop of a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence

import asyncoll
from asyncoll.bench import dense_calls, skewed, sparse_calls
from asyncoll.bench.places import check
from asyncoll.bench.plan import BenchPlan, Row
from asyncoll.communicator import Communicator
from asyncoll.launch.keeper import kept
from asyncoll.testing import run_ranks

TRANSPORTS = {
    "shm": "real processes that share memory",
    "zmq": "real processes over unix sockets",
    "tcp": "real processes over loopback tcp",
    "inproc": "ranks in one process",
}


def rows(plan: BenchPlan) -> Generator[Row, None, None]:
    """Run the benchmark, and give each row when it is measured. Raises SystemExit, with its exit code, if it fails."""
    check(plan)
    transport = "shm" if plan.transport == "shm" else "zmq"
    if plan.transport == "inproc":
        lines = printed([sys.executable, "-m", "asyncoll.bench", plan.to_json()])
    else:
        lines = printed_by_ranks(plan.ranks, ["asyncoll.bench", plan.to_json()], transport)
    yield from map(json.loads, lines)


def printed_by_ranks(ranks: int, module: Sequence[str], transport: str = "shm") -> Iterator[str]:
    """The lines that ranks of a module print. Raises SystemExit, with its exit code, if the job fails."""
    launch = ["launch", "-n", str(ranks), "--transport", transport, "-m", *module]
    for line in printed([sys.executable, "-m", "asyncoll", *launch]):
        yield line.partition(": ")[2]


def printed(command: Sequence[str]) -> Iterator[str]:
    """The lines that a command prints. Raises SystemExit, with its exit code, if it fails."""
    with kept(command) as keeper:
        yield from keeper.stdout
        code = keeper.process.wait()
    if code:
        raise SystemExit(code)


def rows_of(plan: BenchPlan) -> list[Row]:
    """The rows of a benchmark. Raises RuntimeError if a result is wrong."""
    found = list(rows(plan))
    if any(row["wrong"] for row in found):
        raise RuntimeError(f"wrong results of {plan}: {found}")
    return found


def main() -> None:
    """Run one rank, or all of one process, with a plan as argument. Rank 0 prints the rows, as lines of JSON."""
    plan = BenchPlan.from_json(sys.argv[1])
    if plan.transport == "inproc":
        run_ranks(plan.ranks, lambda comm: measure(comm, plan))
        return
    if plan.transport == "tcp":
        # Ranks count as ranks of one host if they share the folder of the job, or the temporary folder. The other ranks
        # take this one for a rank of another host, so they connect to it by TCP.
        os.environ.pop("ASYNCOLL_FOLDER", None)
        tempfile.tempdir = tempfile.mkdtemp()
    asyncoll.run(measure, plan)


async def measure(comm: Communicator, plan: BenchPlan) -> None:
    """Measure the benchmark of `plan`. All ranks call it, and get the same rows. Rank 0 prints them."""
    async for row in _measured(comm, plan):
        if comm.rank == 0:
            print(json.dumps(row), flush=True)


async def _measured(comm: Communicator, plan: BenchPlan) -> AsyncIterator[Row]:
    if plan.benchmark == "solo":
        # Ranks in one process share a loop, which a rank that blocks it would take from the others. So they sleep.
        async for row in skewed.solo(comm, plan, asyncio.sleep if plan.transport == "inproc" else _compute):
            yield row
        return
    for size in plan.sizes:
        if plan.benchmark == "pingpong":
            yield await dense_calls.pingpong(comm, size)
        elif plan.benchmark == "sparse":
            yield await sparse_calls.sparse(comm, size)
        else:
            yield await dense_calls.allreduce(comm, plan, size)


async def _compute(seconds: float) -> None:
    """Block the loop, as a trainer that computes on it does. Progress then has to come from the progress thread."""

    time.sleep(seconds)  # noqa: ASYNC251
