"""Hyperplane regression with 8 processes, of which one random rank is late at each step: steps/s at equal loss.

This is section 6.2.1 of Li et al., "Taming unbalanced training workloads in deep learning with partial collective
operations", PPoPP 2020.

    python benchmarks/reproduce/hyperplane.py [--delays 200ms,300ms,400ms] [--seeds 0,1,2] [--rounds 96] [--methods ...]

The paper's size: 8,193 parameters, 32,768 points, 256 samples on each of 8 ranks. Every step is padded to 300 ms by
sleeping, which is what the paper's three ratios imply, and the rank drawn for a round takes the delay more. Four
trainers in turn, with the same model, data, order of samples, delays and learning rates, by round:

    synchronous   asyncoll.training.AllreduceSGD
    DDP, Gloo     torch's DistributedDataParallel; its allreduce begins when the step has been padded
    solo          asyncoll.training.EagerSGD, with history: every rank applies every result once
    majority      the same, opened by the rank that is drawn for a round

`round allows` is the least a round can take: c + d synchronous, c solo, c + d/8 majority. The paper's solo ratios are
those of c + d/8, the mean step of a rank: there a late rank computes all its steps, here it skips rounds. The loss is a
share of the variance of the held-out targets.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Record, ask, numbers, parser, program
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from asyncoll.testing import StartRule, Waiting, least_round_s
from trainers.experiment import learning_rate
from trainers.imbalance import OneRandom, parse_duration
from trainers.runs import RunFailedError, launch
from trainers.settings import Settings
from trainers.workloads import WORKLOADS

Report = dict[str, Any]
RANKS = 8
COMPUTE_S = 0.3
WORKLOAD = "hyperplane"
DDP = "DDP, Gloo"
OURS = {
    "synchronous": ["allreduce_sgd"],
    "solo": ["eager_sgd", "--partial", "solo"],
    "majority": ["eager_sgd", "--partial", "majority"],
}
METHODS = ("synchronous", DDP, "solo", "majority")
RULES: dict[str, StartRule] = {"synchronous": "synchronous", DDP: "synchronous", "solo": "solo", "majority": "majority"}
# Section 6.2.1 and figure 10: steps per second over Deep500's synchronous SGD, solo; majority against solo at 200 ms.
PAPER = {
    ("solo", 0.2): "1.50",
    ("solo", 0.3): "1.75",
    ("solo", 0.4): "2.01",
    ("majority", 0.2): f"{1.5 * 1.37 / 1.64:.2f}",
}
PRELOAD = "numpy,torch,torch._dynamo,asyncoll"  # imported once by the launcher, not by every rank


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--delays", type=durations, default=durations("200ms,300ms,400ms"))
    options.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    options.add_argument("--rounds", type=int, default=96, help="the paper's 48 epochs are 768")
    record = Record(options, "hyperplane")
    os.environ.setdefault("ASYNCOLL_PRELOAD", PRELOAD)
    chosen = record.arguments
    runs: dict[float, dict[str, list[Report]]] = {delay: {method: [] for method in METHODS} for delay in chosen.delays}
    for seed in chosen.seeds:
        for delay_s in chosen.delays:
            for method in METHODS:
                report = train(method, delay_s, seed, chosen.rounds)
                runs[delay_s][method].append(report)
                done = f"{report['steps_per_s']:.3f} steps/s, loss {1 - report['final_score']:.4f}"
                print(f"# seed {seed}, {1e3 * delay_s:g} ms, {method}: {done}", flush=True)
    for delay_s, found in runs.items():
        title = f"{RANKS} ranks, {1e3 * COMPUTE_S:g} ms a step, one random rank {1e3 * delay_s:g} ms more"
        record.table(
            f"{title}; {chosen.rounds} rounds, seeds {chosen.seeds} (paper: section 6.2.1)", table(delay_s, found)
        )
    plot(record, runs)
    raw = [{"delay_s": delay_s, "runs": found} for delay_s, found in runs.items()]
    record.write(
        raw, {f"hyperplane, {1e3 * delay_s:g} ms late": cells(delay_s, found) for delay_s, found in runs.items()}
    )


def durations(text: str) -> list[float]:
    return [parse_duration(part) for part in text.split(",")]


# -- runs -----------------------------------------------------------------------------------------


def train(method: str, delay_s: float, seed: int, rounds: int) -> Report:
    if method == DDP:
        report: Report = ask(RANKS, __file__, {"delay_s": delay_s, "seed": seed, "rounds": rounds})
        return report
    trainer = [*OURS[method], "--workload", WORKLOAD, "--rounds", str(rounds), "--seed", str(seed)]
    machine = ["--compute", f"{COMPUTE_S}s", "--imbalance", str(OneRandom(delay_s))]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return launch(RANKS, [*trainer, *machine], Path(folder) / "report").report
        except RunFailedError as error:
            sys.exit(f"the {method} run failed: {error}")


def ddp_rank(question: dict[str, Any]) -> Report:
    """A rank of the peer: torch's DDP, trained as its documentation says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size, delays = dist.get_rank(), dist.get_world_size(), OneRandom(question["delay_s"])
    settings = Settings.of(
        "allreduce_sgd",
        WORKLOAD,
        rounds=question["rounds"],
        seed=question["seed"],
        compute_s=COMPUTE_S,
        imbalance=delays,
    )
    workload = WORKLOADS[WORKLOAD](rank, size, settings.batch, settings.seed)
    workload.model = model = DistributedDataParallel(workload.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=settings.momentum)
    step = Step()
    model.register_comm_hook(step, lambda step, bucket: step.gradients_are_there(bucket))
    curve = []
    dist.barrier()
    started = time.perf_counter()
    for t in range(1, settings.rounds + 1):
        step.begin(COMPUTE_S + delays.delay_s(settings.seed, t, rank, size))
        optimizer.zero_grad()
        workload.loss().backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, settings)
        optimizer.step()
        if rank == 0:
            curve.append((time.perf_counter() - started, t, workload.score()))
    dist.barrier()
    wall_s = time.perf_counter() - started
    score = workload.score()
    dist.destroy_process_group()
    return {
        "rounds": settings.rounds,
        "wall_s": wall_s,
        "steps_per_s": settings.rounds / wall_s,
        "active_mean": size,
        "stale_share": 0.0,
        "final_score": score,
        "curve": curve,
    }


