"""The command `asyncoll`. Each subcommand imports its modules when it runs, so the launcher starts at once."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from asyncoll import __version__
from asyncoll.bench.commands import bench
from asyncoll.cli_base import (
    Command,
    CommandGroup,
    Count,
    Kinds,
    RankCounts,
    chosen_seeds,
    json_option,
    ranks_option,
    seeds_option,
)
from asyncoll.errors import UsageError
from asyncoll.kinds import ALL as ALL_KINDS

_COUNT = Count(1, 1024)
EXIT_CODES = {
    "0": "success: all ranks of launch have succeeded, no law is broken, no cell has failed, no element is wrong",
    "1": "laws: a law is broken; faults: a cell has failed; bench: an element is wrong, or a claim does not hold; "
    "doctor: no job of this host can run; launch: the rank that failed first has raised an exception; or no space is "
    "left for the output",
    "2": "wrong options, values or variables; nothing was started",
    "124": "launch --timeout: the time is over",
    "130": "Ctrl-C",
    "143": "SIGTERM",
    "147": "launch: a rank was still stopped (SIGSTOP) when all others had ended: ASYNCOLL_STOPPED_S",
    "others": "launch: the exit code of the rank that failed first; 128 plus the signal, if a signal has killed it: "
    "137 is SIGKILL, often of the kernel for want of memory, and 139 is SIGSEGV",
}


_PLACE = re.compile("(-n|--ranks|--hosts)(=?[0-9].*|=.*)?")  # an option that says where ranks run


class _Seconds(click.FloatRange):
    name = "number of seconds"


class _Doctor(Command):
    """What is wrong in the environment is among its findings."""

    checks_environment = False


class _FilePath(click.Path):
    """A path that is neither empty, which pathlib would take for the current folder, nor an option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("an empty path; give one", param, ctx)
        if str(value).startswith("-"):
            self.fail(f"'{value}' is an option; give a path (of a file of this name: ./{value})", param, ctx)
        return super().convert(value, param, ctx)


