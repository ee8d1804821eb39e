"""The environment variables that describe the world which this process is to join.

They are torchrun's, and some more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncoll.arguments import seconds
from asyncoll.errors import UsageError
from asyncoll.transport.keys import KEY_FILE
from asyncoll.transport.messages.peers import FREEZE_S

TRANSPORTS = ("shm", "zmq")  # shared memory within a host and messages for the rest; or messages alone
ENCRYPT = ("control", "all")  # between hosts: all but long payloads (CURVE moves a fourth of them a second); or all
_DEADLINE_S = 1800.0
_FREEZE_MIN_S, _FREEZE_MAX_S = 0.02, 86_400  # ZeroMQ counts heartbeats in whole ms, in 32 bits
_LAUNCHERS = {  # programs that start processes, and their variables for the rank and the number of processes
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # SLURM_NTASKS is also set where there is no srun, by salloc
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec (PMI)": ("PMI_RANK", "PMI_SIZE"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "a launcher with PMIx": ("PMIX_RANK", ""),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The world that the environment describes, for this process."""

    rank: int
    size: int
    folder: str  # of the job's sockets; empty unless `asyncoll launch` made one
    master_addr: str
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
        """The world of the `size` ranks that share `store`; everything else as `environ` has it."""
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} | {
            name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)
        }
        given = {"RANK": str(rank), "WORLD_SIZE": str(size), "ASYNCOLL_FOLDER": "", **master}
        environment = cls.read({**environ, **given})
        assert environment is not None
        return replace(environment, store=store)

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment | None:
        """Read `environ`. None if it describes no world.

        Raises UsageError if it describes a part of a world, or an impossible one.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            check_alone(environ)
            return None
        rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UsageError(f"RANK={rank} is not between 0 and WORLD_SIZE-1={size - 1}")
        folder = environ.get("ASYNCOLL_FOLDER", "")
        meets_in_store = size > 1 and not folder
        return cls(
            rank,
            size,
            folder,
            master_addr=environ.get("MASTER_ADDR", "") if not meets_in_store else _text(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT") if meets_in_store else 0,
            shares_memory=_choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS) == "shm",
            run="/".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
            freeze_s=freeze_s(environ),
            deadline_s=seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf,
            key_file=environ.get(KEY_FILE, ""),
            encrypt=_choice(environ, "ASYNCOLL_ENCRYPT", ENCRYPT),
        )


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise UsageError if another launcher has started several processes: each would be a world of its own."""
    for launcher, (rank_name, size_name) in _LAUNCHERS.items():
        for name, least in ((rank_name, 0), (size_name, 1)):
            count = environ.get(name, "")
            if not count.isdecimal() or int(count) <= least:
                continue
            raise UsageError(
                f"this is one of several processes that {launcher} has started ({name}={count}), but RANK and "
                "WORLD_SIZE are not set: have it start one `torchrun` on each host, or on one host `asyncoll launch`; "
                "set RANK=0 and WORLD_SIZE=1 if each process is to be alone"
            )


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


def freeze_s(environ: Mapping[str, str]) -> float:
    """Seconds without an answer after which a process counts as frozen; 0 for never."""
    limit = seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S)
    if limit and not _FREEZE_MIN_S <= limit <= _FREEZE_MAX_S:
        allowed = f"{_FREEZE_MIN_S} to {_FREEZE_MAX_S} seconds, or 0 for never"
        raise UsageError(f"ASYNCOLL_FREEZE_S={limit:g}: give {allowed}")
    return limit
