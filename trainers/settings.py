"""What one training run is told; the command line's flags are generated from these fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from trainers.eager_sgd import Partial
from trainers.imbalance import Balanced, Imbalance, parse_duration, parse_imbalance
from trainers.workloads import WORKLOADS


def _parsed(name: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A click type around a function that raises `ValueError`, whose words become the usage error."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value  # a default is a value already
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    convert.__name__ = name  # what --help shows
    return convert


def _flag(kind: Any, help_: str, *, eager_only: bool = False) -> dict[str, Any]:
    return {"type": kind, "help": help_, "eager_only": eager_only}


_POSITIVE = click.IntRange(min=1)
_NATURAL = click.IntRange(min=0)
_MOMENTUM = click.FloatRange(0.0, 1.0, max_open=True)
_PARTIAL = click.Choice(["solo", "majority"])
_DURATION = _parsed("duration", parse_duration)
_IMBALANCE = _parsed("imbalance", parse_imbalance)
_FILE = click.Path(dir_okay=False, path_type=Path)

_SYNC_HELP = "Wait for all ranks in every N-th round (0: never)."
_HISTORY_HELP = "Results kept for late ranks, so that none is missed."
_AVERAGE_HELP = "Rounds between averages of the models (0: one at the end)."
_IMBALANCE_HELP = "Delays: none, one-random:200ms or all-skewed:50ms-400ms."


@dataclass(frozen=True, slots=True)
class Settings:
    """One run: what to train, how, and on which emulated machine.

    The defaults train digits to about 98 % in 180 rounds on 4 ranks.
    """

    workload: str = field(default="digits", metadata=_flag(click.Choice(sorted(WORKLOADS)), "What is trained."))
    rounds: int = field(default=180, metadata=_flag(_POSITIVE, "Rounds to train."))
    batch: int = field(default=64, metadata=_flag(_POSITIVE, "Samples per rank and step."))
    learning_rate: float = field(default=1.0, metadata=_flag(click.FloatRange(min=0.0), "Peak, half-way."))
    momentum: float = field(default=0.0, metadata=_flag(_MOMENTUM, "Momentum of SGD."))
    partial: Partial = field(default="solo", metadata=_flag(_PARTIAL, "Which allreduce.", eager_only=True))
    sync_every: int = field(default=0, metadata=_flag(_NATURAL, _SYNC_HELP, eager_only=True))
    history: int = field(default=32, metadata=_flag(_NATURAL, _HISTORY_HELP, eager_only=True))
    average_every: int = field(default=0, metadata=_flag(_NATURAL, _AVERAGE_HELP, eager_only=True))
    seed: int = field(default=0, metadata=_flag(_NATURAL, "Of everything drawn; the same at every rank."))
    compute_s: float = field(default=0.0, metadata=_flag(_DURATION, "Stretch each step to this, as in 100ms."))
    imbalance: Imbalance = field(default=Balanced(), metadata=_flag(_IMBALANCE, _IMBALANCE_HELP))
    target: float = field(default=0.96, metadata=_flag(click.FloatRange(0.0, 1.0), "Score to time."))
    report: Path | None = field(default=None, metadata=_flag(_FILE, "Write the report to this JSON file."))
    plot: Path | None = field(default=None, metadata=_flag(_FILE, "Plot score over time to this PNG file."))


def options(*, eager: bool) -> list[click.Parameter]:
    """The command line options of a trainer: one for each field of `Settings`, `compute_s` as `--compute`."""
    return [
        click.Option(
            [f"--{f.name.removesuffix('_s').replace('_', '-')}", f.name],
            type=f.metadata["type"],
            default=f.default,
            help=f.metadata["help"],
            show_default=f.default is not None,
        )
        for f in dataclasses.fields(Settings)
        if eager or not f.metadata["eager_only"]
    ]
