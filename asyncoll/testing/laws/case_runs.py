"""Runs a case: in virtual time, among ranks on one loop in real time, or among processes under the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncoll import _core
from asyncoll.communicator import Communicator
from asyncoll.rpc import codec
from asyncoll.rpc.hints import dataclasses_in
from asyncoll.testing.devices.of_rank import device_of
from asyncoll.testing.laws import deaths, dense, ending, gossip, rounds, sparse, training
from asyncoll.testing.laws.deaths import EpochsProgram
from asyncoll.testing.laws.dense_program import DenseProgram
from asyncoll.testing.laws.ending import EndingProgram, ProgramError
from asyncoll.testing.laws.methods import split
from asyncoll.testing.laws.story import (
    DENSE,
    ENDING,
    EPOCHS,
    GOSSIP,
    KINDS,
    SPARSE,
    TRAINING,
    AlarmError,
    Case,
    Part,
    Story,
    StoryTrainer,
    WorldStory,
    draw,
)
from asyncoll.testing.worlds import ON_ONE_LOOP, run_ranks, simulate
from asyncoll.transport.messages.simulated import Network
from asyncoll.world.join import run

SIMULATED = "simulated"
MEMORY = "memory"  # simulated ranks of one host
HOSTS = "hosts"  # simulated ranks of several hosts: memory on each, messages between them
# To the values of `asyncoll launch --transport`. In MIXED every second rank does without the compiled core.
MIXED = "shm-mixed-processes"
PROCESSES = {"shm-processes": "shm", "zmq-processes": "zmq", MIXED: "shm"}
TRANSPORTS = (SIMULATED, MEMORY, HOSTS, *ON_ONE_LOOP, *PROCESSES)
_TIMEOUT_S = 120  # a case takes about a second, so a world that runs this long has a rank that waits for ever


class WorldKind(NamedTuple):
    """What kinds of worlds differ in, beside their cases."""

    program: Callable[[Case], Any]  # of all ranks
    rank: Callable[..., Any]  # makes one of its communicator, the case and perhaps a device; its `run` returns a part
    part: Any  # the type of that
    steps: Callable[[Any], float]  # in a part
    laws: Sequence[Callable[[Any], Iterator[rounds.Breach]]]


def _case_itself(case: Case) -> Case:
    return case


WORLD_KINDS = {
    kind: WorldKind(_case_itself, StoryTrainer, Part, lambda part: 0, rounds.laws_of(kind)) for kind in KINDS
} | {
    GOSSIP: WorldKind(_case_itself, gossip.Gossiper, gossip.GossipPart, lambda part: part.averages / 2, gossip.LAWS),
    DENSE: WorldKind(DenseProgram, dense.DenseCaller, dense.DensePart, lambda part: len(part.gots), dense.LAWS),
    SPARSE: WorldKind(
        sparse.SparseProgram, sparse.SparseCaller, sparse.SparsePart, lambda part: len(part.gots), sparse.LAWS
    ),
    TRAINING: WorldKind(
        training.TrainingProgram, training.Learner, training.TrainingPart, lambda part: len(part.done), training.LAWS
    ),
    ENDING: WorldKind(EndingProgram, ending.Mortal, ending.EndingPart, lambda part: part.calls, ending.LAWS),
    EPOCHS: WorldKind(EpochsProgram, deaths.Survivor, deaths.EpochsPart, lambda part: len(part.sums), deaths.LAWS),
}
_WITH_DEVICES = (*KINDS, GOSSIP)  # kinds


def tell(case: Case, transport: str, *, devices: bool = False) -> Any:
    """Run the world and return its `Story`, or `WorldStory`. A real transport has no drawn network and no sleeper.

    Without `devices` no rank has one.
    """
    case = case if devices else replace(case, on_devices=())
    is_simulated = transport in (SIMULATED, MEMORY, HOSTS)
    case = case if is_simulated else _in_real_time(case)
    if transport in PROCESSES:
        return _story(case, _launch(case, transport), 0)
    case = replace(case, alarmed=None, forking=None)
    parts: dict[int, Any] = {}
    main = partial(take_part, case=case, parts=parts)
    messages = 0
    with contextlib.suppress(ProgramError):
        if is_simulated:
            hosts = case.hosts if transport == HOSTS else [0] * case.size
            in_memory = set() if transport == SIMULATED else set(hosts) - ({case.bare} if transport == HOSTS else set())
            report = simulate(
                case.size,
                main,
                case.network,
                case.seed,
                shared_memory=in_memory,
                hosts=hosts,
                departs=case.kind == ENDING and EndingProgram(case).departs,
            )
            messages = report.messages
        else:
            run_ranks(case.size, main, transport)
    return _story(case, [parts[rank] for rank in range(case.size)], messages)


def _in_real_time(case: Case) -> Case:
    return replace(case, sleeper=None, network=Network())


def _in_processes(case: Case) -> Case:
    """The devices are for tests of calls, and bear neither the exceptions of signal handlers nor forks.

    A call that is dropped here may end in another thread, after the next one has begun: its rounds come one call later.
    """
    on_devices = tuple(rank for rank in case.on_devices if rank not in (case.alarmed, case.forking))
    return replace(case, on_devices=on_devices, careless=None, gathers=False)


async def take_part(comm: Communicator, case: Case, parts: dict[int, Any]) -> None:
    """Leave in `parts` what the program of this rank has done. Raises ProgramError where programs raise."""
    make_rank = WORLD_KINDS[case.kind].rank
    if case.kind == ENDING:
        await ending.live(make_rank(comm, case), parts)
    elif case.kind == EPOCHS:
        await deaths.live(make_rank(comm, case), parts)
    elif comm.rank in case.on_devices and case.kind in _WITH_DEVICES:
        with device_of(comm, case.seed) as device:
            # At the end of the block the answers get their values.
            parts[comm.rank] = await make_rank(comm, case, device).run()
    else:
        parts[comm.rank] = await make_rank(comm, case).run()


def _story(case: Case, parts: list[Any], messages: int) -> Story | WorldStory[Any, Any]:
    if case.kind in KINDS:
        calls, cancelled, joined = zip(*parts, strict=True)
        return Story(case, list(calls), [*chain(*cancelled)], messages, [*chain(*joined)])
    kind = WORLD_KINDS[case.kind]
    return WorldStory(kind.program(case), parts, messages, round(sum(map(kind.steps, parts))))


# -- processes -----------------------------------------------------------------------------------


def _launch(case: Case, transport: str) -> list[Any]:
    """Run every rank as a process, which draws the case itself and writes a record of its part.

    Each case needs a launch of its own, because a rank of a case may leave the world early.
    """
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        cores, devices = "mixed" if transport == MIXED else "same", "devices" if case.on_devices else "none"
        kind = f"{case.kind}:{case.method}" if case.method else case.kind
        program = ["-m", "asyncoll.testing.laws", kind, str(case.seed), folder, cores, devices]
        _run_job(["-n", str(case.size), "--transport", PROCESSES[transport], "--timeout", str(_TIMEOUT_S), *program])
        return [read_record(_record(folder, rank), case.kind) for rank in range(case.size)]


def _run_job(arguments: list[str]) -> None:
    """Run `asyncoll launch` as a process: `launch()` needs the main thread, and its output cannot be captured."""
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run(
            [sys.executable, "-m", "asyncoll", "launch", "--json", str(report), *arguments],
            env=os.environ | {"ASYNCOLL_PRELOAD": "asyncoll.testing.laws"},  # not torch: its import takes a second
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            output = f"the job failed with exit code {done.returncode}:\n{done.stdout.rstrip()}"
            raise RuntimeError(_raised(report) or output)
    print(done.stdout, end="", file=sys.stderr)  # a job that succeeds prints warnings at most


def _raised(report: Path) -> str:
    """The rank that failed first, its exception and the place of that; empty if it was not an exception."""
    first = json.loads(report.read_text())["first"] if report.exists() else None
    if not (first and first["traceback"]):
        return ""
    return f"rank {first['rank']} failed: {first['error']}" + (f" ({first['place']})" if first["place"] else "")


def rank_main() -> None:
    """The program of a rank."""
    kind, seed, folder, cores, devices = sys.argv[1:]
    split(kind)  # before the world begins: others may announce its policy at once
    if cores == "mixed" and int(os.environ["RANK"]) % 2:
        os.environ[_core.VARIABLE] = "python"
    # The exception of the signal handler may come between the creation of a coroutine and its await.
    warnings.simplefilter("ignore", RuntimeWarning)
    sys.unraisablehook = _ignore_alarms

    parts: dict[int, Any] = {}

    async def main(comm: Communicator) -> None:
        case = _in_processes(_in_real_time(draw(kind, comm.size, int(seed))))
        await take_part(comm, case if devices == "devices" else replace(case, on_devices=()), parts)

    with contextlib.suppress(ProgramError):
        run(main)
    [(rank, part)] = parts.items()
    write_record(_record(folder, rank), part)


def _record(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.npz"


def _ignore_alarms(unraisable: Any) -> None:
    """Drop what the signal handler raises inside a finalizer: Python cannot raise it, and would print it."""
    if not isinstance(unraisable.exc_value, AlarmError):
        sys.__unraisablehook__(unraisable)


def write_record(record: Path, part: Any) -> None:
    body, arrays, _ = codec.encode(part)
    with record.open("wb") as file:
        np.savez(file, np.frombuffer(body, np.uint8), *arrays)


def read_record(record: Path, kind: str) -> Any:
    with np.load(record) as stored:
        body, *arrays = stored.values()
    return codec.decode(body.tobytes(), arrays, dataclasses_in([WORLD_KINDS[kind].part]))
