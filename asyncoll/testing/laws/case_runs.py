"""Runs a case: in virtual time, among ranks on one loop in real time, or among processes under the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from asyncoll import _core
from asyncoll.algorithms.rounds.reduction import Reduction
from asyncoll.communicator import Communicator
from asyncoll.tensors.reductions import Array
from asyncoll.testing.devices.of_rank import device_of
from asyncoll.testing.laws import dense, ending, gossip, sparse, training
from asyncoll.testing.laws.dense import DenseStory
from asyncoll.testing.laws.dense_program import DenseProgram
from asyncoll.testing.laws.ending import EndingProgram, EndingStory, ProgramError
from asyncoll.testing.laws.gossip import Gossiper, GossipStory
from asyncoll.testing.laws.sparse import SparseProgram, SparseStory
from asyncoll.testing.laws.story import (
    DENSE,
    ENDING,
    GOSSIP,
    SPARSE,
    TRAINING,
    AlarmError,
    Cancelled,
    Case,
    Joined,
    MadeCall,
    Story,
    StoryTrainer,
    draw,
)
from asyncoll.testing.laws.training import Learner, TrainingProgram, TrainingStory
from asyncoll.testing.worlds import run_ranks, simulate
from asyncoll.transport.messages.simulated import Network
from asyncoll.world.join import run

SIMULATED = "simulated"
MEMORY = "memory"  # simulated ranks of one host
HOSTS = "hosts"  # simulated ranks of several hosts: memory on each, messages between them
# To the values of `asyncoll launch --transport`. In MIXED every second rank does without the compiled core.
MIXED = "shm-mixed-processes"
PROCESSES = {"shm-processes": "shm", "zmq-processes": "zmq", MIXED: "shm"}
_TIMEOUT_S = 120  # a case takes about a second, so a world that runs this long has a rank that waits for ever


def tell(case: Case, transport: str, *, devices: bool = False) -> Any:
    """Run the world and return its `Story`, or `GossipStory`. A real transport has no drawn network and no sleeper.

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
    if case.kind == ENDING:
        await ending.live(comm, case, parts)
    else:
        parts[comm.rank] = await _part(comm, case)


async def _part(comm: Communicator, case: Case) -> Any:
    if case.kind in (DENSE, SPARSE):
        return await (dense.DenseCaller if case.kind == DENSE else sparse.SparseCaller)(comm, case).run()
    if case.kind == TRAINING:
        return await Learner(comm, case).run()
    trainer = Gossiper if case.kind == GOSSIP else StoryTrainer
    if comm.rank not in case.on_devices:
        return await trainer(comm, case).run()
    with device_of(comm, case.seed) as device:
        # At the end of the block the answers get their values.
        return await trainer(comm, case, device).run()


def _story(
    case: Case, parts: list[Any], messages: int
) -> Story | GossipStory | DenseStory | SparseStory | TrainingStory | EndingStory:
    if case.kind == DENSE:
        return DenseStory(DenseProgram(case), parts, messages)
    if case.kind == SPARSE:
        return SparseStory(SparseProgram(case), parts, messages)
    if case.kind == TRAINING:
        return TrainingStory(TrainingProgram(case), parts, messages)
    if case.kind == GOSSIP:
        return GossipStory(case, parts, messages)
    if case.kind == ENDING:
        return EndingStory(EndingProgram(case), parts, messages)
    calls, cancelled, joined = zip(*parts, strict=True)
    return Story(case, list(calls), [*chain(*cancelled)], messages, [*chain(*joined)])


# -- processes -----------------------------------------------------------------------------------


def _launch(case: Case, transport: str) -> list[Any]:
    """Run every rank as a process, which draws the case itself and writes a record of its part.

    Each case needs a launch of its own, because a rank of a case may leave the world early.
    """
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        cores, devices = "mixed" if transport == MIXED else "same", "devices" if case.on_devices else "none"
        program = ["-m", "asyncoll.testing.laws", case.kind, str(case.seed), folder, cores, devices]
        _run_job(["-n", str(case.size), "--transport", PROCESSES[transport], "--timeout", str(_TIMEOUT_S), *program])
        return [read_record(_record(folder, rank), case.kind) for rank in range(case.size)]


def _run_job(arguments: list[str]) -> None:
    """Run `asyncoll launch` as a process: `launch()` needs the main thread, and its output cannot be captured."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncoll.cli", "launch", *arguments],
        env=os.environ | {"ASYNCOLL_PRELOAD": "asyncoll.testing.laws"},  # not torch: its import takes a second
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the job failed with exit code {done.returncode}:\n{done.stdout.rstrip()}")
    print(done.stdout, end="", file=sys.stderr)  # a job that succeeds prints warnings at most


def rank_main() -> None:
    """The program of a rank."""
    kind, seed, folder, cores, devices = sys.argv[1:]
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
    return Path(folder) / f"rank-{rank}.json"


def _ignore_alarms(unraisable: Any) -> None:
    """Drop what the signal handler raises inside a finalizer: Python cannot raise it, and would print it."""
    if not isinstance(unraisable.exc_value, AlarmError):
        sys.__unraisablehook__(unraisable)


def write_record(record: Path, part: Any) -> None:
    fields = [[*map(asdict, each)] for each in part] if isinstance(part, tuple) else asdict(part)
    record.write_text(json.dumps(fields, default=_array_to_json))


def read_record(record: Path, kind: str = "") -> Any:
    fields = json.loads(record.read_text(), object_hook=_array_from_json)
    if kind == DENSE:
        return _dense(**fields)
    if kind == SPARSE:
        return sparse.SparsePart(
            [sparse.RoundGot(**got | {"thresholds": tuple(got["thresholds"])}) for got in fields["gots"]]
        )
    if kind == GOSSIP:
        return _gossip(**fields)
    if kind == ENDING:
        return ending.EndingPart(**fields)
    if kind == TRAINING:
        return training.TrainingPart(fields["made"], [training.Done(**done) for done in fields["done"]])
    calls, cancelled, joined = fields
    return (
        [_call(**each) for each in calls],
        [Cancelled(**each) for each in cancelled],
        [Joined(**each) for each in joined],
    )


def _array_to_json(array: Array) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": array.shape, "bytes": array.tobytes().hex()}


def _array_from_json(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"dtype", "shape", "bytes"}:
        return fields
    return np.frombuffer(bytes.fromhex(fields["bytes"]), fields["dtype"]).reshape(fields["shape"])


def _dense(**fields: Any) -> dense.DensePart:
    gots = [dense.CallGot(**got) for got in fields["gots"]]
    return dense.DensePart(**fields | {"gots": gots, "last": dense.LastCall(**fields["last"])})


def _gossip(**fields: Any) -> gossip.GossipPart:
    return gossip.GossipPart(**fields | {"updates": [gossip.Update(**update) for update in fields["updates"]]})


def _call(**fields: Any) -> MadeCall:
    """A `MadeCall` from fields read from JSON, which has lists instead of tuples."""
    fields["missed"] = tuple(fields["missed"])
    reduction = fields["reduction"]
    fields["reduction"] = Reduction(**reduction | {name: tuple(reduction[name]) for name in ("group", "ranks")})
    return MadeCall(**fields)