class Step:
    """DDP's hook: pads the computation of the step, and then starts the allreduce that DDP would have started."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self._world = dist.group.WORLD

    def begin(self, seconds: float) -> None:
        self._end_s = time.perf_counter() + seconds

    def gradients_are_there(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last(), "so small a model is one bucket"
        time.sleep(max(0.0, self._end_s - time.perf_counter()))
        return allreduce_hook(self._world, bucket)


# -- showing --------------------------------------------------------------------------------------


def cells(delay_s: float, runs: dict[str, list[Report]]) -> dict[str, float | str]:
    """What the page of benchmarks shows: rounds per second over synchronous SGD, and the bound."""
    row: dict[str, float | str] = {}
    for method in ("solo", "majority"):
        least_s = [
            least_round_s(Waiting(RULES[of]), COMPUTE_S, OneRandom(delay_s), RANKS) for of in ("synchronous", method)
        ]
        row[method] = statistics.median(ratios(runs[method], runs["synchronous"]))
        row[f"bound of {method}"] = least_s[0] / least_s[1]
    return row


def table(delay_s: float, runs: dict[str, list[Report]]) -> list[list[str]]:
    lines = [
        ["", "steps/s", "round (ms)", "round allows", "over synchronous", f"over {DDP}", "of seeds", "paper", "allows"]
    ]
    lines[0] += ["loss", "of seeds", "loss/synchronous", "active", "stale"]
    for method, reports in runs.items():
        speeds = [report["steps_per_s"] for report in reports]
        over = [ratios(reports, runs[base]) for base in ("synchronous", DDP)]
        least_s = {
            of: least_round_s(Waiting(RULES[of]), COMPUTE_S, OneRandom(delay_s), RANKS, are_drawn=True)
            for of in ("synchronous", method)
        }
        times = [
            f"{statistics.median(speeds):.3f}",
            f"{1e3 / statistics.median(speeds):.0f}",
            f"{1e3 * least_s[method]:.1f}",
        ]
        gains = [
            *(f"{statistics.median(values):.2f}" for values in over),
            " ".join(f"{value:.2f}" for value in over[1]),
        ]
        theory = [PAPER.get((method, delay_s), "-"), f"{least_s['synchronous'] / least_s[method]:.2f}"]
        counts = [f"{mean(reports, 'active_mean'):.1f}", f"{mean(reports, 'stale_share'):.0%}"]
        lines.append([method, *times, *gains, *theory, *losses(reports, runs["synchronous"]), *counts])
    return lines


def ratios(reports: list[Report], base: list[Report]) -> list[float]:
    """Steps per second over those of the base, seed by seed."""
    return [mine["steps_per_s"] / other["steps_per_s"] for mine, other in zip(reports, base, strict=True)]


def losses(reports: list[Report], base: list[Report]) -> list[str]:
    final = [1 - report["final_score"] for report in reports]
    over = [mine / (1 - other["final_score"]) for mine, other in zip(final, base, strict=True)]
    return [
        f"{statistics.median(final):.4f}",
        " ".join(f"{loss:.4f}" for loss in final),
        f"{statistics.median(over):.2f}",
    ]


def mean(reports: list[Report], key: str) -> float:
    return statistics.fmean(report[key] for report in reports)


def plot(record: Record, runs: dict[float, dict[str, list[Report]]]) -> None:
    """Loss over time, the first seed: a panel for each delay."""
    with record.figure(len(runs)) as panels:
        for axes, (delay_s, found) in zip(panels, runs.items(), strict=True):
            for method, reports in found.items():
                curve = reports[0]["curve"]
                axes.plot([point[0] for point in curve], [1 - point[2] for point in curve], label=method)
            axes.set(yscale="log", xlabel="wall time, seconds", ylabel="loss, share of the variance")
            axes.set_title(f"one random rank {1e3 * delay_s:g} ms late")
            axes.legend()


if __name__ == "__main__":
    program(main, ddp_rank)
