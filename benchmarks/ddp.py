"""DistributedDataParallel, FSDP2 and the communication hooks, beside Gloo.

    python benchmarks/ddp.py {steps,allreduce,fsdp,straggler,sparse} [--ranks 2] [--repeats 30] [--rounds 40]
        [--seeds 0] [--late-ms 300] [--partial solo] [--op AVG] [--workload digits] [--density 0.01] [--warm-up 0]

Real processes with one thread each. What is compared alternates in one run, after a barrier.

*steps*: a step of an MLP of 10 million parameters, batch 16, plain SGD: on each rank alone (`local`); with DDP on Gloo;
on asyncoll; and with the hook `allreduce`, whose buckets are in registered memory. `gradient_as_bucket_view` is on in
all. `beyond local` is the time that communication adds.

*allreduce*: 40 MB, by Gloo and in registered memory.

*fsdp*: a step of FSDP2 for the same MLP, by Gloo and by asyncoll with buffers in registered memory.

*straggler*: the language model of `trainers`; in each step one rank, drawn at random, is `--late-ms` late. Plain DDP on
Gloo takes `--rounds` steps, and the hook `eager_sgd` twice as many rounds. The share of the time is that of the first
evaluation with the score, on held-out text, that plain DDP has at the end. Evaluations are not timed.

*sparse*: a workload of `trainers` without delays, by plain DDP and by the hook `oktopk`.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Record, ask, parser, program
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import asyncoll
from asyncoll.torch import hooks
from trainers.workloads import WORKLOADS, Workload

WIDTH, LAYERS, BATCH = 1290, 6, 16  # 10.0 million parameters
SCORES = 12  # evaluations of a training

TASKS = {"language": (4, 3e-3, 0.9), "digits": (64, 0.3, 0.0)}  # batch, learning rate, momentum

Step = Callable[[], None]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("part", choices=PARTS)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--repeats", type=int, default=30)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--late-ms", type=float, default=300.0)
    options.add_argument("--partial", default="solo")
    options.add_argument("--op", default="AVG", choices=["AVG", "AVG_ACTIVE"])
    options.add_argument("--workload", default="digits")
    options.add_argument("--density", type=float, default=0.01)
    options.add_argument("--warm-up", type=int, default=0, help="dense rounds at the start")
    options.add_argument("--seeds", default="0", help="with commas")
    record = Record(options, "ddp")
    chosen = record.arguments
    answers = []
    for seed in map(int, chosen.seeds.split(",")):
        question = vars(chosen) | {"seed": seed, "out": None}
        answers.append(ask(chosen.ranks, __file__, question))
        record.table(f"{chosen.part}, {chosen.ranks} ranks, seed {seed}", answers[-1]["lines"])
    record.write(answers, {f"{chosen.ranks} ranks": answers[-1].get("cells", {})})


def rank(question: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("asyncoll")
    gloo = dist.new_group(backend="gloo")
    answer: dict[str, Any] = PARTS[question["part"]](question, gloo)
    dist.destroy_process_group()
    return answer


# -- times ----------------------------------------------------------------------------------------


def alternate(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """The median time of each step in seconds, of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            elapsed = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            if repeat >= 3:
                times[name].append(float(elapsed))
    return {name: statistics.median(each) for name, each in times.items()}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def stepping(model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(question: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    on_gloo = DistributedDataParallel(mlp(), process_group=gloo, gradient_as_bucket_view=True)
    plain = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    registered = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    registered.register_comm_hook(hooks.AllreduceState(registered), hooks.allreduce)
    named = {"local": mlp(), "Gloo": on_gloo, "asyncoll": plain, "registered": registered}
    times_s = alternate({name: stepping(model) for name, model in named.items()}, question["repeats"])
    lines = [["", "step (ms)", "/ Gloo", "beyond local (ms)", "/ Gloo"]]
    local_s, gloo_s = times_s["local"], times_s["Gloo"]
    for name, each in times_s.items():
        beyond = each - local_s
        shares = f"{each / gloo_s:.2f}", f"{1e3 * beyond:.1f}", f"{beyond / (gloo_s - local_s):.2f}"
        lines.append([name, f"{1e3 * each:.1f}", *shares])
    named_s = {"asyncoll": "asyncoll", "hook": "registered", "Gloo": "Gloo", "no communication": "local"}
    return {"times_s": times_s, "lines": lines, "cells": {name: times_s[of] for name, of in named_s.items()}}


def allreduce(question: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    count = 10_000_000
    ordinary, registered = (
        torch.ones(count),
        dist.group.WORLD.allocate_tensor(  # type: ignore[union-attr]
            count, dtype=torch.float32, device=torch.device("cpu")
        ),
    )
    registered.fill_(1)
    times_s = alternate(
        {
            "Gloo": lambda: dist.all_reduce(ordinary, dist.ReduceOp.MAX, gloo),
            "Gloo, sum": lambda: dist.all_reduce(ordinary.fill_(1), group=gloo),
            "asyncoll, registered": lambda: dist.all_reduce(registered, dist.ReduceOp.MAX),
            "asyncoll, registered, sum": lambda: dist.all_reduce(registered.fill_(1)),
            "fill": lambda: ordinary.fill_(1),
        },
        question["repeats"],
    )
    gloo_s = times_s["Gloo, sum"] - times_s["fill"]
    lines = [["40 MB", "ms"], *([name, f"{1e3 * each:.1f}"] for name, each in times_s.items())]
    ours_s = times_s["asyncoll, registered, sum"] - times_s["fill"]
    lines.append(["sum, times as fast as Gloo", f"{gloo_s / ours_s:.2f}"])
    return {"times_s": times_s, "lines": lines}


def fsdp(question: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    models = {}
    for name, group in {"Gloo": gloo, "asyncoll": dist.group.WORLD}.items():
        mesh = dist.DeviceMesh.from_group(group, "cpu")  # type: ignore[arg-type]
        model = mlp()
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        sharded: Any = fully_shard(model, mesh=mesh)
        if name == "asyncoll":
            for module in sharded.modules():
                if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                    module.set_allocate_memory_from_process_group_for_comm(True)
        models[name] = sharded
    times_s = alternate({name: stepping(model) for name, model in models.items()}, question["repeats"])
    lines = [["FSDP2", "step (ms)", "/ Gloo"]]
    lines += [[name, f"{1e3 * each:.1f}", f"{each / times_s['Gloo']:.2f}"] for name, each in times_s.items()]
    return {"times_s": times_s, "lines": lines}


# -- training -------------------------------------------------------------------------------------


def task(seed: int, name: str = "language") -> tuple[Workload, torch.optim.Optimizer]:
    batch, learning_rate, momentum = TASKS[name]
    workload = WORKLOADS[name](dist.get_rank(), dist.get_world_size(), batch, seed)
    return workload, workload.optimizer(learning_rate, momentum)


def train(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    ddp: DistributedDataParallel,
    rounds: int,
    late_s: Callable[[int], float],
    state: hooks.EagerSGDState | hooks.OkTopkState | None,
) -> tuple[list[tuple[int, float, float]], float]:
    """Returns (round, seconds, score) at some rounds of rank 0, and the seconds of the whole training."""
    workload.model = ddp
    scores, spent_s, made, due = [], 0.0, 0, 0
    dist.barrier()
    while made < rounds:
        began = time.perf_counter()
        time.sleep(late_s(made))
        workload.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        made = made + 1 if state is None else state.round
        spent_s += time.perf_counter() - began
        if dist.get_rank() == 0 and made >= due:
            due = made + rounds // SCORES
            scores.append((made, spent_s, copy.deepcopy(ddp.module.state_dict())))
    began = time.perf_counter()
    if state is not None:
        state.finish()
    spent_s += time.perf_counter() - began
    dist.barrier()
    scores.append((made, spent_s, copy.deepcopy(ddp.module.state_dict())))
    return [(made_, at_s, score_of(workload, ddp, weights)) for made_, at_s, weights in scores], spent_s


def score_of(workload: Workload, ddp: DistributedDataParallel, weights: dict[str, Any]) -> float:
    """The score with these weights. `ddp` gets them."""
    ddp.module.load_state_dict(weights)
    workload.model = ddp.module
    return workload.score()


def lateness(seed: int, late_s: float) -> Callable[[int], float]:
    """The seconds that this rank is late in a step. One rank is, in each."""
    drawn = random.Random(seed)
    order = [drawn.randrange(dist.get_world_size()) for _ in range(100_000)]
    return lambda made: late_s if order[made] == dist.get_rank() else 0.0


def straggler(question: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    seed, rounds, late_s = question["seed"], question["rounds"], 1e-3 * question["late_ms"]
    workload, optimizer = task(seed)
    ddp = DistributedDataParallel(workload.model, process_group=gloo)
    plain, plain_s = train(workload, optimizer, ddp, rounds, lateness(seed, late_s), None)
    workload, optimizer = task(seed)
    ddp = DistributedDataParallel(workload.model, forward_sync_buffers=False)
    op = asyncoll.ReduceOp[question["op"]]
    state = hooks.EagerSGDState(ddp, optimizer, partial=question["partial"], op=op, history=1000)
    ddp.register_comm_hook(state, hooks.eager_sgd)
    eager, eager_s = train(workload, optimizer, ddp, 2 * rounds, lateness(seed, late_s), state)
    target = plain[-1][2]
    reached_s = next((at_s for _, at_s, score in eager if score >= target), None)
    lines = [["", "rounds", "seconds", "score"]]
    lines += [[name, *map(str, row)] for name, rows in (("plain", plain), ("eager", eager)) for row in rows]
    lines.append(["to the score of plain", "", str(reached_s), str(target)])
    lines.append(["share of the time", "", f"{reached_s / plain_s:.2f}" if reached_s else "not reached", ""])
    lines.append(["replicas are equal", "", "", str(are_equal(ddp.module))])
    return {"plain": plain, "eager": eager, "seconds": [plain_s, eager_s], "lines": lines}


def sparse(question: dict[str, Any], gloo: dist.ProcessGroup) -> dict[str, Any]:
    del gloo
    lines, rows = [["", "score", "replicas are equal"]], {}
    for name in ("dense", "oktopk"):
        workload, optimizer = task(question["seed"], question["workload"])
        ddp = DistributedDataParallel(workload.model)
        state = None
        if name == "oktopk":
            state = hooks.OkTopkState(ddp, density=question["density"], warm_up=question["warm_up"])
            ddp.register_comm_hook(state, hooks.oktopk)
        found, _ = train(workload, optimizer, ddp, question["rounds"], lambda made: 0.0, state)
        rows[name] = found
        lines.append([name, f"{found[-1][2]:.4f}", str(are_equal(ddp.module))])
    return {"rows": rows, "lines": lines}


def are_equal(module: nn.Module) -> bool:
    """Whether all ranks have the same parameters, to the bit."""
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


PARTS = {"steps": steps, "allreduce": allreduce, "fsdp": fsdp, "straggler": straggler, "sparse": sparse}

if __name__ == "__main__":
    program(main, rank)
