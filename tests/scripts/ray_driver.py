"""A driver of Ray for `tests/test_ray.py`: runs each case on a cluster of two nodes, and writes what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import asyncoll
import asyncoll.ray

told: dict[str, object] = {}
SMALL = {"CPU": 0.5}
PATIENCE_S = 60


async def total(comm):
    x = np.full(1, comm.rank)
    await comm.allreduce(x)
    return [int(x[0]), comm.rank, "torch" in sys.modules]


async def fail(comm, how):
    await comm.barrier()
    if comm.rank == 1:
        if how == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)
    await comm.barrier()


async def interrupt(comm, driver, folder):
    note(folder, comm.rank)
    await comm.barrier()
    if comm.rank == 0:
        os.kill(driver, signal.SIGINT)
    await asyncio.Event().wait()


async def lock(comm):
    return threading.Lock()


@ray.remote
def trial():
    """What a trial of Ray Tune does: a driver in a placement group whose children run there."""

    async def main(comm):
        x = np.ones(1)
        await comm.allreduce(x)
        return [1, int(x[0])]

    return asyncoll.ray.run(main, ranks=2, resources_per_rank=SMALL)


def note(folder, rank):
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))


def run_page():
    """Run the program of the documentation."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "ray.md"
    source = page.read_text().partition("```python\n# ranks_of_ray.py\n")[2].partition("```")[0]
    exec(source, {"__name__": "__main__"})


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


def tell(name, action):
    try:
        told[name] = {"result": action()}
    except BaseException as error:
        told[name] = {"type": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}


def run(main, *args, **options):
    return lambda: asyncoll.ray.run(main, *args, **{"ranks": 2, "resources_per_rank": SMALL, **options})


def limited(action):
    with asyncoll.deadline(0.5):
        return action()


def trials(bundles):
    groups = [placement_group([SMALL] * bundles) for _ in range(2)]
    strategies = [PlacementGroupSchedulingStrategy(group, 0, True) for group in groups]
    try:
        return ray.get([trial.options(num_cpus=0.5, scheduling_strategy=each).remote() for each in strategies])
    finally:
        for group in groups:
            remove_placement_group(group)


def main(folder: str) -> None:
    options = {"object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={"num_cpus": 2, **options})
    cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
    ray.init(address=cluster.address)
    try:
        lock_here = threading.Lock()
        tell("sum", run(total, ranks=3, placement="spread"))
        run_page()
        tell("raise", run(fail, "raise", ranks=3))
        tell("kill", run(fail, "kill", ranks=3))
        tell("interrupt", run(interrupt, os.getpid(), folder))
        told["have ended"] = [has_ended(int(path.read_text())) for path in Path(folder).glob("pid-*")]
        tell("no room", lambda: limited(run(total, ranks=99, resources_per_rank={"CPU": 1})))
        tell("no ranks", run(total, ranks=0))
        tell("no coroutine", run(print))
        tell("a lock", run(total, lock_here))
        tell("no such placement", run(total, placement="near"))
        tell("no resources", run(total, resources_per_rank={"GPU": 0}))
        tell("a negative amount", run(total, resources_per_rank={"CPU": -1}))
        tell("a result", run(lock, ranks=1))
        tell("trials", lambda: trials(3))
        tell("full trial", lambda: trials(1))
    finally:
        ray.shutdown()
        cluster.shutdown()
    Path(folder, "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
