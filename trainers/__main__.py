"""`python -m trainers NAME ...`: a trainer on a workload, alone or under `asyncoll launch`; or the demo."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import asyncoll
from trainers.demo import demo
from trainers.experiment import experiment
from trainers.plots import plot_scores
from trainers.settings import TRAINERS, Settings, options


@click.group()
def main() -> None:
    """Trainers on small workloads, with emulated compute time and imbalance."""


def _command(trainer: str, summary: str) -> click.Command:
    def train(**flags: Any) -> None:
        settings = Settings.of(trainer, **flags)
        if settings.plot:
            _need_matplotlib()
        try:
            asyncoll.run(_train_and_tell, trainer, settings)
        except (
            asyncoll.UsageError
        ) as error:  # an option that only the number of ranks makes impossible, such as a larger quorum
            raise click.UsageError(str(error)) from error

    return click.Command(trainer, params=options(trainer), callback=train, help=summary)


async def _train_and_tell(comm: asyncoll.Communicator, trainer: str, settings: Settings) -> None:
    torch.set_num_threads(1)  # the models are tiny, and the ranks share the cores
    report = await experiment(comm, trainer, settings)
    if report is None:
        return
    Console().print(report.table())
    if settings.report:
        report.write(settings.report)
    if settings.plot:
        plot_scores({trainer: report.curve}, report.metric, settings.target, settings.plot)


@main.command("demo")
@click.option("-n", "--ranks", type=click.IntRange(min=2), default=4, show_default=True, help="Processes to start.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all draws.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for the reports and the plot.",
)
def _demo(ranks: int, seed: int, folder: Path) -> None:
    """Compare synchronous SGD with eager-SGD, solo and majority. Takes two minutes."""
    _need_matplotlib()
    demo(ranks, seed, folder)


def _need_matplotlib() -> None:
    """Raise UsageError if matplotlib is missing: before the training, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("plotting needs matplotlib: pip install 'asyncoll[plots]'")


for _trainer, _summary in TRAINERS.items():
    main.add_command(_command(_trainer, _summary))

if __name__ == "__main__":
    main()
