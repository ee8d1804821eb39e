"""The findings of `asyncoll doctor`: the resources of this host, the choices for a job here, and warnings."""

from __future__ import annotations

import json
import mmap
import os
import platform
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import numpy

from asyncoll import _core
from asyncoll.errors import DeviceError, UsageError
from asyncoll.launch.rank_environment import socket_folder, threads
from asyncoll.transport.keys import find_key
from asyncoll.transport.processes import WITHOUT_PROC
from asyncoll.world.launchers import read_launcher
from asyncoll.world.meeting import files_for
from asyncoll.world.network import addresses, place
from asyncoll.world.versions import too_old

PACKAGES = ("torch", "numpy", "pyzmq", "msgpack", "uvloop", "click", "rich", "typeguard")
WORLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ASYNCOLL_FOLDER",
    "ASYNCOLL_KEY_FILE",
    "ASYNCOLL_ENCRYPT",
    "ASYNCOLL_ADDRESS",
    "ASYNCOLL_INTERFACE",
    "ASYNCOLL_PORTS",
)
EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documentation: no host has it, but the route to it is the default route
FILES_MIN = 1024
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings by section and name; `warnings` are sentences."""

    sections: dict[str, dict[str, str]]
    warnings: list[str] = field(default_factory=list)


def examine(*, with_gpu: bool = False) -> Findings:
    """Examine this host and this environment. Sends nothing and changes nothing.

    `with_gpu` also opens the devices of CUDA, which takes seconds and imports torch.

    The compiled core has been chosen when this module was imported, which raises UsageError as it does for a rank.
    """
    sections = {
        "versions": _versions(),
        "host": {"cores": _cores(), "memory": _memory(), "open files": _files()},
        "interfaces": {name: ", ".join(its) or "no address" for name, its in addresses()},
        "transports": _transports(),
        "choices": {
            "tcp address": _own_address(),
            "socket folder": _folder(),
            "key": find_key(os.environ) or "none: ranks of several hosts need one (asyncoll key ~/.asyncoll.key)",
            "core": _core_of_ranks(),
            "threads per rank": " ".join(f"{name}={value}" for name, value in threads(2, os.environ).items()),
        },
        "world": {name: os.environ[name] for name in WORLD if name in os.environ},
    }
    if with_gpu:
        sections["gpu"] = _gpus()
    return Findings(sections, [*too_old(), *_odd_world(), *_odd_host_name(), *_few_files(), *_no_proc()])


def render(findings: Findings, as_json: bool) -> str:
    """The findings as text, or as one JSON object."""
    if as_json:
        return json.dumps(asdict(findings), indent=2)
    width = max(len(name) for section in findings.sections.values() for name in section)
    lines = []
    for title, section in findings.sections.items():
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in section.items())]
        if not section:
            lines.append("  none in the environment: a world of one")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in findings.warnings)])


def ways(ranks: int, as_json: bool) -> str:
    """The ways of calls among so many ranks, in the order in which they are tried, as text or as one JSON object.

    It says of each whether the core of this process carries it out, too, once it has learnt a call from one like it.

    Raises UsageError for a wrong ASYNCOLL_SIZES.
    """
    from asyncoll.algorithms.choice import tables
    from asyncoll.algorithms.seam.ways import limits

    rows = defaultdict(list)
    for where, table in tables(ranks, os.environ).items():
        for way in table:
            if way.over < way.up_to:
                in_c = "whole calls" * (way.compiled > 0 and _core.native is not None)
                needs = way.needs or "an element for each rank" * way.is_cut
                rows[f"{way.call}, {where}"].append((limits(way), way.name, in_c, way.why, needs))
    head = "bytes", "way", "in C", "why", "needs"
    if as_json:
        return json.dumps({call: [dict(zip(head, row, strict=True)) for row in shown] for call, shown in rows.items()})
    widths = [max(map(len, column)) for column in zip(head, *chain.from_iterable(rows.values()), strict=True)]
    lines = [f"Ranks: {ranks}. The first way that takes a call carries it out; one that declines has changed nothing."]
    for call, shown in rows.items():
        lines += ["", call, *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *shown))]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    import zmq

    import asyncoll

    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "asyncoll": asyncoll.__version__,
        **{package: _version(package) for package in PACKAGES},
        "libzmq": zmq.zmq_version(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cores() -> str:
    quota = cpu_quota()
    limited = "" if quota is None else f", {quota:g} by the control group's quota"
    return f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}{limited}"


def _memory() -> str:
    if not os.path.exists("/proc/meminfo"):
        return "unknown"
    known = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(known[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit = memory_limit(total)
    limited = "" if limit is None else f", {_gib(limit)} by the control group's limit"
    return f"{_gib(free)} available of {_gib(total)}{limited}"


def _files() -> str:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = ("any number" if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return f"{soft} at once, which a rank may raise to {hard}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The number of cores that the control group may use, in either version of the interface; None without a limit."""
    text = _first_text(root / "cpu.max")
    quota, period = text.split() if text else (_first_text(root / "cpu/cpu.cfs_quota_us"), "")
    period = period or _first_text(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def memory_limit(total: int, root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The control group's limit in bytes; None if there is none below what the host has."""
    text = _first_text(root / "memory.max", root / "memory/memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < total else None


def _first_text(*files: Path) -> str:
    for file in files:
        try:
            return file.read_text().strip()
        except OSError:
            continue
    return ""


def _transports() -> dict[str, str]:
    import zmq

    curve = "with a key, encrypted (CURVE)" if zmq.has("curve") else "on loopback only: this libzmq has no CURVE"
    return {
        "inproc": "yes, ranks of one process",
        "ipc": "yes, ranks of one host" if zmq.has("ipc") else "no: libzmq was built without it",
        "tcp": f"yes, ranks of several hosts; {curve}",
    }


def _own_address() -> str:
    """The address at which a rank listens for other hosts, and its interface."""
    chosen = [os.environ.get(name, "") for name in ("ASYNCOLL_ADDRESS", "ASYNCOLL_INTERFACE")]
    try:
        found = place(os.environ.get("MASTER_ADDR", EXTERNAL_ADDRESS).strip("[]"), *chosen)
    except UsageError as error:
        return f"none: {error}"
    interface = next((name for name, its in addresses() if found.listens in its), "unknown")
    told = "" if found.told == found.listens else f", others are told {found.told}"
    return f"{found.listens} (interface {interface}){told}"


def _core_of_ranks() -> str:
    """The core that a rank uses, and why."""
    if _core.native is None:
        return f"pure Python: {_core.reason}"
    return f"compiled ({_core.native.__file__}): {_core.reason}"


def _folder() -> str:
    try:
        return str(socket_folder())
    except UsageError as error:
        return f"none: {error}"


def _gpus() -> dict[str, str]:
    """Each device of CUDA: the route of copies between it and the memory that ranks share, and from rank to rank."""
    try:
        import torch
    except ImportError:
        return {"cuda": "no: torch is not installed"}
    if not torch.cuda.is_available():
        return {"cuda": f"no: torch {torch.__version__} finds no device"}
    found: dict[str, str] = {}
    for index in range(torch.cuda.device_count()):
        found |= _gpu(index)
    return found


def _gpu(index: int) -> dict[str, str]:
    import torch

    from asyncoll.transport.staging.cuda import CudaDevice
    from asyncoll.transport.staging.probe import why_not_shared

    properties, name = torch.cuda.get_device_properties(index), f"cuda:{index}"
    try:
        device = CudaDevice(index)
    except DeviceError as error:
        return {name: f"{properties.name}, {properties.uuid}: {error}"}
    pages = numpy.frombuffer(mmap.mmap(-1, _PROBE_BYTES), numpy.uint8)  # of the kind that ranks share
    if device.pin(pages):
        device.unpin(pages)
        route = "copies go through shared memory, which is pinned"
    else:
        route = f"copies go through memory of torch's, because the driver does not pin shared memory: {device.refusal}"
    reason = why_not_shared(device, index)
    device.close()
    return {
        name: f"{properties.name}, {properties.uuid}, {_gib(properties.total_memory)}; {route}",
        f"{name} between ranks": f"no, through memory of the host: {reason}" if reason else _direct_route(index),
    }


def _direct_route(index: int) -> str:
    """Which ranks read memory of "cuda:`index`" where it is."""
    import torch

    others = [other for other in range(torch.cuda.device_count()) if other != index]
    peers = [f"cuda:{other}" for other in others if torch.cuda.can_device_access_peer(other, index)]
    namespace = os.readlink("/proc/self/ns/pid")  # CUDA opens memory of processes in the same one only
    return f"read in place by ranks in {namespace} on {', '.join([f'cuda:{index}', *peers])}" + (
        "; the other GPUs have no access as peers" if len(peers) < len(others) else ""
    )


def _few_files() -> Iterator[str]:
    """A rank raises its soft limit as far as it needs, so only the hard limit is checked."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    size = max((size for size in range(FILES_MIN) if files_for(size, has_key=True) <= files), default=0)
    if 0 <= files < FILES_MIN:
        worlds = f"worlds of more than {size} ranks" if size > 1 else "any world of several ranks"
        yield f"only {files} files may be open at once (ulimit -Hn): too few for {worlds}"


def _no_proc() -> Iterator[str]:
    if not os.path.exists("/proc/self/fd"):
        yield WITHOUT_PROC


def _odd_world() -> Iterator[str]:
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        try:
            read_launcher(os.environ)
        except UsageError as error:
            yield str(error)
    if len(given) == 1:
        yield f"{given[0]} is set alone: a rank needs RANK and WORLD_SIZE"
    if len(given) == 2:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            yield f"RANK={rank} is not a rank of WORLD_SIZE={size}"
    folder = os.environ.get("ASYNCOLL_FOLDER")
    if folder and not os.path.exists(os.path.join(folder, "job")):
        yield f"ASYNCOLL_FOLDER={folder} is not the folder of a running job"


def _odd_host_name() -> Iterator[str]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield f"the host name {name} has no address: other hosts cannot connect to this one by name"
        return
    if address.startswith("127."):
        yield f"the host name {name} is {address} on this host (/etc/hosts): other hosts cannot use it as MASTER_ADDR"
