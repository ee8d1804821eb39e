"""The demo: synchronous SGD against eager-SGD, solo and majority, with one late rank in each round.

The setting is the light imbalance of Li et al., PPoPP 2020, section 6.2.1 (one process, drawn at random in each step,
is late), with four processes and shorter times. Steps are stretched to a given compute time by sleeping, so that four
ranks fit on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from trainers.imbalance import OneRandom
from trainers.plots import plot_scores
from trainers.report import Point, seconds
from trainers.time_model import Rule, expected_round_s, least_round_s

COMPUTE_S = 0.1
LATE = OneRandom(0.2)
# Loaded once, before the launcher forks the ranks (torch.optim pulls in torch._dynamo): with eight ranks on
# two cores a run then starts in 6 s instead of 31 s.
PRELOAD = "numpy,torch,torch._dynamo,sklearn.datasets,sklearn.model_selection,asyncoll"
RUNS: dict[Rule, list[str]] = {
    "synchronous": ["allreduce_sgd"],
    "solo": ["eager_sgd", "--partial", "solo"],
    "majority": ["eager_sgd", "--partial", "majority"],
}


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of one of the three runs: its report, as read back from JSON."""

    rule: Rule
    report: dict[str, Any]

    @property
    def curve(self) -> list[Point]:
        """Score over time."""
        return [Point(*point) for point in self.report["curve"]]


def demo(ranks: int, seed: int, folder: Path) -> None:
    """Run the three trainings, print their measurements with the values of the time model, and plot.

    Raises ClickException if a run fails.
    """
    console = Console()
    console.print(
        f"{ranks} ranks, each step computes {1000 * COMPUTE_S:g} ms, "
        f"one random rank of each round {1000 * LATE.late_s:g} ms more; files go to {folder}"
    )
    runs = [_launch(rule, ranks, seed, folder, console) for rule in RUNS]
    target, metric = runs[0].report["settings"]["target"], runs[0].report["metric"]
    plot_scores({run.rule: run.curve for run in runs}, metric, target, folder / "accuracy.png")
    console.print(_comparison(runs, ranks, target))
    console.print(_verdict(runs, target))


def _launch(rule: Rule, ranks: int, seed: int, folder: Path, console: Console) -> Run:
    path = folder / f"{rule}.json"
    path.unlink(missing_ok=True)
    trainer = [*RUNS[rule], "--compute", f"{COMPUTE_S}s", "--imbalance", str(LATE), "--seed", str(seed)]
    launch = [sys.executable, "-m", "asyncoll.cli", "launch", "-n", str(ranks), "-m", "trainers"]
    with console.status(f"training: {rule}"):
        done = subprocess.run(
            [*launch, *trainer, "--report", str(path)],
            env={**os.environ, "ASYNCOLL_PRELOAD": PRELOAD},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode != 0 or not path.exists():
        console.print(done.stdout, markup=False, highlight=False)
        raise click.ClickException(f"the {rule} run failed with exit status {done.returncode}")
    run = Run(rule, json.loads(path.read_text()))
    console.print(f"{rule}: {run.report['rounds']} rounds in {run.report['wall_s']:.1f} s")
    return run


def _comparison(runs: list[Run], ranks: int, target: float) -> Table:
    """One column for each run. The rows "theory" have the values of `time_model`."""
    first = runs[0].report
    rows: dict[str, list[str]] = {
        "rounds": [f"{run.report['rounds']}" for run in runs],
        "wall time": [f"{run.report['wall_s']:.1f} s" for run in runs],
        "steps per second (rounds)": [f"{run.report['steps_per_s']:.2f}" for run in runs],
        "time per round": [f"{1000 / run.report['steps_per_s']:.0f} ms" for run in runs],
        "  theory expects": [f"{1000 * _expected_s(run, ranks):.0f} ms" for run in runs],
        "rounds, against synchronous": [_ratio(first["wall_s"], run.report["wall_s"]) for run in runs],
        "  theory allows at most": [f"{_least_s(runs[0], ranks) / _least_s(run, ranks):.2f}x" for run in runs],
        f"time to {target:.0%}": [seconds(run.report["time_to_target_s"]) for run in runs],
        "  against synchronous": [_ratio(first["time_to_target_s"], run.report["time_to_target_s"]) for run in runs],
        "final test accuracy": [f"{run.report['final_score']:.1%}" for run in runs],
        "active ranks per round, mean": [f"{run.report['active_mean']:.1f}" for run in runs],
        "stale contributions": [f"{run.report['stale_share']:.0%}" for run in runs],
    }
    table = Table("", *(run.rule for run in runs), title="synchronous and eager-SGD on digits")
    for column in table.columns[1:]:
        column.justify = "right"
    for measure, values in rows.items():
        table.add_row(measure, *values)
    return table


def _expected_s(run: Run, ranks: int) -> float:
    return expected_round_s(run.rule, COMPUTE_S, LATE, ranks, run.report["settings"]["average_every"])


def _least_s(run: Run, ranks: int) -> float:
    return least_round_s(run.rule, COMPUTE_S, LATE.late_s, ranks)


def _verdict(runs: list[Run], target: float) -> str:
    base_s = runs[0].report["time_to_target_s"]
    speed_ups = " and ".join(f"{_ratio(base_s, run.report['time_to_target_s'])} with {run.rule}" for run in runs[1:])
    scores = [run.report["final_score"] for run in runs]
    spread = 100 * (max(scores) - min(scores))
    return f"Speed-up to {target:.0%}: {speed_ups}; final accuracies lie {spread:.1f} points apart."


def _ratio(base: float | None, value: float | None) -> str:
    return "-" if base is None or value is None else f"{base / value:.2f}x"
