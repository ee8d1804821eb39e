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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, starmap
from pathlib import Path
from threading import Thread
from typing import Any

import click
import numpy

from asyncoll import _core
from asyncoll.errors import DeviceError, UsageError
from asyncoll.launch.rank_environment import socket_folder, threads
from asyncoll.transport.keys import KEY_FILE, find_key, read_key
from asyncoll.transport.processes import WITHOUT_PROC
from asyncoll.transport.settings import NAMES
from asyncoll.world.environment import read_settings
from asyncoll.world.launchers import read_launcher
from asyncoll.world.meeting import files_for
from asyncoll.world.network import Place, addresses, is_loopback, place
from asyncoll.world.versions import check as check_versions

PACKAGES = ("torch", "numpy", "pyzmq", "msgpack", "uvloop", "click", "rich", "typeguard")
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *NAMES)
EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documentation: no host has it, but the route to it is the default route
FILES_MIN = 1024
PATIENCE_S = 2.0
ONE_HOST, SEVERAL_HOSTS = "one host", "several hosts"
_PROBE_BYTES = 1 << 20
Needs = Mapping[str, Callable[[Mapping[str, str]], object]]  # by what is missing: raises UsageError if it is


@dataclass(slots=True)
class Findings:
    """Findings by section and name. `warnings` are sentences.

    `obstacles` are what prevents a job of one host, and one of several: short names, none if such a job can run. A
    place that has not been examined is missing.
    """

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    obstacles: dict[str, list[str]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """1 if no job of one host can run."""
        return int(bool(self.obstacles.get(ONE_HOST)))


def examine(
    findings: Findings, environ: Mapping[str, str] = os.environ, *, key_file: str | None = None, with_gpu: bool = False
) -> Findings:
    """Examine this host and this environment, and add to `findings`. Sends nothing and changes nothing.

    `key_file` is examined in place of the key that `environ` leads to. `with_gpu` also opens the devices of CUDA, which
    takes seconds and imports torch.

    The compiled core has been chosen when this module was imported, which raises UsageError as it does for a rank.
    """
    sections, world = findings.sections, {name: environ[name] for name in WORLD if name in environ}
    if key_file is not None:
        environ = {**environ, KEY_FILE: key_file}
    sections["versions"] = _versions()
    sections["host"] = {"cores": _cores(), "memory": _memory(), "open files": _files()}
    sections["interfaces"] = {name: ", ".join(its) or "no address" for name, its in addresses()}
    sections["transports"] = _transports()
    sections["choices"] = {
        "tcp address": _own_address(environ),
        "socket folder": _folder(),
        "key": find_key(environ) or "none: ranks of several hosts need one (asyncoll key ~/.asyncoll.key)",
        "core": _core_of_ranks(),
        "threads per rank": " ".join(f"{name}={value}" for name, value in threads(2, environ).items()),
    }
    sections["world"] = world
    of_one_host, of_several = dict(_failing(ONE_HOST_NEEDS, environ)), dict(_failing(SEVERAL_HOSTS_NEED, environ))
    findings.obstacles[ONE_HOST] = [*of_one_host]
    findings.obstacles[SEVERAL_HOSTS] = [*of_one_host, *of_several]
    findings.warnings += [
        *of_one_host.values(),
        *filter(None, of_several.values()),
        *_odd_world(environ),
        *_few_files(),
    ]
    if with_gpu:
        sections["gpu"] = _gpus()
    findings.warnings += _odd_host_name()
    return findings


def _failing(needs: Needs, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of the needs that are not met, and why."""
    for name, check in needs.items():
        try:
            check(environ)
        except UsageError as error:
            yield name, str(error)


def print_findings(as_json: bool, **chosen: Any) -> int:
    """Examine as `examine`, print, and return the exit code. Ctrl-C prints what has been found so far."""
    findings, done = Findings(), Future[Findings]()

    def work() -> None:
        try:
            done.set_result(examine(findings, **chosen))
        except Exception as error:
            done.set_exception(error)

    # A look-up of a host's name, or a driver of a GPU, takes its time in C, where Ctrl-C has no effect.
    Thread(target=work, name="asyncoll-doctor", daemon=True).start()
    try:
        with suppress(TimeoutError):
            return done.result(PATIENCE_S).exit_code
        click.echo("the name of this host, or its GPUs, are still looked up", err=True)
        return done.result().exit_code
    finally:
        found = Findings({**findings.sections}, [*findings.warnings], {**findings.obstacles})  # `work` may go on
        click.echo(render(found, as_json))


def render(findings: Findings, as_json: bool) -> str:
    """The findings as text, or as one JSON object."""
    if as_json:
        return json.dumps(asdict(findings), indent=2)
    width = max((len(name) for section in findings.sections.values() for name in section), default=0)
    lines = []
    for title, section in findings.sections.items():
        lines += [click.style(title, bold=True), *(f"  {name:<{width}}  {value}" for name, value in section.items())]
        if not section:
            lines.append("  none in the environment: a world of one")
    lines += [f"{click.style('warning:', fg='yellow')} {warning}" for warning in findings.warnings]
    return "\n".join([*lines, "; ".join(starmap(_verdict, findings.obstacles.items()))])


def _verdict(place: str, obstacles: list[str]) -> str:
    if obstacles:
        return f"{place}: {click.style('no', fg='red', bold=True)}, {', '.join(obstacles)}"
    return f"{place}: {click.style('yes', fg='green', bold=True)}"


def ways(ranks: int, as_json: bool) -> str:
    """The ways of calls among so many ranks, in the order in which they are tried, as text or as one JSON object.

    It says of each whether the core of this process carries it out, too, once it has learnt a call from one like it.
    Without a core there are no ways that need one.

    Raises UsageError for a wrong ASYNCOLL_SIZES.
    """
    from asyncoll.algorithms.choice import tables
    from asyncoll.algorithms.seam.ways import limits

    rows = defaultdict(list)
    for where, table in tables(ranks, os.environ).items():
        for way in table:
            if way.over < way.up_to and (_core.native is not None or not way.by_core):
                in_c = "whole calls" * (way.compiled > 0 and _core.native is not None)
                needs = way.needs or "an element for each rank" * way.is_cut
                rows[f"{way.call}, {where}"].append((limits(way), way.name, in_c, way.why, needs))
    head = "bytes", "way", "in C", "why", "needs"
    if as_json:
        return json.dumps({call: [dict(zip(head, row, strict=True)) for row in shown] for call, shown in rows.items()})
    widths = [max(map(len, column)) for column in zip(head, *chain.from_iterable(rows.values()), strict=True)]
    lines = [
        f"Ranks: {ranks}. The first way that takes a call carries it out; one that declines has changed nothing.",
        "Bytes are those of an array; for AVG of halves by message, as float32; of an allgather, those of all blocks.",
        "A link: those of all arrays of the call that pass the same link. Other calls have one way.",
    ]
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


def _own_place(environ: Mapping[str, str]) -> Place:
    chosen = [environ.get(name, "") for name in ("ASYNCOLL_ADDRESS", "ASYNCOLL_INTERFACE")]
    return place(environ.get("MASTER_ADDR", EXTERNAL_ADDRESS).strip("[]"), *chosen)


def _own_address(environ: Mapping[str, str]) -> str:
    """The address at which a rank listens for other hosts, and its interface."""
    try:
        found = _own_place(environ)
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


def _check_settings(environ: Mapping[str, str]) -> None:
    from asyncoll.algorithms.choice import tables

    read_settings(environ)
    tables(2, environ)  # reads ASYNCOLL_SIZES


def _check_proc(_: Mapping[str, str]) -> None:
    if not os.path.exists("/proc/self/fd"):
        raise UsageError(WITHOUT_PROC)


def _check_files(_: Mapping[str, str]) -> None:
    files, ranks = _files_and_ranks()
    if ranks < 2:
        raise UsageError(f"{_only(files)} any world of several ranks")


def _few_files() -> Iterator[str]:
    files, ranks = _files_and_ranks()
    if ranks >= 2 and 0 <= files < FILES_MIN:
        yield f"{_only(files)} worlds of more than {ranks} ranks"


def _only(files: int) -> str:
    return f"only {files} files may be open at once (ulimit -Hn): too few for"


def _files_and_ranks() -> tuple[int, int]:
    """The number of files that a rank may open, -1 for any, and the size, at most FILES_MIN, of a world that may.

    A rank raises its soft limit as far as it needs, so only the hard limit counts.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    sizes = range(FILES_MIN)
    return files, max((size for size in sizes if files < 0 or files_for(size, has_key=True) <= files), default=0)


def _check_place(environ: Mapping[str, str]) -> None:
    listens = _own_place(environ).listens
    if is_loopback(listens):
        raise UsageError(f"ranks would listen at {listens}, which no other host reaches: set ASYNCOLL_INTERFACE")


def _check_has_key(environ: Mapping[str, str]) -> None:
    if not find_key(environ):
        raise UsageError("")  # the choices tell what to do


def _check_key(environ: Mapping[str, str]) -> None:
    if file := find_key(environ):
        read_key(Path(file))


def _check_encryption(_: Mapping[str, str]) -> None:
    import zmq

    if not zmq.has("curve"):
        raise UsageError("this libzmq has no CURVE, which encrypts between hosts: install pyzmq from PyPI")


ONE_HOST_NEEDS: Needs = {
    "old packages": lambda _: check_versions(),
    "wrong settings": _check_settings,
    "no folder for sockets": lambda _: socket_folder(),
    "no /proc": _check_proc,
    "too few open files": _check_files,
}
SEVERAL_HOSTS_NEED: Needs = {
    "no address": _check_place,
    "no key": _check_has_key,
    "no usable key": _check_key,
    "no encryption": _check_encryption,
}


def _odd_world(environ: Mapping[str, str]) -> Iterator[str]:
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        try:
            read_launcher(environ)
        except UsageError as error:
            yield str(error)
    if len(given) == 1:
        yield f"{given[0]} is set alone: a rank needs RANK and WORLD_SIZE"
    if len(given) == 2:
        rank, size = environ["RANK"], environ["WORLD_SIZE"]
        if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            yield f"RANK={rank} is not a rank of WORLD_SIZE={size}"
    folder = environ.get("ASYNCOLL_FOLDER")
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
