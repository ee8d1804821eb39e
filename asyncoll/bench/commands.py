"""The commands `asyncoll bench …`. A command imports the measuring modules when it runs, so that `--help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asyncoll.bench.plan import BenchPlan, parse_duration, parse_sizes
from asyncoll.cli_base import CommandGroup, ranks_option


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str], Any]:
    """A click callback that converts an option by `parse`. A ValueError of `parse` becomes a usage error."""

    def convert(ctx: click.Context, param: click.Parameter, value: str) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return convert


def _sizes(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--sizes",
        callback=_parsed(parse_sizes),
        default=default,
        show_default=True,
        help="Bytes: FROM:TO by factors of 4, or a list such as 4,1K,1M.",
    )


_transport = click.option(
    "--transport",
    type=click.Choice(["shm", "ipc", "tcp", "inproc"]),
    default="shm",
    show_default=True,
    help="Processes that share memory, or talk over unix sockets or loopback tcp; or ranks in one process.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure on this host. Every result is checked: #wrong counts wrong elements over all ranks.

    Exits with 1 if an element is wrong.
    """


@bench.command()
@ranks_option(1)
@_sizes("4:100M")
@_transport
@click.option("--registered", is_flag=True, help="Reduce a tensor of `comm.empty`, in place.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Reduce a tensor of the host or of a GPU; ranks take the GPUs in turn.",
)
@_json
def allreduce(as_json: bool, **plan: Any) -> None:
    """Allreduce of float32: time (the slowest rank's median) and bandwidths, as nccl-tests defines them.

    \b
    Examples:
      asyncoll bench allreduce -n 4 --sizes 4K:64M
      asyncoll bench allreduce -n 4 --transport tcp --json
    """
    _measure(BenchPlan("allreduce", **plan), as_json)


@bench.command()
@_sizes("4:100M")
@_transport
@_json
def pingpong(as_json: bool, **plan: Any) -> None:
    """Send and receive between two ranks: half a round trip.

    \b
    Example:
      asyncoll bench pingpong --sizes 4,1M --transport ipc
    """
    _measure(BenchPlan("pingpong", ranks=2, **plan), as_json)


@bench.command()
@ranks_option(2)
@_sizes("4K")
@_transport
@_json
@click.option(
    "--skew",
    "skew_s",
    callback=_parsed(parse_duration),
    default="1ms",
    show_default=True,
    help="Rank r arrives r times this late.",
)
@click.option("--iterations", type=click.IntRange(1, 1_000_000), default=128, show_default=True, help="Counted calls.")
def solo(as_json: bool, **plan: Any) -> None:
    """Skewed arrivals: the waits of ranks in full, majority, quorum (half of the ranks) and solo allreduces.

    \b
    Example:
      asyncoll bench solo -n 4 --skew 5ms --sizes 1M
    """
    _measure(BenchPlan("solo", **plan), as_json)


@bench.command()
@ranks_option(2)
def tune(ranks: int) -> None:
    """Measure the best sizes of pieces in shared memory on this host, and print the setting. Takes some minutes.

    \b
    Example:
      asyncoll bench tune -n 4
    """

    from asyncoll.algorithms.dense.tuning import VARIABLE, choose
    from asyncoll.bench.table import aligned
    from asyncoll.bench.tune import setting
    from asyncoll.bench.tune import tune as measure

    sizes, lines = measure(ranks)
    click.echo(aligned(lines))
    click.echo(f"\nbuilt in: {VARIABLE}={setting(choose(ranks, {}))}\nhere:     {VARIABLE}={setting(sizes)}")


@bench.command()
@click.option("--quick", is_flag=True, help="Fewer ranks, rounds and draws: some four minutes for all claims.")
@click.option(
    "--claim", "names", multiple=True, help="A claim of the page of benchmarks; several with several options."
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all cells to this file.")
def suite(names: tuple[str, ...], file: Path | None, quick: bool) -> None:
    """Check the claims of the page of benchmarks that need no peer. Exits with 1 if one does not hold here.

    \b
    Examples:
      asyncoll bench suite --quick
      asyncoll bench suite --claim waiting --json here.json
    """
    import json

    from asyncoll.bench import suite as claims

    found, hold = {}, True
    for claim in claims.chosen(names):
        click.echo(f"# measuring: {claim.heading}", err=True)
        found[claim.name] = claims.cells_of(claim, quick=quick)
        for holds, line in claims.verdicts(claim, found[claim.name]):
            click.echo(line)
            hold = hold and holds
        if file:
            file.write_text(json.dumps({"claims": found}, indent=1) + "\n")
    sys.exit(int(not hold))


@bench.command()
@click.argument("first", metavar="A.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("second", metavar="B.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def compare(first: Path, second: Path) -> None:
    """Compare two results of `asyncoll bench suite --json`, or records of `make benchmarks`, cell by cell.

    \b
    Example:
      asyncoll bench compare here.json there.json
    """
    from asyncoll.bench.suite import compared
    from asyncoll.bench.table import aligned

    click.echo(aligned(compared(first, second)))


def _measure(plan: BenchPlan, as_json: bool) -> None:
    from asyncoll.bench.runs import run_plan
    from asyncoll.bench.table import show

    code, rows = run_plan(plan)
    if code:
        sys.exit(code)
    show(plan, rows, as_json=as_json)
    sys.exit(int(any(row["wrong"] for row in rows)))
