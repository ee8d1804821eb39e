"""Allreduce of float32, asyncoll (ipc) and Gloo in turn: medians and their ratio.

    python benchmarks/allreduce_vs_gloo.py [--ranks 2,4] [--sizes 4,1K,...] [--rounds 3]

Both do the same: three uncounted calls, then for each call a fresh input, a barrier, the timed allreduce, and a check
of the result. A number is the slowest rank's median, and of several rounds the median again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from asyncoll.bench.dense import WARMUP, pattern
from asyncoll.bench.plan import Plan, parse_sizes, repeats
from asyncoll.bench.table import aligned, headline
from asyncoll.bench.worlds import run_plan
from asyncoll.launch.environment import reserve_port

SIZES = "4,1K,16K,256K,1M,4M,16M,100M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for ranks in map(int, arguments.ranks.split(",")):
        compare(Plan("allreduce", ranks, arguments.sizes), arguments.rounds)


def compare(plan: Plan, rounds: int) -> None:
    ours, gloos = [], []
    for _ in range(rounds):
        ours.append(run_asyncoll(plan))
        gloos.append(run_gloo(plan))
    print(f"{headline(plan)}; torch {torch.__version__}; {rounds} rounds")
    lines = [["size (B)", "asyncoll (us)", "Gloo (us)", "asyncoll/Gloo", "faster"]]
    for place, size in enumerate(plan.sizes):
        mine, other = (statistics.median(times[place] for times in runs) for runs in (ours, gloos))
        faster = "asyncoll" if mine < other else "Gloo"
        lines.append([str(size), f"{mine:.0f}", f"{other:.0f}", f"{mine / other:.2f}", faster])
    print(aligned(lines), flush=True)


def run_asyncoll(plan: Plan) -> list[float]:
    code, rows = run_plan(plan)
    if code or any(row["wrong"] for row in rows):
        sys.exit(f"asyncoll: exit code {code}, {rows}")
    return [row["time_us"] for row in rows]


def run_gloo(plan: Plan) -> list[float]:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with reserve_port() as holder:
        port = holder.getsockname()[1]
        ranks = [context.Process(target=gloo_rank, args=(rank, plan, port, sender)) for rank in range(plan.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("Gloo: a rank failed")
    times: list[float] = receiver.recv()
    return times


def gloo_rank(rank: int, plan: Plan, port: int, sender: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=plan.ranks)
    medians = torch.tensor([gloo_median(rank, plan.ranks, size) for size in plan.sizes], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    if rank == 0:
        sender.send([float(median) * 1e6 for median in medians])
    dist.barrier()
    dist.destroy_process_group()


def gloo_median(rank: int, ranks: int, size: int) -> float:
    base = torch.from_numpy(pattern(size // 4))
    mine, total, x = base * (rank + 1), base * (ranks * (ranks + 1) // 2), torch.empty_like(base)
    seconds = []
    for _ in range(WARMUP + repeats(size)):
        x.copy_(mine)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        seconds.append(time.perf_counter() - start)
        if not torch.equal(x, total):
            sys.exit("Gloo: a wrong result")
    return statistics.median(seconds[WARMUP:])


if __name__ == "__main__":
    main()
