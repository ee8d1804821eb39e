"""Score over wall time, one curve for each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainers.report import Point


def plot_scores(curves: Mapping[str, Sequence[Point]], metric: str, target: float, path: Path) -> None:
    """Write a PNG; needs matplotlib (`pip install 'asyncoll[plots]'`)."""
    import matplotlib as mpl

    mpl.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for label, curve in curves.items():
        axes.plot([p.wall_s for p in curve], [100 * p.score for p in curve], label=label)
    axes.axhline(100 * target, color="grey", linewidth=0.8, linestyle="--")
    # Only the scores near the target are shown: the runs differ there, and not in the steep first rounds.
    axes.set(xlabel="wall time, seconds", ylabel=f"{metric}, %", ylim=(100 * target - 26, 100))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
