"""A driver of Ray for `tests/ray/test_ray.py`: runs each case on a cluster of two nodes, and writes what came of it.

Each rank is a process that imports Ray, which takes a second of processor time: few ranks serve all cases.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import asyncoll
import asyncoll.ray
from tests.scripts.world import program_ends
from tests.support.places import ROOT

PAGE = ROOT / "docs" / "howto" / "ray.md"
SMALL = {"CPU": 0.25}
PATIENCE_S = 60


async def fail(comm, how):
    await comm.barrier()
    if comm.rank == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "abort":
            comm.abort("enough")
            return
        os.kill(os.getpid(), signal.SIGKILL)
    await comm.barrier()


async def lose_node(comm, raylet, folder):
    await comm.barrier()
    if os.getppid() == raylet:
        note(folder, comm.rank)
        os.kill(raylet, signal.SIGKILL)
    await comm.barrier()


async def interrupt(comm, driver, folder):
    note(folder, comm.rank)
    await comm.barrier()
    if comm.rank == 0:
        os.kill(driver, signal.SIGINT)
    await asyncio.Event().wait()


async def lock(comm):
    return threading.Lock()


async def total(comm):
    x = np.full(1, comm.rank)
    await comm.allreduce(x)
    return [int(x[0]), comm.rank, "torch" in sys.modules]


@ray.remote
class Trial:
    """What a trial of Ray Tune is: a driver in a placement group whose children run there, beside it."""

    def run(self):
        with asyncoll.deadline(PATIENCE_S):
            return outcome(total), outcome(total, ranks=3), outcome(total, ranks=9)


def note(folder, rank):
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))


def noted(folder):
    """The processes that ranks have noted, by rank. Forgets them."""
    paths = list(Path(folder).glob("pid-*"))
    found = {int(path.name.removeprefix("pid-")): int(path.read_text()) for path in paths}
    for path in paths:
        path.unlink()
    return found


def has_ended(pid):
    """Whether the process ends. It may be ending still."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE_S)[0])
    finally:
        os.close(process)


def outcome(main, *args, **options):
    try:
        return {"result": asyncoll.ray.run(main, *args, **{"ranks": 2, "resources_per_rank": SMALL, **options})}
    except BaseException as error:
        return {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}


def start_page(folder, address):
    """Start the program of the documentation by the command of the documentation."""
    program, command = (PAGE.read_text().partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "sh"))
    Path(folder, "ranks_of_ray.py").write_text(program)
    env = os.environ | {"RAY_ADDRESS": address, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "-e", "-c", command], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def without_room():
    with asyncoll.deadline(0.5):
        return outcome(total, ranks=99, resources_per_rank={"CPU": 1})


def trials():
    group = placement_group([SMALL] * 3, strategy="SPREAD")
    strategy = PlacementGroupSchedulingStrategy(group, 0, True)
    try:
        return ray.get(Trial.options(num_cpus=0.25, scheduling_strategy=strategy).remote().run.remote())
    finally:
        remove_placement_group(group)


def cases(folder, cluster, far):
    """What came of each case. Those that end by themselves run at the same time."""
    with ThreadPoolExecutor() as pool:
        page = start_page(folder, cluster.address)
        under_way = {
            "raise": pool.submit(outcome, fail, "raise", ranks=3),
            "kill": pool.submit(outcome, fail, "kill"),
            "abort": pool.submit(outcome, fail, "abort"),
            "a result": pool.submit(outcome, lock, ranks=1),
            "trial": pool.submit(trials),
            "no room": pool.submit(without_room),
        }
        ends = [end for end in program_ends.ENDS if end not in program_ends.HANDLED_BY_RAY]
        by_end = [pool.submit(outcome, program_ends.main, end) for end in ends]
        told = {
            "no ranks": outcome(total, ranks=0),
            "no coroutine": outcome(print),
            "a lock": outcome(total, threading.Lock()),
            "no such placement": outcome(total, placement="near"),
            "no resources": outcome(total, resources_per_rank={"GPU": 0}),
            "a negative amount": outcome(total, resources_per_rank={"CPU": -1}),
            "a tiny amount": outcome(total, resources_per_rank={"CPU": 1e-5}),
            "no name": outcome(total, resources_per_rank={"": 1}),
        }
        told |= {name: each.result() for name, each in under_way.items()}
        told["ends"] = {end: each.result() for end, each in zip(ends, by_end, strict=True)}
        out, _ = page.communicate()
        told["page"] = [page.returncode, out]
    told["interrupt"] = outcome(interrupt, os.getpid(), folder)
    told["have ended"] = [has_ended(pid) for pid in noted(folder).values()]
    told["lost node"] = outcome(lose_node, far, folder, placement="strict_spread")
    told["ranks there"] = [[rank, has_ended(pid)] for rank, pid in noted(folder).items()]
    return told


def main(folder: str) -> None:
    options = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={"no_monitor": True, **options})
    far = cluster.add_node(**options).all_processes["raylet"][0].process.pid
    ray.init(address=cluster.address)
    try:
        told = cases(folder, cluster, far)
    finally:
        ray.shutdown()
        cluster.shutdown()
    Path(folder, "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
