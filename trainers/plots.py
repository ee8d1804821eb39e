"""Score over wall time, one curve for each algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trainers.report import Point

_SHOWN = 0.26  # of the scores below the target: the runs differ there, and not in the steep first rounds
_TIMES = 400


def plot_scores(curves: Mapping[str, Sequence[Sequence[Point]]], metric: str, target: float, path: Path) -> None:
    """Write a PNG; needs matplotlib (`pip install 'asyncoll[plots]'`).

    `curves` has the runs of each label, one for each seed: their mean is a line, their range a band.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for label, runs in curves.items():
        times_s, scores = aligned(runs)
        (line,) = axes.plot(times_s, 100 * scores.mean(axis=0), label=label)
        if len(runs) > 1:
            bounds = 100 * scores.min(axis=0), 100 * scores.max(axis=0)
            axes.fill_between(times_s, *bounds, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.axhline(100 * target, color="grey", linewidth=0.8, linestyle="--")
    scores_of_all = [point.score for runs in curves.values() for run in runs for point in run]
    lowest = max(min(*scores_of_all, target), target - _SHOWN)
    highest = max(*scores_of_all, target)
    margin = 0.05 * (highest - lowest)
    axes.set(xlabel="wall time, seconds", ylabel=f"{metric}, %", ylim=(100 * lowest, 100 * (highest + margin)))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def aligned(runs: Sequence[Sequence[Point]]) -> tuple[np.ndarray, np.ndarray]:
    """Times, and the score of each run at these times, one row for each run; a run that has ended keeps its score."""
    if len(runs) == 1:
        return np.array([p.wall_s for p in runs[0]]), np.array([[p.score for p in runs[0]]])
    times_s = np.linspace(max(run[0].wall_s for run in runs), max(run[-1].wall_s for run in runs), _TIMES)
    return times_s, np.array([np.interp(times_s, [p.wall_s for p in run], [p.score for p in run]) for run in runs])
