"""Calls of torch.distributed with the backend asyncoll, and with Gloo: all_reduce by size, and the cost of issuing.

    python benchmarks/torch_backend.py [--ranks 2,4] [--sizes 1K,1M,25M] [--repeats 3]

One world of processes has a group of each backend, and blocks of calls alternate, because a program uses one of them.
Per call: fresh input, a barrier of the group, the timed `all_reduce`, and a check of every element. The first call of a
block is not counted. A time is from the start of the last rank to the end of the last rank: the median of the calls,
and of several repeats the median. A ratio is taken within each repeat, and of the ratios the median.

The cost of issuing is the processor time that the calling thread spends in `all_reduce(async_op=True)`, of 1 KiB,
without the wait.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Record, ask, numbers, parser, program

from asyncoll.bench.plan import ITEM_BYTES, parse_sizes

SIZES = "1K,1M,25M"
BLOCK = 20  # calls
BYTES_PER_REPEAT = 200_000_000
ISSUED = 500
OURS, GLOO = "asyncoll", "gloo"
Row = dict[str, list[float]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=numbers, default=[2, 4])
    options.add_argument("--sizes", type=parse_sizes, default=parse_sizes(SIZES))
    options.add_argument("--repeats", type=int, default=3)
    record = Record(options, "torch_backend")
    chosen = record.arguments
    raw: dict[int, Any] = {}
    for ranks in chosen.ranks:
        runs = raw[ranks] = [ask(ranks, __file__, {"sizes": chosen.sizes}) for _ in range(chosen.repeats)]
        lines = [["bytes", f"{OURS} (us)", f"{GLOO} (us)", "times faster"]]
        for size in map(str, chosen.sizes):
            ours, gloo = ([run["seconds"][size][name] * 1e6 for run in runs] for name in (OURS, GLOO))
            ratio = median(theirs / mine for mine, theirs in zip(ours, gloo, strict=True))
            lines.append([size, f"{median(ours):.0f}", f"{median(gloo):.0f}", f"{ratio:.1f}"])
        record.table(f"{ranks} ranks: all_reduce", lines)
        issued = [[name, f"{median(run['issued'][name] for run in runs) * 1e6:.0f}"] for name in (OURS, GLOO)]
        record.table(f"{ranks} ranks: processor time to issue a call", [["backend", "us"], *issued])
    record.write(raw)


# -- a rank ---------------------------------------------------------------------------------------


def rank(question: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group(OURS)
    groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend=GLOO)}
    seconds = {size: timed(groups, size // ITEM_BYTES) for size in question["sizes"]}
    found = {"seconds": seconds, "issued": {name: issuing(group) for name, group in groups.items()}}
    dist.destroy_process_group()
    return found


def timed(groups: dict[str, Any], count: int) -> dict[str, float]:
    """The median of the seconds of an all_reduce of `count` float32, in each group."""
    blocks = max(2, min(25, BYTES_PER_REPEAT // (count * ITEM_BYTES * BLOCK)))
    starts: Row = {name: [] for name in groups}
    ends: Row = {name: [] for name in groups}
    pattern = torch.arange(count, dtype=torch.float32).remainder_(1000)
    x = torch.empty(count)
    total = pattern * (dist.get_world_size() * (dist.get_world_size() + 1) / 2)
    for _ in range(blocks):
        for name, group in groups.items():
            for call in range(BLOCK):
                torch.mul(pattern, dist.get_rank() + 1, out=x)
                dist.barrier(group)
                start = time.perf_counter()
                dist.all_reduce(x, group=group)
                end = time.perf_counter()
                if not torch.equal(x, total):
                    raise SystemExit(f"{name}: wrong results")
                if call:
                    starts[name].append(start)
                    ends[name].append(end)
    return {name: (latest(ends[name]) - latest(starts[name])).median().item() for name in groups}


def issuing(group: Any) -> float:
    """The slowest rank's median of the seconds of processor time in an asynchronous all_reduce of 1 KiB."""
    x, found = torch.zeros(256), []
    for _ in range(ISSUED):
        dist.barrier(group)
        start = time.thread_time()
        work = dist.all_reduce(x, group=group, async_op=True)
        found.append(time.thread_time() - start)
        work.wait()
    return latest([median(found)]).item()


def latest(seconds: list[float]) -> torch.Tensor:
    """Of each of these numbers, the greatest of all ranks. The ranks of a host have one clock."""
    x = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


if __name__ == "__main__":
    program(main, rank)
