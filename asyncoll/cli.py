"""The command `asyncoll`. A subcommand imports what it needs when it runs, so the launcher starts at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from asyncoll.bench.commands import bench
from asyncoll.errors import UsageError

THE_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Await your collectives."""


@main.command(context_settings=THE_PROGRAM)
@click.option("-n", "size", type=click.IntRange(min=1), required=True, help="Number of ranks.")
@click.option("-m", "module", is_flag=True, help="Run a module, as `python -m` does.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Keep each rank's raw rank-R.out and rank-R.err here.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop the job after so many seconds (exit code 124).",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "zmq"]),
    help="Memory that the ranks share, or messages alone.  [default: $ASYNCOLL_TRANSPORT, or shm]",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|MODULE [ARGS]...")
def launch(
    size: int,
    module: bool,
    log_dir: Path | None,
    timeout: float | None,
    transport: str | None,
    program: tuple[str, ...],
) -> None:
    """Run a Python program as N ranks on this host.

    What follows the script's or the module's name belongs to the program. The ranks find each other by the
    environment variables that torchrun sets. If one fails, the others are stopped, its traceback comes first,
    and its exit code is the command's. Ctrl-C lets the ranks finish; a second one kills them.
    """
    from asyncoll.launch import launch as run

    try:
        code = run(size, program, module=module, log_dir=log_dir, timeout=timeout, transport=transport)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def key(file: Path) -> None:
    """Make a key for jobs that run on several hosts.

    Copy FILE to every host, readable for you alone, and set ASYNCOLL_KEY_FILE=FILE for all ranks.
    """
    from asyncoll.transport.keys import write_key

    try:
        write_key(file)
    except UsageError as error:
        raise click.UsageError(str(error)) from error


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what asyncoll finds on this host and would choose for a job."""
    from asyncoll.doctor import examine, render

    findings = examine()
    click.echo(render(findings, as_json))


@main.command()
@click.option(
    "--kind", default="all", show_default=True, help="solo, majority, quorum, full, candidates, group; or all."
)
@click.option("--ranks", default="1-9,12,13,16,17", show_default=True, help="Sizes; the seeds take turns at them.")
@click.option("--seeds", default="0:200", show_default=True, help="FROM:TO. The same seed, the same world.")
@click.option("--seed", type=click.IntRange(min=0), help="One seed only: replays one world.")
@click.option("--jobs", type=click.IntRange(min=1), default=os.cpu_count() or 1, help="Processes; one for each CPU.")
@click.option(
    "--transport",
    type=click.Choice(["simulated", "memory", "inproc", "zmq", "shm", "zmq-processes", "shm-processes"]),
    default="simulated",
    show_default=True,
    help="A simulated network, or memory shared, in virtual time; in real time, ranks in one process or in one each.",
)
def laws(kind: str, ranks: str, seeds: str, seed: int | None, jobs: int, transport: str) -> None:
    """Check the laws of wait-avoiding collectives in many worlds, each drawn from a seed.

    Exits with 1 if a law is broken, and prints which one, where, and the command that replays that world.
    """
    from asyncoll.testing.laws import sweep

    if seed is not None:
        if click.get_current_context().get_parameter_source("seeds") is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError("give --seed or --seeds, not both")
        seeds, jobs = f"{seed}:{seed + 1}", 1
    try:
        worlds = sweep.parse_kinds(kind), sweep.parse_ranks(ranks), sweep.parse_seeds(seeds)
        lawful = sweep.sweep(*worlds, jobs, transport)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(not lawful)


@main.command()
@click.option(
    "--cells", default="*", show_default=True, help="FAULT/OPERATION/MOMENT, with * and ?; several with commas."
)
@click.option("--sample", type=click.IntRange(min=0), default=0, help="Draw so many of them.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed, the same cells.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Go on with the next seeds.")
@click.option("-n", "size", type=click.IntRange(min=2), default=4, show_default=True, help="Number of ranks.")
@click.option("--transport", type=click.Choice(["shm", "zmq"]), default="shm", show_default=True)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Cells at a time.")
def faults(cells: str, sample: int, seed: int, repeat: int, size: int, transport: str, jobs: int) -> None:
    """Let a rank fail in every way, in every operation, and check that all others know, and in time.

    Each cell is a world of real processes: {kill, orphan, exit, raise, signal, disconnect, stop, gil, slow} strikes one
    of them {before, inside, after} an operation. An orphan is a living child of a rank that is killed; the handler of a
    signal ends its program by an exception. Within 100 ms of a death and 1 s of a freeze everybody else must raise an
    error that names that rank; of a rank that is slow or holds its GIL nobody may notice anything. Nothing may hang, or
    be left behind. Exits with 1 if that is not so, and prints the command that repeats each such cell. With more jobs
    than the processors have room for, times are not to be trusted.
    """
    from asyncoll.testing.faults import cells as matrix
    from asyncoll.testing.faults.matrix import sweep

    try:
        chosen = matrix.select(cells, sample, repeat, seed, transport, size)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(not sweep(chosen, jobs))


main.add_command(bench)

if __name__ == "__main__":
    main()
