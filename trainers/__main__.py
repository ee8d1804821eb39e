"""`python -m trainers NAME ...`: an algorithm on a workload, alone or under `asyncoll launch`; or a comparison."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import asyncoll
from trainers.algorithms import ALGORITHMS
from trainers.compare import OF_ONE_RUN, TABLE_WIDTH, compare, parse_algorithms, parse_seeds
from trainers.demo import demo
from trainers.experiment import experiment
from trainers.listing import listing
from trainers.plots import plot_scores
from trainers.settings import Settings, common_flags, flags

_INTERRUPTED = 130  # the exit code after Ctrl-C


class _Group(click.Group):
    """Its commands end at Ctrl-C as those of asyncoll do."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Algorithms on small workloads, with emulated compute time and imbalance."""


def _command(algorithm: str, summary: str) -> click.Command:
    def train(**given: Any) -> None:
        settings = Settings.of(algorithm, **given)
        if settings.plot:
            _need_matplotlib()
        try:
            asyncoll.run(_train_and_tell, algorithm, settings)
        except asyncoll.UsageError as error:  # such as a quorum that is larger than the number of ranks
            raise click.UsageError(str(error)) from error

    return click.Command(algorithm, params=flags(algorithm), callback=train, help=summary)


async def _train_and_tell(comm: asyncoll.Communicator, algorithm: str, settings: Settings) -> None:
    torch.set_num_threads(1)  # the models are tiny, and the ranks share the cores
    report = await experiment(comm, algorithm, settings)
    if report is None:
        return
    Console().print(report.table())
    if settings.report:
        report.write(settings.report)
    if settings.plot:
        plot_scores({algorithm: [report.curve]}, report.metric, settings.target, settings.plot)


@main.command("list")
def _list() -> None:
    """Name all algorithms, workloads and imbalances, each with its paper."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    for table in listing():
        console.print(table)


Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_RANKS: Decorator = click.option(
    "-n", "--ranks", type=click.IntRange(min=2), default=4, show_default=True, help="Processes to start."
)


def _folder(default: str) -> Decorator:
    return click.option(
        "--folder",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(default),
        show_default=True,
        help="Folder for the reports and the plot.",
    )


@main.command("demo")
@_RANKS
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all draws.")
@click.option("--device", default="cpu", show_default=True, help="Where to train, as for the algorithms.")
@_folder("runs/demo")
def _demo(ranks: int, seed: int, device: str, folder: Path) -> None:
    """Compare synchronous SGD with eager-SGD, solo and majority. Takes two minutes."""
    _need_matplotlib()
    demo(ranks, seed, device, folder)


@main.command("compare")
@click.option(
    "--algorithms",
    required=True,
    help="Names, separated by commas, each with its options: allreduce_sgd,eager_sgd:partial=majority:history=0",
)
@click.option("--seeds", metavar="FROM:TO", default="0:3", show_default=True, help="FROM:TO, or a number of seeds.")
@_RANKS
@_folder("runs/compare")
@click.option("--tensorboard", is_flag=True, help="Write event files for TensorBoard, too.")
def _compare(algorithms: str, seeds: str, ranks: int, folder: Path, tensorboard: bool, **common: Any) -> None:
    """Run algorithms one after the other, with several seeds, and print one table.

    Ctrl-C prints that of the runs so far, and ends with 130.
    """
    chosen, of_seeds = parse_algorithms(algorithms), parse_seeds(seeds)
    _need_matplotlib()
    if tensorboard:
        _need("tensorboard", "--tensorboard", "tensorboard")
    if not compare(chosen, ranks, of_seeds, _given(common), folder, tensorboard):
        sys.exit(1)


_compare.params += common_flags(without=OF_ONE_RUN)


def _given(common: dict[str, Any]) -> list[str]:
    """The arguments of every run: the common options that the command line has."""
    context = click.get_current_context()
    arguments: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in common or context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        value = common[name]
        text = f"{value}s" if name == "compute_s" else str(value)
        arguments += parameter.opts if value is True else [*parameter.opts, text]
    return arguments


def _need_matplotlib() -> None:
    _need("matplotlib", "plotting", "plots")


def _need(module: str, what: str, extra: str) -> None:
    """Raise UsageError if the module is missing: before the training, not after it."""
    if importlib.util.find_spec(module) is None:
        raise click.UsageError(f"{what} needs {module}: pip install 'asyncoll[{extra}]'")


for _name, _entry in ALGORITHMS.items():
    main.add_command(_command(_name, _entry.summary))

if __name__ == "__main__":
    main()
