"""The environment variables that describe the world which this process is to join.

They are torchrun's, and some more. Without RANK and WORLD_SIZE, those of SLURM and of launchers of MPI are read.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncoll.arguments import seconds
from asyncoll.errors import UsageError
from asyncoll.transport.keys import KEY_FILE
from asyncoll.transport.messages.peers import FREEZE_S

TRANSPORTS = ("shm", "zmq")  # shared memory within a host and messages for the rest; or messages alone
ENCRYPT = ("control", "all")  # between hosts: all but long payloads (CURVE moves a fourth of them a second); or all
_RUN = "TORCHELASTIC_RUN_ID"
_DEADLINE_S = 1800.0
_FREEZE_MIN_S, _FREEZE_MAX_S = 0.02, 86_400  # ZeroMQ counts heartbeats in whole ms, in 32 bits
# Programs that start processes, and their variables for the rank, the number of processes, and that on this host.
# mpirun may start one daemon on each host by srun, so the variables of both are set, and SLURM's are read later.
_LAUNCHERS = {
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec (PMI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),  # SLURM_NTASKS is also set where there is no srun, by salloc
    "flux run": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", ""),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
    "mpiexec (PALS)": ("PALS_RANKID", "", ""),
    "a launcher with PMIx": ("PMIX_RANK", "", ""),
    "a launcher": ("LOCAL_RANK", "LOCAL_WORLD_SIZE", ""),  # torchrun's for one host, which do not tell the world
}
_OF_HOST = "LOCAL_RANK"
_NO_STEPS = 0xFFFF_FFF0  # step ids from here on are none of srun, such as that of a batch script
_JOBS = (("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",))  # equal at all ranks
_PORTS = range(15_000, 25_000)  # for a job without MASTER_PORT; below those that the system gives to connections
_PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Environment:
    """The world that the environment describes, for this process."""

    rank: int
    size: int
    folder: str  # of the job's sockets; empty unless `asyncoll launch` made one
    master_addr: str  # empty: the store has no address
    master_port: int
    shares_memory: bool  # with the ranks of its host, if possible
    run: str  # distinguishes the runs of an elastic job
    freeze_s: float = FREEZE_S  # a rank that does not answer for so long counts as frozen; 0: never
    deadline_s: float = _DEADLINE_S  # the longest time that a call may take; infinity: no limit
    key_file: str = ""  # has the job's key; empty: there is none
    encrypt: str = ENCRYPT[0]
    store: Any = None  # a torch.distributed store of all ranks; None: rank 0, or torchrun's agent, serves one

    @classmethod
    def of_store(cls, store: Any, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> Environment:
        """The world of the `size` ranks that share `store`; everything else as `environ` has it.

        A call has no time limit but its own, unless ASYNCOLL_DEADLINE_S is set.
        """
        address, port = _place(store)
        place = address or environ.get("MASTER_ADDR", ""), port  # of a file there is none
        given = {"RANK": str(rank), "WORLD_SIZE": str(size), "ASYNCOLL_FOLDER": "", _RUN: ""}
        limit = {"ASYNCOLL_DEADLINE_S": environ.get("ASYNCOLL_DEADLINE_S") or "0"}
        environment = cls.read({**environ, **given, **limit}, place)
        assert environment is not None
        return replace(environment, store=store)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, place: tuple[str, int] | None = None) -> Environment | None:
        """Read `environ`. None if it describes no world. An empty variable counts as not set.

        `place` replaces MASTER_ADDR and MASTER_PORT: that of a given store; empty, and 0, as far as it has none.

        Raises UsageError if it describes a part of a world, or an impossible one.
        """
        if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
            launched = read_launcher(environ)
            if launched is not None:
                _check_agrees(environ, launched)
                environ = {**environ, **launched}
            elif not environ.get("RANK") and not environ.get("WORLD_SIZE"):
                return None
        rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(f"RANK={rank} is not between 0 and WORLD_SIZE-1={size - 1}")
        folder = environ.get("ASYNCOLL_FOLDER", "")
        if place is None:
            place = environ.get("MASTER_ADDR", ""), 0
            if size > 1 and not folder:  # the ranks meet in a store
                place = _text(environ, "MASTER_ADDR"), _port(environ)
        return cls(
            rank,
            size,
            folder,
            master_addr=place[0],
            master_port=place[1],
            shares_memory=_choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS) == "shm",
            run="/".join(environ.get(name, "") for name in (_RUN, "TORCHELASTIC_RESTART_COUNT")),
            freeze_s=freeze_s(environ),
            deadline_s=seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf,
            key_file=environ.get(KEY_FILE, ""),
            encrypt=_choice(environ, "ASYNCOLL_ENCRYPT", ENCRYPT),
        )


def _place(store: Any) -> tuple[str, int]:
    """The address and the port at which `store` is served, as far as it has them."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return getattr(store, "host", ""), getattr(store, "port", 0)


