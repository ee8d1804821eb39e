"""The settings of one training run. The flags of the command line are generated from their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import click

from trainers.eager_sgd import Partial
from trainers.imbalance import Balanced, Imbalance, parse_duration, parse_imbalance
from trainers.oktopk_sgd import Accumulate, Algorithm
from trainers.wagma_sgd import Order
from trainers.workloads import WORKLOADS

TRAINERS = {
    "allreduce_sgd": "Synchronous data-parallel SGD.",
    "eager_sgd": "Eager-SGD: partial allreduces, which do not wait for slow ranks.",
    "wagma_sgd": "WAGMA-SGD: changing groups average their models, and do not wait for slow ranks.",
    "dc_s3gd": "DC-S3GD: synchronous, one step stale and compensated; communication overlaps computation.",
    "oktopk_sgd": "Ok-Topk SGD: sparse allreduces send the largest updates and keep the others; and its baselines.",
}


def _parsed(name: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A click type from a function that raises ValueError, whose text becomes the usage error."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value  # a default is not text
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    convert.__name__ = name  # the name in --help
    return convert


def _flag(kind: Any, help_: str, *, only: tuple[str, ...] = tuple(TRAINERS)) -> dict[str, Any]:
    """The flag of a field, and the trainers that have it."""
    return {"type": kind, "help": help_, "only": only}


_POSITIVE = click.IntRange(min=1)
_NATURAL = click.IntRange(min=0)
_LEAST_ZERO = click.FloatRange(min=0.0)
_MOMENTUM = click.FloatRange(0.0, 1.0, max_open=True)
_DURATION = _parsed("duration", parse_duration)
_IMBALANCE = _parsed("imbalance", parse_imbalance)
_FILE = click.Path(dir_okay=False, path_type=Path)
_DENSITY = click.FloatRange(0.0, 1.0, min_open=True)
_EAGER, _WAGMA, _DC, _OKTOPK = ("eager_sgd",), ("wagma_sgd",), ("dc_s3gd",), ("oktopk_sgd",)

_PARTIAL = _flag(click.Choice(get_args(Partial)), "The rule by which a round starts.", only=_EAGER)
_CANDIDATES = _flag(_POSITIVE, "Ranks drawn for each round; the first of them to arrive starts it.", only=_EAGER)
_QUORUM = _flag(_POSITIVE, "Ranks that a round waits for (by default more than half).", only=_EAGER)
_HISTORY = _flag(_NATURAL, "Results kept for late ranks, so that they apply each one.", only=_EAGER)
_AVERAGE = _flag(_NATURAL, "Rounds between averages of the models, without history (0: one at the end).", only=_EAGER)
_SYNC = _flag(_NATURAL, "Wait for all ranks in every N-th round (0: never).", only=_EAGER + _WAGMA)
_GROUP = _flag(_POSITIVE, "Ranks that average their models (by default the square root of all).", only=_WAGMA)
_FIXED = _flag(bool, "The same groups in every round.", only=_WAGMA)
_ORDER = _flag(click.Choice(get_args(Order)), "The paper's order, or that of its authors' code.", only=_WAGMA)
_LAMBDA = _flag(_LEAST_ZERO, "Delay compensation, as a share of the gradient (0: none).", only=_DC)
_ALGORITHM = _flag(click.Choice(get_args(Algorithm)), "The allreduce.", only=_OKTOPK)
_SHARE = _flag(_DENSITY, "The share of all elements that is sent.", only=_OKTOPK)
_THRESHOLDS = _flag(_POSITIVE, "Number of rounds for which a threshold is used (τ').", only=_OKTOPK)
_REGIONS = _flag(_POSITIVE, "Number of rounds for which the regions are used (τ).", only=_OKTOPK)
_WARM_UP = _flag(_NATURAL, "Dense rounds at the start.", only=_OKTOPK)
_ACCUMULATE = _flag(
    click.Choice(get_args(Accumulate)), "What residuals hold: as in the paper, or in its code.", only=_OKTOPK
)
_DELAYS = _flag(_IMBALANCE, "Delays: none, one-random:200ms or all-skewed:50ms-400ms.")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run: what to train, how, and on which emulated machine.

    The defaults train digits to about 98 % in 180 rounds on 4 ranks. The default history is longer than that, so it
    keeps every result.
    """

    workload: str = field(default="digits", metadata=_flag(click.Choice(sorted(WORKLOADS)), "The workload to train."))
    rounds: int = field(default=180, metadata=_flag(_POSITIVE, "Rounds to train."))
    batch: int = field(default=64, metadata=_flag(_POSITIVE, "Samples per rank and step."))
    learning_rate: float = field(
        default=1.0, metadata=_flag(_LEAST_ZERO, "Peak of the learning rate, in the middle of the run.")
    )
    momentum: float = field(default=0.0, metadata=_flag(_MOMENTUM, "Momentum of SGD."))
    partial: Partial = field(default="solo", metadata=_PARTIAL)
    candidates: int = field(default=1, metadata=_CANDIDATES)
    quorum: int | None = field(default=None, metadata=_QUORUM)
    history: int = field(default=256, metadata=_HISTORY)
    average_every: int = field(default=0, metadata=_AVERAGE)
    sync_every: int = field(default=0, metadata=_SYNC)
    group_size: int | None = field(default=None, metadata=_GROUP)
    fixed: bool = field(default=False, metadata=_FIXED)
    order: Order = field(default="step-then-average", metadata=_ORDER)
    lambda0: float = field(default=0.2, metadata=_LAMBDA)
    algorithm: Algorithm = field(default="oktopk", metadata=_ALGORITHM)
    density: float = field(default=0.02, metadata=_SHARE)
    accumulate: Accumulate = field(default="updates", metadata=_ACCUMULATE)
    thresholds_every: int = field(default=1, metadata=_THRESHOLDS)
    regions_every: int = field(default=64, metadata=_REGIONS)
    warm_up: int = field(default=0, metadata=_WARM_UP)
    seed: int = field(default=0, metadata=_flag(_NATURAL, "Seed of all draws; the same at every rank."))
    compute_s: float = field(default=0.0, metadata=_flag(_DURATION, "Stretch each step to this time, such as 100ms."))
    imbalance: Imbalance = field(default=Balanced(), metadata=_DELAYS)
    target: float = field(default=0.96, metadata=_flag(click.FloatRange(0.0, 1.0), "Measure the time to this score."))
    report: Path | None = field(default=None, metadata=_flag(_FILE, "Write the report to this JSON file."))
    plot: Path | None = field(default=None, metadata=_flag(_FILE, "Plot score over time to this PNG file."))

    @classmethod
    def of(cls, trainer: str, workload: str = "digits", **given: Any) -> Settings:
        """The `given` values that are not None; otherwise those of the workload, of the trainer, and the defaults."""
        own: dict[str, Any] = {"sync_every": 10} if trainer == "wagma_sgd" else {}  # τ = 10, section IV
        chosen = {name: value for name, value in given.items() if value is not None}
        return cls(workload=workload, **own | WORKLOADS[workload].defaults | chosen)


def options(trainer: str) -> list[click.Parameter]:
    """The command line options of a trainer: one for each of its fields of `Settings`; `compute_s` is `--compute`.

    An option whose default depends on the workload is None unless it is given; `Settings.of` then sets it.
    """
    return [_option(trainer, f) for f in dataclasses.fields(Settings) if trainer in f.metadata["only"]]


def _option(trainer: str, f: dataclasses.Field[Any]) -> click.Option:
    default = getattr(Settings.of(trainer), f.name)
    shown: bool | str = default is not None
    if any(f.name in workload.defaults for workload in WORKLOADS.values()):
        values = {name: getattr(Settings.of(trainer, name), f.name) for name in sorted(WORKLOADS)}
        default, shown = None, ", ".join(f"{value} for {name}" for name, value in values.items())
    return click.Option(
        [f"--{f.name.removesuffix('_s').replace('_', '-')}", f.name],
        type=f.metadata["type"],
        is_flag=f.metadata["type"] is bool,
        default=default,
        help=f.metadata["help"],
        show_default=shown,
    )
