"""The commands `asyncoll bench …`. A command imports the measuring modules when it runs, so that `--help` is fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from asyncoll.bench.plan import BenchPlan, parse_duration, parse_sizes
from asyncoll.cli_base import CommandGroup, Count, json_option, ranks_option


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
        metavar="BYTES,...",
        callback=_parsed(parse_sizes),
        default=default,
        show_default=True,
        help="Bytes: FROM:TO by factors of 4, or a list such as 4,1K,1M.",
    )


_transport = click.option(
    "--transport",
    type=click.Choice(["shm", "zmq", "tcp", "inproc"]),
    default="shm",
    show_default=True,
    help="Processes that share memory, or talk over unix sockets (zmq) or, as on several hosts, over tcp; or ranks in "
    "one process.",
)
_json = json_option("Print a JSON object for each row.")


@click.group(cls=CommandGroup)
def bench() -> None:
    """Measure on this host. Every result is checked: #wrong counts wrong elements over all ranks.

    Exits with 1 if an element is wrong. Ctrl-C ends all ranks, and prints what has been measured.

    \b
    Examples:
      asyncoll bench allreduce -n 4 --sizes 4:64M
      asyncoll bench suite --quick
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
      asyncoll bench pingpong --sizes 4,1M --transport zmq
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
    metavar="TIME",
    callback=_parsed(parse_duration),
    default="1ms",
    show_default=True,
    help="Rank r arrives r times this late.",
)
@click.option(
    "--iterations", metavar="N", type=Count(1, 1_000_000), default=128, show_default=True, help="Counted calls."
)
def solo(as_json: bool, **plan: Any) -> None:
    """Skewed arrivals: the waits of ranks in full, majority, quorum (half of the ranks) and solo allreduces.

    \b
    Example:
      asyncoll bench solo -n 4 --skew 5ms --sizes 1M
    """
    _measure(BenchPlan("solo", **plan), as_json)


@bench.command()
@ranks_option(2)
@json_option("Print a JSON object for each time, and one for the setting.")
def tune(ranks: int, as_json: bool) -> None:
    """Measure the best sizes of pieces in shared memory on this host, and print the setting. Takes some minutes.

    \b
    Examples:
      asyncoll bench tune -n 4
      asyncoll bench tune -n 4 --json
    """
    from asyncoll.algorithms.dense.tuning import VARIABLE, choose
    from asyncoll.bench import tune as tuning
    from asyncoll.bench.table import print_table

    lines: list[list[str]] = []

    def tell(timing: tuning.Timing) -> None:
        if as_json:
            click.echo(json.dumps(timing._asdict()))
        else:
            lines.append(timing.line())

    try:
        sizes = tuning.tune(ranks, tell)
    finally:
        if lines:
            print_table(tuning.HEADINGS, lines)
    built_in, here = (tuning.setting(each) for each in (choose(ranks, {}), sizes))
    if as_json:
        click.echo(json.dumps({"variable": VARIABLE, "built_in": built_in, "here": here}))
    else:
        click.echo(f"\nbuilt in: {VARIABLE}={built_in}\nhere:     {VARIABLE}={here}")


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
    from asyncoll.bench import suite as claims
    from asyncoll.bench.claims import Cells
    from asyncoll.testing.progress_bar import progress

    chosen, hold = claims.chosen(names), True
    found: dict[str, Cells] = {}
    if file:
        claims.write(file, found)  # now, and not after minutes, it is an error if that cannot be
    try:
        with progress(chosen[0].heading, len(chosen)) as advance:
            for number, claim in enumerate(chosen):
                found[claim.name] = claims.cells_of(claim, quick=quick)
                advance(chosen[min(number + 1, len(chosen) - 1)].heading)
                for holds, line in claims.verdicts(claim, found[claim.name]):
                    click.echo(line)
                    hold = hold and holds
                if file:
                    claims.write(file, found)
    finally:
        if file and not found:
            file.unlink(missing_ok=True)
    sys.exit(int(not hold))


@bench.command()
@click.argument("first", metavar="A.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("second", metavar="B.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("Print a JSON object for each cell.")
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Compare two results of `asyncoll bench suite --json`, or records of `make benchmarks`, cell by cell.

    \b
    Example:
      asyncoll bench compare here.json there.json
    """
    from asyncoll.bench.suite import compared, shown
    from asyncoll.bench.table import print_table

    cells = compared(first, second)
    if as_json:
        click.echo("\n".join(map(json.dumps, cells)))
    else:
        headings = ["claim", "row", "column", first.name, second.name, "second / first"]
        print_table(headings, [shown(cell) for cell in cells])


def _measure(plan: BenchPlan, as_json: bool) -> None:
    from asyncoll.bench.runs import rows
    from asyncoll.bench.table import show

    sys.exit(show(plan, rows(plan), as_json=as_json))
