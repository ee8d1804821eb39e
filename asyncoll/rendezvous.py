"""How the ranks of a job find each other: what the environment says, and who listens where.

The environment contract is torchrun's. Under `asyncoll launch` all ranks are on one host and their addresses follow
from the job's folder. Otherwise they meet in the store at MASTER_ADDR:MASTER_PORT (torch's TCPStore: under torchrun
that is the agent's, elsewhere rank 0 serves it): ranks that share a host talk over ipc, others over tcp.

Anybody who reaches the store may write in it. So whatever ranks tell each other there is sealed with the job's key,
for one run: each rank has its part in the session, so nothing that was said in another run is taken for this one's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgpack

from asyncoll.errors import ProtocolError, UsageError
from asyncoll.keys import KEY_FILE, Key, check_folder, read_key
from asyncoll.transport import Transport
from asyncoll.transport.arena import HostArena
from asyncoll.transport.handover import ArenaUnavailable, join
from asyncoll.transport.monitor import FREEZE_S
from asyncoll.transport.split import SplitTransport
from asyncoll.transport.zeromq import ZeroMQTransport, ipc_address

TRANSPORTS = ("shm", "zmq")  # memory between the ranks of a host, and messages for the rest; or messages alone
ENCRYPT = ("control", "all")  # between hosts: all but long payloads, which would be four times slower; or all
_TIMEOUT = timedelta(seconds=300)
_DEADLINE_S = 1800.0
_FREEZE_MIN_S, _FREEZE_MAX_S = 0.02, 86_400  # what ZeroMQ counts in whole ms, and in 32 bits
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
    freeze_s: float = FREEZE_S  # a rank without a sign of life for so long counts as frozen; 0: never
    deadline_s: float = _DEADLINE_S  # how long a call may take; infinity: for ever
    key_file: str = ""  # with the job's key; empty for none
    encrypt: str = ENCRYPT[0]

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
            shares_memory=_choice(environ, "ASYNCOLL_TRANSPORT", TRANSPORTS) == "shm",
            run="/".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")),
            freeze_s=_freeze_s(environ),
            deadline_s=_seconds(environ, "ASYNCOLL_DEADLINE_S", _DEADLINE_S) or math.inf,
            key_file=environ.get(KEY_FILE, ""),
            encrypt=_choice(environ, "ASYNCOLL_ENCRYPT", ENCRYPT),
        )


def _choice(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Of `choices`, the first unless the environment says otherwise."""
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


def _freeze_s(environ: Mapping[str, str]) -> float:
    seconds = _seconds(environ, "ASYNCOLL_FREEZE_S", FREEZE_S)
    if seconds and not _FREEZE_MIN_S <= seconds <= _FREEZE_MAX_S:
        raise UsageError(
            f"ASYNCOLL_FREEZE_S={seconds:g}: give {_FREEZE_MIN_S} to {_FREEZE_MAX_S} seconds, or 0 for never"
        )
    return seconds


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

    transport: Transport
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
        check_folder(folder)
        key = read_key(folder / "job")
    except UsageError as error:
        raise UsageError(f"ASYNCOLL_FOLDER={folder} is not the folder of a running job: {error}") from error
    transport = ZeroMQTransport(
        environment.rank, environment.size, key.derive("messages"), freeze_s=environment.freeze_s
    )
    transport.peers = [ipc_address(folder, rank) for rank in range(environment.size)]
    transport.bind(transport.peers[environment.rank])
    arena = _share_memory(environment, folder, tuple(range(environment.size)))
    return Meeting(transport, arena, (socket.gethostname(),) * environment.size)


def _share_memory(environment: Environment, folder: Path, ranks: tuple[int, ...]) -> HostArena | None:
    """The arena of the ranks of this host; none if they are not to have one, or cannot."""
    if not environment.shares_memory or len(ranks) == 1:
        return None
    try:
        arena = join(folder, environment.rank, ranks)
    except ArenaUnavailable as error:
        if environment.rank == ranks[0]:
            logger.warning("the ranks of this host share no memory and go on by messages: %s", error)
        return None
    arena.patience.seconds = environment.freeze_s or math.inf
    return arena


