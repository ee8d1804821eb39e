"""A study: several methods train one workload on one emulated machine, beside the values that a paper states.

The scripts of this folder are studies. Each method is a run of `python -m trainers` under the launcher, for each seed;
seeds are the outer loop, so that a change of the machine's speed reaches all methods. Steps are stretched by sleeping,
so that more ranks than cores can train; times are wall times of this machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import Record, numbers, parser

from trainers.runs import Run, launch


@dataclass(frozen=True)
class Study:
    """The methods, by label: the algorithm and the options of each run. They override `common`.

    The first method is the base of ratios.

    `paper` has what the paper states of a method, `remarks` a sentence for each difference that needs one.
    """

    title: str
    ranks: int
    common: Sequence[str]
    methods: dict[str, Sequence[str]]
    paper: dict[str, str]
    remarks: Sequence[str]
    rounds: int
    seeds: Sequence[int] = field(default=(0, 1, 2))
    row: str = ""  # of the page of benchmarks


Runs = dict[str, list[Run]]
EQUAL = 0.02  # scores that differ by no more are equal
BOUND = "steps_per_s_bound"


def main(doc: str | None, name: str, studies: Sequence[Study]) -> None:
    """Run the studies, and print a table, a plot and the remarks of each."""
    options = parser(doc)
    options.add_argument("--seeds", type=numbers, default=None, help="by default those of each study")
    options.add_argument("--rounds", type=int, default=None, help="by default those of each study")
    record = Record(options, name)
    chosen = record.arguments
    found = [_run(study, chosen.seeds or study.seeds, chosen.rounds or study.rounds) for study in studies]
    for study, runs in zip(studies, found, strict=True):
        first = next(iter(runs.values()))[0].report
        data = "synthetic data" if first["is_synthetic"] else "real data"
        settings = f"{study.ranks} ranks, {' '.join(study.common)}, {first['rounds']} rounds, {data}"
        record.table(f"{study.title}; {settings}, seeds {list(chosen.seeds or study.seeds)}", _table(study, runs))
        for remark in study.remarks:
            print(f"- {remark}")
    _plot(record, studies, found)
    raw = [{label: [run.report for run in each] for label, each in runs.items()} for runs in found]
    record.write(raw, {study.row: _cells(runs) for study, runs in zip(studies, found, strict=True) if study.row})


def _run(study: Study, seeds: Sequence[int], rounds: int) -> Runs:
    runs: Runs = {label: [] for label in study.methods}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for label, (algorithm, *own) in study.methods.items():
                arguments = [algorithm, *study.common, *own, "--rounds", str(rounds), "--seed", str(seed)]
                run = launch(study.ranks, arguments, Path(folder) / "report.json")
                runs[label].append(run)
                rate, score = run.report["steps_per_s"], run.report["final_score"]
                print(f"# {study.title}, seed {seed}, {label}: {rate:.2f} steps/s, score {score:.4f}", flush=True)
    return runs


def _cells(runs: Runs) -> dict[str, float | str]:
    """What the page of benchmarks shows: rounds per second over the first method at equal accuracy, and the bound."""
    base, *_ = runs.values()
    row: dict[str, float | str] = {}
    for method in ("solo", "majority"):
        scores, bounds = ([_median(each, key) or 0 for each in (base, runs[method])] for key in ("final_score", BOUND))
        is_equal = scores[1] >= scores[0] - EQUAL
        row[method] = statistics.median(_ratios(runs[method], base)) if is_equal else "less accurate"
        row[f"bound of {method}"] = bounds[1] / bounds[0]
    return row


def _ratios(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    return [run.report["steps_per_s"] / other.report["steps_per_s"] for run, other in zip(runs, base, strict=True)]


def _table(study: Study, runs: Runs) -> list[list[str]]:
    base = next(iter(runs.values()))
    metric = base[0].report["metric"]
    lines = [["method", "steps/s", "theory allows", "over the first", "of seeds", "paper", "allows"]]
    lines[0] += ["time to target", f"final {metric}", "of seeds", "active", "stale"]
    for label, each in runs.items():
        ratios = _ratios(each, base)
        scores = [run.report["final_score"] for run in each]
        bounds = _median(each, BOUND), _median(base, BOUND)
        lines.append(
            [
                label,
                f"{statistics.median(run.report['steps_per_s'] for run in each):.2f}",
                _shown(bounds[0], "{:.2f}"),
                f"{statistics.median(ratios):.2f}",
                " ".join(f"{ratio:.2f}" for ratio in ratios),
                study.paper.get(label, "-"),
                _shown(bounds[0] / bounds[1] if bounds[0] and bounds[1] else None, "{:.2f}"),
                _shown(_median(each, "time_to_target_s"), "{:.1f} s"),
                f"{statistics.median(scores):.2%}",
                " ".join(f"{score:.2%}" for score in scores),
                _shown(_median(each, "active_mean"), "{:.1f}"),
                _shown(_median(each, "stale_share"), "{:.0%}"),
            ]
        )
    return lines


def _median(runs: Sequence[Run], name: str) -> float | None:
    """The median over the runs; None if a run lacks it."""
    values = [run.report[name] for run in runs]
    return None if None in values else statistics.median(values)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _plot(record: Record, studies: Sequence[Study], found: Sequence[Runs]) -> None:
    """Score over time of the first seed: a panel for each study."""
    with record.figure(len(studies)) as panels:
        for axes, study, runs in zip(panels, studies, found, strict=True):
            for label, each in runs.items():
                axes.plot(
                    [point.wall_s for point in each[0].curve], [point.score for point in each[0].curve], label=label
                )
            axes.set(xlabel="wall time, seconds", ylabel=next(iter(runs.values()))[0].report["metric"])
            axes.set_title(study.title)
            axes.legend()
