"""The command `asyncoll`. Each subcommand imports its modules when it runs, so the launcher starts at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from asyncoll import __version__
from asyncoll.bench.commands import CommandGroup, bench
from asyncoll.errors import UsageError

_SEED = click.IntRange(0, (1 << 63) - 1)
_COUNT = click.IntRange(1, 1024)
PROGRAM_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _FilePath(click.Path):
    """A path that is not empty: pathlib would take an empty one for the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("an empty path; give one", param, ctx)
        return super().convert(value, param, ctx)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="asyncoll %(version)s")
def main() -> None:
    """Asynchronous and wait-avoiding collectives for ranks that do not run in step."""


@main.command(context_settings=PROGRAM_SETTINGS)
@click.option("-n", "size", type=click.IntRange(min=1), help="Number of ranks on this host.")
@click.option("--hosts", metavar="HOST:RANKS,...", help="Hosts to reach by ssh, and the number of ranks on each.")
@click.option(
    "--env", "environment", metavar="NAME", multiple=True, help="A variable that all hosts get. May be repeated."
)
@click.option("-m", "module", is_flag=True, help="Run a module, as `python -m` does.")
@click.option(
    "--log-dir", type=_FilePath(path_type=Path), help="Folder for the raw output of each rank: rank-R.out, rank-R.err."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop the job after this number of seconds (exit code 124).",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "zmq"]),
    help="Shared memory, or messages alone.  [default: $ASYNCOLL_TRANSPORT, or shm]",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|MODULE [ARGS]...")
def launch(size: int | None, hosts: str | None, program: tuple[str, ...], **options: Any) -> None:
    """Run a Python program as N ranks on this host, or on several hosts.

    Arguments after the script's or the module's name are passed to the program. The ranks find each other by the
    environment variables that torchrun sets. If one rank fails, the others are stopped. The traceback of the rank that
    failed first is printed first, and its exit code is the command's. Ctrl-C gives the ranks time to end; a second
    Ctrl-C kills them.

    With --hosts a:4,b:4 ranks 0 to 3 run on host a, and 4 to 7 on host b. `ssh a` and `ssh b` must work without a
    question, also for this host. Python, asyncoll, the program and the current folder must be at the same paths on all
    hosts. The ranks get the variables ASYNCOLL_*, PYTHON*, OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, and those of --env.

    The exit code is that of the rank that failed first (128 plus the signal that has killed it), 124 after --timeout,
    and 130 after Ctrl-C.

    \b
    Examples:
      asyncoll launch -n 4 train.py --epochs 3
      asyncoll launch --hosts a:4,b:4 --timeout 3600 -m package.train
    """
    from asyncoll.launch import launch as run
    from asyncoll.launch import parse_hosts

    if program[0].startswith("-"):
        known = [name for parameter in click.get_current_context().command.params for name in parameter.opts]
        raise click.NoSuchOption(program[0], possibilities=known)
    late = next((word for word in program[1:] if word in ("-n", "--hosts")), None)
    if late and size is None and hosts is None:
        remedy = f"put it before, as in `asyncoll launch {late} ... {program[0]}`"
        raise UsageError(f"{late} after the program is an argument of the program: {remedy}")
    ranks = size if hosts is None else parse_hosts(hosts)
    if ranks is None or None not in (size, hosts):
        raise UsageError("give either -n RANKS, for this host, or --hosts HOST:RANKS,...")
    if options["environment"] and hosts is None:
        raise UsageError("--env goes with --hosts: ranks of this host have its environment")
    sys.exit(run(ranks, program, **options))


@main.command()
@click.argument("file", type=_FilePath(path_type=Path))
def key(file: Path) -> None:
    """Make a key for jobs that run on several hosts.

    Copy FILE to every host, readable for your user alone. Ranks find it there as ~/.asyncoll.key, or by
    ASYNCOLL_KEY_FILE=FILE.

    \b
    Example:
      asyncoll key ~/.asyncoll.key
    """
    from asyncoll.transport.keys import write_key

    write_key(file)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--gpu", is_flag=True, help="Open the devices of CUDA, and show the routes of copies.")
@click.option("--ways", is_flag=True, help="Show instead which way each call takes, and why.")
@click.option(
    "-n",
    "ranks",
    type=_COUNT,
    default=2,
    envvar="WORLD_SIZE",
    help="Number of ranks, for --ways.  [default: WORLD_SIZE, or 2]",
)
def doctor(as_json: bool, gpu: bool, ways: bool, ranks: int) -> None:
    """Show what asyncoll finds on this host, and what it would choose for a job.

    \b
    Examples:
      asyncoll doctor
      asyncoll doctor --ways -n 8
    """
    from asyncoll import doctor

    click.echo(doctor.ways(ranks, as_json) if ways else doctor.render(doctor.examine(with_gpu=gpu), as_json))


@main.command()
@click.option(
    "--kind",
    default="all",
    show_default=True,
    help="solo, majority, quorum, full, candidates, group, policy, gossip, dense, sparse, training, ending; or all. "
    "Also sparse:ALGORITHM, and sparse:FILE:NAME or policy:FILE:NAME of a Python file that registers NAME.",
)
@click.option(
    "--ranks", default="1-9,12,13,16,17", show_default=True, help="Sizes of the worlds, used by the seeds in turn."
)
@click.option("--seeds", default="0:200", show_default=True, help="FROM:TO. A seed determines the world.")
@click.option("--seed", type=_SEED, help="Replay the world of this seed alone.")
@click.option(
    "--jobs",
    type=_COUNT,
    default=os.cpu_count() or 1,
    help="The most processes; one is started for every 20 worlds.  [default: one for each CPU]",
)
@click.option(
    "--transport",
    type=click.Choice(
        [
            *("simulated", "memory", "hosts", "inproc", "zmq", "shm", "shm-mixed"),
            *("zmq-processes", "shm-processes", "shm-mixed-processes"),
        ]
    ),
    default="simulated",
    show_default=True,
    help="simulated, memory, hosts: virtual time; inproc, zmq, shm, shm-mixed: real time in one process; others: a "
    "process each. mixed: every second rank does without the compiled core.",
)
@click.option("--devices", is_flag=True, help="Some ranks have tensors on devices, which have no hardware.")
def laws(kind: str, ranks: str, seeds: str, seed: int | None, jobs: int, transport: str, devices: bool) -> None:
    """Check the laws of collectives, of gossip, of training and of ends of programs in many worlds, drawn from seeds.

    Exits with 1 if a law is broken. Then it prints the law, the world, and the command that replays this world.

    \b
    Examples:
      asyncoll laws --kind solo,quorum --seeds 0:50
      asyncoll laws --kind dense --ranks 4 --transport shm --seed 17
    """
    from asyncoll.launch import check_current_folder
    from asyncoll.testing.laws import sweep

    check_current_folder()
    if seed is not None:
        if click.get_current_context().get_parameter_source("seeds") is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError("give --seed or --seeds, not both")
        jobs = 1
    chosen = sweep.parse_seeds(seeds) if seed is None else range(seed, seed + 1)
    sys.exit(not sweep.sweep(sweep.parse_kinds(kind), sweep.parse_ranks(ranks), chosen, jobs, transport, devices))


@main.command()
@click.option(
    "--cells",
    default="*",
    show_default=True,
    help="FAULT/OPERATION/MOMENT with the wildcards * and ?; several are separated by commas.",
)
@click.option("--sample", type=click.IntRange(min=1), help="Draw this number of cells.  [default: all]")
@click.option("--seed", type=_SEED, default=0, show_default=True, help="Seed of the draw.")
@click.option("--repeat", type=_COUNT, default=1, show_default=True, help="Repeat with the next seeds.")
@click.option("-n", "size", type=click.IntRange(2, 1024), default=4, show_default=True, help="Number of ranks.")
@click.option(
    "--transport",
    type=click.Choice(["shm", "zmq", "shm-mixed"]),
    default="shm",
    show_default=True,
    help="shm-mixed: every second rank does without the compiled core.",
)
@click.option(
    "--jobs",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Number of cells that run at the same time.",
)
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Number of hosts.")
def faults(
    cells: str, sample: int | None, seed: int, repeat: int, size: int, transport: str, jobs: int, hosts: int
) -> None:
    """Let a rank fail in every way, in every operation, and check that the other ranks raise the right error in time.

    Each cell is a world of real processes, in which one rank suffers a FAULT at a MOMENT of an OPERATION.

    The other ranks must raise an error that names the rank: within 100 ms of a death, within 1 s of a freeze. For a
    rank that is slow, or holds its GIL, no rank may raise an error. No rank may hang, and no process or file may be
    left behind.

    \b
    FAULT is
      kill, orphan           SIGKILL; orphan: of a rank with a living child
      exit, raise            the program exits, or raises
      signal                 a signal whose handler ends the program by raising
      interrupt, terminate   SIGINT (Ctrl-C), SIGTERM
      crash, fatal           SIGSEGV, SIGABRT
      disconnect             the connections are closed
      stop, gil, slow        SIGSTOP; the GIL is held; the rank is slow
      return                 a program of asyncoll.init or torch ends without leaving
      kill-host, stop-host   all ranks of a host, with --hosts
      down-host, cut-host    the interface of a host is set down, its cable is cut

    MOMENT is before, inside or after the operation; for tensors on devices also begun and landed, those of a copy. kill
    and stop strike at each injection point of the compiled core, too, as in kill/allreduce/meeting-arrived.

    OPERATION is a call; staged_*: one with tensors on devices without hardware; init_*: a program of asyncoll.init;
    torch_*: one of torch.distributed; ddp_solo: one of DDP with a solo hook; joining: the start of ranks on --hosts.

    With --hosts, ranks are on hosts that are network namespaces of this machine, which needs root.

    Exits with 1 if a cell fails, and prints the command that repeats it. The measured times are reliable only if --jobs
    leaves a processor for each process.

    \b
    Examples:
      asyncoll faults --sample 20
      asyncoll faults --cells 'kill/*/inside,stop/solo/after' -n 3
    """
    from asyncoll.launch import check_current_folder
    from asyncoll.testing.faults import cells as matrix
    from asyncoll.testing.faults.matrix import sweep

    check_current_folder()
    sys.exit(not sweep(matrix.select(cells, sample or 0, repeat, seed, transport, size, hosts), jobs))


main.add_command(bench)

if __name__ == "__main__":
    main()
