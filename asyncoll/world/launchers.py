"""Launchers beside torchrun: what their variables say, as torchrun's would.

SLURM tells all that ranks need. Other launchers tell less; what is missing is an error that says what to set, so that
no rank runs alone in silence.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from asyncoll.errors import UsageError
from asyncoll.transport.loopback import loopback

RUN = "TORCHELASTIC_RUN_ID"
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
# The ports for a job without MASTER_PORT. They are below those that the system gives to connections.
_PORTS = range(15_000, 25_000)


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
            return {"RANK": str(rank), "WORLD_SIZE": str(size), RUN: _job(environ), **meeting}
        missing = [name for name, value in meeting.items() if is_told and not value] or ["RANK", "WORLD_SIZE"]
        shown = f"{size_name}={size}" if size > 1 else f"{rank_name}={rank}"
        raise _several(launcher, shown, missing, is_certain=rank > 0 or size > 1)
    return None


def check_is_no_worker() -> None:
    """Raise UsageError in a worker of Ray Train, whose trainer has set no variables: it would be alone in silence."""
    train: Any = sys.modules.get("ray.train")  # such a worker has loaded it
    try:
        size = train.get_context().get_world_size()
    except (AttributeError, RuntimeError, DeprecationWarning):  # not loaded; in another process; in a trial of Ray Tune
        return
    if size > 1:
        raise UsageError(
            f"this is one of {size} workers of Ray Train, and its trainer has set no RANK and WORLD_SIZE: use a "
            "TorchTrainer, or call asyncoll.ray.run in place of the trainer; set RANK=0 and WORLD_SIZE=1 if each "
            "worker is to be alone"
        )


def _meeting(environ: Mapping[str, str], *, is_local: bool) -> dict[str, str]:
    """Where the processes of a launcher meet, as far as its variables tell. `is_local`: all are on this host."""
    address, port, job = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT"), _job(environ)
    return {
        "MASTER_ADDR": address or (loopback() if is_local else _first_host(environ)),
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


def check_agrees(environ: Mapping[str, str], launched: Mapping[str, str]) -> None:
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
    """The first host of SLURM's list, as in "node[03-05,9],other"; rank 0 runs there. Empty if it may run elsewhere.

    The list is sorted. The user has chosen the order of hosts with `--distribution=arbitrary`, and that of the parts of
    a heterogeneous job.
    """
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" or environ.get("SLURM_HET_SIZE"):
        return ""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else ""
