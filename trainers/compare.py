"""`python -m trainers compare`: algorithms and seeds, one run after the other, and then one table, plot and JSON."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trainers.algorithms import ALGORITHMS
from trainers.plots import plot_scores
from trainers.report import MEGABYTE, Point, machine, number
from trainers.runs import Run, RunFailedError, launch
from trainers.settings import flags

TABLE_WIDTH = 160  # at most: a table is as wide as its content
OF_ONE_RUN = {"seed", "report", "plot", "trace", "checkpoints", "checkpoint_every"}
_OF_ALL = {"workload", "full", "data", "rounds", "target", "compute_s", "imbalance", *OF_ONE_RUN}  # runs
_BETWEEN_OPTIONS = re.compile(r"(?<!\.py):")  # FILE.py:NAME is one value
_NOT_IN_A_NAME = re.compile(r"[^\w.=-]+")


@dataclass(slots=True)
class Compared:
    """An algorithm with its options, the runs of all seeds, and the output of those that have failed, by seed."""

    label: str
    algorithm: str
    arguments: list[str]
    runs: list[Run] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The label without the signs that file systems treat in a special way."""
        return _NOT_IN_A_NAME.sub("-", self.label)

    def values(self, name: str) -> list[Any]:
        """This number of all runs that have it."""
        return [run.report[name] for run in self.runs if run.report[name] is not None]

    def mean(self, name: str) -> float | None:
        """Its mean over the runs; None if any run lacks it."""
        values = self.values(name)
        return statistics.fmean(values) if values and len(values) == len(self.runs) else None


def parse_algorithms(text: str) -> list[Compared]:
    """The algorithms of "NAME,NAME:option=value:option=value". Raises UsageError for unknown names and bad values."""
    found = [_parse_algorithm(label.strip()) for label in text.split(",")]
    labels = [compared.label for compared in found]
    doubled = sorted({label for label in labels if labels.count(label) > 1})
    if doubled:
        raise click.UsageError(f"--algorithms names {', '.join(doubled)} more than once")
    return found


def parse_seeds(text: str) -> range:
    """The seeds of "FROM:TO", or of a count N: "0:N". Raises UsageError."""
    found = re.fullmatch("(?:([0-9]{1,9}):)?([0-9]{1,9})", text)
    seeds = range(int(found[1] or 0), int(found[2])) if found else range(0)
    if not seeds:
        raise click.UsageError(f"--seeds: {text!r:.80} are no seeds: use FROM:TO, such as 0:3, or a count")
    return seeds


def _parse_algorithm(label: str) -> Compared:
    name, *options = _BETWEEN_OPTIONS.split(label)
    if name not in ALGORITHMS:
        raise click.UsageError(f"{name!r} is not an algorithm: {', '.join(ALGORITHMS)}")
    arguments = [argument for option in options for argument in _arguments(option)]
    try:
        click.Command(name, params=flags(name, _OF_ALL)).make_context(name, list(arguments))
    except click.UsageError as error:
        raise click.UsageError(f"{label}: {error.format_message()}") from error
    return Compared(label, name, arguments)


def _arguments(option: str) -> list[str]:
    key, separator, value = option.partition("=")
    flag = f"--{key.replace('_', '-')}"
    return [flag, value] if separator else [flag]


def compare(
    algorithms: Sequence[Compared],
    ranks: int,
    seeds: range,
    common: Sequence[str],
    folder: Path,
    tensorboard: bool,
) -> bool:
    """Run all algorithms with all seeds, print a table, and write a plot and a JSON file. Returns whether none failed.

    `common` are arguments of all runs. Seeds are the outer loop, so that a change of the machine's speed reaches all
    algorithms. Ctrl-C shows the runs that have ended, if there are any.
    """
    console = Console()
    try:
        _run_all(algorithms, ranks, seeds, common, folder, console)
    finally:
        if any(compared.runs or compared.failures for compared in algorithms):
            _show(algorithms, seeds, folder, console, tensorboard)
    return not any(compared.failures for compared in algorithms)


def _show(algorithms: Sequence[Compared], seeds: range, folder: Path, console: Console, tensorboard: bool) -> None:
    _write(algorithms, seeds, folder)
    finished = [compared for compared in algorithms if compared.runs]
    if finished:
        Console(width=max(console.width, TABLE_WIDTH)).print(comparison(finished))  # a narrow terminal wraps lines
        _plot(finished, folder)
        if tensorboard:
            _write_events(finished, folder / "tensorboard")
    console.print(f"reports, plot and all numbers: {folder}", soft_wrap=True)


def _run_all(
    algorithms: Sequence[Compared], ranks: int, seeds: range, common: Sequence[str], folder: Path, console: Console
) -> None:
    planned, done = [(compared, seed) for seed in seeds for compared in algorithms], 0
    with _progress(console) as progress:
        task = progress.add_task("", total=len(planned))
        try:
            for done, (compared, seed) in enumerate(planned):
                progress.update(task, description=f"{compared.label}, seed {seed}", completed=done)
                _run(compared, ranks, seed, common, folder, console)
        except KeyboardInterrupt:
            print(f"interrupted: {done} of {len(planned)} done", file=sys.stderr)
            raise


