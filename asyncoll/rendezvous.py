"""How the ranks of a job find each other: what the environment says, and who listens where.

The environment contract is torchrun's. Under `asyncoll launch` all ranks are on one host and their addresses follow
from the job's folder. Otherwise they meet in the store at MASTER_ADDR:MASTER_PORT (torch's TCPStore: under torchrun
that is the agent's, elsewhere rank 0 serves it): ranks that share a host talk over ipc, others over tcp.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgpack

from asyncoll.errors import UsageError
from asyncoll.transport.arena import HostArena
from asyncoll.transport.handover import ArenaUnavailable, join
from asyncoll.transport.zeromq import FREEZE_S, ZeroMQTransport, ipc_address

TRANSPORTS = ("shm", "zmq")  # memory between the ranks of a host, and messages for the rest; or messages alone
_TIMEOUT = timedelta(seconds=300)
_DEADLINE_S = 1800.0
logger = logging.getLogger("asyncoll")


@dataclass(frozen=True, slots=True)
class Environment:
    """The world that the environment describes, as seen by this process."""

    rank: int
    size: int
    folder: str  # of the job's sockets; empty unless `asyncoll launch` made one
    master_addr: str
    master_port: int
    shares_memory: bool  # with the ranks of its host, if that is possible
    run: str  # tells the runs of an elastic job apart
    freeze_s: float  # a rank without a sign of life for so long counts as frozen; 0: never
    deadline_s: float  # how long a call may take; infinity: for ever

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment | None:
        """None when no world is described. Raises UsageError for half a description or an impossible one."""
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
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
            shares_memory=_shares_memory(environ),
            run="/".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
            freeze_s=_seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S),
            deadline_s=_seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf,
        )


def _shares_memory(environ: Mapping[str, str]) -> bool:
    transport = environ.get("ASYNCOLL_TRANSPORT") or "shm"
    if transport not in TRANSPORTS:
        raise UsageError(f"ASYNCOLL_TRANSPORT={transport!r} in the environment: use one of {', '.join(TRANSPORTS)}")
    return transport == "shm"


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise UsageError(f"the environment describes a world but {name} is not set: start with `asyncoll launch`")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.lstrip("-").isdigit():
        raise UsageError(f"{name}={text!r} in the environment is not a number")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name}={text!r} in the environment: give a number of seconds, or 0 for no limit")
    return seconds


@dataclass(frozen=True, slots=True)
class Meeting:
    """A transport that knows its peers, and where each rank runs."""

    transport: ZeroMQTransport
    arena: HostArena | None  # of this host's ranks
    hosts: tuple[str, ...]
    store: Any = None  # kept alive: where rank 0 serves it, it must outlive the meeting
    folder: Path | None = None  # of this host's sockets, if this rank made it and must remove it once all are connected


def meet(environment: Environment) -> Meeting:
    """Open this rank's sockets and learn everybody's addresses. Blocks until every rank has published its own."""
    if environment.folder:
        return _meet_in_folder(environment)
    return _meet_in_store(environment)


def _meet_in_folder(environment: Environment) -> Meeting:
    folder = Path(environment.folder)
    try:
        job = (folder / "job").read_bytes()
    except OSError as error:
        raise UsageError(f"ASYNCOLL_FOLDER={folder} is not the folder of a running job: {error}") from error
    transport = ZeroMQTransport(environment.rank, environment.size, job, environment.freeze_s)
    transport.peers = [ipc_address(folder, rank) for rank in range(environment.size)]
    transport.bind(transport.peers[environment.rank])
    arena = _share_memory(environment, folder, tuple(range(environment.size)))
    return Meeting(transport, arena, (socket.gethostname(),) * environment.size)


def _share_memory(environment: Environment, folder: Path, ranks: tuple[int, ...]) -> HostArena | None:
    """The arena of the ranks of this host; none if they are not to have one, or cannot."""
    if not environment.shares_memory or len(ranks) == 1:
        return None
    try:
        return join(folder, environment.rank, ranks, environment.freeze_s or math.inf)
    except ArenaUnavailable as error:
        if environment.rank == ranks[0]:
            logger.warning("the ranks of this host share no memory and go on by messages: %s", error)
        return None


class _Store(Protocol):
    """What is used of a torch.distributed store; `get` waits until the key is there."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...


def _meet_in_store(environment: Environment) -> Meeting:
    rank, size = environment.rank, environment.size
    store = _open_store(environment)
    board = _Board(store, f"asyncoll/{environment.run}", size)
    if rank == 0:
        board.post("job", 0, secrets.token_bytes(16))
    machines = board.exchange("machine", rank, [_machine(), socket.gethostname()])
    transport = ZeroMQTransport(rank, size, board.look("job", 0), environment.freeze_s)
    neighbours = [peer for peer in range(size) if machines[peer][0] == machines[rank][0]]
    with contextlib.ExitStack() as undo:
        if rank == neighbours[0]:
            made = tempfile.mkdtemp(prefix="asyncoll-")
            undo.callback(shutil.rmtree, made, ignore_errors=True)
            board.post("folder", rank, made)
        folder = Path(board.look("folder", neighbours[0]))
        ipc = transport.bind(ipc_address(folder, rank))
        tcp = transport.bind(f"tcp://{_own_address(environment.master_addr)}:0") if len(neighbours) < size else ""
        addresses = board.exchange("address", rank, [ipc, tcp])
        transport.peers = [addresses[peer][peer not in neighbours] for peer in range(size)]
        arena = _share_memory(environment, folder, tuple(neighbours))
        undo.pop_all()
    hosts = tuple(name for _, name in machines)
    return Meeting(transport, arena, hosts, store, folder if rank == neighbours[0] else None)


class _Board:
    """Small values that ranks publish for each other in the store."""

    def __init__(self, store: _Store, prefix: str, size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._size = size

    def post(self, topic: str, rank: int, value: object) -> None:
        self._store.set(f"{self._prefix}/{topic}/{rank}", msgpack.packb(value))

    def look(self, topic: str, rank: int) -> Any:
        return msgpack.unpackb(self._store.get(f"{self._prefix}/{topic}/{rank}"))

    def exchange(self, topic: str, rank: int, value: object) -> list[Any]:
        self.post(topic, rank, value)
        return [self.look(topic, peer) for peer in range(self._size)]


def _open_store(environment: Environment) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = environment.rank == 0 and not served_by_agent
    return TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.size,
        is_master=serves,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=_listen(environment.master_addr, environment.master_port) if serves else None,
    )


def _listen(address: str, port: int) -> int:
    """A socket that listens on this address alone: left to itself, the store listens on all of them."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family).detach()
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen on MASTER_ADDR={address}, MASTER_PORT={port}: {error}; they must be an address of "
            "this host and a free port"
        ) from error


def _machine() -> str:
    """Equal for two ranks that can reach each other's unix sockets: one kernel, and one folder for temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    where = os.stat(tempfile.gettempdir())
    return f"{boot}/{where.st_dev}/{where.st_ino}/{os.getuid()}"


def _own_address(master: str) -> str:
    """The address of this host that leads to `master`; ASYNCOLL_ADDRESS overrides it."""
    chosen = os.environ.get("ASYNCOLL_ADDRESS")
    if chosen:
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))  # a datagram socket sends nothing when it connects
        except OSError as error:
            raise UsageError(f"no route to MASTER_ADDR={master}: {error}; set ASYNCOLL_ADDRESS") from error
        return str(probe.getsockname()[0])
