"""The settings of one training run. The flags of the command line are generated from their fields."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from trainers.algorithms import ALGORITHMS, LEAST_ZERO, NATURAL, POSITIVE, Option
from trainers.devices import parse_device
from trainers.imbalance import IMBALANCES, Balanced, Imbalance, parse_duration, parse_imbalance
from trainers.workloads import WORKLOADS


def _parsed(name: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A click type from a function that raises ValueError, whose text becomes the usage error."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value  # a default is not text
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    convert.__name__ = name  # the name in --help
    return convert


def _flag(kind: Any, help_: str) -> dict[str, Any]:
    return {"type": kind, "help": help_}


_MOMENTUM = click.FloatRange(0.0, 1.0, max_open=True)
_NORM = click.FloatRange(min=0.0, min_open=True)
_DURATION = _parsed("duration", parse_duration)
_IMBALANCE = _parsed("imbalance", parse_imbalance)
_FILE = click.Path(dir_okay=False, path_type=Path)
_WORKLOAD = _flag(click.Choice(sorted(WORKLOADS)), "The workload to train.")
_FULL = _flag(bool, "The size of the paper, instead of one for two cores and minutes.")
_DATA = _flag(click.Path(path_type=Path), "The workload's data, for those that read files.")
_DEVICE = _flag(
    _parsed("device", parse_device), "Where to train: cpu, cuda (the ranks of a host share its GPUs) or cuda:N."
)
_RATE = _flag(LEAST_ZERO, "Peak of the learning rate, in the middle of the run.")
_BETA = _flag(_MOMENTUM, "Momentum of SGD; beta 1 of the Adam family.")
_CLIP = _flag(_NORM, "Clip gradients to this norm.")
_ACCUMULATE = _flag(POSITIVE, "Batches that make one gradient.")
_BUFFERS = _flag(
    click.Choice(["broadcast", "average", "local"]), "What happens to buffers where all models are made equal."
)
_COMPUTE = _flag(_DURATION, "Stretch the computation of each batch to this time, such as 100ms.")
_DELAYS = _flag(_IMBALANCE, f"How steps differ in length: {', '.join(IMBALANCES)}.")
_CHECKPOINTS = _flag(
    click.Path(file_okay=False, path_type=Path), "Folder for checkpoints; a run goes on from the newest one there."
)
_TRACE = _flag(
    click.Path(file_okay=False, path_type=Path), "Folder for a trace of a few steps of each rank, by torch.profiler."
)
_TARGET = _flag(click.FloatRange(0.0, 1.0), "Measure the time to this score.")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run: what to train, how, and on which emulated machine.

    The defaults train digits to about 98 % in 180 rounds on 4 ranks. `options` are those of the algorithm alone.
    """

    workload: str = field(default="digits", metadata=_WORKLOAD)
    full: bool = field(default=False, metadata=_FULL)
    data: Path | None = field(default=None, metadata=_DATA)
    rounds: int = field(default=180, metadata=_flag(POSITIVE, "Rounds to train."))
    device: str = field(default="cpu", metadata=_DEVICE)
    batch: int = field(default=64, metadata=_flag(POSITIVE, "Samples per rank and step."))
    learning_rate: float = field(default=1.0, metadata=_RATE)
    momentum: float = field(default=0.0, metadata=_BETA)
    clip_norm: float | None = field(default=None, metadata=_CLIP)
    accumulate: int = field(default=1, metadata=_ACCUMULATE)
    buffers: str = field(default="broadcast", metadata=_BUFFERS)
    compute_s: float = field(default=0.0, metadata=_COMPUTE)
    imbalance: Imbalance = field(default=Balanced(), metadata=_DELAYS)
    target: float = field(default=0.96, metadata=_TARGET)
    seed: int = field(default=0, metadata=_flag(NATURAL, "Seed of all draws; the same at every rank."))
    report: Path | None = field(default=None, metadata=_flag(_FILE, "Write the report to this JSON file."))
    plot: Path | None = field(default=None, metadata=_flag(_FILE, "Plot score over time to this PNG file."))
    trace: Path | None = field(default=None, metadata=_TRACE)
    checkpoints: Path | None = field(default=None, metadata=_CHECKPOINTS)
    checkpoint_every: int = field(default=20, metadata=_flag(POSITIVE, "Rounds between two checkpoints."))
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, algorithm: str, /, workload: str = "digits", **given: Any) -> Settings:
        """The `given` values that are not None, also of the algorithm's options; otherwise the defaults.

        Defaults are those of the workload, and of the algorithm, where these have their own.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        options = ALGORITHMS[algorithm].defaults()
        own = {name: chosen.pop(name) for name in options if name in chosen}
        return cls(workload=workload, options=options | own, **WORKLOADS[workload].defaults | chosen)

    def plain(self) -> dict[str, Any]:
        """All settings and options, as values that JSON has."""
        common = {f.name: getattr(self, f.name) for f in COMMON}
        return {name: _plain(value) for name, value in (common | self.options).items()}


def _plain(value: Any) -> Any:
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, int | float | str | None) else str(value)


COMMON = tuple(f for f in dataclasses.fields(Settings) if f.name != "options")


def flags(algorithm: str, without: Iterable[str] = ()) -> list[click.Parameter]:
    """The command line options of an algorithm's command: the common ones, and its own."""
    entry = ALGORITHMS[algorithm]
    defaults = entry.defaults()
    return [*common_flags(without), *(_own_flag(option, defaults[option.name]) for option in entry.options)]


def common_flags(without: Iterable[str] = ()) -> list[click.Parameter]:
    """The options of all algorithms: one for each field of `Settings`; `compute_s` is `--compute`.

    An option whose default depends on the workload is None unless it is given; `Settings.of` then sets it.
    """
    return [_common_flag(f) for f in COMMON if f.name not in without]


def _common_flag(f: dataclasses.Field[Any]) -> click.Option:
    default = f.default
    shown: bool | str = _has_value(default)
    others = {name: kind.defaults[f.name] for name, kind in sorted(WORKLOADS.items()) if f.name in kind.defaults}
    if others:
        listed = ", ".join(f"{value} for {name}" for name, value in others.items())
        default, shown = None, f"{default}; {listed}"
    return _option(f.name.removesuffix("_s"), f.name, f.metadata["type"], f.metadata["help"], default, shown)


def _own_flag(option: Option, default: Any) -> click.Option:
    shown = _plain(default) if isinstance(default, enum.Enum) else _has_value(default)
    return _option(option.name, option.name, option.kind, option.help, default, shown)


def _has_value(default: Any) -> bool:
    return default is not None and default is not False


def _option(flag: str, name: str, kind: Any, help_: str, default: Any, shown: bool | str) -> click.Option:
    return click.Option(
        [f"--{flag.replace('_', '-')}", name],
        type=kind,
        is_flag=kind is bool,
        default=default,
        help=help_,
        show_default=shown,
    )