def _run(compared: Compared, ranks: int, seed: int, common: Sequence[str], folder: Path, console: Console) -> None:
    arguments = [compared.algorithm, *common, *compared.arguments, "--seed", str(seed)]
    try:
        run = launch(ranks, arguments, folder / f"{compared.file_name}-seed-{seed}.json")
    except RunFailedError as error:
        compared.failures[seed] = str(error)
        console.print(f"{compared.label}, seed {seed}, failed: {error}", markup=False, highlight=False, soft_wrap=True)
        return
    compared.runs.append(run)
    rate, score = run.report["steps_per_s"], run.report["final_score"]
    console.print(f"{compared.label}, seed {seed}: {rate:.2f} steps/s, final score {score:.2%}", highlight=False)


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


# -- the table ------------------------------------------------------------------------------------


def comparison(algorithms: Sequence[Compared]) -> Table:
    """One row for each algorithm: means over its seeds."""
    first = algorithms[0]
    report = first.runs[0].report
    target, ranks, workload = report["settings"]["target"], report["ranks"], report["settings"]["workload"]
    synthetic = ", synthetic data" if report["is_synthetic"] else ""
    imbalance, seeds = report["settings"]["imbalance"], max(len(compared.runs) for compared in algorithms)
    title = f"{workload}{synthetic}, {ranks} ranks, imbalance {imbalance}, seeds: {seeds}"
    columns: dict[str, Callable[[Compared], str]] = {
        "steps/s": lambda compared: number(compared.mean("steps_per_s")),
        "theory\nallows": lambda compared: number(compared.mean("steps_per_s_bound")),
        "ratio": lambda compared: _ratio(compared, first, "steps_per_s"),
        f"time to\n{target:.0%}": lambda compared: _time_to_target(compared),
        "speed-up": lambda compared: _ratio(first, compared, "time_to_target_s"),
        f"final\n{report['metric']}": lambda compared: _spread(compared.values("final_score")),
        "active": lambda compared: number(compared.mean("active_mean")),
        "lag": lambda compared: number(compared.mean("lag_mean")),
        "stale": lambda compared: _percent(compared.mean("stale_share")),
        "wait,\nupdate": lambda compared: f"{1000 * (compared.mean('waited_s') or 0):.1f} ms",
        "MB per rank\nand round": lambda compared: _megabytes(compared.mean("bytes_per_round")),
    }
    table = Table(title=title, caption=f"ratio of steps/s, and speed-up to {target:.0%}: against {first.label}")
    table.add_column("algorithm", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for compared in algorithms:
        table.add_row(escape(compared.label), *(cell(compared) for cell in columns.values()))
    return table


def _ratio(over: Compared, under: Compared, name: str) -> str:
    """How many times as large the mean is; "-" if one of them lacks it."""
    means = over.mean(name), under.mean(name)
    return "-" if means[0] is None or not means[1] else f"{means[0] / means[1]:.2f}x"


def _time_to_target(compared: Compared) -> str:
    times_s = compared.values("time_to_target_s")
    if not times_s:
        return "not reached"
    reached = "" if len(times_s) == len(compared.runs) else f" ({len(times_s)} of {len(compared.runs)})"
    return f"{statistics.fmean(times_s):.2f} s{reached}"


def _spread(scores: Sequence[float]) -> str:
    mean = f"{statistics.fmean(scores):.2%}"
    return mean if len(scores) == 1 else f"{mean} ({100 * min(scores):.2f} to {100 * max(scores):.2f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / MEGABYTE:.3g}"


# -- files ----------------------------------------------------------------------------------------


def _write(algorithms: Sequence[Compared], seeds: range, folder: Path) -> None:
    document = {
        "command": shlex.join(["python", "-m", "trainers", *sys.argv[1:]]),
        "machine": machine(),
        "seeds": list(seeds),
        "algorithms": [
            {
                "label": compared.label,
                "algorithm": compared.algorithm,
                "arguments": compared.arguments,
                "runs": [run.report for run in compared.runs],
                "failures": compared.failures,
            }
            for compared in algorithms
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.json").write_text(json.dumps(document, indent=1) + "\n")


def _plot(algorithms: Sequence[Compared], folder: Path) -> None:
    report = algorithms[0].runs[0].report
    curves = {compared.label: [run.curve for run in compared.runs] for compared in algorithms}
    plot_scores(curves, report["metric"], report["settings"]["target"], folder / "score.png")


def _write_events(algorithms: Sequence[Compared], folder: Path) -> None:
    """One folder of events for each run: the score by round, and the numbers of the report."""
    from torch.utils.tensorboard import SummaryWriter

    for compared in algorithms:
        for run in compared.runs:
            seed = run.report["settings"]["seed"]
            with SummaryWriter(folder / compared.file_name / f"seed-{seed}") as writer:
                for point in map(Point._make, run.curve):
                    writer.add_scalar("score", point.score, point.round, walltime=point.wall_s)
                for name in ("steps_per_s", "time_to_target_s", "active_mean", "lag_mean", "stale_share", "waited_s"):
                    if run.report[name] is not None:
                        writer.add_scalar(name, run.report[name], run.report["rounds"])