def read_launcher(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The variables of torchrun that follow from those of another launcher; None if it has started one process.

    Raises UsageError if it has started several, or an unknown number, and their variables do not tell where these meet.
    """
    is_alone = False  # so a launcher says; variables without a size are then of another one, around it
    for launcher, (rank_name, size_name, local_name) in _LAUNCHERS.items():
        rank, size = _count(environ, rank_name), _count(environ, size_name)
        is_alone = is_alone or size == 1
        is_of_others = rank < 0 or is_alone or (launcher == "srun" and not _is_step(environ))
        if rank <= 0 and (size == 1 or (size < 1 and is_of_others)):
            continue
        is_local = size == _count(environ, local_name) or environ.get("SLURM_STEP_NUM_NODES") == "1"
        meeting = _meeting(environ, is_local=is_local)
        is_told = rank >= 0 and size > 0 and rank_name != _OF_HOST
        if is_told and all(meeting.values()):
            return {"RANK": str(rank), "WORLD_SIZE": str(size), _RUN: _job(environ), **meeting}
        missing = [name for name, value in meeting.items() if is_told and not value] or ["RANK", "WORLD_SIZE"]
        shown = f"{size_name}={size}" if size > 1 else f"{rank_name}={rank}"
        raise _several(launcher, shown, missing, is_certain=rank > 0 or size > 1)
    return None


def _meeting(environ: Mapping[str, str], *, is_local: bool) -> dict[str, str]:
    """Where the processes of a launcher meet, as far as its variables tell. `is_local`: all are on this host."""
    address, port, job = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"), _job(environ)
    return {
        "MASTER_ADDR": address or ("127.0.0.1" if is_local else _first_host(environ)),
        "MASTER_PORT": port or (str(_port_of(job)) if job else ""),
    }


def _several(launcher: str, shown: str, missing: Sequence[str], *, is_certain: bool) -> UsageError:
    """The error for a launcher whose variables do not tell all; `is_certain` that it has started several processes."""
    return UsageError(
        f"this is one of {'several' if is_certain else 'an unknown number of'} processes that {launcher} has started "
        f"({shown}), but RANK and WORLD_SIZE are not both set, and its own variables do not tell all: set "
        f"{' and '.join(missing)} (MASTER_ADDR is the host of rank 0, and MASTER_PORT a port that is free there); or "
        "have it start one `torchrun` on each host, or on one host `asyncoll launch`; set RANK=0 and WORLD_SIZE=1 if "
        "each process is to be alone"
    )


def _check_agrees(environ: Mapping[str, str], launched: Mapping[str, str]) -> None:
    """Raise UsageError if RANK or WORLD_SIZE, one of which is set, is not what the launcher's variables tell."""
    for name in ("RANK", "WORLD_SIZE"):
        if environ.get(name) and environ[name] != launched[name]:
            raise UsageError(
                f"{name}={environ[name]} in the environment, but by the variables of its launcher this process is rank "
                f"{launched['RANK']} of {launched['WORLD_SIZE']}: set both RANK and WORLD_SIZE, or neither"
            )


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process. A batch script has SLURM_PROCID=0, too."""
    return 0 <= _count(environ, "SLURM_STEP_ID") < _NO_STEPS


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else -1


def _job(environ: Mapping[str, str]) -> str:
    """A text that is equal at all processes of a job, and differs from that of other jobs; empty if there is none."""
    for names in _JOBS:
        if all(environ.get(name) for name in names):
            return ".".join(environ[name] for name in names)
    return ""


def _port_of(job: str) -> int:
    return _PORTS[int.from_bytes(hashlib.blake2b(job.encode(), digest_size=8).digest(), "big") % len(_PORTS)]


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of SLURM's list, as in "node[03-05,9],other"; rank 0 runs there. Empty without a list."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else ""


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """The value of `name`, one of `choices`; the first of them if it is not set."""
    chosen = environ.get(name) or choices[0]
    if chosen not in choices:
        raise UsageError(f"{name}={chosen!r} in the environment: use one of {', '.join(choices)}")
    return chosen


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"the environment describes a world but {name} is not set: start with `asyncoll launch`")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment is not a number") from None


def _port(environ: Mapping[str, str]) -> int:
    port = _integer(environ, "MASTER_PORT")
    if not 1 <= port <= _PORT_MAX:
        raise UsageError(f"MASTER_PORT={port} in the environment: give 1 to {_PORT_MAX}, a free port of rank 0's host")
    return port


def freeze_s(environ: Mapping[str, str]) -> float:
    """Seconds without an answer after which a process counts as frozen; 0 for never."""
    limit = seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S)
    if limit and not _FREEZE_MIN_S <= limit <= _FREEZE_MAX_S:
        allowed = f"{_FREEZE_MIN_S} to {_FREEZE_MAX_S} seconds, or 0 for never"
        raise UsageError(f"ASYNCOLL_FREEZE_S={limit:g}: give {allowed}")
    return limit