class _Store(Protocol):
    """What is used of a torch.distributed store; `get` waits until the key is there."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...


def _meet_in_store(environment: Environment) -> Meeting:
    rank, size = environment.rank, environment.size
    key = read_key(Path(environment.key_file)) if environment.key_file else None
    store = _open_store(environment)
    board = _Board(store, f"asyncoll/{environment.run}", rank, size, key or Key(b""))
    session = board.begin_session()
    hosts = board.exchange("host", _machine(), socket.gethostname(), environment.encrypt)
    if len(modes := {mode for _, _, mode in hosts}) > 1:
        raise UsageError(f"the ranks have different settings of ASYNCOLL_ENCRYPT: {' and '.join(sorted(modes))}")
    neighbours = tuple(peer for peer in range(size) if hosts[peer][0] == hosts[rank][0])
    tcp = f"tcp://{_own_address(environment)}:0" if len(neighbours) < size else ""
    messages = ZeroMQTransport(
        rank, size, session.derive("messages"), encrypted=key is not None, freeze_s=environment.freeze_s
    )
    beside = None  # whose connections have no pulse of their own
    if _has_two_streams(environment, tcp):
        beside = ZeroMQTransport(rank, size, session.derive("payloads"), freeze_s=0)
    with contextlib.ExitStack() as undo:
        if rank == neighbours[0]:
            made = tempfile.mkdtemp(prefix="asyncoll-")  # with mode 0700
            undo.callback(shutil.rmtree, made, ignore_errors=True)
            board.post("folder", made)
        folder = Path(*board.look("folder", neighbours[0], 1))
        check_folder(folder)
        messages.bind(ipc_address(folder, rank))
        arena = _share_memory(environment, folder, neighbours)
        if arena is not None:
            undo.callback(arena.close)
        own = [stream.bind(tcp) if tcp and stream else "" for stream in (messages, beside)]
        addresses = board.exchange("address", *own)  # last: nobody comes to a door before somebody answers there soon
        messages.peers = [
            ipc_address(folder, peer) if peer in neighbours else addresses[peer][0] for peer in range(size)
        ]
        undo.pop_all()
    transport: Transport = messages
    if beside is not None:
        beside.peers = ["" if peer in neighbours else addresses[peer][1] for peer in range(size)]
        transport = SplitTransport(messages, beside, set(range(size)).difference(neighbours))
    names = tuple(name for _, name, _ in hosts)
    return Meeting(transport, arena, names, store, folder if rank == neighbours[0] else None)


def _has_two_streams(environment: Environment, tcp: str) -> bool:
    return bool(tcp and environment.key_file) and environment.encrypt == "control"


class _Board:
    """Short texts that ranks publish for each other in the store, each sealed for its place there."""

    def __init__(self, store: _Store, prefix: str, rank: int, size: int, key: Key) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._size = size
        self._key = key

    def begin_session(self) -> Key:
        """What seals all that follows, and whatever else belongs to this run alone."""
        nonces = self.exchange("nonce", secrets.token_hex(16))
        self._key = Key(self._key.derive("session", self._prefix, *(nonce for (nonce,) in nonces)))
        return self._key

    def post(self, topic: str, *texts: str) -> None:
        place = self._place(topic, self._rank)
        self._store.set(place, self._key.seal(msgpack.packb(texts), place))

    def look(self, topic: str, rank: int, count: int) -> list[str]:
        """The `count` texts that `rank` has posted, or will."""
        place = self._place(topic, rank)
        try:
            texts = msgpack.unpackb(self._key.open(self._store.get(place), place))
        except (ProtocolError, ValueError):
            texts = None
        if not isinstance(texts, list) or len(texts) != count or not all(isinstance(text, str) for text in texts):
            raise UsageError(
                f"what stands in the store as the {topic} of rank {rank} is not sealed with the key of this job: give "
                f"all ranks the same file in {KEY_FILE}, or somebody else writes in this store"
            )
        return texts

    def exchange(self, topic: str, *texts: str) -> list[list[str]]:
        """What every rank says, by rank."""
        self.post(topic, *texts)
        return [self.look(topic, peer, len(texts)) for peer in range(self._size)]

    def _place(self, topic: str, rank: int) -> str:
        return f"{self._prefix}/{topic}/{rank}"


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


def _own_address(environment: Environment) -> str:
    """Where this rank listens for those of other hosts. Raises UsageError where nobody may listen without a key."""
    address = os.environ.get("ASYNCOLL_ADDRESS") or _address_towards(environment.master_addr)
    with contextlib.suppress(ValueError):  # the name of an interface is none of the two
        known = ipaddress.ip_address(address)
        if known.is_unspecified:
            raise UsageError(f"ASYNCOLL_ADDRESS={address} is every address of this host: choose the one to listen on")
        if known.is_loopback and not environment.key_file and environment.encrypt != "all":
            return address
    if not environment.key_file:
        raise UsageError(
            f"ranks that talk over tcp ({address}) need a key, or anybody on the network could join them: make one "
            f"with `asyncoll key FILE`, copy the file to every host and set {KEY_FILE}=FILE for all ranks"
        )
    return address


def _address_towards(master: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))  # a datagram socket sends nothing when it connects
        except OSError as error:
            raise UsageError(f"no route to MASTER_ADDR={master}: {error}; set ASYNCOLL_ADDRESS") from error
        return str(probe.getsockname()[0])
