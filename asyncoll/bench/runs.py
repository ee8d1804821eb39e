"""Runs a benchmark: in real processes under the launcher, or in ranks that share one loop."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import asyncoll
from asyncoll.bench import dense_calls, skewed, sparse_calls
from asyncoll.bench.places import check
from asyncoll.bench.plan import BenchPlan, Row
from asyncoll.communicator import Communicator
from asyncoll.launch import launch
from asyncoll.testing import run_ranks

TRANSPORTS = {
    "shm": "real processes that share memory",
    "ipc": "real processes over unix sockets",
    "tcp": "real processes over loopback tcp",
    "inproc": "ranks in one process",
}


def run_plan(plan: BenchPlan) -> tuple[int, list[Row]]:
    """Run the benchmark. Returns the exit code of the job, and its rows: none if it has failed."""
    check(plan)
    if plan.transport == "inproc":
        return 0, run_ranks(plan.ranks, lambda comm: measure(comm, plan))[0]
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        results = Path(folder) / "rows"
        transport = "shm" if plan.transport == "shm" else "zmq"
        code = launch(plan.ranks, ["asyncoll.bench", plan.to_json(), folder], module=True, transport=transport)
        return code, [json.loads(line) for line in results.read_text().splitlines()] if code == 0 else []


def rows_of(plan: BenchPlan) -> list[Row]:
    """The rows of a benchmark. Raises RuntimeError if the job fails or a result is wrong."""
    code, rows = run_plan(plan)
    if code or any(row["wrong"] for row in rows):
        raise RuntimeError(f"{plan}: exit code {code}, {rows}")
    return rows


def rank_main() -> None:
    """Run one rank, with a plan and a folder as arguments. Rank 0 writes the rows into the folder, as lines of JSON."""
    plan, folder = BenchPlan.from_json(sys.argv[1]), Path(sys.argv[2])
    if plan.transport == "tcp":
        # Ranks count as ranks of one host if they share the folder of the job, or the temporary folder. The other ranks
        # take this one for a rank of another host, so they connect to it by TCP.
        os.environ.pop("ASYNCOLL_FOLDER", None)
        tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    rows = asyncoll.run(measure, plan)
    if int(os.environ["RANK"]) == 0:
        (folder / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def measure(comm: Communicator, plan: BenchPlan) -> list[Row]:
    """Measure the benchmark of `plan`. All ranks call it, and get the same rows."""
    # Ranks in one process share a loop, which a rank that blocks it would take from the others. So they sleep instead.
    if plan.benchmark == "solo":
        return await skewed.solo(comm, plan, asyncio.sleep if plan.transport == "inproc" else _compute)
    if plan.benchmark == "pingpong":
        return [await dense_calls.pingpong(comm, size) for size in plan.sizes]
    if plan.benchmark == "sparse":
        return [await sparse_calls.sparse(comm, size) for size in plan.sizes]
    return [await dense_calls.allreduce(comm, plan, size) for size in plan.sizes]


async def _compute(seconds: float) -> None:
    """Block the loop, as a trainer that computes on it does. Progress then has to come from the progress thread."""

    time.sleep(seconds)  # noqa: ASYNC251
