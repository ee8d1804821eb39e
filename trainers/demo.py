"""The demo: synchronous SGD against eager-SGD, solo and majority, with one late rank in each round.

The setting is the light imbalance of Li et al., PPoPP 2020, section 6.2.1 (one process, drawn at random in each step,
is late), with four processes and shorter times. Steps are stretched to a given compute time by sleeping, so that four
ranks fit on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from asyncoll.testing import StartRule, expected_round_s
from trainers.imbalance import OneRandom
from trainers.plots import plot_scores
from trainers.report import Point, seconds
from trainers.runs import Run, RunFailedError, launch

COMPUTE_S = 0.1
LATE = OneRandom(0.2)
RUNS: dict[StartRule, list[str]] = {
    "synchronous": ["allreduce_sgd"],
    "solo": ["eager_sgd", "--partial", "solo"],
    "majority": ["eager_sgd", "--partial", "majority"],
}


def demo(ranks: int, seed: int, device: str, folder: Path) -> None:
    """Run the three trainings, print their measurements with the values of the time model, and plot.

    Raises ClickException if a run fails.
    """
    console = Console()
    console.print(
        f"{ranks} ranks, each step computes {1000 * COMPUTE_S:g} ms, "
        f"one random rank of each round {1000 * LATE.late_s:g} ms more; files go to {folder}"
    )
    runs = {rule: _launch(rule, ranks, seed, device, folder, console) for rule in RUNS}
    first = runs["synchronous"].report
    target = first["settings"]["target"]
    curves: dict[str, list[list[Point]]] = {rule: [run.curve] for rule, run in runs.items()}
    plot_scores(curves, first["metric"], target, folder / "accuracy.png")
    console.print(_comparison(runs, ranks, target))
    console.print(_verdict(runs, target))


def _launch(rule: StartRule, ranks: int, seed: int, device: str, folder: Path, console: Console) -> Run:
    machine = ["--compute", f"{COMPUTE_S}s", "--imbalance", str(LATE), "--seed", str(seed), "--device", device]
    try:
        with console.status(f"training: {rule}"):
            run = launch(ranks, [*RUNS[rule], *machine], folder / f"{rule}.json")
    except RunFailedError as error:
        raise click.ClickException(f"the {rule} run failed: {error}") from error
    console.print(f"{rule}: {run.report['rounds']} rounds in {run.report['wall_s']:.1f} s")
    return run


def _comparison(runs: Mapping[StartRule, Run], ranks: int, target: float) -> Table:
    """One column for each run. The rows "theory" have the values of `expected_round_s`."""
    reports = [run.report for run in runs.values()]
    first = reports[0]
    expected_s = [expected_round_s(rule, COMPUTE_S, LATE, ranks, average_every=0) for rule in runs]
    rows: dict[str, list[str]] = {
        "rounds": [f"{report['rounds']}" for report in reports],
        "wall time": [f"{report['wall_s']:.1f} s" for report in reports],
        "steps per second (rounds)": [f"{report['steps_per_s']:.2f}" for report in reports],
        "time per round": [f"{1000 / report['steps_per_s']:.0f} ms" for report in reports],
        "  theory expects": [f"{1000 * round_s:.0f} ms" for round_s in expected_s],
        "rounds, against synchronous": [_ratio(first["wall_s"], report["wall_s"]) for report in reports],
        "  theory allows at most": [
            f"{report['steps_per_s_bound'] / first['steps_per_s_bound']:.2f}x" for report in reports
        ],
        f"time to {target:.0%}": [seconds(report["time_to_target_s"]) for report in reports],
        "  against synchronous": [_ratio(first["time_to_target_s"], report["time_to_target_s"]) for report in reports],
        "final test accuracy": [f"{report['final_score']:.1%}" for report in reports],
        "active ranks per round, mean": [f"{report['active_mean']:.1f}" for report in reports],
        "stale contributions": [f"{report['stale_share']:.0%}" for report in reports],
    }
    table = Table("", *runs, title="synchronous and eager-SGD on digits")
    for column in table.columns[1:]:
        column.justify = "right"
    for measure, values in rows.items():
        table.add_row(measure, *values)
    return table


def _verdict(runs: Mapping[StartRule, Run], target: float) -> str:
    times_s = {rule: run.report["time_to_target_s"] for rule, run in runs.items()}
    first_s = times_s.pop("synchronous")
    speed_ups = " and ".join(f"{_ratio(first_s, time_s)} with {rule}" for rule, time_s in times_s.items())
    scores = [run.report["final_score"] for run in runs.values()]
    spread = 100 * (max(scores) - min(scores))
    return f"Speed-up to {target:.0%}: {speed_ups}; final accuracies lie {spread:.1f} points apart."


def _ratio(base: float | None, value: float | None) -> str:
    return "-" if base is None or value is None else f"{base / value:.2f}x"