class _WithExitCodes(CommandGroup):
    """Its help ends with the exit codes of all commands."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands and os.path.isfile(args[0]):
            ctx.fail(f"{args[0]} is not a command: `asyncoll launch -n RANKS {args[0]}` runs a program")
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([*EXIT_CODES.items()])


_NO_COLOR = bool(os.environ.get("NO_COLOR"))


@click.group(
    cls=_WithExitCodes,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "color": False if _NO_COLOR else None,  # None: on a terminal
    },
)
@click.version_option(__version__, "-V", "--version", message="asyncoll %(version)s")
def main() -> None:
    """Asynchronous and wait-avoiding collectives for ranks that do not run in step.

    \b
    Examples:
      asyncoll launch -n 4 train.py
      asyncoll doctor
    """


@main.command(context_settings={"allow_interspersed_args": False})
@ranks_option(most=None, default=None, show_default=False, help="Number of ranks on this host.")
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
    metavar="SECONDS",
    type=_Seconds(min=0, min_open=True),
    help="Stop the job after this number of seconds (exit code 124).",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "zmq"]),
    help="Shared memory, or messages alone.  [default: $ASYNCOLL_TRANSPORT, or shm]",
)
@click.option(
    "--min-ranks",
    metavar="M",
    type=Count(1),
    help="Go on after deaths of ranks while M of them are left.  [default: all]",
)
@click.option(
    "--json",
    "report",
    type=_FilePath(path_type=Path),
    metavar="FILE",
    help="Write how the job and each rank has ended.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|MODULE [ARGS]...")
def launch(ranks: int | None, hosts: str | None, program: tuple[str, ...], **options: Any) -> None:
    """Run a Python program as N ranks on this host, or on several hosts.

    Arguments after the script's or the module's name are the program's, also those that are options here, as under
    torchrun. The ranks find each other by the environment variables that torchrun sets. If one rank fails, the others
    are stopped. The traceback of the rank that failed first is printed first, and its exit code is the command's.
    Ctrl-C gives the ranks time to end; a second Ctrl-C kills them. --json writes a report for programs, however the job
    has ended.

    With --min-ranks M the job goes on after the death of a rank while at least M ranks are left: a line on stderr tells
    each death, and the exit code is 0 if all ranks that are left succeed. A death is an end by a signal, as of kill -9,
    or with the rank's host. A rank that raises, or exits with another code than 0, ends the job nevertheless.

    With --hosts a:4,b:4 ranks 0 to 3 run on host a, and 4 to 7 on host b. `ssh a` and `ssh b` must work without a
    question, also for this host. Python, asyncoll, the program and the current folder must be at the same paths on all
    hosts. The ranks get the variables ASYNCOLL_*, PYTHON*, OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, and those of --env.

    The exit code is that of the rank that failed first (128 plus the signal that has killed it), 124 after --timeout,
    and 130 after Ctrl-C.

    \b
    Examples:
      asyncoll launch -n 4 train.py --epochs 3
      asyncoll launch --hosts a:4,b:4 --timeout 3600 -m package.train
      asyncoll launch -n 4 --json report.json train.py || jq .first report.json
      asyncoll launch -n 4 --min-ranks 2 train.py
    """
    from asyncoll.launch import launch as run
    from asyncoll.launch import parse_hosts

    late = next((found[1] for word in program[1:] if (found := _PLACE.fullmatch(word))), None)
    if late and ranks is None and hosts is None:
        remedy = f"put it before, as in `asyncoll launch {late} ... {program[0]}`"
        raise UsageError(f"{late} after the program is an argument of the program: {remedy}")
    places = ranks if hosts is None else parse_hosts(hosts)
    if places is None or None not in (ranks, hosts):
        raise UsageError("give either -n RANKS, for this host, or --hosts HOST:RANKS,...")
    if options["environment"] and hosts is None:
        raise UsageError("--env goes with --hosts: ranks of this host have its environment")
    if os.environ.get("ASYNCOLL_SIZES"):  # the rule for them imports numpy, which a launcher does without
        from asyncoll.algorithms.choice import tables

        tables(2, os.environ)
    sys.exit(run(places, program, **options))


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
@click.option(
    "--listen", metavar="HOST:PORT", required=True, help="An IP address of this host, and a port; 0: a free one."
)
@click.option(
    "--key-file",
    type=_FilePath(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The key of the ranks.  [default: $ASYNCOLL_KEY_FILE, or ~/.asyncoll.key]",
)
def store(listen: str, key_file: Path | None) -> None:
    """Keep what the ranks of any number of jobs decide after a death, until Ctrl-C.

    Ranks that are not started by `asyncoll launch -n` find it by ASYNCOLL_STORE=HOST:PORT. It must outlive them. All of
    them have its key, and two jobs may have the same one: no job sees an entry of another. Prints where it listens.

    \b
    Examples:
      asyncoll store --listen 10.0.0.1:29600
      ASYNCOLL_STORE=10.0.0.1:29600 srun --ntasks 4 python train.py
    """
    import asyncio

    from asyncoll.transport.keys import find_key
    from asyncoll.transport.settings import host_and_port
    from asyncoll.world.remote_store import serve_store

    address, port = host_and_port(listen, "--listen ", least=0)
    found = key_file or find_key(os.environ)
    if not found:
        raise UsageError("a store needs a key, which the ranks have, too: make one with `asyncoll key ~/.asyncoll.key`")
    asyncio.run(serve_store(address, port, Path(found), lambda place: click.echo(f"the store listens at {place}")))


@main.command(cls=_Doctor)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--gpu", is_flag=True, help="Open the devices of CUDA, and show the routes of copies.")
@click.option(
    "--key-file",
    type=_FilePath(exists=True, dir_okay=False),
    metavar="FILE",
    help="The key to examine.  [default: $ASYNCOLL_KEY_FILE, or ~/.asyncoll.key]",
)
@click.option("--ways", is_flag=True, help="Show instead which way each call takes, and why.")
@ranks_option(default=None, show_default=False, help="Number of ranks, for --ways.  [default: $WORLD_SIZE, or 2]")
def doctor(as_json: bool, gpu: bool, key_file: str | None, ways: bool, ranks: int | None) -> None:
    """Show what asyncoll finds on this host, what it would choose for a job, and whether jobs can run.

    The last line is the verdict, such as "one host: yes; several hosts: no, no key". Exits with 1 if a job of this host
    cannot run. `asyncoll launch --hosts` makes a key for its job; other jobs of several hosts need one.

    \b
    Examples:
      asyncoll doctor
      asyncoll doctor --json | jq .obstacles
      asyncoll doctor --ways -n 8
    """
    from asyncoll import doctor

    if not ways:
        if ranks is not None:
            raise UsageError("-n goes with --ways: without it, nothing depends on the number of ranks")
        sys.exit(doctor.print_findings(as_json, key_file=key_file, with_gpu=gpu))
    if gpu or key_file is not None:
        raise UsageError("--ways shows the ways of calls alone: leave out --gpu and --key-file")
    click.echo(doctor.ways(_ranks_of_world() if ranks is None else ranks, as_json))


def _ranks_of_world() -> int:
    text = os.environ.get("WORLD_SIZE") or "2"
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise UsageError(f"WORLD_SIZE={text!r} in the environment is no number of ranks: give one with -n")
    return int(text)


@main.command()
@click.option(
    "--kind",
    "kinds",
    type=Kinds(),
    default="all",
    show_default=True,
    help=f"Some of {', '.join(ALL_KINDS)}; or all. Also sparse:ALGORITHM, and sparse:FILE:NAME, policy:FILE:NAME or "
    "training:FILE:NAME of a Python file that registers NAME.",
)
@click.option(
    "--sizes",
    type=RankCounts(),
    default="1-9,12,13,16,17",
    show_default=True,
    help="Numbers of ranks of the worlds, used by the seeds in turn.",
)
@seeds_option("0:200", "FROM:TO, or a number of seeds. A seed determines the world.")
@click.option(
    "--jobs",
    metavar="N",
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
@json_option("Print a JSON object for each kind, with all laws that it breaks.")
def laws(
    kinds: list[str], sizes: list[int], seed: int | None, seeds: range, jobs: int, transport: str, **options: bool
) -> None:
    """Check the laws of collectives, of gossip, of training and of ends of programs in many worlds, drawn from seeds.

    Exits with 1 if a law is broken. Then it prints the law, the world, and the command that replays this world. Ctrl-C
    prints what the worlds so far have given. All kinds with the default seeds take two minutes on two idle CPUs.

    \b
    Examples:
      asyncoll laws --kind solo,quorum --seeds 0:50
      asyncoll laws --kind dense --sizes 4 --transport shm --seed 17
      asyncoll laws --seeds 20 --json
    """
    from asyncoll.launch import check_current_folder
    from asyncoll.testing.laws.sweep import sweep

    check_current_folder()
    sys.exit(not sweep(kinds, sizes, chosen_seeds(seed, seeds), jobs, transport, **options))


@main.command()
@click.option(
    "--cells",
    metavar="CELL,...",
    default="*",
    show_default=True,
    help="FAULT/OPERATION/MOMENT with the wildcards * and ?; several are separated by commas.",
)
@click.option(
    "--sample", metavar="N", type=Count(min=1), help="Draw this number of cells with each seed.  [default: all of them]"
)
@seeds_option("0:1", "FROM:TO, or a number of seeds: of the draws, and of what happens in a cell.")
@ranks_option(2, default=4)
@click.option(
    "--transport",
    type=click.Choice(["shm", "zmq", "shm-mixed"]),
    default="shm",
    show_default=True,
    help="shm-mixed: every second rank does without the compiled core.",
)
@click.option(
    "--jobs", metavar="N", type=_COUNT, default=1, show_default=True, help="Number of cells that run at the same time."
)
@click.option("--hosts", metavar="N", type=Count(min=1), default=1, show_default=True, help="Number of hosts.")
@json_option("Print a JSON object for each cell: it, the seconds to each error, what is broken, what was late.")
def faults(
    cells: str,
    sample: int | None,
    seed: int | None,
    seeds: range,
    ranks: int,
    transport: str,
    jobs: int,
    hosts: int,
    as_json: bool,
) -> None:
    """Let a rank fail in every way, in every operation, and check that the other ranks raise the right error in time.

    Each cell is a world of real processes, in which one rank suffers a FAULT at a MOMENT of an OPERATION.

    The other ranks must raise an error that names the rank: within 100 ms of a death, within 1 s of a freeze. For a
    rank that is slow, or holds its GIL, no rank may raise an error. No rank may hang, and no process or file may be
    left behind.

    \b
    FAULT is
      kill, orphan           SIGKILL; orphan: of a rank with a living child
      linger                 SIGKILL; the locks of other ranks see it 0.3 s late
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
    and stop strike at each injection point of the compiled core, too, as in kill/allreduce/meeting-arrived, and linger
    at lock-taken. kill and stop strike at record, too, where a rank without the core changes the record of rounds.

    OPERATION is a call; staged_*: one with tensors on devices without hardware; init_*: a program of asyncoll.init;
    torch_*: one of torch.distributed; ddp_solo: one of DDP with a solo hook; joining: the start of ranks on --hosts.

    With --hosts, ranks are on hosts that are network namespaces of this machine, which needs root.

    Exits with 1 if a cell fails, and prints the command that repeats it. A cell is broken by a wrong or missing error,
    and late if the right error comes after its time; both have failed. Times are reliable only if --jobs leaves a
    processor for each process: repeat late cells on an idle machine. Ctrl-C ends all processes, and prints the table of
    the cells so far.

    \b
    Examples:
      asyncoll faults --sample 20
      asyncoll faults --cells 'kill/*/inside,stop/solo/after' -n 3 --seeds 0:5
      asyncoll faults --cells 'raise/barrier/*' --json
    """
    from asyncoll.launch import check_current_folder
    from asyncoll.testing.faults import cells as matrix
    from asyncoll.testing.faults.matrix import sweep

    check_current_folder()
    chosen = matrix.select(cells, sample, chosen_seeds(seed, seeds), transport, ranks, hosts)
    sys.exit(not sweep(chosen, jobs, as_json=as_json))


main.add_command(bench)
